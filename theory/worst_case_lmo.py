"""Worst case of delayed LMO descent in an arbitrary norm, with and without the correction: a sound linear program (upper side). Ours.

The method: x_{t+1} = x_t − γ[u_t + θ(u_t − u_{t−1})], u_t = lmo(∇f(x_{t−τ})), no noise, no momentum, start "first". Worst value over all
norms, all L-smooth f and all starts of min_{t<N} or mean_{t<N} of ‖∇f(x_t)‖_* subject to f(x_0) − f(x_i) ≤ Δ. With γ = L = 1 it is Δ/N +
c; c is the constant of Lγ.

Relaxation. What a norm guarantees is linear in f_i, n_i = ‖g_i‖_* and P_ik = ⟨g_i, d_k⟩ (d_k = −lmo(g_k)): P_kk = −n_k;  |P_ik| ≤ n_i;
|P_ik − P_jk| ≤ r_ij;  |n_i − n_j| ≤ r_ij;  |f_j − f_i − ⟨g_i, x_j − x_i⟩| ≤ r_ij²/2;  r_ij ≥ ‖x_i − x_j‖ by the triangle inequality.
Every real instance satisfies these, so the optimum bounds the worst case from above (sound). No inner product of two g's or two d's
occurs, and any cross products P are completed to a positive semidefinite Gram matrix by large diagonals: a semidefinite
program over Gram matrices *is* this linear program (`semidefinite`, PEPit + Clarabel, confirms it). Linear programs have rational certificates:
theory/certificates.py.

Found (τ = 1): minimum 3/2 − 1/N without correction; 1.75 … 4.19 (N = 4 … 14) with full error feedback: *the worst case does not show the
correction helping*, it shows it hurting, and without momentum it really does (theory/limit_cycle.py). It helps under δ̄ < 1
(theory/update_correction.py). The lower side is theory/separable.py; nowhere is a constant called tight unless both sides meet.
"""

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csr_matrix

from theory.evidence import Identities

METRICS = ("minimum", "average")


@dataclass(frozen=True)
class Method:
    """delay τ, correction θ (lag 1, first step uncorrected), number of steps N."""

    steps: int
    delay: int = 1
    theta: float = 0.0

    def displacements(self) -> list[dict[int, float]]:
        """Per step t: {k: coefficient of d_k in (x_{t+1} − x_t)/γ}; d_k is the direction made from the gradient at x_k."""
        steps = []
        for t in range(self.steps):
            now, before = max(t - self.delay, 0), max(t - 1 - self.delay, 0)
            step: dict[int, float] = defaultdict(float)
            step[now] += 1 + (self.theta if t else 0)
            step[before] -= self.theta if t else 0
            steps.append({k: v for k, v in step.items() if v})
        return steps

    def between(self, i: int, j: int) -> dict[int, float]:
        """(x_j − x_i)/γ as a combination of the d_k."""
        total: dict[int, float] = defaultdict(float)
        steps = self.displacements()
        for t in range(min(i, j), max(i, j)):
            for k, v in steps[t].items():
                total[k] += v if i < j else -v
        return {k: v for k, v in total.items() if v}


@dataclass(frozen=True)
class Program:
    """maximise cᵀv subject to A v ≤ b (v free): names of the variables and labels of the rows make a certificate readable."""

    c: np.ndarray
    A: csr_matrix
    b: np.ndarray
    variables: list[str]
    labels: list[str]


def program(method: Method, metric: str = "minimum", delta: float = 100.0) -> Program:
    """The linear program for γ = L = 1 and Δ = `delta` (in units of Lγ²; c does not depend on it once it is not small)."""
    if metric not in METRICS:
        raise ValueError(f"metric must be one of {METRICS}, but got {metric!r}")
    N = method.steps
    sources = sorted({max(t - method.delay, 0) for t in range(N)})
    variables = (
        [f"f{i}" for i in range(N + 1)] + [f"n{i}" for i in range(N + 1)] + [f"p{i},{k}" for i in range(N + 1) for k in sources] + ["value"]
    )
    index = {name: i for i, name in enumerate(variables)}
    rows: list[tuple[dict[str, float], float, str]] = []

    def add(terms: dict[str, float], bound: float, label: str) -> None:
        rows.append((terms, bound, label))

    for i in range(N + 1):
        add({f"n{i}": -1.0}, 0.0, f"n{i} >= 0")
        add({"f0": 1.0, f"f{i}": -1.0} if i else {}, delta, f"f0 - f{i} <= Delta")
        for k in sources:
            own = {f"p{i},{k}": 1.0}
            if i == k:
                add(own | {f"n{i}": 1.0}, 0.0, f"<g{i},d{k}> <= -n{i}")
            else:
                add(own | {f"n{i}": -1.0}, 0.0, f"<g{i},d{k}> <= n{i}")
            add({f"p{i},{k}": -1.0, f"n{i}": -1.0}, 0.0, f"-<g{i},d{k}> <= n{i}")
    for i in range(N + 1):
        for j in range(N + 1):
            if i == j:
                continue
            moved = method.between(i, j)
            r = sum(abs(v) for v in moved.values())
            along = {f"p{i},{k}": v for k, v in moved.items()}
            add({f"f{j}": 1.0, f"f{i}": -1.0} | {name: -v for name, v in along.items()}, r * r / 2, f"smooth above {i}->{j}")
            add({f"f{j}": -1.0, f"f{i}": 1.0} | along, r * r / 2, f"smooth below {i}->{j}")
            add({f"n{i}": 1.0, f"n{j}": -1.0}, r, f"n{i} - n{j} <= r")
            for k in sources:
                add({f"p{i},{k}": 1.0, f"p{j},{k}": -1.0}, r, f"<g{i}-g{j},d{k}> <= r")
    if metric == "minimum":
        for t in range(N):
            add({"value": 1.0, f"n{t}": -1.0}, 0.0, f"value <= n{t}")
    else:
        add({"value": 1.0} | {f"n{t}": -1.0 / N for t in range(N)}, 0.0, "value <= mean")
    entries = [(r, index[name], v) for r, (terms, _, _) in enumerate(rows) for name, v in terms.items()]
    data = ([v for _, _, v in entries], ([r for r, _, _ in entries], [c for _, c, _ in entries]))
    c = np.zeros(len(variables))
    c[index["value"]] = 1.0
    return Program(
        c,
        csr_matrix(data, shape=(len(rows), len(variables))),
        np.array([b for _, b, _ in rows]),
        variables,
        [label for _, _, label in rows],
    )


