"""A batch cut into micro-batches of one shape, and how much each counts."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Cutter:
    """Cuts batches along the first dimension into `parts` equal micro-batches, and holds later batches to the first one's shape.

    A batch is a tensor, or a tuple, list or dict of tensors; values that are no tensors go to every micro-batch as they are.
    """

    def __init__(self, what: str, parts: int, device: torch.device):
        self.what, self.parts, self.device = what, parts, device
        self._rows: int | None = None

    def __call__(self, batch: Any) -> list[Any]:
        """The micro-batches, in order, on the device.

        Raises:
            ValueError: no tensor, not divisible by `num_microbatches`, or another number of rows than before (an uneven last batch).
        """
        tensors = [value for value in _values(batch) if isinstance(value, Tensor)]
        if not tensors:
            raise ValueError(f"{self.what} must be a tensor, or a tuple or dict with tensors, on this stage, but got {type(batch).__name__}")
        rows = {tensor.size(0) if tensor.ndim else 0 for tensor in tensors}
        if len(rows) > 1:
            raise ValueError(f"{self.what}: the tensors have different numbers of rows, {sorted(rows)}")
        (count,) = rows
        if count == 0 or count % self.parts:
            raise ValueError(f"{self.what}: a batch of {count} rows cannot be cut into num_microbatches={self.parts} equal parts")
        if self._rows not in (None, count):
            raise ValueError(
                f"{self.what}: this batch has {count} rows, the ones before had {self._rows}: drop the uneven last batch (drop_last=True) or pad it"
            )
        self._rows = count
        pieces = [self._cut(value) for value in _values(batch)]
        return [_like(batch, [piece[j] for piece in pieces]) for j in range(self.parts)]

    def _cut(self, value: Any) -> list[Any]:
        if isinstance(value, Tensor):
            return list(value.to(self.device, non_blocking=True).chunk(self.parts))
        return [value] * self.parts


def loss_shares(targets: Iterable[Any], weigh: Callable[[Any], Any], replicas: Any, wire: torch.device) -> list[float]:
    """Each micro-batch's part of the whole batch's weight, over all replicas.

    Args:
        replicas: the process group of the last stage's replicas; None without.
        wire: device that this group talks on.

    Raises:
        ValueError: a weight that is negative or not finite, or a batch without any weight.
    """
    weights = [float(weigh(target)) for target in targets]
    for weight in weights:
        if not 0 <= weight < float("inf"):
            raise ValueError(f"loss_weight gave {weight}: a micro-batch's weight must be a finite number, 0 or more")
    total = torch.tensor([sum(weights)], dtype=torch.float64, device=wire)
    if replicas is not None:
        dist.all_reduce(total, group=replicas)
    if not total.item():
        raise ValueError("loss_weight is 0 for every micro-batch of this batch: there is nothing to learn from it")
    return [weight / total.item() for weight in weights]


def _values(batch: Any) -> list[Any]:
    if isinstance(batch, dict):
        return list(batch.values())
    return list(batch) if isinstance(batch, (tuple, list)) else [batch]


def _like(batch: Any, values: list[Any]) -> Any:
    if isinstance(batch, dict):
        return dict(zip(batch, values))
    return tuple(values) if isinstance(batch, (tuple, list)) else values[0]
