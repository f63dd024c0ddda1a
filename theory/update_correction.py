"""Theorem 3. The correction after the optimizer (the paper's error feedback is θ = 1, lag 1), any norm, stochastic, non-convex. Ours.

Setting. Assumptions of theory/lmo_delay.py; x_{t+1} = x_t − η[u_t + θ(u_t − u_{t−k})], gradients at x_{t−τ}, θ ≥ 0, first-gradient
momentum start. z_t = x_t + θηΣ_{i=1}^k u_{t−i} obeys z_{t+1} = z_t − ηu_t (Proposition E2). Staleness: z_t − x_{t−τ} = −ηS_t, for τ = k =
1 S_t = u_{t−1} − θu_{t−2}. δ̄ := (1/T)Σ_t Σ_j w_{t,j} E‖S_{t−j}‖ (theory.recursion.weighted_staleness; always ≤ τ + kθ); one inner
product per step to measure.

Guarantee, any η > 0, T ≥ 1:
 (a)   (1/T)Σ E‖∇f(z_t)‖_*     ≤ Δ_z/(ηT) + 2ρσ√(α/(2−α)) + 2ρσ/(αT) + Lη[1/2 + 2(1−α)/α + 2δ̄]                     metric "average" (at z)
 (a_N) under A2′ ‖∇f(x) − ∇f(y)‖_* ≤ L_N N(x−y), N ≤ ‖·‖: 2Lδ̄ may be replaced by 2L_N δ̄_N (δ̄ with N): pass L_mixed and that δ̄
 (a_x) (1/T)Σ E‖∇f(x_t)‖_*     ≤ (a) + kθLη                                                                        metric "average-x"
 (b)   (1/T)Σ E‖∇f(x_{t−τ})‖_* ≤ the same with Lη[1/2 + 2(1−α)/α + δ̄ + D̄],                                        metric "average-stale"
       D̄ = (1/T)Σ_t Σ_j w_{t,j} E‖p_{t−τ} − p_{t−τ−j}‖, p_s = θΣ_{i=1}^k u_{s−i} (0 if α = 1).
 Δ_z = Δ₀ for start="zero"; for start="first" (first step uncorrected, as implemented) Δ_z = (√Δ₀ + kθη√(L/2))², and at θ = k = 1 the
 chain z_1, z_2, … starts at x₀, so "zero"'s guarantee holds with one step more.
Proof. The gradient of age j was taken at x_s, s = (t−j−τ)⁺, and z_t − x_s = (z_t − z_{t−j}) + (z_{t−j} − x_s) = −η[Σ_{i=1}^{j}u_{t−i} +
S_{t−j}]; hence the drift against ∇f(z_t) is ≤ LηΣ_j w_{t,j}(j + ‖S_{t−j}‖). Lemma 1 on the chain z with y = z_t, Lemma 2 for the noise,
f(z_T) ≥ f_*: (a). (a_N): go through z_t + ηΣ_{i≤j}u_{t−i} and use A2′ on the second leg. (a_x): ‖z_t − x_t‖ ≤ kθη. (b): y = x_{t−τ}; x_s = z_s − ηp_s gives ‖x_{t−τ} −
x_{t−τ−j}‖ ≤ η(j + ‖p_{t−τ} − p_{t−τ−j}‖); the descent error keeps ∇f(z_t) (one δ̄). start="first": f(z_0) = f(x₀ + kθηu_0) ≤ f(x₀) +
kθη‖∇f(x₀)‖_* + L(kθη)²/2 and ‖∇f(x₀)‖_*² ≤ 2LΔ₀. ∎

When it helps (τ = 1). (a) against Theorem 1(a): iff δ̄ < 1. (a) against the sharper 1(b): iff δ̄ < 1/2. Worst case δ̄ = 1 + θ: as bad as
one more step of delay, never worse. Without an assumption on successive updates the worst case does not show the correction helping
(theory/worst_case_lmo.py). In an inner-product geometry ‖u_s − θu_{s−1}‖² = 1 + θ² − 2θc: shorter than 1 iff θ < 2c; θ = 1 iff the angle
is under 60°; best θ = c.
"""

from dataclasses import replace

import numpy as np
import sympy

