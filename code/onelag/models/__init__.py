"""Language models in the SmolLM2 / Llama shape, dense or with experts, at any size, with the parameter names that the field uses.

`build_model(config, seed)` gives a model whose initial values depend on (seed, parameter name) alone, so a pipeline stage starts from the same.
"""

from onelag.models.build import build_meta, build_model
from onelag.models.dense import DenseConfig, DenseModel
from onelag.models.moe import MoEConfig

__all__ = ["DenseConfig", "DenseModel", "MoEConfig", "build_meta", "build_model"]
