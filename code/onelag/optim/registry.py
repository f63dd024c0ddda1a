"""`build_optimizer`: makes any optimizer of the study by name and routes the parameters to it."""

import inspect
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from onelag.optim.combined import CombinedOptimizer
from onelag.optim.recipes import ADAMW, OPTIMIZERS
from onelag.optim.routing import FALLBACK_PATTERNS, check_patterns, route

logger = logging.getLogger("onelag")


def build_optimizer(
    name: str,
    model: nn.Module | Iterable[tuple[str, Tensor]],
    lr: float | None = None,
    weight_decay: float | None = None,
    fallback_lr: float | None = None,
    fallback: Sequence[str] | None = None,
    **settings: Any,
) -> torch.optim.Optimizer:
    """Builds an optimizer by name; for muon, normuon and soap the hidden matrices go to it, everything else to AdamW.

    Args:
        name: one of `OPTIMIZERS`.
        model: a module, or (global name, parameter) pairs, as a pipeline stage has them. Routing is by these names.
        lr: peak learning rate; None takes the recipe's. Every group also carries it as "initial_lr".
        weight_decay: decoupled; None is 0.1 (0 for sgd, whose decay is coupled). Vectors (norms, biases) are never decayed.
        fallback_lr: of the AdamW that takes the rest; None is `lr`. Only with the matrix optimizers.
        fallback: shell patterns of names that go to the AdamW; None is `routing.FALLBACK_PATTERNS`. On a whole module each must match something.
        **settings: override the recipe's settings, e.g. momentum=0.9.

    Raises:
        ValueError: unknown name or setting (the message lists the choices), a pattern that matches nothing, no trainable parameter.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {name!r}: choose one of {', '.join(OPTIMIZERS)}")
    recipe = OPTIMIZERS[name]
    unknown = set(settings) - set(recipe.settings)
    if unknown:
        raise ValueError(f"optimizer {name!r} has no setting {', '.join(sorted(unknown))}: it has {', '.join(recipe.settings)}")
    if fallback_lr is not None and not recipe.matrices_only:
        raise ValueError(f"fallback_lr is for optimizers that take matrices only, and {name!r} takes every parameter")
    whole = isinstance(model, nn.Module)
    named = [(n, p) for n, p in (model.named_parameters() if whole else model) if p.requires_grad]
    if not named:
        raise ValueError(f"optimizer {name!r}: the model has no trainable parameter")
    if whole and fallback is not None:
        check_patterns([n for n, _ in named], fallback)
    lr = recipe.learning_rate if lr is None else lr
    weight_decay = (0.0 if name == "sgd" else 0.1) if weight_decay is None else weight_decay
    merged = {**recipe.settings, **settings}
    if not recipe.matrices_only:
        return _with_initial_lr(recipe.make(_decay_groups(named, weight_decay), lr=lr, **_known(recipe.make, merged)))

    routing = route(named, FALLBACK_PATTERNS if fallback is None else fallback)
    matrices = [(n, p) for n, p in named if routing[n] == "matrix"]
    rest = [(n, p) for n, p in named if routing[n] == "fallback"]
    logger.info(
        "%s: %d matrices (%s parameters) → %s, %d others (%s) → AdamW",
        name, len(matrices), f"{sum(p.numel() for _, p in matrices):,}", recipe.make.__name__, len(rest), f"{sum(p.numel() for _, p in rest):,}",
    )  # fmt: skip
    parts = []
    if matrices:
        group = {"params": matrices, "weight_decay": weight_decay}
        parts.append(recipe.make([group], lr=lr, **_known(recipe.make, merged)))
    if rest:
        parts.append(torch.optim.AdamW(_decay_groups(rest, weight_decay), lr=lr if fallback_lr is None else fallback_lr, **ADAMW))
    return _with_initial_lr(parts[0] if len(parts) == 1 else CombinedOptimizer(parts))


def _decay_groups(named: list[tuple[str, Tensor]], weight_decay: float) -> list[dict[str, Any]]:
    """Matrices with decay, vectors without."""
    groups = [
        {"params": [(n, p) for n, p in named if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [(n, p) for n, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _known(make: Callable, settings: dict[str, Any]) -> dict[str, Any]:
    """Refuses a setting that the constructor does not name: pytorch-optimizer's take any keyword and would drop it in silence."""
    named = set()
    for cls in inspect.getmro(make) if inspect.isclass(make) else (make,):
        if cls is not object and "__init__" in vars(cls):
            named |= set(inspect.signature(cls.__init__).parameters)
    stray = set(settings) - named
    if stray:
        raise ValueError(f"{make.__name__} of the installed version takes no setting {', '.join(sorted(stray))}")
    return settings


def _with_initial_lr(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return optimizer
