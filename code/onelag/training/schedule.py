"""The learning-rate schedule: linear warmup, cosine to a fraction of the peak."""

import math

import torch


def warmup_cosine(step: int, steps: int, warmup: float = 0.1, final: float = 0.1) -> float:
    """The factor on the peak learning rate for the update of step 0 … steps − 1.

    Rises linearly to 1 at the last of the ⌊warmup·steps⌋ warmup steps and falls along half a cosine to `final` at the last step.
    """
    rising = int(warmup * steps)
    if step < rising:
        return (step + 1) / rising
    progress = (step - rising + 1) / max(1, steps - rising)
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Every group's learning rate becomes its own "initial_lr" times `factor`."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor
