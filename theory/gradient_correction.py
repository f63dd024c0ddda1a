"""Theorem 4 and Propositions 4.2, 4.3. The correction inside the optimizer: u_t = lmo(M_t + θ(M_t − M_{t−1})). Ours (proved here).

Theorem 4. Assumptions and notation of theory/lmo_delay.py, first-gradient start, 0 ≤ θ ≤ (1−α)/α, any delay τ. Then
  (1/T)Σ E‖∇f(x_t)‖_*     ≤ Δ₀/(ηT) + 2ρσ√(α(1+2αθ(1+θ))/(2−α)) + 2ρσ/(αT) + Lη[1/2 + 2((1−α)/α − θ) + 2τ]        metric "average"
  (1/T)Σ E‖∇f(x_{t−τ})‖_* ≤ the same with 2τ replaced by τ                                                        metric "average-stale"
 Hence θ = τ restores the undelayed drift of "average" exactly, in the worst case, at a noise factor √(1 + 2ατ(1+τ)); Nesterov (θ = 1−α)
 removes a (1−α)-fraction of a one-step delay.
Proof. Theorem 1's proof with the kernel of Lemma 4 (theory/kernels.py): it is nonnegative for θ ≤ (1−α)/α, its mean age is at most
(1−α)/α − θ, and its squares sum to at most the stationary value + (1−α)^{2t}. ∎

Proposition 4.2 (honesty). For 0 < θ ≤ (1−α)/α the *uncorrected* EMA with α' = α/(1−αθ) has the same mean age and less noise: the
difference of Σw² is 2α²θ(1+2θ)(1−α−αθ)/((2−α)(2−α−2αθ)) ≥ 0. Where α may be retuned, the bound never prefers this correction, nor
Nesterov.

Proposition 4.3 (α = 1: a secant). ĝ_t = 2g_t − g_{t−1}, τ = 1, and ‖(∇²f(x) − ∇²f(y))v‖_* ≤ L₂‖x−y‖‖v‖ besides. Then
  ‖2∇f(x_{t−1}) − ∇f(x_{t−2}) − ∇f(x_t)‖_* ≤ Lη‖u_{t−1} − u_{t−2}‖ + L₂η²   (uncorrected: Lη), at a noise √5σ instead of σ.
Proof. With a = x_t − x_{t−1}, b = x_{t−1} − x_{t−2}: ∇f(x_t) = ∇f(x_{t−1}) + ∇²f(x_{t−1})a + r_a and ∇f(x_{t−2}) = ∇f(x_{t−1}) −
∇²f(x_{t−1})b + r_b with ‖r_a‖_* ≤ L₂‖a‖²/2, ‖r_b‖_* ≤ L₂‖b‖²/2. The sum is ∇²f(x_{t−1})(b − a) − r_a − r_b, and ‖∇²f v‖_* ≤ L‖v‖. Noise:
E‖2n_t − n_{t−1}‖₂² ≤ 5σ². ∎
"""

from dataclasses import replace

import numpy as np
import sympy

from theory.evidence import Bound, Identities, Rows, Sharp
from theory.geometry import Euclidean, MaxNorm, Spectral
from theory.kernels import mean_age, square_sum
from theory.problems import line_quadratic
from theory.recursion import Rule, run
from theory.sampling import Sample, instances


def bound(Delta, L, eta, alpha, sigma, rho, T, delay=1, theta=1.0, metric="average") -> Bound:
    """Theorem 4, term by term. Raises ValueError outside 0 ≤ θ ≤ (1−α)/α, where the kernel has negative weights."""
    alpha, theta = np.asarray(alpha, float), np.asarray(theta, float)
    if np.any(theta < 0) or np.any(theta > (1 - alpha) / alpha * (1 + 1e-12)):
        raise ValueError("Theorem 4 needs 0 <= theta <= (1 - alpha)/alpha: beyond it the momentum kernel has negative weights")
    if metric not in ("average", "average-stale"):
        raise ValueError(f"metric must be 'average' or 'average-stale', but got {metric!r}")
    return Bound(
        {
            "start": Delta / (eta * T),
            "noise": 2 * rho * sigma * np.sqrt(square_sum(alpha, theta)),
            "start noise": 2 * rho * sigma / (alpha * T),
            "curvature": L * eta / 2,
            "momentum": L * eta * 2 * mean_age(alpha, theta),
            "delay": L * eta * delay * (2 if metric == "average" else 1),
        }
    )


def retuned_alpha(alpha, theta):
    """Proposition 4.2: the α' of the plain EMA that has the corrected kernel's mean age, with less noise."""
    return alpha / (1 - alpha * theta)


