"""Worst case of delayed gradient descent, exact, by semidefinite programming (PEPit, solver Clarabel). Classes: convex, strongly convex,
non-convex, L = 1.

Method: x_{t+1} = x_t − γ[g_{t−τ} + θ(g_{t−τ} − g_{t−τ−1})], g_s = ∇f(x_{max(s,0)}); for a linear optimizer gradient-level and
update-level correction are the same.
Metrics: convex f(x_N) − f_* over ‖x_0 − x_*‖ ≤ 1; strongly convex (μ = 0.1) the same; non-convex min_{t≤N} ‖∇f(x_t)‖² over f(x_0) − f_* ≤
1 (f ≥ f_* enters as f_i − ‖g_i‖²/2 ≥ f_*, which is necessary and sufficient for an extension with that infimum). The classes'
interpolation conditions are necessary and sufficient (Taylor, Hendrickx, Glineur 2017), so each number is the exact worst case up to the
solver's 1e-6, in any dimension ≥ N + 2. Known, used as a check: τ = 0, convex, γ ≤ 1: 1/(4Nγ + 2) (Drori & Teboulle 2014).
Found (N = 3): one step of delay costs convex f nothing up to γL = 1/2 (0.125 with and without), and a factor 7 at γL = 1 (0.5 against
  0.0714), of which the correction removes most (0.125). For non-convex f at
γL = 1/2 delay costs 8 % (0.594 against 0.552) and the best correction is partial (θ = 1/2: 0.578, θ = 1: 0.589). These are short runs at
fixed N: for N → ∞ at β = 0 the correction's stable range is the smaller one (theory/stability.py), and both statements are true.
"""

import warnings
from dataclasses import dataclass

import numpy as np

from theory.evidence import Rows

WIDE = 1e3  # a Huber function this wide is a quadratic for every iterate here
CLASSES = ("convex", "strongly convex", "nonconvex")


@dataclass(frozen=True)
class Descent:
    """γ in units of 1/L, number of steps N, delay τ, correction θ."""

    gamma: float
    steps: int = 4
    delay: int = 1
    theta: float = 0.0

    def coefficients(self) -> list[dict[int, float]]:
        """Per step t: {s: coefficient of g_s in (x_t − x_{t+1})/γ}."""
        rows = []
        for t in range(self.steps):
            now, before = max(t - self.delay, 0), max(t - self.delay - 1, 0)
            row = {now: 1.0}
            if self.theta and before != now:
                row = {now: 1.0 + self.theta, before: -self.theta}
            rows.append(row)
        return rows


def worst(method: Descent, family: str, mu: float = 0.1) -> float:
    """The exact worst case. Raises ValueError for an unknown class."""
    from PEPit import PEP, Expression
    from PEPit.functions import SmoothConvexFunction, SmoothFunction, SmoothStronglyConvexFunction

    if family not in CLASSES:
        raise ValueError(f"family must be one of {CLASSES}, but got {family!r}")
    problem = PEP()
    declared = {
        "convex": lambda: problem.declare_function(SmoothConvexFunction, L=1.0),
        "strongly convex": lambda: problem.declare_function(SmoothStronglyConvexFunction, L=1.0, mu=mu),
        "nonconvex": lambda: problem.declare_function(SmoothFunction, L=1.0),
    }
    f = declared[family]()
    start = x = problem.set_initial_point()
    first_gradient, first = f.oracle(x)
    gradients, values = [first_gradient], [first]
    for row in method.coefficients():
        x = x - method.gamma * sum((c * gradients[s] for s, c in row.items()), 0 * first_gradient)
        gradient, value = f.oracle(x)
        gradients.append(gradient)
        values.append(value)
    if family == "nonconvex":
        infimum = Expression()
        problem.set_initial_condition(first - infimum <= 1)
        for gradient, value in zip(gradients, values):
            problem.add_constraint(value - gradient**2 / 2 >= infimum)
            problem.set_performance_metric(gradient**2)
    else:
        star = f.stationary_point()
        problem.set_initial_condition((start - star) ** 2 <= 1)
        problem.set_performance_metric(values[-1] - f(star))
    with (
        warnings.catch_warnings()
    ):  # Clarabel reports reduced accuracy (1e-6 instead of 1e-8) near degenerate optima; the checks allow 1e-6
        warnings.filterwarnings("ignore", message="Solution may be inaccurate")
        return float(problem.solve(wrapper="cvxpy", solver="CLARABEL", verbose=0))


