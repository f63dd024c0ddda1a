"""GPUs as the planner sees them: data-sheet numbers, and how much of them real programs reach."""

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True)
class GPU:
    """One kind of GPU in a node of eight.

    Attributes:
        memory: bytes on the card.
        peak: dense bfloat16 operations per second, from the data sheet.
        bandwidth: bytes per second of its memory.
        node_link, network: bytes per second in one direction between two GPUs of a node, and of different nodes.
        price: dollars per GPU hour, a guess of ours for a sum to compare with; give your own.
    """

    name: str
    memory: float
    peak: float
    bandwidth: float
    node_link: float
    network: float
    price: float

    @property
    def usable(self) -> float:
        """Without 3 GiB for the CUDA context, NCCL's buffers and the allocator's gaps (a reserve of ours)."""
        return self.memory - 3 * GIB


GPUS = {
    "h100": GPU("H100 SXM 80GB", 79.1 * GIB, 989e12, 3.35e12, 450e9, 50e9, 2.50),
    "h200": GPU("H200 SXM 141GB", 139.8 * GIB, 989e12, 4.8e12, 450e9, 50e9, 3.00),
    "a100": GPU("A100 SXM 80GB", 79.1 * GIB, 312e12, 2.04e12, 300e9, 25e9, 1.50),
}


@dataclass(frozen=True)
class Reached:
    """Which part of the data sheet is reached; assumptions of ours, to be replaced by measured ones (code/benchmarks/gpu_check.py)."""

    products: float = 0.65
    """of `peak`, in products of weights and activations"""
    grouped: float = 0.45
    """of `peak`, in grouped products of experts"""
    attention: float = 0.45
    """of `peak`, in attention"""
    orthogonalization: float = 0.55
    """of `peak`, in Newton–Schulz"""
    bandwidth: float = 0.75
    """of the memory's bandwidth, in everything elementwise"""
    network: float = 0.7
    """of the links' bandwidth"""
    latency: float = 2e-5
    """seconds to start a message"""


def get_gpu(name: str) -> GPU:
    """Raises ValueError for an unknown name, listing the choices."""
    if name not in GPUS:
        raise ValueError(f"unknown GPU {name!r}: choose one of {', '.join(GPUS)}, or give measured times")
    return GPUS[name]
