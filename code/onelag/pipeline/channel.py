"""The wire between two neighbours: an outbox at one end of an edge, an inbox at the other. Public torch.distributed API only, one thread.

Every message is a fixed list of tensors, sent one by one (never a batched operation: pytorch #132644, #174288). What a message looks like is
told once, ahead of the first one; afterwards both ends hold the sender to it, because gloo aborts the process on a wrong size and takes a wrong
dtype of the right size without a word.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onelag.pipeline.topology import Edge


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of one tensor at a boundary, and whether a gradient comes back for it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorSpec":
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}{' with gradient' if self.needs_grad else ''}"


@dataclass(frozen=True)
class MessageSpec:
    """What a boundary carries: one tensor (keys None), a tuple (keys "tuple") or a dict of tensors (its keys)."""

    keys: tuple[str, ...] | str | None
    tensors: tuple[TensorSpec, ...]

    def pack(self) -> bytes:
        tensors = [[list(t.shape), str(t.dtype).removeprefix("torch."), t.needs_grad] for t in self.tensors]
        return json.dumps({"keys": self.keys, "tensors": tensors}).encode()

    @classmethod
    def unpack(cls, content: bytes) -> "MessageSpec":
        told = json.loads(content)
        tensors = tuple(TensorSpec(tuple(shape), getattr(torch, dtype), grad) for shape, dtype, grad in told["tensors"])
        return cls(tuple(told["keys"]) if isinstance(told["keys"], list) else told["keys"], tensors)

    def __str__(self) -> str:
        names = self.keys if isinstance(self.keys, tuple) else range(len(self.tensors))
        return ", ".join(f"{name}: {tensor}" for name, tensor in zip(names, self.tensors))

    @classmethod
    def of_gradients(cls, tensors: Sequence[Tensor]) -> "MessageSpec":
        return cls("tuple", tuple(TensorSpec(tuple(t.shape), t.dtype) for t in tensors))

    @property
    def gradients(self) -> "MessageSpec":
        """What comes back: the gradients of the tensors that need one."""
        return MessageSpec("tuple", tuple(TensorSpec(t.shape, t.dtype) for t in self.tensors if t.needs_grad))


def take_apart(value: Any) -> tuple[MessageSpec, list[Tensor]]:
    """A stage's output as a list of tensors, and how to put it together again.

    Raises:
        TypeError: anything else than a tensor, a tuple or list of tensors, or a dict of tensors with string keys.
    """
    if isinstance(value, Tensor):
        keys, tensors = None, [value]
    elif isinstance(value, (tuple, list)):
        keys, tensors = "tuple", list(value)
    elif isinstance(value, dict) and all(isinstance(key, str) for key in value):
        keys, tensors = tuple(value), list(value.values())
    else:
        keys, tensors = None, [value]
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"a stage's output must be a tensor, a tuple of tensors or a dict of tensors with string keys, but it contains {type(tensor).__name__}"
            )
    return MessageSpec(keys, tuple(TensorSpec.of(tensor) for tensor in tensors)), tensors


def put_together(spec: MessageSpec, tensors: Sequence[Tensor]) -> Any:
    """The inverse of `take_apart`; a list comes back as a tuple."""
    if spec.keys is None:
        return tensors[0]
    return tuple(tensors) if spec.keys == "tuple" else dict(zip(spec.keys, tensors))


class Outbox:
    """The sending end. A message is copied as it is posted, so whatever happens to the original, the receiver gets what was posted."""

    def __init__(self, edge: Edge, wire: torch.device):
        self.edge, self.wire = edge, wire
        self.spec: MessageSpec | None = None
        self._sending: dict[int, list[tuple[Any, Tensor]]] = {}

    def announce(self, spec: MessageSpec) -> None:
        """Tells the other end what messages look like from now on."""
        content = torch.frombuffer(bytearray(spec.pack()), dtype=torch.uint8).to(self.wire)
        length = torch.tensor([content.numel()], dtype=torch.int64, device=self.wire)
        for tensor in (length, content):
            dist.isend(tensor, dst=self.edge.peer, group=self.edge.group).wait()
        self.spec = spec

    def post(self, number: int, spec: MessageSpec, tensors: Sequence[Tensor]) -> None:
        """Sends message `number` without waiting.

        Raises:
            ValueError: it does not look like what was announced.
        """
        if spec != self.spec:
            raise ValueError(
                f"the output changed between micro-batches: it was ({self.spec}), now it is ({spec}). "
                "A pipeline carries fixed shapes and dtypes: pad to one shape, and let no module choose by the micro-batch"
            )
        copies = [tensor.detach().to(self.wire, copy=True, memory_format=torch.contiguous_format) for tensor in tensors]
        self._sending[number] = [(dist.isend(copy, dst=self.edge.peer, group=self.edge.group), copy) for copy in copies]

    def settle(self, number: int) -> None:
        """Waits until message `number` and the earlier ones have left, and frees them."""
        for earlier in [n for n in self._sending if n <= number]:
            for work, _ in self._sending.pop(earlier):
                work.wait()

    def settle_all(self) -> None:
        if self._sending:
            self.settle(max(self._sending))

    @property
    def outstanding(self) -> int:
        return len(self._sending)


class Inbox:
    """The receiving end. Receives are posted ahead, each into memory of its own, which lives as long as the graph that uses it."""

    def __init__(self, edge: Edge, wire: torch.device, device: torch.device):
        self.edge, self.wire, self.device = edge, wire, device
        self.spec: MessageSpec | None = None
        self._posted: dict[int, list[tuple[Any, Tensor]]] = {}

    def hear(self) -> MessageSpec:
        """Receives an announcement."""
        length = torch.empty(1, dtype=torch.int64, device=self.wire)
        dist.irecv(length, src=self.edge.peer, group=self.edge.group).wait()
        content = torch.empty(int(length), dtype=torch.uint8, device=self.wire)
        dist.irecv(content, src=self.edge.peer, group=self.edge.group).wait()
        self.spec = MessageSpec.unpack(bytes(content.cpu().tolist()))
        return self.spec

    def expect(self, number: int) -> None:
        """Posts the receive of message `number`, once; numbers must rise in the order of the sender's."""
        if number not in self._posted:
            buffers = [torch.empty(t.shape, dtype=t.dtype, device=self.wire) for t in self.spec.tensors]
            self._posted[number] = [(dist.irecv(buffer, src=self.edge.peer, group=self.edge.group), buffer) for buffer in buffers]

    def take(self, number: int) -> list[Tensor]:
        """Message `number`, as soon as it is here."""
        self.expect(number)
        received = []
        for work, buffer in self._posted.pop(number):
            work.wait()
            received.append(buffer.to(self.device))
        return received
