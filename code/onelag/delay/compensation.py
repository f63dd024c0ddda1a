"""A rival correction: compensate the gradient for the distance that the weights moved meanwhile (DC-ASGD, Zheng et al., arXiv 1609.08326)."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from onelag.delay.wrapper import OptimizerWrapper


class DelayCompensation(OptimizerWrapper):
    """Gives the inner optimizer g + λ g⊙g⊙(W(t) − W(t−τ)) instead of the stale g: a first-order step with g⊙g for the Hessian.

    Wrap as SimulatedDelay(DelayCompensation(optimizer, steps=τ), steps=τ). `p.grad` is what it was after `step()`.

    Args:
        optimizer: any torch optimizer.
        steps: the delay τ ≥ 0 of the gradients; one parameter-sized buffer per step. 0 is bitwise the inner optimizer.
        strength: λ; the paper's λ_0, 0.04 for the constant form (DC-ASGD-c) and 2 for the adaptive one (DC-ASGD-a).
        mean_square_decay: None for the constant form; m ∈ [0, 1) for the adaptive one, λ_t = λ_0 / √(v_t + 1e-7), v_t = m v_{t−1} + (1−m) g².

    Raises:
        ValueError: negative `steps` or `strength`, or a decay outside [0, 1).
    """

    label = "delay_compensation"

    def __init__(self, optimizer: torch.optim.Optimizer, steps: int = 1, strength: float = 0.04, mean_square_decay: float | None = None):
        if steps < 0:
            raise ValueError(f"DelayCompensation: steps must be 0 or more, but got {steps}")
        if not strength >= 0:
            raise ValueError(f"DelayCompensation: strength must be 0 or more, but got {strength}")
        if mean_square_decay is not None and not 0 <= mean_square_decay < 1:
            raise ValueError(f"DelayCompensation: mean_square_decay must be in [0, 1) or None, but got {mean_square_decay}")
        super().__init__(optimizer)
        self.steps, self.strength, self.mean_square_decay = steps, strength, mean_square_decay
        self._older: dict[Tensor, list[Tensor]] = {p: [p.detach().clone() for _ in range(steps)] for p in self.parameters()}
        self._mean_square: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        self._begin_step(closure)
        if self.steps == 0:
            self.optimizer.step()
            return
        true_gradients = {}
        for parameter, older in self._older.items():
            moved = parameter - older[0]  # W(t) − W(t−τ); its memory becomes the compensated gradient
            older.append(older.pop(0).copy_(parameter))
            if parameter.grad is None:
                continue
            gradient = true_gradients[parameter] = parameter.grad
            parameter.grad = gradient + moved.mul_(gradient).mul_(gradient).mul_(self._scale(parameter, gradient))
        self.optimizer.step()
        for parameter, gradient in true_gradients.items():
            parameter.grad = gradient

    def _scale(self, parameter: Tensor, gradient: Tensor) -> float | Tensor:
        if self.mean_square_decay is None:
            return self.strength
        square = gradient.square()
        mean = self._mean_square.setdefault(parameter, torch.zeros_like(parameter))
        mean.lerp_(square, 1 - self.mean_square_decay)
        return self.strength / (mean + 1e-7).sqrt()

    def _settings(self) -> dict[str, Any]:
        return {"steps": self.steps, "mean_square_decay": self.mean_square_decay}

    def _tensors(self, parameter: Tensor) -> Mapping[str, Tensor]:
        tensors = {f"version_{index}": older for index, older in enumerate(self._older[parameter])}
        if parameter in self._mean_square:
            tensors["mean_square"] = self._mean_square[parameter]
        return tensors

    def _restore(self, parameter: Tensor, tensors: Mapping[str, Tensor]) -> None:
        self._older[parameter] = [tensors[f"version_{index}"] for index in range(self.steps)]
        self._mean_square.pop(parameter, None)
        if "mean_square" in tensors:
            self._mean_square[parameter] = tensors["mean_square"]
