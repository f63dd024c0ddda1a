"""One optimizer step: batch → loss → gradients → clip → optimizer (→ correction → delay). All that decides a run's numbers, and no bookkeeping."""

import math
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from onelag.models.loss import next_token_loss
from onelag.training.config import TrainConfig
from onelag.training.schedule import set_learning_rate, warmup_cosine


def training_step(
    step: int, model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor, config: TrainConfig
) -> tuple[float, float, float]:
    """Takes the gradient at the weights that the model holds (the stale ones under a SimulatedDelay) and steps the optimizer.

    Args:
        step: from 0; decides the learning rate.
        inputs, targets: (B, T) int64, cut into `config.data.accumulate` micro-batches whose gradients are averaged.

    Returns:
        Training loss in nats, gradient norm before clipping, factor on the learning rate. Where loss or norm is not finite the optimizer has
        not stepped.
    """
    factor = warmup_cosine(step, config.schedule.steps, config.schedule.warmup, config.schedule.final)
    set_learning_rate(optimizer, factor)
    parts, loss = config.data.accumulate, 0.0
    for micro_inputs, micro_targets in zip(inputs.chunk(parts), targets.chunk(parts)):
        with torch.autocast(config.device, torch.bfloat16) if config.precision == "bf16" else nullcontext():
            micro_loss = next_token_loss(model(micro_inputs.to(config.device)), micro_targets.to(config.device)) / parts
        micro_loss.backward()
        loss += micro_loss.detach()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm if config.clip_norm else math.inf)
    loss, norm = float(loss), float(norm)
    if math.isfinite(loss) and math.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad()
    return loss, norm, factor
