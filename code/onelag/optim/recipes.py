"""Every optimizer of the study by name, each with all its settings written out.

The paper states none of these values; they are the methods' own (sources beside each) or, where no source says, a choice of ours.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytorch_optimizer
import torch

from onelag.optim.muon import Muon
from onelag.optim.normuon import NorMuon

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
