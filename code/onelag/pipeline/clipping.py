"""The global gradient norm without a stall, and what else all ranks learn about a batch in the same small sum.

Clipping per stage is a known fault (torchtitan #596): the norm is over all parameters of all stages, each counted once. A blocking sum at the
update would make every stage wait for the slowest; ours starts there and is waited for where W(t+1) is first needed.
"""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class BatchReport(NamedTuple):
    """What is known on every rank, with the same bits, about a finished batch.

    Attributes:
        batch: number of the batch, from 0; its update made W(batch + 1).
        loss: mean loss over its micro-batches and replicas, at the stale weights it ran on.
        gradient_norm: global 2-norm of its mean gradient, before clipping.
        skipped: its gradient was not finite somewhere, so no stage moved.
        bubble: part of the time since the update before in which the stages did not compute, averaged over ranks; host time, so None on a GPU.
        stopping: some rank was asked to stop before this batch's update.
    """

    batch: int
    loss: float
    gradient_norm: float
    skipped: bool
    bubble: float | None
    stopping: bool


def squared_norm(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """Sum of squares in float64, a tensor of shape () on `device`; norms per tensor first, so that a large batch of small ones costs one pass."""
    gradients = list(gradients)
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(torch._foreach_norm(gradients)).double().square().sum().to(device)


def clip_factor(norm: float, clip_norm: float | None) -> float:
    """min(1, clip_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_; 1 without clipping."""
    return 1.0 if clip_norm is None else min(1.0, clip_norm / (norm + 1e-6))


def scale_(gradients: Iterable[Tensor | None], factor: float) -> None:
    """Multiplies what there is, in place."""
    gradients = [gradient for gradient in gradients if gradient is not None]
    if gradients:  # a stage may own nothing, and torch refuses an empty list
        torch._foreach_mul_(gradients, factor)


class Tally:
    """One batch's sum over all ranks, started and then waited for: squares, loss, wish to stop, busy and total seconds."""

    def __init__(self, squares: Tensor, loss: Tensor | None, stopping: bool, busy: float, elapsed: float, group: Any):
        parts = torch.tensor([0.0, 0.0, float(stopping), busy, elapsed], dtype=torch.float64, device=squares.device)
        parts[0] = squares
        if loss is not None:
            parts[1] = loss
        self._sums = parts
        self._work = None if group is None else dist.all_reduce(parts, group=group, async_op=True)

    def report(self, batch: int, measured: bool) -> BatchReport:
        """Waits for the sum. A norm that is not finite means: skip this batch, everywhere."""
        if self._work is not None:
            self._work.wait()
        squares, loss, stopping, busy, elapsed = self._sums.tolist()
        norm = math.sqrt(squares) if squares >= 0 else math.nan
        bubble = 1 - busy / elapsed if measured and elapsed > 0 else None
        return BatchReport(batch, loss, norm, not math.isfinite(norm), bubble, stopping > 0)
