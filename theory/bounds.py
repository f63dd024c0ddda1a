"""One door to the guarantees: `delayed_lmo_bound` picks the theorem by the correction.

no correction → Theorem 1 (theory/lmo_delay.py); update-level, the paper's error feedback → Theorem 3 (theory/update_correction.py);
gradient-level, Nesterov included → Theorem 4 (theory/gradient_correction.py). With weight decay → Theorem 2, with Newton–Schulz → Theorem
5: call those modules.
"""

from dataclasses import dataclass

from theory import gradient_correction, lmo_delay, update_correction
from theory.evidence import Bound

KINDS = ("none", "error-feedback", "gradient")


@dataclass(frozen=True)
class Correction:
    """kind; theta: its coefficient; staleness: measured δ̄ of Theorem 3 (None: the worst case τ + θ); start: "zero" or "first" (as
    implemented).
    """

    kind: str = "none"
    theta: float = 1.0
    staleness: float | None = None
    start: str = "first"


NONE = Correction()


def delayed_lmo_bound(Delta, L, eta, alpha, sigma, rho, T, delay=1, correction: Correction = NONE, metric: str = "average") -> Bound:
    """The guarantee on the mean (or minimum) gradient norm, term by term; `.total` is the number.

    Delta: f(x₀) − f_*. L, rho, sigma: assumptions A2, A4, A3. eta: step; alpha: EMA weight 1 − β; T: steps; delay: τ. metric: "average"
       (x_t; with error feedback z_t), "average-stale" (x_{t−τ}; with error feedback use Theorem 3(b) directly), "minimum".

    Raises:
        ValueError: unknown kind or metric, or a metric that the chosen theorem does not state.
    """
    if correction.kind not in KINDS:
        raise ValueError(f"Correction: kind must be one of {KINDS}, but got {correction.kind!r}")
    inputs = (Delta, L, eta, alpha, sigma, rho, T, delay)
    if correction.kind == "none":
        return lmo_delay.bound(*inputs, metric=metric)
    if correction.kind == "gradient":
        return gradient_correction.bound(*inputs, theta=correction.theta, metric="average-stale" if metric == "minimum" else metric)
    if metric == "average-stale":
        raise ValueError("delayed_lmo_bound: metric 'average-stale' with error feedback needs D̄: call theory.update_correction.bound")
    options = {"theta": correction.theta, "staleness": correction.staleness, "start": correction.start}
    return update_correction.bound(*inputs, metric="average" if metric == "minimum" else metric, **options)
