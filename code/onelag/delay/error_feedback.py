"""The correction: feed the error of the last stale update back, once (arXiv 2606.30634, "error feedback").

    x_{t+1} = x_t − u_t − c (u_t − u_{t−1}),        c = 1:   x_{t+1} = x_t − 2 u_t + u_{t−1}

u_t is the optimizer's whole update (learning rate and decoupled weight decay included), made from the newest gradient there is.
With y_t = x_t + c u_{t−1} the rule reads y_{t+1} = y_t − u_t with gradients taken at x_t = y_t − c u_{t−1}: it is the plain method on y, run
at an extrapolated point (theory/equivalence.py, Proposition E2). Hence the two forms below.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from onelag.delay.wrapper import OptimizerWrapper, exchange


def lookahead(base: Tensor, previous_base: Tensor, coefficient: float) -> Tensor:
    """x_{t+1} = y_{t+1} − c (y_t − y_{t+1}), written into `previous_base` (y_t), which is returned. The pipeline uses this same line."""
    return previous_base.lerp_(base, 1.0 + coefficient)


class ErrorFeedback(OptimizerWrapper):
    """Adds the correction to any torch optimizer, for one parameter-sized buffer.

        optimizer = ErrorFeedback(torch.optim.AdamW(model.parameters(), lr=3e-3))
        optimizer = SimulatedDelay(optimizer, steps=1)          # in a simulation; a 2BW pipeline has the delay by itself

    The first update of a parameter is applied as it is; the correction starts with the second. A parameter without gradient does not move and
    forgets its stored update, so its next update is a first one again.

    Args:
        optimizer: any torch optimizer; not a SimulatedDelay (the delay goes outside: it must see corrected weights).
        coefficient: c ≥ 0. 1 is the paper's rule, 0 is bitwise the inner optimizer.
        form: "update", the formula read literally: the inner optimizer works on x, and its whole update is kept and fed back.
            "lookahead": the inner optimizer works on y (so weight decay shrinks y), and the model runs on x_{t+1} = y_{t+1} − c (y_t − y_{t+1}).
            Equal to rounding at zero weight decay. The lookahead form needs no working memory during the step.

    Raises:
        ValueError: a coefficient that is negative or not finite, or an unknown form.
        TypeError: the wrapped optimizer is a SimulatedDelay.
    """

    label = "error_feedback"

    def __init__(self, optimizer: torch.optim.Optimizer, coefficient: float = 1.0, form: Literal["update", "lookahead"] = "update"):
        from onelag.delay.simulated import SimulatedDelay  # the two modules know each other by name only

        if isinstance(optimizer, SimulatedDelay):
            raise TypeError(f"{type(self).__name__} goes inside the delay: SimulatedDelay({type(self).__name__}(optimizer))")
        if not (math.isfinite(coefficient) and coefficient >= 0):
            raise ValueError(f"{type(self).__name__}: coefficient must be a finite number, 0 or more, but got {coefficient}")
        if form not in ("update", "lookahead"):
            raise ValueError(f"{type(self).__name__}: form must be 'update' or 'lookahead', but got {form!r}")
        super().__init__(optimizer)
        self.coefficient, self.form = float(coefficient), form
        self._kept: dict[
            Tensor, Tensor
        ] = {}  # parameter → u_{t−1} (form "update") or y_t (form "lookahead"); absent before its first update
        self._newest: Mapping[Tensor, Tensor] = {}  # the newest weights, where a SimulatedDelay keeps them during its step

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        self._begin_step(closure)
        moving, newest = [], self._newest
        for parameter in self.parameters():
            if self.coefficient and parameter.grad is not None:
                moving.append(parameter)
            else:
                self._kept.pop(parameter, None)
                if parameter in newest:
                    parameter.copy_(newest[parameter])
        if self.form == "update":
            self._step_on_x(moving, newest)
        else:
            self._step_on_y(moving, newest)

    def step_beside(self, newest: Mapping[Tensor, Tensor]) -> None:
        self._newest = newest  # saves a copy of the weights in the update form, and copying them at all in the lookahead form
        try:
            self.step()
        finally:
            self._newest = {}

    def _step_on_x(self, moving: list[Tensor], newest: Mapping[Tensor, Tensor]) -> None:
        before = []
        for parameter in moving:
            if parameter in newest:
                parameter.copy_(newest[parameter])
                before.append(newest[parameter])
            else:
                before.append(parameter.detach().clone())
        self.optimizer.step()
        for parameter, x in zip(moving, before):
            update = x - parameter
            previous = self._kept.get(parameter)
            if previous is not None:
                parameter.add_(previous.sub_(update), alpha=self.coefficient)
            self._kept[parameter] = update

    def _step_on_y(self, moving: list[Tensor], newest: Mapping[Tensor, Tensor]) -> None:
        before = []
        for parameter in moving:
            base = self._kept.get(parameter)
            if base is not None:  # x is dead once its gradient is known: its memory takes y_t, and the optimizer works on y_t in place
                before.append(exchange(parameter, base).copy_(parameter))
            else:  # nothing stored: y is x
                before.append(newest.get(parameter, parameter).detach().clone())
                parameter.copy_(before[-1])
        self.optimizer.step()
        for parameter, base in zip(moving, before):
            if parameter in self._kept:
                self._kept[parameter] = exchange(parameter, lookahead(parameter, base, self.coefficient))
            else:
                self._kept[parameter] = self._first_base(parameter, base)

    def _first_base(self, parameter: Tensor, start: Tensor) -> Tensor:
        """y_1 = x_1 + c u_0 with x_1 = x_0 − u_0 (already in the parameter) and x_0 = `start`, whose memory is used."""
        return start.copy_(torch.lerp(parameter, start, self.coefficient))

    @property
    def corrects(self) -> bool:
        return self.coefficient != 0

    @contextmanager
    def base_weights(self) -> Iterator[None]:
        if self.form == "lookahead":
            base = self._kept
        else:
            base = {p: torch.add(p.detach(), update, alpha=self.coefficient) for p, update in self._kept.items()}
        with self._holding("base_weights", base), super().base_weights():
            yield

    def _settings(self) -> dict[str, Any]:
        return {"form": self.form, "coefficient": self.coefficient}

    def _tensors(self, parameter: Tensor) -> Mapping[str, Tensor]:
        return {"kept": self._kept[parameter]} if parameter in self._kept else {}

    def _restore(self, parameter: Tensor, tensors: Mapping[str, Tensor]) -> None:
        self._kept.pop(parameter, None)
        if "kept" in tensors:
            self._kept[parameter] = tensors["kept"]
