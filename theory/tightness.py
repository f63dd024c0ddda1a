"""How loose the theory is, term by term: what each term of Theorem 1(a) allows, and how much of it a run uses. Ours.

Theorem 1(a) is a chain of inequalities; along a run each link can be measured:
  start       allowed Δ₀/(ηT)                        used (f(x_0) − f(x_T))/(ηT)
  noise       allowed 2ρσ√(α/(2−α)) + 2ρσ/(αT)       used 2·mean ‖noise part of M_t‖_*
  drift       allowed 2Lη[(1−α)/α + τ]               used 2·mean ‖(M_t − noise) − ∇f(x_t)‖_*          (momentum and delay together)
  curvature   allowed Lη/2                           used mean of f(x_{t+1}) − f(x_t) + η⟨∇f(x_t), u_t⟩, over η
The used terms still bound the mean gradient (Lemma 1); what then remains, (sum of used)/(mean ‖∇f‖_*), is the loss of Lemma 1's duality
step. The language model's rows come from code/onelag/experiments/theory_tightness.py with estimated L, σ, ρ, in the same form.
"""

import numpy as np

from theory.geometry import Euclidean, Spectral
from theory.kernels import mean_age
from theory.problems import LOGARITHM, QUADRATIC, random_problems
from theory.recursion import Rule, run

TERMS = ("start", "noise", "drift", "curvature")


def allowed(Delta, L, eta, alpha, sigma, rho, T, delay) -> dict:
    """The four terms of Theorem 1(a), momentum and delay summed as "drift"."""
    return {
        "start": Delta / (eta * T),
        "noise": 2 * rho * sigma * (np.sqrt(alpha / (2 - alpha)) + 1 / (alpha * T)),
        "drift": 2 * L * eta * (mean_age(alpha) + delay),
        "curvature": L * eta / 2,
    }


def used(problem, geometry, path) -> dict[str, np.ndarray]:
    """What the run used of each term, (B,)."""
    T, eta = path.steps, np.asarray(path.rule.eta)
    gradients = np.stack([problem.grad(x) for x in path.x[:-1]])
    values = np.stack([problem.f(x) for x in path.x])
    inner = (gradients * path.u).sum((-2, -1))
    return {
        "start": (values[0] - values[-1]) / (eta * T),
        "noise": 2 * np.mean([geometry.dual(n) for n in path.noise], axis=0),
        "drift": 2 * np.mean([geometry.dual(M - n - g) for M, n, g in zip(path.M, path.noise, gradients)], axis=0),
        "curvature": np.mean((values[1:] - values[:-1] + eta * inner) / eta, axis=0),
    }


CASES = (
    ("quadratic, ℓ₂", Euclidean(16), QUADRATIC, 0.0),
    ("quadratic, Muon", Spectral(8, 12), QUADRATIC, 0.0),
    ("non-convex, Muon", Spectral(8, 12), LOGARITHM, 0.0),
    ("noisy quadratic, Muon", Spectral(8, 12), QUADRATIC, 1.0),
)


def table(alpha: float = 0.1, delay: int = 1, steps: int = 300, count: int = 32, seed: int = 18) -> list[dict]:
    """Per case the median over `count` random instances: terms allowed and used, bound, measured; η balances the bound; noise as large as
    the first gradient.
    """
    rows = []
    for name, geometry, kind, loud in CASES:
        rng = np.random.default_rng(seed)
        problem = random_problems(geometry, count, rng, (kind,))
        Delta = problem.delta0
        eta = np.sqrt(Delta / (problem.L * steps * (2 * mean_age(alpha) + 2 * delay + 0.5)))
        sigma = loud * geometry.dual(problem.grad(problem.x0)) / geometry.rho
        path = run(problem, geometry, Rule(eta, np.full(count, alpha), delay), steps, sigma, rng)
        may, did = allowed(Delta, problem.L, eta, alpha, sigma, geometry.rho, steps, delay), used(problem, geometry, path)
        measured = np.mean([geometry.dual(problem.grad(x)) for x in path.x[:-1]], axis=0)
        middle = lambda v, unit=measured: float(np.median(v / unit))  # noqa: E731  (in units of the measured mean gradient)
        rows.append(
            {
                "case": name,
                "n": count,
                "allowed": {term: middle(may[term]) for term in TERMS},
                "used": {term: middle(did[term]) for term in TERMS},
                "bound_over_measured": middle(sum(may.values())),
                "used_over_measured": middle(sum(did.values())),
            }
        )
    return rows
