"""Floating-point operations of a model: two per multiply-add of every matrix product, nothing else counted.

As torch's FlopCounterMode counts, which the tests compare with: attention over all T × T pairs, also those that causality masks.
"""

from dataclasses import dataclass

from onelag.models.dense import DenseConfig
from onelag.models.moe import MoEConfig


@dataclass(frozen=True)
class Flops:
    """Of one forward or backward, split by what their speed depends on."""

    products: float
    """of weights with activations"""
    attention: float
    """scores and their mixing: the part that grows with the square of the length"""
    grouped: float = 0
    """of the routed experts' weights with their tokens"""

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(self.products + other.products, self.attention + other.attention, self.grouped + other.grouped)

    def __mul__(self, factor: float) -> "Flops":
        return Flops(self.products * factor, self.attention * factor, self.grouped * factor)

    @property
    def total(self) -> float:
        return self.products + self.attention + self.grouped


def block_forward(config: DenseConfig, index: int, length: int) -> Flops:
    """One sequence of `length` tokens through layer `index`."""
    head_size = config.width // config.num_heads
    weights = config.width * head_size * (2 * config.num_heads + 2 * config.num_kv_heads)
    grouped = 0
    if isinstance(config, MoEConfig) and index >= config.num_dense_layers:
        weights += config.width * config.num_experts + 3 * config.width * config.expert_width * config.num_shared_experts
        grouped = 3 * config.width * config.expert_width * config.experts_per_token
    else:
        weights += 3 * config.width * config.ffn_width
    return Flops(2 * length * weights, 2 * 2 * config.num_heads * head_size * length**2, 2 * length * grouped)


def head_forward(config: DenseConfig, length: int) -> Flops:
    """One sequence through the output layer."""
    return Flops(2 * length * config.width * config.vocab_size, 0)


def backward(forward: Flops) -> Flops:
    """Two products for each of the forward; attention has five for two, since its kernels keep no scores and compute them again."""
    return Flops(2 * forward.products, 2.5 * forward.attention, 2 * forward.grouped)


def model_forward(config: DenseConfig, length: int) -> Flops:
    """One sequence through the whole model."""
    total = head_forward(config, length)
    for index in range(config.num_layers):
        total += block_forward(config, index, length)
    return total
