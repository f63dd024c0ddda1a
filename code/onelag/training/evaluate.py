"""Validation loss on fixed windows."""

from collections.abc import Iterable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from onelag.models.loss import next_token_loss


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
