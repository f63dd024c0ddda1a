"""Worst-case bounds that need no trust in a solver: dual certificates in rational numbers, verified in exact arithmetic. Ours.

Linear programs (theory/worst_case_lmo.py): max cᵀv, Av ≤ b, v free. Any y ≥ 0 with Aᵀy = c proves cᵀv ≤ bᵀy. All data are rational;
HiGHS's y is a vertex, rounded to small denominators, and `verify_linear` checks Aᵀy = c and y ≥ 0 with fractions.Fraction: the proof is a
list of inequalities with multipliers, which add up to the bound.

Semidefinite programs (delayed gradient descent, L = 1, basis g_0 … g_N and, if convex, x_0 − x_*). Multipliers λ_ij ≥ 0 on the
interpolation inequalities, ν ≥ 0 on the metric and the initial condition prove the bound b when the linear part in the f_i vanishes and
the Gram part S(λ, ν, b) ⪰ 0. Clarabel finds them for a bound 1e-5 (relative) above the optimum with the smallest eigenvalue of S as large
as possible (strictly inside, so that rounding is harmless); they are rounded to rationals, the few linear equations are then solved
exactly, and S ⪰ 0 is verified by a rational LDLᵀ. What is proved is the printed rational bound, exactly.
"""

from dataclasses import dataclass
from fractions import Fraction

import cvxpy as cp
import numpy as np
import sympy
from scipy.optimize import linprog

from theory.worst_case_gd import Descent
from theory.worst_case_lmo import Method, Program, program


@dataclass(frozen=True)
class LinearCertificate:
    """bound: proved for max cᵀv. multipliers: {row label: y > 0}."""

    bound: Fraction
    multipliers: dict[str, Fraction]


def linear(method: Method, metric: str, delta: int = 100) -> LinearCertificate:
    """A verified certificate for the LMO worst case; raises ArithmeticError if the rounded multipliers do not verify."""
    p = program(method, metric, float(delta))
    solved = linprog(-p.c, A_ub=p.A, b_ub=p.b, bounds=(None, None), method="highs")
    y = [Fraction(-float(v)).limit_denominator(10**4) for v in solved.ineqlin.marginals]
    return LinearCertificate(verify_linear(p, y), {label: v for label, v in zip(p.labels, y) if v})


def verify_linear(p: Program, y: list[Fraction]) -> Fraction:
    """bᵀy, after checking y ≥ 0 and Aᵀy = c in rational arithmetic. Raises ArithmeticError otherwise."""
    if any(v < 0 for v in y):
        raise ArithmeticError("certificate refused: a multiplier is negative")
    exact = lambda v: Fraction(float(v)).limit_denominator(10**6)  # noqa: E731  (entries are small rationals such as 1/8)
    total = [Fraction(0)] * len(p.c)
    entries = p.A.tocoo()
    for r, c, v in zip(entries.row, entries.col, entries.data):
        total[c] += exact(v) * y[r]
    wrong = [name for name, have, want in zip(p.variables, total, p.c) if have != exact(want)]
    if wrong:
        raise ArithmeticError(f"certificate refused: the multipliers do not add up for {wrong[:3]}")
    return sum((exact(b) * v for b, v in zip(p.b, y)), Fraction(0))


@dataclass(frozen=True)
class GramProblem:
    """Exact data of the dual: multipliers y ≥ 0 with E y = e and S(y) = Σ_k y_k S_k ⪰ 0 prove `metric ≤ y[0]`."""

    matrices: list[sympy.Matrix]
    equations: sympy.Matrix
    right: sympy.Matrix
    names: list[str]