from theory.evidence import Bound, Identities, Rows, Sharp
from theory.geometry import Euclidean, MaxNorm, Spectral, frobenius
from theory.kernels import mean_age, weights
from theory.problems import line_quadratic
from theory.recursion import Path, Rule, run, weighted_staleness
from theory.sampling import Sample, instances


def start_gap(Delta, L, eta, theta, lag=1, start="zero"):
    """Δ_z ≥ f(z_0) − f_*."""
    if start == "zero":
        return Delta
    return (np.sqrt(Delta) + lag * theta * eta * np.sqrt(L / 2)) ** 2


def bound(
    Delta,
    L,
    eta,
    alpha,
    sigma,
    rho,
    T,
    delay=1,
    *,
    theta=1.0,
    staleness=None,
    lag=1,
    metric="average",
    start="zero",
    spread=None,
    L_mixed=None,
) -> Bound:
    """Theorem 3, term by term. staleness: δ̄ (None: the worst case τ + kθ). spread: D̄, for metric "average-stale". L_mixed: L_N of
    (a_N).
    """
    if metric not in ("average", "average-x", "average-stale"):
        raise ValueError(f"metric must be 'average', 'average-x' or 'average-stale', but got {metric!r}")
    staleness = delay + lag * theta if staleness is None else staleness
    terms = {
        "start": start_gap(Delta, L, eta, theta, lag, start) / (eta * T),
        "noise": 2 * rho * sigma * np.sqrt(alpha / (2 - alpha)),
        "start noise": 2 * rho * sigma / (alpha * T),
        "curvature": L * eta / 2,
        "momentum": L * eta * 2 * mean_age(alpha),
        "delay": (L if L_mixed is None else L_mixed) * eta * staleness * (1 if metric == "average-stale" else 2),
    }
    if metric == "average-x":
        terms["extrapolation"] = L * eta * lag * theta
    if metric == "average-stale":
        if spread is None:
            raise ValueError("metric 'average-stale' of Theorem 3(b) needs spread = D̄")
        terms["extrapolation"] = L * eta * spread
    return Bound(terms)


def helps(staleness, sharp: bool = False):
    """Whether the bound with the correction is below the bound without it, τ = 1, like with like (or against the sharper Theorem 1(b))."""
    return np.asarray(staleness) < (0.5 if sharp else 1.0)


def staleness_from_cosine(cosine, theta=1.0):
    """√(1 + θ² − 2θc): ‖u_s − θu_{s−1}‖ of unit directions with cosine c."""
    return np.sqrt(1 + np.asarray(theta) ** 2 - 2 * np.asarray(theta) * cosine)


def spread(path: Path, geometry) -> np.ndarray:
    """D̄ of (b), shape (B,)."""
    eta = np.asarray(path.rule.eta)[:, None, None]
    p = (path.z - path.x) / eta
    stale = np.maximum(np.arange(path.steps) - path.rule.delay, 0)
    total = np.zeros(path.x.shape[1])
    for i, alpha in enumerate(np.asarray(path.rule.alpha)):
        for t in range(1, path.steps):
            old = np.maximum(t - np.arange(t + 1) - path.rule.delay, 0)
            total[i] += weights(alpha, t) @ geometry.norm(p[stale[t], i] - p[old, i])
    return total / path.steps


def mixed_norm(geometry, problem):
    """A2′ for the random problems: N = ‖·‖₂/ρ ≤ ‖·‖ and L_N = scale·ρ²·λ_max(P). Returns (N, L_N)."""
    top = np.linalg.eigvalsh(problem.S)[:, -1] ** 2
    return (lambda X: frobenius(X) / geometry.rho), problem.scale * geometry.rho**2 * top


