"""How a model is cut for a pipeline: which stage holds which layers, and the module that a stage runs.

Parameters keep their global names (`layers.5.mlp.up_proj.weight` is that on whichever stage holds layer 5), so routing, checkpoints and initial values
are those of the whole model, and a stage never needs more than itself.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onelag.models.dense import DenseConfig, RMSNorm, rotary_tables
from onelag.models.flops import block_forward, head_forward
from onelag.models.moe import build_block, initialize

Split = tuple[tuple[int, int], ...]
"""(first layer, one past the last layer) of each stage."""


def split_by_cost(costs: Sequence[float], num_stages: int, first: float = 0.0, last: float = 0.0) -> Split:
    """The contiguous split whose slowest stage is fastest: each layer on exactly one stage.

    Args:
        costs: one per layer, in any unit; measured seconds or FLOPs.
        num_stages: p ≥ 1. With fewer layers than stages some stages hold no layer.
        first, last: what the first stage (embedding) and the last one (norm, head, loss) do besides.

    Raises:
        ValueError: no layer, p < 1, or a negative cost.
    """
    if num_stages < 1 or not costs or min(*costs, first, last) < 0:
        raise ValueError(f"cannot split {len(costs)} layers over num_stages={num_stages}: at least one of each, and no negative cost")
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    layers = len(costs)

    def stage_cost(stage: int, start: int, end: int) -> float:
        return total[end] - total[start] + first * (stage == 0) + last * (stage == num_stages - 1)

    # best[s][e]: (slowest, imbalance) of stages 0 … s holding layers 0 … e−1; the sum of squares breaks ties towards an even split.
    best = [{end: (stage_cost(0, 0, end), stage_cost(0, 0, end) ** 2) for end in range(layers + 1)}]
    choice: list[dict[int, int]] = [{}]
    for stage in range(1, num_stages):
        row, chosen = {}, {}
        for end in range(layers + 1):
            options = []
            for start in range(end + 1):
                cost = stage_cost(stage, start, end)
                slowest, squares = best[-1][start]
                options.append((max(slowest, cost), squares + cost**2, start))
            *row[end], chosen[end] = min(options)
            row[end] = tuple(row[end])
        best.append(row)
        choice.append(chosen)
    bounds, end = [], layers
    for stage in reversed(range(num_stages)):
        start = choice[stage][end] if stage else 0
        bounds.append((start, end))
        end = start
    return tuple(reversed(bounds))


def split_by_count(num_layers: int, num_stages: int) -> Split:
    """As evenly as it goes: the numbers of layers differ by at most one."""
    return split_by_cost([1.0] * num_layers, num_stages)


def split_by_flops(config: DenseConfig, num_stages: int, sequence_length: int) -> Split:
    """By the operations of a token: attention and MLP or experts for a layer, the head for the last stage."""
    costs = [block_forward(config, index, sequence_length).total for index in range(config.num_layers)]
    return split_by_cost(costs, num_stages, last=head_forward(config, sequence_length).total)


class StageModule(nn.Module):
    """One stage: tokens (B, T) int64 in on the first, hidden states (B, T, width) between, logits (B, T, V) out on the last.

    With tied embeddings the first and the last stage each hold `embed_tokens.weight`; the pipeline keeps the two equal.
    """

    def __init__(self, config: DenseConfig, stage: int, num_stages: int, split: Split | None = None):
        super().__init__()
        if not 0 <= stage < num_stages:
            raise ValueError(f"stage={stage} of num_stages={num_stages} does not exist")
        start, end = (split or split_by_count(config.num_layers, num_stages))[stage]
        self.config, self.stage, self.num_stages = config, stage, num_stages
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        self.tied_names = ("embed_tokens.weight",) if config.tie_embeddings and num_stages > 1 and (self.is_first or self.is_last) else ()
        if self.is_first or (self.is_last and config.tie_embeddings):
            self.embed_tokens = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleDict({str(index): build_block(config, index) for index in range(start, end)})
        if self.is_last:
            self.norm = RMSNorm(config.width, config.norm_eps)
            if not config.tie_embeddings:
                self.lm_head = nn.Linear(config.width, config.vocab_size, bias=False)
        cos, sin = rotary_tables(config.max_length, config.width // config.num_heads, config.rope_theta)
        self.register_buffer("rotary_cos", cos, persistent=False)
        self.register_buffer("rotary_sin", sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if x.size(1) > self.config.max_length:
            raise ValueError(f"a sequence of {x.size(1)} tokens exceeds max_length={self.config.max_length}")
        if self.is_first:
            x = self.embed_tokens(x)
        cos, sin = (table[: x.size(1)].to(x.dtype) for table in (self.rotary_cos, self.rotary_sin))
        for layer in self.layers.values():
            x = layer(x, cos, sin)
        if not self.is_last:
            return x
        x = self.norm(x)
        return F.linear(x, self.embed_tokens.weight) if self.config.tie_embeddings else self.lm_head(x)


def build_stage(config: DenseConfig, stage: int, num_stages: int, seed: int, split: Split | None = None) -> StageModule:
    """A stage on the CPU in float32, with the initial values that the whole model of that seed has."""
    with torch.device("meta"):
        module = StageModule(config, stage, num_stages, split)
    module = module.to_empty(device="cpu")
    cos, sin = rotary_tables(config.max_length, config.width // config.num_heads, config.rope_theta)
    module.rotary_cos.copy_(cos)
    module.rotary_sin.copy_(sin)
    initialize(module, config, seed)
    return module
