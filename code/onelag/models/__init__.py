"""Language models in the SmolLM2 / Llama shape, at any size, with the parameter names that the field uses.

`build_model(config, seed)` gives a model whose initial values depend on (seed, parameter name) alone, so a pipeline stage starts from the same.
"""

from onelag.models.dense import DenseConfig, DenseModel, build_model

__all__ = ["DenseConfig", "DenseModel", "build_model"]