def upper(method: Method, metric: str = "minimum", delta: float = 100.0) -> float:
    """c of the upper side: worst value ≤ Δ/N + c (γ = L = 1). Solver: HiGHS."""
    p = program(method, metric, delta)
    solved = linprog(-p.c, A_ub=p.A, b_ub=p.b, bounds=(None, None), method="highs")
    if solved.status != 0:
        raise RuntimeError(f"worst_case_lmo: HiGHS stopped with {solved.message!r}")
    return float(-solved.fun - delta / method.steps)


def semidefinite(method: Method, metric: str = "minimum", delta: float = 100.0) -> float:
    """The same constant from the semidefinite program over Gram matrices in PEPit, solver Clarabel: an independent formulation."""
    from PEPit import PEP, Expression, Point

    N = method.steps
    problem = PEP()
    x = [problem.set_initial_point()]
    g, f, n = [Point() for _ in range(N + 1)], [Expression() for _ in range(N + 1)], [Expression() for _ in range(N + 1)]
    d = {max(t - method.delay, 0): Point() for t in range(N)}
    for step in method.displacements():
        x.append(x[-1] + sum((v * d[k] for k, v in step.items()), 0 * d[0]))
    for i in range(N + 1):
        problem.add_constraint(n[i] >= 0)
        problem.set_initial_condition(f[0] - f[i] <= delta)
        for k in d:
            if i == k:
                problem.add_constraint(g[i] * d[k] == -n[i])
            else:
                problem.add_constraint(g[i] * d[k] <= n[i])
                problem.add_constraint(-(g[i] * d[k]) <= n[i])
        for j in range(N + 1):
            if i == j:
                continue
            r = sum(abs(v) for v in method.between(i, j).values())
            problem.add_constraint(f[j] <= f[i] + g[i] * (x[j] - x[i]) + r * r / 2)
            problem.add_constraint(f[j] >= f[i] + g[i] * (x[j] - x[i]) - r * r / 2)
            problem.add_constraint(n[i] - n[j] <= r)
            for k in d:
                problem.add_constraint((g[i] - g[j]) * d[k] <= r)
    if metric == "minimum":
        for t in range(N):
            problem.set_performance_metric(n[t])
    else:
        problem.set_performance_metric(sum(n[1:N], n[0]) / N)
    return float(problem.solve(wrapper="cvxpy", solver="CLARABEL", verbose=0) - delta / N)


def closed_form(steps: int, delay: int) -> float:
    """(τ + 1/2) − τ(τ+1)/(2N): the minimum's constant without correction, as found and as Theorem 1's exact start gives it (N ≥ τ)."""
    return delay + 0.5 - delay * (delay + 1) / (2 * steps)


def table(lengths=(4, 6, 8), delta: float = 100.0) -> list[dict]:
    """Upper constants per delay, correction, metric and N."""
    rows = []
    for delay, theta in ((0, 0.0), (1, 0.0), (2, 0.0), (1, 0.5), (1, 1.0)):
        for N in lengths:
            for metric in METRICS:
                rows.append(
                    {"delay": delay, "theta": theta, "steps": N, "metric": metric, "upper": upper(Method(N, delay, theta), metric, delta)}
                )
    return rows


def check_symbolic() -> Identities:
    """The minimum's closed form is Theorem 1(b) with its exact start: Σ_{t<N} min(τ, t) summed by sympy."""
    import sympy

    done = Identities()
    N, tau, t = sympy.symbols("N tau t", integer=True, positive=True)
    drift = sympy.summation(t, (t, 0, tau - 1)) + tau * (N - tau)
    done.equal("1/2 + mean of min(τ, t)", sympy.Rational(1, 2) + drift / N, tau + sympy.Rational(1, 2) - tau * (tau + 1) / (2 * N))
    done.assume("soundness: every inequality of the program holds for every norm and every L-smooth f (A2, duality, triangle inequality)")
    return done