def table(gammas=(0.25, 0.5, 0.75, 1.0), steps: int = 4, families=CLASSES) -> list[dict]:
    """Worst cases per class, step, delay and correction."""
    rows = []
    for family in families:
        for gamma in gammas:
            for delay, theta in ((0, 0.0), (1, 0.0), (1, 0.5), (1, 1.0), (2, 0.0)):
                rows.append(
                    {
                        "family": family,
                        "gamma": gamma,
                        "steps": steps,
                        "delay": delay,
                        "theta": theta,
                        "worst": worst(Descent(gamma, steps, delay, theta), family),
                    }
                )
    return rows


def check_numeric(rows: list[dict], count: int = 300, seed: int = 17) -> list[Rows]:
    """Random functions of the class never beat the worst case (Rows), and the known closed form of τ = 0 is met."""
    found = []
    known = [(row["worst"], 1 / (4 * row["steps"] * row["gamma"] + 2)) for row in rows if row["family"] == "convex" and row["delay"] == 0]
    found.append(
        Rows("Gradient descent, τ = 0, convex: |SDP − 1/(4Nγ+2)|", np.array([abs(a - b) for a, b in known]), np.full(len(known), 1e-6))
    )
    rng = np.random.default_rng(seed)
    for row in rows:
        method = Descent(row["gamma"], row["steps"], row["delay"], row["theta"])
        measured = _random(method, row["family"], count, rng)
        found.append(Rows(f"Gradient descent, {row['family']}: random ≤ worst", measured, np.full(count, row["worst"] * (1 + 1e-6))))
    return found


def _random(method: Descent, family: str, count: int, rng, d: int = 4) -> np.ndarray:
    """The metric on random functions of the class, normalised to its initial condition: f = Σ_i a_i h(x_i), h quadratic or Huber, and for
    "nonconvex" h = ½ log(1 + (x/w)²)·w² (curvature in [−1/8, 1], infimum 0); min ‖g‖² and f(x_0) − f_* scale alike, so the metric is
    their ratio."""
    low = {"convex": 0.0, "strongly convex": 0.1, "nonconvex": 0.0}[family]
    eigen = rng.uniform(low, 1, (count, d))
    eigen[:, 0] = np.where(rng.random(count) < 0.5, 1.0, eigen[:, 0])
    x0 = rng.standard_normal((count, d))
    x0 /= np.linalg.norm(x0, axis=1, keepdims=True)
    bend = np.where(rng.random((count, 1)) < 0.5, rng.uniform(0.02, 0.5, (count, 1)), WIDE)  # Huber width
    if family == "strongly convex":
        bend[:] = WIDE
    if family == "nonconvex":
        bend = rng.uniform(0.05, 3, (count, 1))

    def value(x):
        if family == "nonconvex":
            return (eigen * bend**2 * np.log1p((x / bend) ** 2) / 2).sum(1)
        a = np.abs(x)
        return (eigen * np.where(a < bend, x * x / 2, bend * a - bend**2 / 2)).sum(1)

    def slope(x):
        if family == "nonconvex":
            return eigen * x / (1 + (x / bend) ** 2)
        return eigen * np.clip(x, -bend, bend)

    x, gradients = x0, [slope(x0)]
    for row in method.coefficients():
        x = x - method.gamma * sum(c * gradients[s] for s, c in row.items())
        gradients.append(slope(x))
    if family != "nonconvex":
        return value(x)
    return np.min([(g * g).sum(1) for g in gradients], axis=0) / value(x0)
