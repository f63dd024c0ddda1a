"""Validation through the pipeline: forward only, at the newest weights x or at y, between two steps of training."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onelag.delay import OptimizerWrapper
from onelag.pipeline.assembly import Parts
from onelag.pipeline.channel import put_together, take_apart
from onelag.pipeline.stage import call


@torch.no_grad()
def mean_loss(parts: Parts, weights: dict[str, Tensor], batches: Iterable[tuple[Any, Any]], loss_fn: Callable[[Any, Any], Tensor]) -> float:
    """Mean of loss_fn over equal batches, over the replicas too; the same on every rank.

    Args:
        weights: by local name, in the compute dtype.
        batches: (inputs, targets), equally many on every rank; whole batches travel, all of one shape.
    """
    down_in, down_out = parts.inboxes.get("down_in"), parts.outboxes.get("down_out")
    remembered = {box: box.spec for box in (down_in, down_out) if box is not None}
    sums = torch.zeros(2, dtype=torch.float64)
    with _evaluating(parts.stage.module):
        for number, (inputs, targets) in enumerate(batches):
            if down_in is not None:
                spec = down_in.hear() if number == 0 else down_in.spec
                inputs = put_together(spec, down_in.take(number))
            else:
                inputs = _moved(inputs, parts.device)
            output = parts.stage.run_with(weights, lambda inputs=inputs: call(parts.stage.module, inputs))
            if down_out is not None:
                spec, tensors = take_apart(output)
                if number == 0:
                    down_out.announce(spec)
                down_out.post(number, spec, tensors)
                down_out.settle(number - 2)
            else:
                sums += torch.tensor([float(loss_fn(output, _moved(targets, parts.device))), 1.0], dtype=torch.float64)
    if down_out is not None:
        down_out.settle_all()
    for box, spec in remembered.items():
        box.spec = spec
    sums = sums.to(parts.wire)
    if parts.groups.everyone is not None:
        dist.all_reduce(sums, group=parts.groups.everyone)
    if not sums[1]:
        raise ValueError("evaluate: there is no batch to evaluate on")
    return float(sums[0] / sums[1])


@torch.no_grad()
def base_weights(parts: Parts) -> dict[str, Tensor]:
    """y, by local name, in the compute dtype and on every replica: the master, or what the optimizer's own correction says."""
    master = parts.stage.master

    def of_owner() -> dict[str, Tensor]:
        slot = parts.stage.slots[0]
        return {
            name: master[name].detach().to(slot[name].dtype, copy=True) if name in parts.replicas.owned else torch.empty_like(slot[name]) for name in slot
        }

    optimizer = parts.master.optimizer
    if isinstance(optimizer, OptimizerWrapper):
        with optimizer.base_weights():
            values = of_owner()
    else:
        values = of_owner()
    parts.replicas.share(values)
    return values


def corrects(parts: Parts) -> bool:
    """Whether x and y differ."""
    optimizer = parts.master.optimizer
    return parts.master.coefficient != 0 or (isinstance(optimizer, OptimizerWrapper) and optimizer.corrects)


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    was_training = {submodule: submodule.training for submodule in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for submodule, training in was_training.items():
            submodule.training = training


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {key: _moved(part, device) for key, part in value.items()}
    return tuple(_moved(part, device) for part in value) if isinstance(value, (tuple, list)) else value
