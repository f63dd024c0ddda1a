"""From a configuration to the parts of a run: optimizer, correction and delay, wrapped in this order."""

import torch
from torch import nn

from onelag.delay import DelayCompensation, ErrorFeedback, SimulatedDelay, WeightPrediction, stage_delays
from onelag.optim import build_optimizer
from onelag.training.config import DelayConfig, OptimizerConfig


def build_delayed_optimizer(optimizer: OptimizerConfig, delay: DelayConfig, model: nn.Module) -> torch.optim.Optimizer:
    """SimulatedDelay(correction(optimizer)), each layer only where the configuration asks for it."""
    built = build_optimizer(
        optimizer.name,
        model,
        lr=optimizer.learning_rate,
        weight_decay=optimizer.weight_decay,
        fallback_lr=optimizer.fallback_learning_rate,
        **optimizer.settings,
    )
    if delay.correction == "error-feedback":
        built = ErrorFeedback(built, coefficient=delay.coefficient, form=delay.form)
    elif delay.correction == "weight-prediction":
        built = WeightPrediction(built, steps=delay.steps)
    elif delay.correction == "delay-compensation":
        built = DelayCompensation(built, steps=delay.steps, strength=2.0, mean_square_decay=0.95)
    if delay.pipedream_stages:
        layers = 1 + max(int(name.split(".")[1]) for name, _ in model.named_parameters() if name.startswith("layers."))
        stages = delay.pipedream_stages
        return SimulatedDelay(built, stage_delays(model.named_parameters(), lambda name: _even_stage(name, layers, stages), stages))
    return SimulatedDelay(built, steps=delay.steps) if delay.steps else built


def _even_stage(name: str, layers: int, stages: int) -> int:
    """The embedding is on the first stage, the last norm and the head are on the last, the layers spread evenly."""
    if name.startswith("layers."):
        return int(name.split(".")[1]) * stages // layers
    return 0 if name.startswith("embed") else stages - 1
