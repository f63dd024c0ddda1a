"""The lower side of the LMO worst case: the exact optimum over separable functions, and the function that attains it. Ours.

Class. f(x) = Σ_k φ_k(x_k) in ℓ_∞ (equally on the diagonal of matrices in the spectral norm, so in Muon's geometry): f is L-smooth with L
= Σ_k L_k when φ_k is L_k-smooth, ‖∇f‖_* = Σ_k|φ_k'|, and the lmo acts coordinate by coordinate, so every coordinate runs the
one-dimensional method with its own signs. Within this class the worst case is a convex program, solved here exactly (Clarabel,
second-order cones):
  for each pattern of signs s the path is known (γ = 1), and (f_i, g_i) are values of an L_s-smooth φ ≥ 0 iff (Taylor, Hendrickx, Glineur 2017, μ = −L)
     f_i ≥ f_j + ½(g_i + g_j)(x_i − x_j) + (g_i − g_j)²/(4L_s) − L_s(x_i − x_j)²/4 for all i, j,   and   f_i ≥ g_i²/(2L_s);
  these are jointly convex in (f, g, L_s), so one program mixes all patterns: Σ_s L_s = 1, maximise (min_t or mean_t of Σ_s |g^s_t|) −
  Δ₀/N with Δ₀ = Σ_s f^s_0: the worst constant over all Δ₀. Mixing matters for the minimum: coordinates in different phases keep every
  iterate bad, which one coordinate cannot. The optimum is an instance, not a relaxation: `Piecewise` rebuilds each φ_k as a C¹ piecewise
  quadratic of curvature ±L_k, and `replay` runs the method on it. At a gradient of exactly 0 the lmo may pick either sign (any
selection); replay uses the pattern's sign there.
"""

from dataclasses import dataclass
from itertools import pairwise, product

import clarabel
import numpy as np
from scipy.optimize import brentq
from scipy.sparse import csc_matrix

from theory.worst_case_lmo import METRICS, Method


@dataclass(frozen=True)
class Coordinate:
    """One φ_k: the path x (N+1), slopes g, values f (f_* = 0), its smoothness L and the signs of the direction at each source."""

    x: np.ndarray
    g: np.ndarray
    f: np.ndarray
    L: float
    signs: tuple[int, ...]


@dataclass(frozen=True)
class Optimum:
    """constant: the largest c with worst value = Δ₀/N + c (γ = L = 1); coordinates: those with a share of L."""

    constant: float
    coordinates: list[Coordinate]


def path(method: Method, signs: tuple[int, ...]) -> np.ndarray:
    """x_0 = 0, x_1, …, x_N (γ = 1) when u made from the gradient at x_k is signs[k]."""
    x = [0.0]
    for step in method.displacements():
        x.append(x[-1] - sum(v * signs[k] for k, v in step.items()))
    return np.array(x)


