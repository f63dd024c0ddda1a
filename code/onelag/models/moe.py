"""Mixture of experts in the shape that the field uses today; a choice of ours, since the paper's own is not public.

Fine-grained experts, one of them shared by all tokens; sigmoid router, the k best experts per token, no token dropped; balance without a loss.

Balance (arXiv 2408.15664 adds a bias to the scores that choose the experts, and moves it against the load by hand, outside the optimizer). Here the bias
is a parameter and the excess load is its gradient, attached in the backward. So the bias has the weight version of everything else on its stage: a
micro-batch that recomputes its activations chooses the same experts again although an update came in between; and it is summed over micro-batches
and replicas, delayed, corrected, checkpointed without a line of code of its own. AdamW, which it is routed to, steps by the gradient's sign and size
relative to its past, so the scale of the attached gradient does not matter; it is kept small for the sake of global clipping.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onelag.models.dense import MLP, Block, DenseConfig
from onelag.models.dense import initialize as initialize_dense


@dataclass(frozen=True)
class MoEConfig(DenseConfig):
    """A model with experts, complete. `ffn_width` is that of the first `num_dense_layers` layers, which have no experts."""

    num_experts: int = 8
    """routed experts per layer"""
    experts_per_token: int = 2
    """k: how many of them a token goes to"""
    expert_width: int = 64
    """hidden width of one expert"""
    num_shared_experts: int = 1
    """experts that every token goes to"""
    num_dense_layers: int = 1
    """layers before the first one with experts"""
    route_scale: float = 2.0**0.5
    """factor on the routed part; √k gives k averaged experts the size of one"""
    balance_scale: float = 1e-4
    """factor on the gradient of the balance, see the head of this file; 0 does not balance"""

    def __post_init__(self):
        super().__post_init__()
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(f"experts_per_token={self.experts_per_token} must be between 1 and num_experts={self.num_experts}")
        if not 0 <= self.num_dense_layers <= self.num_layers:
            raise ValueError(f"num_dense_layers={self.num_dense_layers} must be between 0 and num_layers={self.num_layers}")


class _Balanced(torch.autograd.Function):
    """Returns `gates` as they are; in the backward, `bias` gets `excess` as its gradient."""

    @staticmethod
    def forward(ctx, gates: Tensor, bias: Tensor, excess: Tensor) -> Tensor:
        ctx.save_for_backward(excess)
        return gates.view_as(gates)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, ctx.saved_tensors[0], None


class Router(nn.Module):
    """x (N, width) → experts (N, k) int64, gates (N, k), which sum to `route_scale`, and counts (E,) int64: how many choices went to each expert.

    Scores are computed in float32 or better. `counts` stays on the attribute of that name too, for the log.
    """

    def __init__(self, config: MoEConfig):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.width))
        self.bias = nn.Parameter(torch.zeros(config.num_experts))
        self.counts: Tensor | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(x.to(wide), self.weight.to(wide)).sigmoid()
            experts = (scores.detach() + self.bias.detach().to(wide)).topk(self.config.experts_per_token, dim=-1, sorted=False).indices
            gates = scores.gather(-1, experts)
            gates = gates / gates.sum(-1, keepdim=True) * self.config.route_scale
            flat = experts.flatten()
            # Not bincount: on a GPU it waits for the result's size. Integers add up to the same in any order.
            counts = torch.zeros(self.config.num_experts, dtype=torch.int64, device=x.device).scatter_add_(0, flat, torch.ones_like(flat))
            if self.config.balance_scale:
                excess = (counts / flat.numel() - 1 / self.config.num_experts) * self.config.balance_scale
                gates = _Balanced.apply(gates, self.bias, excess.to(self.bias.dtype))
        self.counts = counts
        return experts, gates, counts


class ExpertMatrices(nn.Module):
    """One matrix per expert: weight (E, out, in). Muon takes each slice as a matrix of its own."""

    def __init__(self, experts: int, width_out: int, width_in: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, width_out, width_in))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """x (N, in), sorted by expert; rows ends[e−1] … ends[e] go through matrix e. → (N, out)."""
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        x, weight = x.to(dtype), self.weight.to(dtype)
        if dtype == torch.float64:  # not offered by torch's grouped product
            return grouped_product_reference(x, weight, ends)
        return F.grouped_mm(x, weight.transpose(-2, -1), offs=ends)


def grouped_product_reference(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """The definition: one product per expert. x (N, in), weight (E, out, in), ends (E,) → (N, out)."""
    bounds = [0, *ends.tolist()]
    return torch.cat([F.linear(x[start:end], matrix) for start, end, matrix in zip(bounds, bounds[1:], weight)])


class Experts(nn.Module):
    """SwiGLU per expert, weighed: down(gate · silu(gate_proj(x)) · up(x)) on rows sorted by expert.

    The router's gate multiplies the narrow hidden vector: the same as multiplying the output, at a fraction of the memory.
    """

    def __init__(self, config: MoEConfig):
        super().__init__()
        self.gate_proj = ExpertMatrices(config.num_experts, config.expert_width, config.width)
        self.up_proj = ExpertMatrices(config.num_experts, config.expert_width, config.width)
        self.down_proj = ExpertMatrices(config.num_experts, config.width, config.expert_width)

    def forward(self, x: Tensor, gates: Tensor, ends: Tensor) -> Tensor:
        hidden = F.silu(self.gate_proj(x, ends)) * self.up_proj(x, ends)
        return self.down_proj(hidden * gates.unsqueeze(-1).to(hidden.dtype), ends)


class MoE(nn.Module):
    """Router, routed experts, shared experts: x (B, T, width) → the same shape. No token is dropped, whatever the load."""

    def __init__(self, config: MoEConfig):
        super().__init__()
        self.config = config
        self.gate = Router(config)
        self.experts = Experts(config)
        if config.num_shared_experts:
            self.shared_experts = MLP(_shared(config))

    def forward(self, x: Tensor) -> Tensor:
        rows, k = x.reshape(-1, x.size(-1)), self.config.experts_per_token
        chosen, gates, counts = self.gate(rows)
        order = chosen.flatten().argsort(stable=True)  # (N·k,): the choices, sorted by expert
        out = self.experts(rows.index_select(0, order // k), gates.flatten().index_select(0, order), counts.cumsum(0).to(torch.int32))
        # Back to the order of the tokens by gathering: sums in a fixed order, unlike a scattered addition.
        out = out.index_select(0, order.argsort()).view(-1, k, x.size(-1)).sum(1).view(x.shape)
        return out + self.shared_experts(x) if self.config.num_shared_experts else out


def _shared(config: MoEConfig) -> DenseConfig:
    """The shared experts are one MLP of their width."""
    return DenseConfig(
        width=config.width,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        ffn_width=config.num_shared_experts * config.expert_width,
    )


class MoEBlock(Block):
    """A block whose MLP is a mixture of experts."""

    def __init__(self, config: MoEConfig):
        super().__init__(config)
        self.mlp = MoE(config)


def build_block(config: DenseConfig, index: int) -> Block:
    """Layer `index` of a model."""
    return MoEBlock(config) if isinstance(config, MoEConfig) and index >= config.num_dense_layers else Block(config)


@torch.no_grad()
def initialize(module: nn.Module, config: DenseConfig, seed: int) -> None:
    """As dense.initialize, by global name; the routers' biases are zero."""
    initialize_dense(module, config, seed)
    for name, parameter in module.named_parameters():
        if name.endswith("mlp.gate.bias"):
            parameter.zero_()
