"""Muon: momentum, orthogonalized (Jordan et al., 2024; kellerjordan.github.io/posts/muon).

m_t = β m_{t−1} + (1 − β) g_t                        (EMA; or m_t = β m_{t−1} + g_t, the "sum")
n_t = β m_t + (1 − β) g_t if nesterov else m_t       (sum: g_t + β m_t)
W  ← (1 − lr·λ) W − lr · s(W) · orthogonalize(n_t)
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor

from onelag.optim.newton_schulz import QUINTIC, newton_schulz, svd_orthogonalize


def update_scale(shape: torch.Size, scaling: str) -> float:
    """s(W): "original" √max(1, rows/columns) (Jordan); "match_rms_adamw" 0.2 √max(rows, columns) (Moonlight, arXiv 2502.16982)."""
    rows, columns = shape[-2:]
    return math.sqrt(max(1.0, rows / columns)) if scaling == "original" else 0.2 * math.sqrt(max(rows, columns))


class Muon(torch.optim.Optimizer):
    """Muon for hidden matrices. Never touches `p.grad`, never aliases its momentum buffer; a parameter without gradient does not move.

    Args:
        params: 2-D parameters, or 3-D ones of shape (experts, out, in), of which each slice is a matrix of its own.
        lr: learning rate; the update of a matrix has spectral norm about lr · s(W).
        momentum: β in [0, 1).
        nesterov: see the formula above.
        momentum_form: "ema" or "sum". The orthogonalized direction is the same for both; the buffers differ by the factor 1 − β.
        weight_decay: decoupled, λ.
        orthogonalization: "newton_schulz" or "svd" (exact).
        steps, coefficients, dtype: of `newton_schulz`; dtype None is float32 on CPU, bfloat16 on CUDA.
        scaling: see `update_scale`.
        implementation: "fast" (same-shape matrices in one batched product) or "reference" (one matrix at a time, written to be read).

    Raises:
        ValueError: a parameter that is neither 2-D nor 3-D (named when names are given), or a setting out of range.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float = 0.02,
        momentum: float = 0.95,
        nesterov: bool = True,
        momentum_form: Literal["ema", "sum"] = "ema",
        weight_decay: float = 0.1,
        orthogonalization: Literal["newton_schulz", "svd"] = "newton_schulz",
        steps: int = 5,
        coefficients: tuple[float, float, float] = QUINTIC,
        dtype: torch.dtype | None = None,
        scaling: Literal["original", "match_rms_adamw"] = "original",
        implementation: Literal["fast", "reference"] = "fast",
    ):
        _check(lr >= 0, f"lr must be 0 or more, but got {lr}")
        _check(0 <= momentum < 1, f"momentum must be in [0, 1), but got {momentum}")
        _check(weight_decay >= 0, f"weight_decay must be 0 or more, but got {weight_decay}")
        _check(momentum_form in ("ema", "sum"), f"momentum_form must be 'ema' or 'sum', but got {momentum_form!r}")
        _check(
            orthogonalization in ("newton_schulz", "svd"), f"orthogonalization must be 'newton_schulz' or 'svd', not {orthogonalization!r}"
        )
        _check(scaling in ("original", "match_rms_adamw"), f"scaling must be 'original' or 'match_rms_adamw', but got {scaling!r}")
        _check(implementation in ("fast", "reference"), f"implementation must be 'fast' or 'reference', but got {implementation!r}")
        self.implementation = implementation
        defaults = dict(
            lr=lr,
            momentum=momentum,
            nesterov=nesterov,
            momentum_form=momentum_form,
            weight_decay=weight_decay,
            orthogonalization=orthogonalization,
            steps=steps,
            coefficients=coefficients,
            dtype=dtype,
            scaling=scaling,
        )
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        names = group.get("param_names") or [f"number {index}" for index in range(len(group["params"]))]
        for name, parameter in zip(names, group["params"]):
            if parameter.ndim not in (2, 3):
                self.param_groups.pop()
                raise ValueError(
                    f"Muon orthogonalizes matrices, but parameter {name} has shape {tuple(parameter.shape)}: "
                    "give it to AdamW (build_optimizer does this by name)"
                )

    @torch.no_grad()
    def step(self, closure: Callable | None = None):
        """One step; an optional closure re-evaluates the loss first, as in every torch optimizer."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            moving = [parameter for parameter in group["params"] if parameter.grad is not None]
            if self.implementation == "reference":
                for parameter in moving:
                    self._step_one(parameter, group)
            else:
                self._step_batched(moving, group)
        return loss

    def _momentum_buffer(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        return state["momentum_buffer"]

    def _step_one(self, parameter: Tensor, group: dict) -> None:
        """The definition, line by line."""
        beta, gradient = group["momentum"], parameter.grad
        fresh = 1 - beta if group["momentum_form"] == "ema" else 1.0
        buffer = self._momentum_buffer(parameter)
        buffer.copy_(beta * buffer + fresh * gradient)
        direction = beta * buffer + fresh * gradient if group["nesterov"] else buffer
        update = self._finish(self._orthogonalize(direction, group), [parameter], group)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_(update, alpha=group["lr"] * update_scale(parameter.shape, group["scaling"]))

    def _step_batched(self, moving: list[Tensor], group: dict) -> None:
        """The same with equal shapes stacked: one batched product per iteration instead of one per matrix."""
        beta = group["momentum"]
        fresh = 1 - beta if group["momentum_form"] == "ema" else 1.0
        alike = defaultdict(list)
        for parameter in moving:
            alike[(parameter.shape, parameter.dtype, parameter.device)].append(parameter)
        for (shape, dtype, device), parameters in alike.items():
            directions = torch.empty((len(parameters), *shape), dtype=dtype, device=device)
            for direction, parameter in zip(directions, parameters):
                buffer = self._momentum_buffer(parameter).mul_(beta).add_(parameter.grad, alpha=fresh)
                if group["nesterov"]:
                    torch.mul(buffer, beta, out=direction).add_(parameter.grad, alpha=fresh)
                else:
                    direction.copy_(buffer)
            updates = self._finish(self._orthogonalize(directions, group), parameters, group)
            step_size = group["lr"] * update_scale(shape, group["scaling"])
            for parameter, update in zip(parameters, updates):
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=step_size)

    @staticmethod
    def _orthogonalize(directions: Tensor, group: dict) -> Tensor:
        if group["orthogonalization"] == "svd":
            return svd_orthogonalize(directions)
        return newton_schulz(directions, group["steps"], group["coefficients"], group["dtype"])

    def _finish(self, orthogonal: Tensor, parameters: list[Tensor], group: dict) -> Tensor:
        """What a descendant does to the orthogonalized direction(s) before they are applied; Muon: nothing."""
        return orthogonal


def _check(fine: bool, message: str) -> None:
    if not fine:
        raise ValueError(f"Muon: {message}")