def optimum(method: Method, metric: str = "minimum") -> Optimum:
    """The convex program over all sign patterns. Raises RuntimeError if Clarabel does not solve it."""
    if metric not in METRICS:
        raise ValueError(f"metric must be one of {METRICS}, but got {metric!r}")
    N = method.steps
    patterns = [(1, *rest) for rest in product((1, -1), repeat=N - 1)]  # signs of g_0 … g_{N−1}; a global sign is free
    block = 2 * (N + 1) + 1  # f, g, L
    size = len(patterns) * block + 1
    value = size - 1
    rows, cols, data, b, cones = [], [], [], [], []

    def row(terms: list[tuple[int, float]], bound: float) -> None:  # A v + s = b
        for column, coefficient in terms:
            rows.append(len(b))
            cols.append(column)
            data.append(coefficient)
        b.append(bound)

    base = lambda s: s * block  # noqa: E731
    f = lambda s, i: base(s) + i  # noqa: E731
    g = lambda s, i: base(s) + N + 1 + i  # noqa: E731
    L = lambda s: base(s) + 2 * (N + 1)  # noqa: E731
    row([(L(s), 1.0) for s in range(len(patterns))], 1.0)
    cones.append(clarabel.ZeroConeT(1))
    start = len(b)
    for s, signs in enumerate(patterns):
        row([(L(s), -1.0)], 0.0)
        for t in range(N):
            row([(g(s, t), -float(signs[t]))], 0.0)
    size_of = [[(g(s, t), float(signs[t])) for s, signs in enumerate(patterns)] for t in range(N)]  # Σ_s |g_t|
    if metric == "minimum":
        for t in range(N):
            row([(value, 1.0)] + [(c, -v) for c, v in size_of[t]], 0.0)
    else:
        row([(value, 1.0)] + [(c, -v / N) for terms in size_of for c, v in terms], 0.0)
    cones.append(clarabel.NonnegativeConeT(len(b) - start))

    def cone(q: list[tuple[int, float]], scale: float, Ls: int, room: list[tuple[int, float]]) -> None:
        """(qᵀv)²/(scale·L) ≤ roomᵀv, as ‖(2q, scale·L − room)‖ ≤ scale·L + room."""
        row([(Ls, -scale)] + [(c, -v) for c, v in room], 0.0)
        row([(c, -2 * v) for c, v in q], 0.0)
        row([(Ls, -scale)] + [(c, v) for c, v in room], 0.0)
        cones.append(clarabel.SecondOrderConeT(3))

    for s, signs in enumerate(patterns):
        x = path(method, signs)
        for i in range(N + 1):
            cone([(g(s, i), 1.0)], 2.0, L(s), [(f(s, i), 1.0)])
            for j in range(N + 1):
                if i != j:
                    d = x[i] - x[j]
                    room = [(f(s, i), 1.0), (f(s, j), -1.0), (g(s, i), -d / 2), (g(s, j), -d / 2), (L(s), d * d / 4)]
                    cone([(g(s, i), 1.0), (g(s, j), -1.0)], 4.0, L(s), room)
    A = csc_matrix((data, (rows, cols)), shape=(len(b), size))
    objective = np.zeros(size)
    objective[value] = -1.0
    objective[[f(s, 0) for s in range(len(patterns))]] = 1.0 / N
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    solution = clarabel.DefaultSolver(csc_matrix((size, size)), objective, A, np.array(b), cones, settings).solve()
    if str(solution.status) not in ("Solved", "AlmostSolved"):
        raise RuntimeError(f"separable: Clarabel stopped with {solution.status}")
    v = np.array(solution.x)
    found = [
        Coordinate(path(method, signs), v[g(s, 0) : g(s, 0) + N + 1], v[f(s, 0) : f(s, 0) + N + 1], float(v[L(s)]), signs)
        for s, signs in enumerate(patterns)
        if v[L(s)] > 1e-6
    ]
    return Optimum(float(-objective @ v), found)


