"""Every optimizer of the study by name, each with all its settings written out.

The paper states none of these values; they are the methods' own (sources beside each) or, where no source says, a choice of ours.
"""

import inspect
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytorch_optimizer
import torch
from torch import Tensor, nn

from onelag.optim.combined import CombinedOptimizer
from onelag.optim.muon import Muon
from onelag.optim.normuon import NorMuon
from onelag.optim.routing import FALLBACK_PATTERNS, check_patterns, route

logger = logging.getLogger("onelag")

ADAMW = dict(betas=(0.9, 0.95), eps=1e-8, amsgrad=False, maximize=False, foreach=True)  # β₂ 0.95: the usual choice for language models


@dataclass(frozen=True)
class Recipe:
    """How one optimizer is built.

    Attributes:
        make: the class; called as make(parameter groups, lr=…, **settings).
        settings: all of its settings that a user may override by keyword.
        matrices_only: it takes the hidden matrices alone, and AdamW the rest.
        learning_rate: a starting point at small scale, for users who give none.
    """

    make: Callable[..., torch.optim.Optimizer]
    learning_rate: float
    settings: dict[str, Any] = field(default_factory=dict)
    matrices_only: bool = False


MUON = dict(
    momentum=0.95,
    nesterov=True,
    momentum_form="ema",
    orthogonalization="newton_schulz",
    steps=5,
    coefficients=(3.4445, -4.7750, 2.0315),
    dtype=None,
    scaling="match_rms_adamw",  # so that one learning rate has the meaning of AdamW's (Moonlight, arXiv 2502.16982)
    implementation="fast",
)

OPTIMIZERS: dict[str, Recipe] = {
    "adamw": Recipe(torch.optim.AdamW, 3e-3, ADAMW),
    "nadam": Recipe(
        torch.optim.NAdam,
        3e-3,
        dict(betas=(0.9, 0.95), eps=1e-8, momentum_decay=4e-3, decoupled_weight_decay=True, foreach=True, maximize=False),
    ),
    # The Nesterov-type correction of AsyncPP (Ajanthan et al., arXiv 2505.01099): NAdam with β₁ 0.99. β₂ is torch's default.
    "asyncpp": Recipe(
        torch.optim.NAdam,
        3e-3,
        dict(betas=(0.99, 0.999), eps=1e-8, momentum_decay=4e-3, decoupled_weight_decay=True, foreach=True, maximize=False),
    ),
    # Lion's language-model values (Chen et al., arXiv 2302.06675, section 4).
    "lion": Recipe(
        pytorch_optimizer.Lion,
        5e-4,
        dict(betas=(0.95, 0.98), weight_decouple=True, fixed_decay=False, foreach=True, maximize=False),
    ),
    # Adan's defaults (Xie et al., arXiv 2208.06677), with AdamW-style decay.
    "adan": Recipe(
        pytorch_optimizer.Adan,
        3e-3,
        dict(betas=(0.98, 0.92, 0.99), weight_decouple=True, max_grad_norm=0.0, eps=1e-8, foreach=True, maximize=False),
    ),
    # MARS-AdamW (Yuan et al., arXiv 2411.10438): γ 0.025, betas 0.95, 0.99; vectors by its built-in AdamW at the same learning rate.
    "mars": Recipe(
        pytorch_optimizer.MARS,
        3e-3,
        dict(
            betas=(0.95, 0.99),
            gamma=0.025,
            mars_type="adamw",
            optimize_1d=True,
            weight_decouple=True,
            fixed_decay=False,
            ams_bound=False,
            cautious=False,
            eps=1e-8,
            foreach=True,
            maximize=False,
        ),
    ),
    # SOAP's defaults (Vyas et al., arXiv 2409.11321). Its first step only initialises the preconditioner: parameters do not move.
    "soap": Recipe(
        pytorch_optimizer.SOAP,
        3e-3,
        dict(
            betas=(0.95, 0.95),
            shampoo_beta=None,
            precondition_frequency=10,
            max_precondition_dim=10000,
            merge_dims=False,
            precondition_1d=False,
            correct_bias=True,
            normalize_gradient=False,
            eps=1e-8,
            maximize=False,
        ),
        matrices_only=True,
    ),
    "normuon": Recipe(NorMuon, 1e-2, dict(**MUON, beta2=0.95, eps=1e-10), matrices_only=True),
    "muon": Recipe(Muon, 1e-2, MUON, matrices_only=True),
    # torch's SGD has no decoupled decay, and at its learning rates 0.1 would erase the weights: built without decay unless asked.
    "sgd": Recipe(torch.optim.SGD, 0.3, dict(momentum=0.9, dampening=0.0, nesterov=False, foreach=True, maximize=False)),
}


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
