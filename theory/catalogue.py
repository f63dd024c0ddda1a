"""Every statement with its marks and where its checks are: the table of README.md, the plan of `python -m theory`, and what the tests
walk through.
"""

from dataclasses import dataclass
from types import ModuleType

from theory import (
    adam,
    correlation,
    deterministic,
    equivalence,
    gradient_correction,
    inexact,
    kernels,
    layerwise,
    limit_cycle,
    lmo_delay,
    momentum,
    stability,
    update_correction,
    variance,
    weight_decay,
    weight_prediction,
    worst_case_lmo,
)

KNOWN, PROVED, CONJECTURE = "known", "proved here", "conjecture"


@dataclass(frozen=True)
class Statement:
    """One statement (or family) and the module that states, proves and checks it. A module has `check_symbolic`, and where it applies
    `check_numeric(count)` and `check_sharp()`.
    """

    name: str
    title: str
    module: ModuleType
    mark: str
    figure: str = ""

    @property
    def file(self) -> str:
        return f"theory/{self.module.__name__.rsplit('.', 1)[-1]}.py"

    @property
    def numeric(self) -> bool:
        return hasattr(self.module, "check_numeric")

    @property
    def sharp(self) -> bool:
        return hasattr(self.module, "check_sharp")


STATEMENTS = (
    Statement("Lemmas 2, 4", "momentum as a kernel: mean age, noise", kernels, PROVED),
    Statement("Theorem 1", "delayed LMO, any norm; Corollaries 1.1–1.3", lmo_delay, PROVED, "tightness"),
    Statement("Theorem 2", "weight decay, constrained, star-convex; with the correction", weight_decay, PROVED),
    Statement("Theorem 3", "the correction after the optimizer (error feedback)", update_correction, PROVED, "tightness"),
    Statement("Theorem 4", "the correction inside the optimizer; Propositions 4.2, 4.3", gradient_correction, PROVED),
    Statement("Theorem 5", "inexact LMO: Newton–Schulz, Nesterov, Adam-like rows", inexact, PROVED),
    Statement("Theorem 6", "a guarantee that the correction strictly improves", deterministic, PROVED),
    Statement("Theorem L", "layer-wise norms, steps and delays", layerwise, PROVED),
    Statement("Theorem P", "weight prediction with any predictor", weight_prediction, PROVED),
    Statement("Proposition E", "error feedback = prediction; consistent virtual iterates", equivalence, PROVED),
    Statement("Proposition 7", "exact limit cycle: a lower bound", limit_cycle, PROVED, "cycles"),
    Statement("Theorem 8", "stability limits of the quadratic model", stability, PROVED, "stability"),
    Statement("Theorem 9", "stationary variance of the quadratic model", variance, PROVED, "variance"),
    Statement("Proposition 10", "correlation of consecutive directions", correlation, PROVED),
    Statement("Model A", "why AdamW suffers: coordinate-wise normalisation", adam, PROVED, "adam"),
    Statement("Model M", "momentum protects, momentum exposes", momentum, CONJECTURE, "momentum"),
    Statement("Worst case", "LMO in an arbitrary norm, from above and below", worst_case_lmo, PROVED, "constants"),
)