class Piecewise:
    """The C¹ function through (x_i, f_i, g_i) with curvature ±L and infimum min_i(f_i − g_i²/(2L)).

    Between neighbours the slope first rises with L, then falls with L, then rises with L again; the switch is placed so that f_j comes
    out right. All its local minima lie on a rising piece that contains a data point, hence the infimum. Outside the data the slope goes
    to 0 with curvature L and stays there.
    """

    def __init__(self, x: np.ndarray, f: np.ndarray, g: np.ndarray, L: float):
        order = np.argsort(x, kind="stable")
        keep = [order[0]] + [b for a, b in pairwise(order) if x[b] - x[a] > 1e-9]
        self.L, knots = L, []  # knots: (x, slope, value, curvature to the right)
        first = keep[0]
        tail = abs(g[first]) / L
        sign = 1.0 if g[first] > 0 else -1.0
        knots.append((x[first] - tail, 0.0, f[first] - sign * g[first] ** 2 / (2 * L), sign * L))
        for a, b in pairwise(keep):
            knots += self._between(x[a], x[b], f[a], f[b], g[a], g[b])
        last = keep[-1]
        sign = -1.0 if g[last] > 0 else 1.0
        knots.append((x[last], g[last], f[last], sign * L))
        tail = abs(g[last]) / L
        knots.append((x[last] + tail, 0.0, f[last] + g[last] * tail + sign * L * tail**2 / 2, 0.0))
        self.knots = np.array(knots)

    def _between(self, xa, xb, fa, fb, ga, gb):
        L, r = self.L, xb - xa
        fall = min(max((ga - gb + L * r) / (2 * L), 0.0), r)

        def pieces(rise):
            top, bottom = ga + L * rise, ga + L * rise - L * fall
            middle = fa + ga * rise + L * rise**2 / 2
            low = middle + top * fall - L * fall**2 / 2
            rest = r - rise - fall
            return [
                (xa, ga, fa, L),
                (xa + rise, top, middle, -L),
                (xa + rise + fall, bottom, low, L),
            ], low + bottom * rest + L * rest**2 / 2

        ends = [pieces(0.0)[1] - fb, pieces(r - fall)[1] - fb]
        if ends[0] >= 0 or ends[1] <= 0:  # the data sit on an envelope (up to solver rounding)
            return pieces(0.0 if abs(ends[0]) < abs(ends[1]) else r - fall)[0]
        return pieces(brentq(lambda rise: pieces(rise)[1] - fb, 0.0, r - fall, xtol=1e-14))[0]

    def __call__(self, at: float) -> tuple[float, float]:
        """(value, slope) at a point."""
        i = int(np.searchsorted(self.knots[:, 0], at, side="right")) - 1
        if i < 0:
            return float(self.knots[0, 2]), 0.0
        x, slope, value, curvature = self.knots[i]
        d = at - x
        return float(value + slope * d + curvature * d * d / 2), float(slope + curvature * d)

    def infimum(self) -> float:
        lowest = [self.knots[0, 2], self.knots[-1, 2], *self.knots[:, 2]]
        for (x, slope, value, curvature), following in zip(self.knots[:-1], self.knots[1:, 0]):
            if curvature > 0 and slope < 0 and -slope / curvature < following - x:
                lowest.append(value - slope**2 / (2 * curvature))
        return float(min(lowest))


def replay(method: Method, found: Optimum) -> dict[str, float]:
    """Runs the method on the rebuilt function: measured minimum and average of ‖∇f(x_t)‖_* over t < N, Δ₀ = f(x_0) − inf f, and L = ΣL_k."""
    functions = [Piecewise(c.x, c.f, c.g, c.L) for c in found.coordinates]
    at = np.zeros((1, len(functions)))
    slopes = []
    directions: list[np.ndarray] = []
    steps = method.displacements()
    for t in range(method.steps):
        slopes.append(np.array([phi(v)[1] for phi, v in zip(functions, at[-1])]))
        pattern = np.array([c.signs[t] for c in found.coordinates])
        directions.append(np.where(np.abs(slopes[-1]) < 1e-6, pattern, np.sign(slopes[-1])))
        at = np.vstack([at, at[-1] - sum(v * directions[k] for k, v in steps[t].items())])
    norms = np.abs(np.array(slopes)).sum(1)
    gap = sum(phi(0.0)[0] - phi.infimum() for phi in functions)
    return {
        "minimum": float(norms.min()),
        "average": float(norms.mean()),
        "Delta": float(gap),
        "L": float(sum(c.L for c in found.coordinates)),
    }


def table(lengths=(4, 6)) -> list[dict]:
    """Lower constants per delay, correction, metric and N: each is an explicit function, replayed; `lower` uses its measured Δ₀ and L."""
    rows = []
    for delay, theta in ((0, 0.0), (1, 0.0), (2, 0.0), (1, 0.5), (1, 1.0)):
        for N in lengths:
            for metric in METRICS:
                method = Method(N, delay, theta)
                found = optimum(method, metric)
                run = replay(method, found)
                attained = run[metric] / run["L"] - run["Delta"] / run["L"] / N
                rows.append(
                    {
                        "delay": delay,
                        "theta": theta,
                        "steps": N,
                        "metric": metric,
                        "lower": attained,
                        "program": found.constant,
                        "coordinates": len(found.coordinates),
                    }
                )
    return rows
