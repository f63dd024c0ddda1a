"""Any configuration → its model."""

import torch
from torch import nn

from onelag.models import dense
from onelag.models.dense import DenseConfig
from onelag.models.moe import MoEConfig
from onelag.models.stages import StageModule, build_stage


def build_model(config: DenseConfig, seed: int) -> nn.Module:
    """The whole model on the CPU in float32, with the initial values of that seed: tokens (B, T) int64 → logits (B, T, V)."""
    return build_stage(config, 0, 1, seed) if isinstance(config, MoEConfig) else dense.build_model(config, seed)


def build_meta(config: DenseConfig) -> nn.Module:
    """The whole model without memory, for names, shapes, counts and routing; any size in milliseconds."""
    with torch.device("meta"):
        return StageModule(config, 0, 1)
