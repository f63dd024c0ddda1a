"""The flags of `onelag train` that make a given run: only those that differ from the defaults."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from onelag.configs import ScaleConfig
from onelag.models.presets import PRESETS
from onelag.training.config import TrainConfig
from onelag.training.pipeline_config import PipelineConfig


def train_arguments(config: ScaleConfig, run_dir: Path) -> list[str]:
    """["train", "--model", …].

    Raises:
        ValueError: a model that is no preset, or optimizer.settings, which have no flag.
    """
    name = next((name for name, preset in PRESETS.items() if preset == config.train.model), None)
    if name is None:
        raise ValueError(f"the model of {config.name} is no preset of onelag/models/presets.py: a command line cannot name it")
    flags = ["train", "--model", name]
    flags += _differing("", config.train, TrainConfig(), skip="model")
    flags += _differing("pipeline.", config.pipeline, PipelineConfig())
    return [*flags, "--run-dir", str(run_dir)]


def _differing(prefix: str, value: Any, default: Any, skip: str = "") -> Iterator[str]:
    for field in fields(value):
        mine, usual = getattr(value, field.name), getattr(default, field.name)
        name = prefix + field.name.replace("_", "-")
        if field.name == skip or mine == usual:
            continue
        if is_dataclass(mine):
            yield from _differing(f"{name}.", mine, usual)
        elif isinstance(mine, bool):
            yield f"--{name}" if mine else f"--{prefix}no-{field.name.replace('_', '-')}"
        elif isinstance(mine, dict):
            raise ValueError(f"{prefix}{field.name}={mine} cannot be given on a command line: change the recipe in onelag/optim/recipes.py")
        else:
            yield from (f"--{name}", str(mine))
