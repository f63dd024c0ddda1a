"""Parameters of a model, counted on the meta device."""

from onelag.models.build import build_meta
from onelag.models.dense import DenseConfig
from onelag.models.moe import MoEConfig


def count_parameters(config: DenseConfig) -> tuple[int, int]:
    """(all, active): active are those that one token meets; a tied embedding counts once, and so does the lookup of an untied one."""
    total = sum(parameter.numel() for parameter in build_meta(config).parameters())
    if not isinstance(config, MoEConfig):
        return total, total
    idle = (config.num_experts - config.experts_per_token) * 3 * config.width * config.expert_width
    return total, total - idle * (config.num_layers - config.num_dense_layers)
