"""The update: optimizer and correction on the fp32 master, the new version into its slot.

ErrorFeedback in its lookahead form costs no memory here: the master is y, the slots hold x, and
x_{t+1} = y_{t+1} − c (y_t − y_{t+1}) is made in the slot that is dead anyway (theory/equivalence.py, Proposition E2).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from onelag.delay import DelayCompensation, ErrorFeedback, OptimizerWrapper, SimulatedDelay, WeightPrediction, lookahead
from onelag.pipeline.stage import VersionedStage

# What schedules change from step to step. An update may run after the next step's values were set: it uses those of its own batch.
SCHEDULED = ("lr", "weight_decay", "momentum", "betas")


class MasterUpdate:
    """Steps the user's optimizer on the master parameters that this rank owns and writes weight versions.

    Args:
        optimizer: built on the stage module's own parameters. `ErrorFeedback(…, form="lookahead")` and `WeightPrediction` around it are recognised and
            done here; `ErrorFeedback(…, form="update")` works as any optimizer does, with its own buffer.
        stage: the weight versions.
        owned: local names of the parameters that this rank steps; the others leave the optimizer's groups.

    Raises:
        TypeError: a SimulatedDelay: the pipeline has the delay by itself.
        ValueError: the optimizer holds a parameter that the stage module does not have.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, stage: VersionedStage, owned: list[str]):
        self.stage, self.owned = stage, owned
        self.coefficient, self.predicts = 0.0, False
        self.optimizer = optimizer
        if type(optimizer) in (ErrorFeedback, WeightPrediction) and optimizer.form == "lookahead":
            self.optimizer, self.coefficient = optimizer.optimizer, optimizer.coefficient
            self.predicts = type(optimizer) is WeightPrediction
        self.extrapolated: set[str] = set()  # names of parameters whose x and y differ
        known = {id(p) for p in stage.master.values()}
        mine = {id(stage.master[name]) for name in owned}
        for index, group in enumerate(self.optimizer.param_groups):
            strange = [p for p in group["params"] if id(p) not in known and p.requires_grad]
            if strange:
                raise ValueError(
                    f"the optimizer's group {index} holds {len(strange)} parameters that are not the stage module's own, e.g. one of shape "
                    f"{tuple(strange[0].shape)}: build it from stage_module.parameters(), after the module was moved to its device"
                )
            keep = [id(p) in mine for p in group["params"]]
            if not all(keep):
                group["params"][:] = [p for p, kept in zip(group["params"], keep) if kept]
                if "param_names" in group:
                    group["param_names"][:] = [n for n, kept in zip(group["param_names"], keep) if kept]

    def settings(self) -> list[dict[str, Any]]:
        """The scheduled hyperparameters as they are now, one dict per group."""
        return [
            {key: _copied(group[key]) for key in SCHEDULED if key in group} for group in self.optimizer.param_groups
        ]

    @contextmanager
    def _using(self, settings: list[dict[str, Any]]) -> Iterator[None]:
        groups = self.optimizer.param_groups
        later = self.settings()
        for group, values in zip(groups, settings):
            group.update(values)
        try:
            yield
        finally:
            for group, values in zip(groups, later):
                group.update(values)

    @torch.no_grad()
    def apply(self, version: int, gradients: Mapping[str, Tensor | None], settings: list[dict[str, Any]]) -> None:
        """Makes W(version) from W(version − 1) for the owned parameters. A parameter without gradient does not move and its next update is a first one.

        Args:
            gradients: by local name, in the master's dtype.
            settings: as `settings()` gave them when the batch began.
        """
        newest, target = self.stage.slot(version - 1), self.stage.slot(version)
        before: dict[str, Tensor] = {}
        for name in self.owned:
            master = self.stage.master[name]
            master.grad = gradients[name]
            if not self.coefficient:
                continue
            if gradients[name] is None:
                if name in self.extrapolated:
                    master.copy_(newest[name])  # y becomes x; in bf16 the rounded one, since no other is left
                    self.extrapolated.discard(name)
            elif target[name].dtype == master.dtype:
                before[name] = target[name].copy_(master)  # y_t waits where x_{t+1} will be
            else:
                before[name] = master.detach().clone()
        with self._using(settings):
            self.optimizer.step()
        for name in self.owned:
            master = self.stage.master[name]
            master.grad = None
            if name not in before:
                target[name].copy_(master)
            elif self.predicts or name in self.extrapolated:
                x = lookahead(master, before[name], self.coefficient)
                if x.dtype != target[name].dtype:
                    target[name].copy_(x)
                self.extrapolated.add(name)
            else:  # the first update is uncorrected: x_1 = x_0 − u_0 is in the master, and y_1 = x_1 + c u_0
                base = torch.lerp(master, before[name], self.coefficient)
                target[name].copy_(master)
                master.copy_(base)
                self.extrapolated.add(name)


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raises TypeError for what a pipeline cannot step, ValueError for a correction that is under way."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer on the stage module's parameters, but got {type(optimizer).__name__}")
    inner = optimizer
    while isinstance(inner, OptimizerWrapper):
        if isinstance(inner, SimulatedDelay):
            raise TypeError("the pipeline has the delay by itself: give it the optimizer without SimulatedDelay")
        if isinstance(inner, ErrorFeedback) and inner.form == "lookahead" and any(inner._tensors(p) for p in inner.parameters()):
            raise ValueError(f"this {type(inner).__name__} has been stepped outside the pipeline: build a new one, or resume a pipeline's checkpoint")
        if inner is not optimizer and isinstance(inner, ErrorFeedback):
            raise TypeError(f"{type(inner).__name__} must be the outermost wrapper of the pipeline's optimizer, not inside {type(optimizer).__name__}")
        inner = inner.optimizer


def refuse_replicated(optimizer: torch.optim.Optimizer) -> None:
    """Raises TypeError for a correction that needs every parameter on every replica."""
    while isinstance(optimizer, OptimizerWrapper):
        if isinstance(optimizer, DelayCompensation):
            raise TypeError("DelayCompensation keeps old weights of every parameter and cannot be split over replicas: use num_replicas=1")
        optimizer = optimizer.optimizer


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
