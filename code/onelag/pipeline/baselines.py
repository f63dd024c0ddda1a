"""The synchronous rivals: torch.distributed.pipelining's own schedules on the same stage modules, made to train.

torch's schedules stop at gradients; here the optimizer step, the global clipping and one loss for all ranks come with them, behind the same `step` as
`schedules.Schedule2BW`, so that the two can change places in a loop or a benchmark.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleZBVZeroBubble

from onelag.pipeline.clipping import clip_factor, squared_norm
from onelag.pipeline.handshake import refuse_wrappers
from onelag.pipeline.microbatches import Cutter

Rival = Literal["1f1b", "gpipe", "zbv"]


class TorchPipeline:
    """One of torch's schedules, with an optimizer.

        pipe = TorchPipeline(stage_module, loss_fn, optimizer, num_microbatches=8, schedule="1f1b")
        loss = pipe.step(inputs, targets)

    Every batch ends with a flush, so its gradient is taken at the newest weights.

    Args:
        stage_modules: this rank's stage; for "zbv" (ZB-V, Qi et al., ICLR 2024) its two stages r and 2p − 1 − r of 2p, in that order.
        loss_fn: (output, targets) → scalar, the mean over a micro-batch.
        optimizer: any torch optimizer on this rank's parameters.
        num_microbatches: m; "zbv" needs m ≥ 2p.
        schedule: 1f1b, gpipe or zbv.
        group: a process group of all stages; None is the default one.
        clip_norm: clips the global gradient norm over all stages (a sum that every rank waits for); None does not clip.
        share_loss: give every rank the loss, in the same sum; otherwise only the last stage knows it, and the others get nan.
        device: where the stages are; None takes it from the parameters.

    Raises:
        ValueError: tied parameters (torch's schedules do not sum their gradients), a wrong number of stages or of micro-batches, an unknown schedule.
        TypeError: a wrapped module.
    """

    def __init__(
        self,
        stage_modules: nn.Module | Sequence[nn.Module],
        loss_fn: Callable[[Any, Any], Tensor],
        optimizer: torch.optim.Optimizer,
        num_microbatches: int = 8,
        schedule: Rival = "1f1b",
        group: dist.ProcessGroup | None = None,
        *,
        clip_norm: float | None = None,
        share_loss: bool = False,
        device: torch.device | None = None,
    ):
        if schedule not in get_args(Rival):
            raise ValueError(f"schedule={schedule!r}: torch's are {', '.join(get_args(Rival))} here")
        if clip_norm is not None and not clip_norm > 0:
            raise ValueError(f"clip_norm={clip_norm!r}: use a number above 0, or None not to clip")
        modules = [stage_modules] if isinstance(stage_modules, nn.Module) else list(stage_modules)
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        wanted = 2 if schedule == "zbv" else 1
        if len(modules) != wanted:
            raise ValueError(f"schedule={schedule!r} has {wanted} stage module(s) per rank, but got {len(modules)}")
        if schedule == "zbv" and num_microbatches < 2 * ranks:
            raise ValueError(
                f"num_microbatches={num_microbatches} is too small for schedule='zbv' on {ranks} ranks: the smallest is {2 * ranks}"
            )
        for module in modules:
            refuse_wrappers(module)
            if getattr(module, "tied_names", ()):
                raise ValueError(
                    f"parameter {module.tied_names[0]!r} is tied to another stage, and torch's schedules do not sum its gradients: untie it, "
                    "or use onelag.pipeline.schedules.Schedule1F1B"
                )
        self.optimizer, self.group, self.clip_norm = optimizer, group, clip_norm
        self._share = (share_loss or clip_norm is not None) and ranks > 1
        device = device or next((p.device for module in modules for p in module.parameters()), torch.device("cpu"))
        self._wire = torch.device("cpu") if dist.get_backend(group) == "gloo" else device
        places = [rank, 2 * ranks - 1 - rank] if schedule == "zbv" else [rank]
        stages = [PipelineStage(m, s, wanted * ranks, device, group=group) for m, s in zip(modules, places)]
        self._parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
        self.is_first, self.is_last = any(s.is_first for s in stages), any(s.is_last for s in stages)
        if schedule == "zbv":
            self._schedule = ScheduleZBVZeroBubble(stages, num_microbatches, loss_fn=loss_fn)
        else:
            self._schedule = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[schedule](stages[0], num_microbatches, loss_fn=loss_fn)
        # Cut only to be refused: torch would chunk an uneven batch into micro-batches of different sizes.
        self._check_inputs, self._check_targets = (Cutter(name, num_microbatches, torch.device("cpu")) for name in ("inputs", "targets"))

    def step(self, inputs: Any = None, targets: Any = None) -> float:
        """Trains on one batch: all forwards and backwards, the flush, the update.

        Args:
            inputs: the batch for the first stage: a tensor, a tuple (positional) or a dict (keyword arguments). Other ranks ignore it.
            targets: a tensor, for the last stage.

        Returns:
            This batch's loss, on the last stage or, when shared, everywhere; nan elsewhere.

        Raises:
            ValueError: a batch that cannot be cut evenly.
        """
        losses: list[Tensor] = []
        positional: tuple = ()
        named: dict[str, Any] = {}
        if self.is_first:
            self._check_inputs(inputs)
            positional = inputs if isinstance(inputs, tuple) else () if isinstance(inputs, dict) else (inputs,)
            named = inputs if isinstance(inputs, dict) else {}
        if self.is_last:
            self._check_targets(targets)
            named = {**named, "target": targets, "losses": losses}
        self._schedule.step(*positional, **named, return_outputs=False)
        loss = float(torch.stack([part.detach() for part in losses]).mean()) if losses else math.nan
        if self._share or self.clip_norm is not None:
            loss = self._clip(loss)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def _clip(self, loss: float) -> float:
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        sums = torch.zeros(2, dtype=torch.float64, device=self._wire)
        sums[0] = squared_norm(gradients, self._wire)
        if self.is_last:
            sums[1] = loss
        if self._share:
            dist.all_reduce(sums, group=self.group)
        if self.clip_norm is not None and gradients:
            torch._foreach_mul_(gradients, clip_factor(math.sqrt(float(sums[0])), self.clip_norm))
        return float(sums[1])

    def flush(self) -> None:
        """Nothing is left after a step; here so that a loop can call it."""
