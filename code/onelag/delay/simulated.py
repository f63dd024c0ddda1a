"""The delay: train on gradients that are `steps` weight versions old, in one process, with any optimizer.

W(t+1) = W(t) − u(∇f_t(W(max(t − steps, 0))))          arXiv 2606.30634; PipeDream-2BW is steps = 1
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from onelag.delay.wrapper import OptimizerWrapper, exchange


class SimulatedDelay(OptimizerWrapper):
    """After `step()` the parameters hold the stale version that the next gradient is to be taken at; the optimizer works on the newest one.

        optimizer = SimulatedDelay(torch.optim.AdamW(model.parameters(), lr=3e-3), steps=1)
        loss(model(x)).backward(); optimizer.step(); optimizer.zero_grad()
        with optimizer.latest_weights():
            evaluate(model)

    Weights are W(0), W(1), …. Before step t the parameters hold W(max(t − steps, 0)); momentum, weight decay and every other part of the
    optimizer act on W(t); only the gradient is old. Memory: `steps` buffers of the size of the parameters, no more.

    Args:
        optimizer: any torch optimizer, or a correction of this package around one.
        steps: the delay τ ≥ 0, in optimizer steps, for all parameters; or one delay per parameter, {parameter: τ}, for stage-dependent delays
            as PipeDream's (see `stage_delays`). `steps=0` is bitwise the inner optimizer.

    Raises:
        ValueError: a negative delay, or a mapping that does not name exactly the optimizer's parameters.
        TypeError: a delay that is no integer.
    """

    label = "simulated_delay"

    def __init__(self, optimizer: torch.optim.Optimizer, steps: int | Mapping[Tensor, int] = 1):
        super().__init__(optimizer)
        self.steps = steps
        self._newer: dict[Tensor, list[Tensor]] = {}  # parameter → W(t−τ+1), …, W(t); the parameter itself holds W(t−τ)
        for parameter, delay in _delay_of_each(list(self.parameters()), steps).items():
            if delay:
                self._newer[parameter] = [parameter.detach().clone() for _ in range(delay)]

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        self._begin_step(closure)
        newest = {parameter: newer[-1] for parameter, newer in self._newer.items()}
        if isinstance(self.optimizer, OptimizerWrapper):
            self.optimizer.step_beside(newest)
        else:
            for parameter, weights in newest.items():
                parameter.copy_(weights)  # W(t−τ) is dead once its gradient is known: its memory takes a working copy of W(t)
            self.optimizer.step()
        for parameter, newer in self._newer.items():
            newer.append(exchange(parameter, newer.pop(0)))

    @contextmanager
    def latest_weights(self) -> Iterator[None]:
        with self._holding("latest_weights", {p: newer[-1] for p, newer in self._newer.items()}), super().latest_weights():
            yield

    @contextmanager
    def base_weights(self) -> Iterator[None]:
        with self._holding("base_weights", {p: newer[-1] for p, newer in self._newer.items()}), super().base_weights():
            yield

    def _settings(self) -> dict[str, Any]:
        return {"steps": [len(self._newer.get(parameter, ())) for parameter in self.parameters()]}

    def _tensors(self, parameter: Tensor) -> Mapping[str, Tensor]:
        if parameter not in self._newer:
            return {}
        # The stale version is saved too: the model's own checkpoint may hold another version, taken inside latest_weights().
        versions = [parameter.detach(), *self._newer[parameter]]
        return {f"version_{age}": version for age, version in enumerate(reversed(versions))}

    def _restore(self, parameter: Tensor, tensors: Mapping[str, Tensor]) -> None:
        if parameter not in self._newer:
            return
        delay = len(self._newer[parameter])
        if len(tensors) != delay + 1:
            raise ValueError(f"SimulatedDelay: a parameter has {len(tensors)} saved weight versions where steps={delay} needs {delay + 1}")
        parameter.copy_(tensors[f"version_{delay}"])
        self._newer[parameter] = [tensors[f"version_{age}"] for age in reversed(range(delay))]


def stage_delays(named_parameters: Iterable[tuple[str, Tensor]], stage_of: Callable[[str], int], num_stages: int) -> dict[Tensor, int]:
    """PipeDream's delays for `SimulatedDelay(steps=…)`: stage s of p (from 0) is p − 1 − s updates late.

    Args:
        named_parameters: `model.named_parameters()`.
        stage_of: the stage, from 0, that holds the parameter of that name.
        num_stages: p ≥ 1.
    """
    delays = {}
    for name, parameter in named_parameters:
        stage = stage_of(name)
        if not 0 <= stage < num_stages:
            raise ValueError(f"stage_of({name!r}) is {stage}, but the stages are 0 … {num_stages - 1} (num_stages={num_stages})")
        delays[parameter] = num_stages - 1 - stage
    return delays


def _delay_of_each(parameters: list[Tensor], steps: int | Mapping[Tensor, int]) -> dict[Tensor, int]:
    if isinstance(steps, Mapping):
        known = {id(parameter) for parameter in parameters}
        unknown = sum(id(parameter) not in known for parameter in steps)
        missing = sum(parameter not in steps for parameter in parameters)
        if unknown or missing:
            raise ValueError(
                f"SimulatedDelay: steps={{parameter: delay}} must name each of the optimizer's {len(parameters)} parameters: "
                f"{missing} are missing, {unknown} belong to no group"
            )
    delays = {p: steps[p] if isinstance(steps, Mapping) else steps for p in parameters}
    for delay in delays.values():
        if isinstance(delay, bool) or not isinstance(delay, int):
            raise TypeError(f"SimulatedDelay: steps must be an integer number of optimizer steps, but got {delay!r}")
        if delay < 0:
            raise ValueError(f"SimulatedDelay: steps must be 0 or more, but got {delay}: a gradient cannot come from the future")
    return delays