def check_symbolic() -> Identities:
    done = Identities()
    D, L, eta, th, k, c = sympy.symbols("Delta L eta theta k c", positive=True)
    done.equal(
        "Δ_z is a square",
        D + k * th * eta * sympy.sqrt(2 * L * D) + L * (k * th * eta) ** 2 / 2,
        (sympy.sqrt(D) + k * th * eta * sympy.sqrt(L / 2)) ** 2,
    )
    z, u = sympy.symbols("z"), sympy.symbols("u0:9")
    t, j = 6, 2
    for tau, lag in ((1, 1), (2, 1), (2, 2)):
        zs = {8: z}
        for s in range(7, -1, -1):
            zs[s] = zs[s + 1] + eta * u[s]
        xs = {s: zs[s] - th * eta * sum(u[s - i] for i in range(1, lag + 1)) for s in range(lag, 9)}
        S = sum(u[t - j - i] for i in range(1, tau + 1)) - th * sum(u[t - j - tau - i] for i in range(1, lag + 1))
        done.equal(f"staleness τ = {tau}, lag {lag}", zs[t] - xs[t - j - tau], -eta * (sum(u[t - i] for i in range(1, j + 1)) + S))
    done.equal("angle: ‖u − θv‖² for unit u, v", 1 + th**2 - 2 * th * c, (th - c) ** 2 + 1 - c**2)
    done.equal("θ = 1 shortens iff c > 1/2", sympy.solve(2 - 2 * c - 1, c)[0], sympy.Rational(1, 2))
    done.assume("‖∇f(x)‖_*² ≤ 2L(f(x) − f_*): A2 along lmo(∇f(x)) with the best step, and A1")
    done.assume("column sums: the gradients at x₀ (age t) are bounded by the path itself, so the first steps add nothing for θk ≤ 2")
    return done


def check_numeric(count: int = 1000, seed: int = 5) -> list[Rows]:
    rows = []
    for sample in instances(count, seed):
        delay = sample.rule.delay
        theta = np.tile([0.5, 1.0, 1.0, 2.0], len(sample.alpha) // 4)
        for start in ("zero", "first"):
            for lag in {1, max(delay, 1)}:
                path = sample.run(replace(sample.rule, theta=theta, lag=lag, start=start))
                options = {"theta": theta, "lag": lag, "start": start}
                measured = weighted_staleness(path, sample.geometry)
                rows += sample.compare(f"Theorem 3(a), {start} start", path, path.z[:-1], bound, staleness=measured, **options)
                rows += sample.compare("Theorem 3(a), worst-case δ̄", path, path.z[:-1], bound, **options)
                rows += sample.compare("Theorem 3(a_x)", path, path.x[:-1], bound, staleness=measured, metric="average-x", **options)
                if sample.geometry.name != "layers":
                    N, L_mixed = mixed_norm(sample.geometry, sample.problem)
                    rows += sample.compare(
                        "Theorem 3(a_N)", path, path.z[:-1], bound, staleness=weighted_staleness(path, _Only(N)), L_mixed=L_mixed, **options
                    )
    for sample in instances(count, seed + 1, steps=12):
        theta = np.tile([0.5, 1.0, 1.0, 2.0], len(sample.alpha) // 4)
        path = sample.run(replace(sample.rule, theta=theta, start="first"))
        options = {"theta": theta, "start": "first", "staleness": weighted_staleness(path, sample.geometry)}
        rows += sample.compare(
            "Theorem 3(b)", path, path.stale(), bound, metric="average-stale", spread=spread(path, sample.geometry), **options
        )
    return Sample.merge(rows)


class _Only:
    """A geometry that knows a norm and nothing else."""

    def __init__(self, norm):
        self.norm = norm


def check_sharp() -> list[Sharp]:
    """Monotone descent of a quadratic: (b) with θ = 1/2 is met up to its start; δ̄ = 1/2 there, and the z-chain's curvature term is
    exact.
    """
    found = []
    for geometry in (Spectral(3, 4), MaxNorm(4), Euclidean(4)):
        for theta, term in ((0.5, "delay"), (1.0, "curvature"), (1.0, "start")):
            T = 60
            problem = line_quadratic(geometry, start=float(T))
            path = run(problem, geometry, Rule(eta=np.ones(1), alpha=np.ones(1), delay=1, theta=theta, start="zero"), T)
            measured = np.mean([geometry.dual(problem.grad(x))[0] for x in path.stale()])
            options = {"theta": theta, "metric": "average-stale", "spread": 0.0, "staleness": weighted_staleness(path, geometry)[0]}
            value = bound(problem.f(problem.x0)[0], 1.0, 1.0, 1.0, 0.0, geometry.rho, T, 1, **options)
            found.append(Sharp.of(f"Theorem 3(b), {geometry.name}, θ = {theta}", term, measured, value))
    return found