def gram_problem(method: Descent, family: str) -> GramProblem:
    """Dual of theory.worst_case_gd for L = 1, all entries rational.

    convex: b − f_N = b(1 − ‖x_0‖²) + Σ λ_ij(f_i − f_j − ⟨Q_ij, G⟩) + ⟨S, G⟩ (x_* = 0, f_* = 0), so Σ λ_ij(e_i − e_j) = −e_N and S =
    b·x_0x_0ᵀ + Σ λ_ijQ_ij. nonconvex (f_* = 0): b − t = b(1 − f_0) + Σ w_i(‖g_i‖² − t) + Σ μ_i(f_i − ½‖g_i‖²) + Σ λ_ij(f_i − f_j − ⟨Q_ij,
    G⟩) + ⟨S, G⟩, so Σ w = 1, Σ μ_ie_i − b·e_0 + Σ λ_ij(e_i − e_j) = 0 and S = Σ λ_ijQ_ij + Σ (½μ_i − w_i) g_ig_iᵀ.
    """
    if family not in ("convex", "nonconvex"):
        raise ValueError(f"family must be 'convex' or 'nonconvex', but got {family!r}")
    N, convex = method.steps, family == "convex"
    gamma, size = sympy.Rational(str(method.gamma)), N + 1 + convex
    unit = lambda i: sympy.Matrix([1 if j == i else 0 for j in range(size)])  # noqa: E731
    outer = lambda a, b: (a * b.T + b * a.T) / 2  # noqa: E731
    g = [unit(i) for i in range(N + 1)]
    x = [unit(N + 1) if convex else sympy.zeros(size, 1)]
    for row in method.coefficients():
        x.append(x[-1] - gamma * sum((sympy.Rational(str(c)) * g[s] for s, c in row.items()), sympy.zeros(size, 1)))
    e = lambda i: sympy.Matrix([1 if k == i else 0 for k in range(N + 1)])  # noqa: E731  (e(None) = 0 is x_*)
    points = [(x[i], g[i], i) for i in range(N + 1)] + ([(sympy.zeros(size, 1), sympy.zeros(size, 1), None)] if convex else [])
    entries = [("initial condition", outer(x[0], x[0]) if convex else sympy.zeros(size), sympy.zeros(N + 1, 1) if convex else -e(0), 0)]
    for xi, gi, i in points:
        for xj, gj, j in points:
            if i != j:
                dx, dg = xi - xj, gi - gj
                quadratic = outer(dg, dg) / 2 if convex else (outer(dg, dg) - outer(dx, dx) + 2 * outer(dg, dx)) / 4
                entries.append((f"interpolation {i},{j}", outer(gj, dx) + quadratic, e(i) - e(j), 0))
    if not convex:
        entries += [(f"metric {i}", -outer(g[i], g[i]), sympy.zeros(N + 1, 1), 1) for i in range(N + 1)]
        entries += [(f"infimum {i}", outer(g[i], g[i]) / 2, e(i), 0) for i in range(N + 1)]
    equations = sympy.Matrix.hstack(*(column.col_join(sympy.Matrix([total])) for _, _, column, total in entries))
    right = (-e(N) if convex else sympy.zeros(N + 1, 1)).col_join(sympy.Matrix([0 if convex else 1]))
    return GramProblem([m for _, m, _, _ in entries], equations, right, [name for name, *_ in entries])


@dataclass(frozen=True)
class GramCertificate:
    """bound: proved. optimum: what the solver found (float). multipliers: the positive ones. pivots: of the exact LDLᵀ of S, all > 0."""

    bound: Fraction
    optimum: float
    multipliers: dict[str, Fraction]
    pivots: list[Fraction]


def gram(method: Descent, family: str, slack: float = 1e-5, digits: int = 7) -> GramCertificate:
    """A verified certificate of the delayed gradient descent's worst case, `slack` (relative) above the optimum."""
    data = gram_problem(method, family)
    number = lambda m: np.array(m.tolist(), float)  # noqa: E731
    E, e, S = number(data.equations), number(data.right)[:, 0], [number(m) for m in data.matrices]
    y = cp.Variable(len(S))
    slackness = sum(y[k] * S[k] for k in range(len(S)))
    least = cp.Problem(cp.Minimize(y[0]), [y >= 0, E @ y == e, slackness >> 0])
    least.solve(solver=cp.CLARABEL)
    optimum = float(least.value)
    margin = cp.Variable()
    inside = [y >= margin, y[0] <= optimum * (1 + slack), E @ y == e, slackness >> margin * np.eye(len(S[0]))]
    cp.Problem(cp.Maximize(margin), inside).solve(solver=cp.CLARABEL)
    rounded = [sympy.Rational(Fraction(float(v)).limit_denominator(10**digits)) for v in y.value]
    exact = _solve_equations(data, rounded)
    return GramCertificate(Fraction(exact[0]), optimum, {n: Fraction(v) for n, v in zip(data.names, exact) if v}, verify_gram(data, exact))


