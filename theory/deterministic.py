"""Theorem 6. A guarantee that the correction strictly improves: no noise, no momentum, Euclidean, delay 1. Ours (proved here).

Setting. σ = 0, α = 1, ‖·‖ Euclidean, τ = 1, η = cε/L. The first t with ‖∇f(x_t)‖ < ε satisfies (metric: first hit)
  undelayed                    t ≤ LΔ₀/(ε²c(1−c/2))                                              best c = 1:        2.00 LΔ₀/ε²
  delayed, uncorrected         t ≤ LΔ₀/(ε²c(1−3c/2)) (+ the undelayed first step saves a little)  best c = 1/3:      6.00 LΔ₀/ε²
  delayed, U(1), start "zero"  t ≤ [LΔ₀/(cε²) + c/(1−c)]/(1 − c/2 − c²/(1−c)), c < 1             best c = 0.3473…:  4.49 LΔ₀/ε² + 0.83
  delayed, U(1), start "first" t ≤ 1 + [LΔ₀/(cε²)]/(1 − c/2 − c²/(1−c))                          best c = 0.3473…:  4.49 LΔ₀/ε² + 1
Proof. Let T be that first time: ‖∇f(x_s)‖ ≥ ε for s < T. Uncorrected: M_t = ∇f(x_{t−1}), f(x_{t+1}) ≤ f(x_t) − η‖M_t‖ + η‖M_t − ∇f(x_t)‖
+ Lη²/2 ≤ f(x_t) − ηε + (3/2)Lη². Corrected, on z: f(z_{t+1}) ≤ f(z_t) − ηε + Lη²S_t + Lη²/2 with S_t = ‖u_{t−1} − u_{t−2}‖ (M_t − ∇f(z_t)
has norm ≤ L‖x_{t−1} − z_t‖ = LηS_t). u_0 = u_1, both from x₀, so S_2 = 0. For t ≥ 3 Dunkl–Williams ‖a/‖a‖ − b/‖b‖‖ ≤ 2‖a−b‖/(‖a‖+‖b‖)
with both norms ≥ ε: S_t ≤ ‖∇f(x_{t−2}) − ∇f(x_{t−3})‖/ε ≤ (L/ε)‖x_{t−2} − x_{t−3}‖ = c‖2u_{t−3} − u_{t−4}‖ ≤ c(1 + S_{t−2}).
start "zero": S_0 = 0, S_1 = 1, and by induction S_{2k+1} ≤ c(1−c^k)/(1−c) + c^k, S_{2k+2} ≤ c(1−c^k)/(1−c), so Σ_{t<T}S_t ≤ (cT+1)/(1−c).
start "first": z_1 = x₀ and S_1 = S_2 = 0, so every S_t ≤ c/(1−c), and Σ_{1≤t<T}S_t ≤ c(T−1)/(1−c). Sum the descent, divide by ηε. ∎
Both sides are upper bounds: the *guarantee* improves, and the mechanism has a name: directions of neighbouring gradients are themselves
Lipschitz while ‖∇f‖ ≥ ε. Tightness: bound/observed ≥ 3 on the random instances, so the ratio of the two guarantees predicts nothing
quantitative.
"""

from dataclasses import dataclass

import numpy as np
import sympy

from theory.evidence import Identities, Rows, Sharp
from theory.geometry import Euclidean
from theory.problems import random_problems

SCHEMES = ("undelayed", "delayed", "corrected-zero", "corrected-first")


def rate(scheme: str, c):
    """The factor of LΔ₀/ε² at η = cε/L; works on numbers and on sympy symbols."""
    if scheme == "undelayed":
        return 1 / (c * (1 - c / 2))
    if scheme == "delayed":
        return 1 / (c * (1 - 3 * c / 2))
    if scheme in ("corrected-zero", "corrected-first"):
        return 1 / (c * (1 - c / 2 - c**2 / (1 - c)))
    raise ValueError(f"scheme must be one of {SCHEMES}, but got {scheme!r}")


def best_step(scheme: str) -> float:
    """The c that minimises the rate: 1, 1/3, or the algebraic number `best_corrected`."""
    return {"undelayed": 1.0, "delayed": 1 / 3}.get(scheme) or float(best_corrected())


def best_corrected() -> sympy.Expr:
    """The algebraic number c in (0, 1) at which c(1 − c/2 − c²/(1−c)) is largest."""
    c = sympy.symbols("c", real=True)
    numerator = sympy.numer(sympy.together(sympy.diff(c * (1 - c / 2 - c**2 / (1 - c)), c)))
    roots = [root for root in sympy.Poly(numerator, c).real_roots() if 0 < root < 1]
    return roots[0]


def bound(scheme: str, Delta, L, epsilon, c=None):
    """Upper bound on the first t with ‖∇f(x_t)‖ < ε at η = cε/L (default: the best c)."""
    c = best_step(scheme) if c is None else c
    main = L * Delta / epsilon**2 * rate(scheme, c)
    if scheme == "corrected-zero":
        return main + (c / (1 - c)) / (1 - c / 2 - c**2 / (1 - c))
    return main + 1 if scheme == "corrected-first" else main


@dataclass(frozen=True)
class Hits:
    """First hitting times of many instances, shape (B,)."""

    times: np.ndarray
    staleness: np.ndarray  # (steps, B): S_t while the instance is running, NaN later


