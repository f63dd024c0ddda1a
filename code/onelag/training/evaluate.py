"""Validation loss on fixed windows."""

from collections.abc import Iterable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from onelag.delay import OptimizerWrapper
from onelag.models.loss import next_token_loss
from onelag.training.config import TrainConfig


@torch.no_grad()
def validation_loss(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], device: str = "cpu", bf16: bool = False) -> float:
    """Mean next-token loss in nats over equal batches of (inputs, targets), each (B, T) int64; dropout off, training mode restored."""
    was_training = model.training
    model.eval()
    losses = []
    for inputs, targets in batches:
        with torch.autocast(device, torch.bfloat16) if bf16 else nullcontext():
            losses.append(next_token_loss(model(inputs.to(device)), targets.to(device)))
    model.train(was_training)
    return torch.stack(losses).double().mean().item()


def validate(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list, config: TrainConfig) -> dict[str, float | None]:
    """At the newest weights x, and where there is a correction also at y (None without one)."""
    where = {"device": config.device, "bf16": config.precision == "bf16"}
    if not isinstance(optimizer, OptimizerWrapper):
        return {"validation_loss": validation_loss(model, batches, **where), "validation_loss_base": None}
    with optimizer.latest_weights():
        at_x = validation_loss(model, batches, **where)
    at_y = None
    if optimizer.corrects:
        with optimizer.base_weights():
            at_y = validation_loss(model, batches, **where)
    return {"validation_loss": at_x, "validation_loss_base": at_y}