def _solve_equations(data: GramProblem, y: list[sympy.Rational]) -> list[sympy.Rational]:
    """Corrects the largest multipliers so that E y = e holds exactly: pivot columns of E taken in the order of falling y."""
    order = sorted(range(1, len(y)), key=lambda k: -y[k])
    reduced = data.equations[:, order]
    pivots = [order[c] for c in reduced.rref()[1]]
    rest = data.right - sum((data.equations[:, k] * y[k] for k in range(len(y)) if k not in pivots), sympy.zeros(data.equations.rows, 1))
    basis = data.equations[:, pivots]
    rows = list(basis.T.rref()[1])
    solved = basis.extract(rows, list(range(len(pivots)))).LUsolve(rest.extract(rows, [0]))
    out = list(y)
    for k, v in zip(pivots, solved):
        out[k] = v
    return out


def verify_gram(data: GramProblem, y: list) -> list[Fraction]:
    """Pivots of the exact LDLᵀ of S(y), all > 0, after checking y ≥ 0 and E y = e. Raises ArithmeticError otherwise."""
    y = [sympy.Rational(v) for v in y]
    if any(v < 0 for v in y):
        raise ArithmeticError("certificate refused: a multiplier is negative")
    if data.equations * sympy.Matrix(y) != data.right:
        raise ArithmeticError("certificate refused: the multipliers do not cancel the function values")
    S = sum((v * m for v, m in zip(y, data.matrices)), sympy.zeros(*data.matrices[0].shape))
    rows = [[Fraction(int(v.p), int(v.q)) for v in S.row(i)] for i in range(S.rows)]
    pivots = []
    for k in range(len(rows)):
        if rows[k][k] <= 0:
            raise ArithmeticError("certificate refused: S is not positive definite")
        pivots.append(rows[k][k])
        for i in range(k + 1, len(rows)):
            factor = rows[i][k] / rows[k][k]
            rows[i] = [a - factor * b for a, b in zip(rows[i], rows[k])]
    return pivots


CASES = (("convex", Descent(0.5, 3, 1)), ("nonconvex", Descent(0.5, 3, 1)), ("nonconvex", Descent(0.25, 3, 1, 1.0)))


def all_certificates() -> list[dict]:
    """Every certificate of the suite with its proved bound as an exact fraction."""
    found = []
    for steps, delay, theta, metric in ((6, 1, 0.0, "minimum"), (6, 2, 0.0, "minimum"), (6, 1, 1.0, "minimum"), (6, 1, 1.0, "average")):
        proof = linear(Method(steps, delay, theta), metric)
        constant = proof.bound - Fraction(100, steps)
        found.append(
            {
                "problem": f"LMO, N = {steps}, delay {delay}, θ = {theta}, {metric}",
                "kind": "linear program",
                "bound": str(constant),
                "value": float(constant),
                "multipliers": len(proof.multipliers),
            }
        )
    for family, method in CASES:
        proof = gram(method, family)
        label = f"gradient descent, {family}, γL = {method.gamma}, N = {method.steps}, delay {method.delay}, θ = {method.theta}"
        found.append(
            {
                "problem": label,
                "kind": "semidefinite program",
                "bound": str(proof.bound),
                "value": float(proof.bound),
                "optimum": proof.optimum,
                "multipliers": len(proof.multipliers),
            }
        )
    return found
