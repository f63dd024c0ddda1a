"""The dense decoder in the SmolLM2 / Llama shape: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases.

Parameter names are those of transformers' Llama without the leading `model.`, so checkpoints go both ways.
"""

import hashlib
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class DenseConfig:
    """A model, complete. SmolLM2's values where the paper uses them; initialization is a choice of ours."""

    vocab_size: int = 256
    num_layers: int = 3
    width: int = 96
    num_heads: int = 3
    num_kv_heads: int = 1
    """each serves num_heads / num_kv_heads query heads"""
    ffn_width: int = 256
    max_length: int = 512
    """longest sequence, in tokens"""
    rope_theta: float = 100000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = True
    """the head shares the embedding's matrix"""
    init_std: float = 0.02
    """of all matrices; the two that write to the residual stream are divided by √(2·num_layers)"""
    dropout: float = 0.0

    def __post_init__(self):
        if self.width % self.num_heads or (self.width // self.num_heads) % 2:
            raise ValueError(f"width={self.width} must be num_heads={self.num_heads} times an even head size")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}")


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last dimension, in float32 or better."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


def rotary_tables(length: int, head_size: int, theta: float, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """cos and sin, each (length, head_size): position × frequency θ^(−2i/head_size), both halves of the head alike (Llama's convention)."""
    frequencies = theta ** (-torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies).repeat(1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (B, heads, T, head_size) turned by its positions; cos and sin (T, head_size)."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, config: DenseConfig):
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_size = config.width // config.num_heads
        self.dropout = config.dropout
        self.q_proj = nn.Linear(config.width, config.num_heads * self.head_size, bias=False)
        self.k_proj = nn.Linear(config.width, config.num_kv_heads * self.head_size, bias=False)
        self.v_proj = nn.Linear(config.width, config.num_kv_heads * self.head_size, bias=False)
        self.o_proj = nn.Linear(config.num_heads * self.head_size, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, self.num_heads, self.head_size).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, self.num_kv_heads, self.head_size).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, self.num_kv_heads, self.head_size).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout, enable_gqa=self.num_kv_heads != self.num_heads)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) · up(x))."""

    def __init__(self, config: DenseConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.ffn_width, bias=False)
        self.up_proj = nn.Linear(config.width, config.ffn_width, bias=False)
        self.down_proj = nn.Linear(config.ffn_width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: DenseConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(config.width, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.width, config.norm_eps)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), cos, sin))
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))


class DenseModel(nn.Module):
    """tokens (B, T) int64 → logits (B, T, V). Raises ValueError for T > max_length."""

    def __init__(self, config: DenseConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.width, config.norm_eps)
        if not config.tie_embeddings:
            self.lm_head = nn.Linear(config.width, config.vocab_size, bias=False)
        cos, sin = rotary_tables(config.max_length, config.width // config.num_heads, config.rope_theta)
        self.register_buffer("rotary_cos", cos, persistent=False)
        self.register_buffer("rotary_sin", sin, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.size(1)
        if length > self.config.max_length:
            raise ValueError(f"a sequence of {length} tokens exceeds max_length={self.config.max_length}")
        x = self.embed_tokens(tokens)
        cos, sin = (table[:length].to(x.dtype) for table in (self.rotary_cos, self.rotary_sin))
        for layer in self.layers:
            x = layer(x, cos, sin)
        x = self.norm(x)
        return F.linear(x, self.embed_tokens.weight) if self.config.tie_embeddings else self.lm_head(x)


@torch.no_grad()
def initialize(module: nn.Module, config: DenseConfig, seed: int) -> None:
    """Fills every parameter from its own generator, seeded by (seed, global name): a part of the model gets what the whole would give it."""
    for name, parameter in module.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
            continue
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") % 2**63)
        std = config.init_std
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            std /= math.sqrt(2 * config.num_layers)
        parameter.copy_(torch.empty(parameter.shape).normal_(0, std, generator=generator))


def build_model(config: DenseConfig, seed: int) -> DenseModel:
    """A model on the CPU in float32 with the initial values of that seed."""
    with torch.device("meta"):
        model = DenseModel(config)
    model = model.to_empty(device="cpu")
    cos, sin = rotary_tables(config.max_length, config.width // config.num_heads, config.rope_theta)
    model.rotary_cos.copy_(cos)
    model.rotary_sin.copy_(sin)
    initialize(model, config, seed)
    return model