def check_symbolic() -> Identities:
    a, th, tau = sympy.symbols("alpha theta tau", positive=True)
    done = Identities()
    done.equal("θ = τ restores the undelayed drift", (1 - a) / a - tau + tau, (1 - a) / a)
    noise = lambda alpha, theta: alpha / (2 - alpha) * (1 + 2 * alpha * theta * (1 + theta))  # noqa: E731
    done.equal("noise factor² at θ = τ", noise(a, tau) / noise(a, 0), 1 + 2 * a * tau * (1 + tau))
    other = a / (1 - a * th)
    done.equal("4.2: same mean age", (1 - other) / other, (1 - a) / a - th)
    gain = 2 * a**2 * th * (1 + 2 * th) * (1 - a - a * th) / ((2 - a) * (2 - a - 2 * a * th))
    done.equal("4.2: difference of Σw²", noise(a, th) - noise(other, 0), gain)
    p, q = sympy.symbols("p q", nonnegative=True)  # θ = (1−α)/α · p/(1+p), α = 1/(1+q): the whole range of the theorem
    region = {th: q * p / (1 + p), a: 1 / (1 + q)}
    done.nonnegative(
        "4.2: the difference is ≥ 0", sympy.simplify(gain.subs(region, simultaneous=True)), (p, q), "α = 1/(1+q), θ = qp/(1+p)"
    )
    g0 = sympy.symbols("g0")
    a_, b_, H, ra, rb = sympy.symbols("a b H r_a r_b")
    done.equal("4.3: the expansion", 2 * g0 - (g0 - H * b_ + rb) - (g0 + H * a_ + ra), H * (b_ - a_) - ra - rb)
    done.equal("4.3: variance of 2n_t − n_{t−1}", 2**2 + 1, 5)
    done.assume("Theorem 1's proof with a nonnegative kernel; Taylor remainders of 4.3 from the Lipschitz Hessian")
    return done


def check_numeric(count: int = 1000, seed: int = 4) -> list[Rows]:
    rows = []
    for sample in instances(count, seed):
        share = np.linspace(0, 1, len(sample.alpha)) ** 2  # θ over its whole range, small values more often
        theta = np.minimum(share * (1 - sample.alpha) / sample.alpha, 3.0)
        path = sample.run(replace(sample.rule, inner=theta))
        rows += sample.compare("Theorem 4 average", path, path.x[:-1], bound, theta=theta)
        rows += sample.compare("Theorem 4 average-stale", path, path.stale(), bound, theta=theta, metric="average-stale")
    return [*Sample.merge(rows), _never_better(20 * count, seed), _secant(count, seed)]


def _never_better(count: int, seed: int) -> Rows:
    """Proposition 4.2 on the bound at its best η: retuned plain EMA against corrected EMA, over α, θ, T and noise."""
    rng = np.random.default_rng(seed)
    alpha = rng.uniform(0.001, 0.999, count)
    theta = rng.uniform(0, 1, count) * (1 - alpha) / alpha
    T, r = 10.0 ** rng.uniform(1, 6, count), 10.0 ** rng.uniform(-2, 2, count)

    def best(alpha, theta):
        A = 0.5 + 2 * mean_age(alpha, theta) + 2
        return 2 * np.sqrt(A / T) + 2 * r * np.sqrt(square_sum(alpha, theta)) + 2 * r / (alpha * T)

    return Rows("Proposition 4.2: retuned plain bound ≤ corrected bound", best(retuned_alpha(alpha, theta), 0.0), best(alpha, theta))


def _secant(count: int, seed: int) -> Rows:
    """Proposition 4.3 with f = Σ ½log(1 + (Sx)_i²), ‖S‖ = 1: L = 1 and L₂ = max|φ'''| = max|2u(u²−3)/(1+u²)³|; Euclidean."""
    rng = np.random.default_rng(seed)
    u = np.linspace(-3, 3, 100001)
    third = np.abs(2 * u * (u * u - 3) / (1 + u * u) ** 3).max()
    d = 8
    Q, _ = np.linalg.qr(rng.standard_normal((count, d, d)))
    S = (Q * np.sqrt(np.geomspace(1, 0.1, d))) @ np.swapaxes(Q, -1, -2)
    psi = lambda v: v / (1 + v * v)  # noqa: E731
    grad = lambda x: np.einsum("bij,bj->bi", S, psi(np.einsum("bij,bj->bi", S, x)))  # noqa: E731
    unit = lambda v: v / np.linalg.norm(v, axis=-1, keepdims=True)  # noqa: E731
    eta = 10.0 ** rng.uniform(-3, 0.5, (count, 1))
    x = rng.standard_normal((count, d))
    new = unit(rng.standard_normal((count, d)))
    old = np.where(rng.random((count, 1)) < 0.5, unit(rng.standard_normal((count, d))), unit(new + 0.1 * rng.standard_normal((count, d))))
    left = 2 * grad(x) - grad(x + eta * old) - grad(x - eta * new)
    right = eta[:, 0] * np.linalg.norm(new - old, axis=1) + third * eta[:, 0] ** 2
    return Rows("Proposition 4.3: secant error", np.linalg.norm(left, axis=1), right)


def check_sharp() -> list[Sharp]:
    """α = 1/2, θ = 1: the corrected kernel is the newest gradient alone, and monotone descent of a quadratic meets the bound."""
    found = []
    for geometry in (Spectral(3, 4), MaxNorm(4), Euclidean(4)):
        for delay, term in ((0, "curvature"), (1, "delay"), (0, "start")):
            T = 20 * (delay + 1)
            problem = line_quadratic(geometry, start=float(T))
            path = run(problem, geometry, Rule(eta=1.0, alpha=0.5, inner=1.0, delay=delay), T)
            measured = np.mean([geometry.dual(problem.grad(x))[0] for x in path.stale()])
            value = bound(problem.f(problem.x0)[0], 1.0, 1.0, 0.5, 0.0, geometry.rho, T, delay, 1.0, "average-stale")
            found.append(Sharp.of(f"Theorem 4, {geometry.name}, delay {delay}", term, measured, value))
    return found