def first_hits(scheme: str, problem, eta, epsilon, limit: int) -> Hits:
    """Runs each instance until its gradient is below ε; raises RuntimeError if one needs more than `limit` steps."""
    x = before = problem.x0
    u_before = None
    times = np.full(len(problem.x0), -1)
    step, records = eta[:, None, None], []
    older = None
    for t in range(limit):
        size = np.sqrt((problem.grad(x) ** 2).sum((-2, -1)))
        times = np.where((times < 0) & (size < epsilon), t, times)
        if (times >= 0).all():
            return Hits(times, np.array(records))
        g = problem.grad(x if scheme == "undelayed" else before)
        u = g / np.sqrt((g * g).sum((-2, -1), keepdims=True))
        if u_before is not None and older is not None:
            records.append(np.where(times < 0, np.sqrt(((u_before - older) ** 2).sum((-2, -1))), np.nan))
        memory = u_before if u_before is not None else (u if scheme == "corrected-first" else 0 * u)
        before, x = x, (x - step * (2 * u - memory) if scheme.startswith("corrected") else x - step * u)
        older, u_before = u_before, u
    raise RuntimeError(f"deterministic: an instance has not reached epsilon within {limit} steps: raise `limit`")


def check_symbolic() -> Identities:
    done = Identities()
    c = sympy.symbols("c", positive=True)
    done.equal("undelayed: best c = 1 gives 2", rate("undelayed", sympy.Integer(1)), 2)
    done.equal("delayed: best c = 1/3 gives 6", rate("delayed", sympy.Rational(1, 3)), 6)
    for scheme, at in (("undelayed", sympy.Integer(1)), ("delayed", sympy.Rational(1, 3))):
        done.equal(f"{scheme}: stationary there", sympy.diff(1 / rate(scheme, c), c).subs(c, at), 0)
    best = best_corrected()
    done.true("corrected: best c = 0.3473 to 1e-4", bool(abs(sympy.N(best, 20) - sympy.Rational("0.3473")) < sympy.Rational(1, 10**4)))
    value = sympy.N(rate("corrected-zero", best), 20)
    done.true("corrected: factor between 4.485 and 4.495, under 6", bool(sympy.Rational("4.485") < value < sympy.Rational("4.495")))
    k = sympy.symbols("k", integer=True, nonnegative=True)
    odd = lambda k: c * (1 - c**k) / (1 - c) + c**k  # noqa: E731
    even = lambda k: c * (1 - c**k) / (1 - c)  # noqa: E731
    done.equal("induction, odd: c(1 + S_{2k+1}) = S_{2k+3}", c * (1 + odd(k)), odd(k + 1))
    done.equal("induction, even: c(1 + S_{2k+2}) = S_{2k+4}", c * (1 + even(k)), even(k + 1))
    done.equal("even is below c/(1−c)", c / (1 - c) - even(k), c ** (k + 1) / (1 - c))
    done.equal("odd + what is left of the sum: S_{2k+1} = c/(1−c) + c^k(1−2c)/(1−c)", odd(k), c / (1 - c) + c**k * (1 - 2 * c) / (1 - c))
    a, b = sympy.symbols("a b", positive=True)
    t = sympy.symbols("t", real=True)  # cosine of the angle
    # Dunkl–Williams squared, inner product form: 4(a²+b²−2abt)/(a+b)² − (2−2t) = 2(1+t)(a−b)²/(a+b)² ≥ 0
    done.equal(
        "Dunkl–Williams defect", 4 * (a**2 + b**2 - 2 * a * b * t) / (a + b) ** 2 - (2 - 2 * t), 2 * (1 + t) * (a - b) ** 2 / (a + b) ** 2
    )
    done.assume("‖∇f(x_s)‖ ≥ ε for s before the first hit; A1, A2")
    return done


def check_numeric(count: int = 1000, seed: int = 10) -> list[Rows]:
    rows = []
    geometry = Euclidean(6)
    for accuracy in (0.3, 0.1):
        problem = random_problems(geometry, count // 2, np.random.default_rng(seed + int(100 * accuracy)))
        size = np.sqrt((problem.grad(problem.x0) ** 2).sum((-2, -1)))
        epsilon = accuracy * size
        for scheme in SCHEMES:
            c = best_step(scheme)
            limit = int(np.max(bound(scheme, problem.delta0, problem.L, epsilon))) + 2
            hits = first_hits(scheme, problem, c * epsilon / problem.L, epsilon, limit)
            rows.append(Rows(f"Theorem 6, {scheme}", hits.times.astype(float), bound(scheme, problem.delta0, problem.L, epsilon)))
            if scheme == "corrected-first":
                rows.append(Rows("Theorem 6, staleness ≤ c/(1−c)", np.nanmax(hits.staleness, axis=0), np.full(count // 2, c / (1 - c))))
    merged = {}
    for row in rows:
        merged.setdefault(row.label, []).append(row)
    found = [Rows(k, np.concatenate([r.measured for r in v]), np.concatenate([r.bound for r in v])) for k, v in merged.items()]
    return [*found, _dunkl_williams(20 * count, seed)]


def _dunkl_williams(count: int, seed: int) -> Rows:
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((2, count, 3))
    b *= 10.0 ** rng.uniform(-2, 2, (count, 1))
    size = lambda v: np.linalg.norm(v, axis=1)  # noqa: E731
    left = size(a / size(a)[:, None] - b / size(b)[:, None])
    return Rows("Dunkl–Williams", left, 2 * size(a - b) / (size(a) + size(b)))


def check_sharp() -> list[Sharp]:
    """Dunkl–Williams is an equality for equal lengths: its constant 2 cannot be 1.6."""
    a, b = np.array([1.0, 0.0]), np.array([np.cos(0.1), np.sin(0.1)])
    left = float(np.linalg.norm(a - b))
    return [Sharp("Dunkl–Williams at equal lengths", "constant 2", left, 2 * left / 2, 1.6 * left / 2)]
