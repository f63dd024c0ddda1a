"""Theorem 1. Delayed LMO descent with momentum, any norm, stochastic, non-convex. Ours (proved here); base: Kovalev, arXiv 2503.12645.

Setting. A1 f ≥ f_*, Δ₀ = f(x₀) − f_*. A2 ‖∇f(x) − ∇f(y)‖_* ≤ L‖x − y‖. A3 E g = ∇f, E‖g − ∇f‖₂² ≤ σ². A4 ‖v‖_* ≤ ρ‖v‖₂. A5 independent
samples. x_{t+1} = x_t − ηu_t, u_t = lmo(M_t), gradients at x_{t−τ}, EMA weight α ∈ (0, 1], first-gradient start, any η > 0, any τ ≥ 0.

Guarantee, for every T ≥ 1:
 (a) (1/T)Σ_{t<T} E‖∇f(x_t)‖_*     ≤ Δ₀/(ηT) + 2ρσ√(α/(2−α)) + 2ρσ/(αT) + Lη[1/2 + 2(1−α)/α + 2τ]        metric "average"
 (b) (1/T)Σ_{t<T} E‖∇f(x_{t−τ})‖_*  ≤ the same with 2τ replaced by τ                                        metric "average-stale"
 (c) (1/T)Σ_{t<T} E‖∇f(x_{t−τ−k})‖_* ≤ the same with Lη[1/2 + (1−α)/α + τ + D_k], D_k = Σ_j α(1−α)^j|j−k|;
     the best k gives D_k → (ln 2)/α                                                                        metric "average-shifted"
 The minimum over t is no larger than each average (metric "minimum" = (b)). With the zero start, 2ρσ/(αT) becomes 4C₀ρσ/(√(α(2−α))T).
 Sharper start: every drift term may be replaced by its exact finite sum, min(j + τ, t) for j + τ (`exact_start`).

Proof. Lemma 1: for x⁺ = x − ηd, ‖d‖ ≤ κ, ⟨M, d⟩ ≥ q‖M‖_* and any y,
     f(x⁺) ≤ f(x) − ηq‖∇f(y)‖_* + ηq‖M − ∇f(y)‖_* + ηκ‖M − ∇f(x)‖_* + Lκ²η²/2.
   [A2 gives f(x⁺) ≤ f(x) − η⟨∇f(x), d⟩ + Lκ²η²/2; ⟨∇f(x), d⟩ = ⟨M, d⟩ − ⟨M − ∇f(x), d⟩ ≥ q‖M‖_* − κ‖M − ∇f(x)‖_*; and ‖M‖_* ≥ ‖∇f(y)‖_* −
   ‖M − ∇f(y)‖_*.] Use it with q = κ = 1 and y = x_t (a), x_{t−τ} (b), x_{t−τ−k} (c); sum over t < T, f(x_T) ≥ f_*, divide by ηT. It
   remains to bound the two errors. M_t − ∇f(x_t) = noise + Σ_j w_{t,j}(∇f(x_{t−j−τ}) − ∇f(x_t)): noise ≤ ρσ(√(α/(2−α)) + (1−α)^t) by
   Lemma 2 and √(a+b) ≤ √a + √b, and Σ_t (1−α)^t ≤ 1/α; drift ≤ LηΣ_j w_{t,j}(j + τ) ≤ Lη[(1−α)/α + τ] because ‖x_t − x_s‖ ≤ η(t − s).
   Against x_{t−τ} the drift is LηΣ w_j j, against x_{t−τ−k} it is LηΣ w_j|j − k|; E|J − k| = k − EJ + 2E(J − k)⁺ and E(J − k)⁺ =
   (1−α)^{k+1}/α. ∎

The delay costs one additive term, τLη in (b), beside the 2(1−α)Lη/α that momentum pays anyway, and no step size is forbidden.
Tightness. (b) is exact up to Lη/T (τ = 1) on a quadratic descended monotonely: `check_sharp`; theory/limit_cycle.py for the long run.
"""

from dataclasses import replace

import numpy as np
import sympy

from theory.evidence import Bound, Identities, Rows, Sharp
from theory.geometry import Euclidean, MaxNorm, Spectral
from theory.kernels import START_NOISE, best_shift, mean_age, weights
from theory.problems import line_quadratic
from theory.recursion import Rule, run
from theory.sampling import Sample, instances

METRICS = ("average", "average-stale", "average-shifted", "minimum")


def bound(Delta, L, eta, alpha, sigma, rho, T, delay=1, metric="average-stale", momentum="first-gradient") -> Bound:
    """The guarantee, term by term as printed; arrays broadcast over instances."""
    drift = {"average": 2 * mean_age(alpha), "average-stale": 2 * mean_age(alpha), "minimum": 2 * mean_age(alpha)}
    if metric == "average-shifted":
        momentum_drift = mean_age(alpha) + np.vectorize(lambda a: best_shift(a)[1])(alpha)
    elif metric in drift:
        momentum_drift = drift[metric]
    else:
        raise ValueError(f"metric must be one of {METRICS}, but got {metric!r}")
    if momentum == "first-gradient":
        start_noise = 2 * rho * sigma / (alpha * T)
    elif momentum == "zero":
        start_noise = np.where(np.asarray(alpha) < 1, 4 * START_NOISE * rho * sigma / (np.sqrt(alpha * (2 - alpha)) * T), 0.0)
    else:
        raise ValueError(f"momentum must be 'first-gradient' or 'zero', but got {momentum!r}")
    return Bound(
        {
            "start": Delta / (eta * T),
            "noise": 2 * rho * sigma * np.sqrt(alpha / (2 - alpha)),
            "start noise": start_noise,
            "curvature": L * eta / 2,
            "momentum": L * eta * momentum_drift,
            "delay": L * eta * delay * (2 if metric == "average" else 1),
        }
    )


def exact_start(Delta, L, eta, alpha: float, sigma, rho, T: int, delay: int) -> Bound:
    """(b) with the finite sums of the drift kept: exact for T of the order of τ or 1/α. alpha and T are scalars."""
    ages = [weights(alpha, t) for t in range(T)]
    to_now = sum(float(w @ np.minimum(np.arange(t + 1) + delay, t)) for t, w in enumerate(ages)) / T
    to_stale = sum(float(w @ np.maximum(np.minimum(np.arange(t + 1) + delay, t) - min(delay, t), 0)) for t, w in enumerate(ages)) / T
    plain = bound(Delta, L, eta, alpha, sigma, rho, T, delay).terms
    return Bound({**plain, "momentum": L * eta * 2 * to_stale, "delay": L * eta * (to_now - to_stale)})


def penalty(alpha, delay=1, metric="average-stale"):
    """Corollary 1.1: (bound at delay τ)/(bound at 0) at fixed α, each with its best η, noise aside; its square is the ratio of iterations.

    Minimising Δ₀/(ηT) + LηA over η gives 2√(LΔ₀A/T), A = 1/2 + 2(1−α)/α + τ (2τ for "average").
    """
    free = 0.5 + 2 * mean_age(alpha)
    return np.sqrt((free + delay * (2 if metric == "average" else 1)) / free)


def recommended(epsilon, Delta, L, sigma, rho, delay=1) -> dict:
    """Corollary 1.2: α, η and the number of steps K with min_{t<K} E‖∇f(x_{t−τ})‖_* ≤ ε.

    α = min{1, ε²/(16ρ²σ²)}, A = 2/α + τ − 3/2, η = ε/(4LA), K = ⌈max{32LΔ₀A/ε², 16ρσ/(αε)}⌉, hence
    K = O(1024 LΔ₀ρ²σ²/ε⁴ + 32(1+τ)LΔ₀/ε² + 256ρ³σ³/ε³ + 16ρσ/ε): the delay is in the ε⁻² term only.
    Proof. 2ρσ√(α/(2−α)) ≤ 2ρσ√α ≤ ε/2; LηA = ε/4 as 1/2 + 2(1−α)/α + τ = A; Δ₀/(ηK) ≤ ε/8; 2ρσ/(αK) ≤ ε/8. ∎
    """
    noise = 16 * (rho * sigma) ** 2
    alpha = np.where(noise > epsilon**2, epsilon**2 / np.maximum(noise, 1e-300), 1.0)
    A = 2 / alpha + delay - 1.5
    eta = epsilon / (4 * L * A)
    steps = np.ceil(np.maximum(32 * L * Delta * A / epsilon**2, 16 * rho * sigma / (alpha * epsilon)))
    return {"alpha": alpha, "eta": eta, "steps": np.maximum(steps, 1)}


def tuned(Delta, L, sigma, rho, T, delay=1, grid=4001) -> tuple[float, float]:
    """(bound, α) of (b) minimised over η (closed form) and α (grid of [1e-5, 1]); Corollary 1.3 says the delay adds a relative ατ/8."""
    alpha = np.geomspace(1e-5, 1, grid)
    A = 0.5 + 2 * mean_age(alpha) + delay
    value = 2 * np.sqrt(L * Delta * A / T) + 2 * rho * sigma * (np.sqrt(alpha / (2 - alpha)) + 1 / (alpha * T))
    best = int(np.argmin(value))
    return float(value[best]), float(alpha[best])


def check_symbolic() -> Identities:
    a, tau, L, eta, eps, r, D, T = sympy.symbols("alpha tau L eta epsilon r Delta T", positive=True)
    done = Identities()
    A = 2 / a + tau - sympy.Rational(3, 2)
    done.equal("A = 1/2 + 2(1−α)/α + τ", A, sympy.Rational(1, 2) + 2 * (1 - a) / a + tau)
    best = sympy.sqrt(D / (L * A * T))
    total = D / (eta * T) + L * eta * A
    done.equal("best η: derivative is zero", sympy.diff(total, eta).subs(eta, best), 0)
    done.equal("value at the best η is 2√(LΔ₀A/T)", sympy.powdenest((total.subs(eta, best)) ** 2, force=True), 4 * L * D * A / T)
    done.equal("penalty² = 1 + 2ατ/(4−3α)", A / A.subs(tau, 0), 1 + 2 * a * tau / (4 - 3 * a))
    chosen = {eta: eps / (4 * L * A)}
    done.equal("Cor 1.2: LηA = ε/4", (L * eta * A).subs(chosen), eps / 4)
    done.equal("Cor 1.2: Δ₀/(ηK) = ε/8 at K = 32LΔ₀A/ε²", (D / (eta * (32 * L * D * A / eps**2))).subs(chosen), eps / 8)
    done.equal("Cor 1.2: 2r√α = ε/2 at α = ε²/(16r²)", 2 * r * sympy.sqrt(eps**2 / (16 * r**2)), eps / 2)
    done.equal("Cor 1.2: 2r/(αK) = ε/8 at K = 16r/(αε)", 2 * r / (a * (16 * r / (a * eps))), eps / 8)
    leading = 2 * sympy.sqrt(2 * L * D / (a * T)) + sympy.sqrt(2) * r * sympy.sqrt(a)
    a_star = 2 * sympy.sqrt(L * D / T) / r
    done.equal("Cor 1.3: the leading part is stationary at α = 2√(LΔ₀/T)/r", sympy.diff(leading, a).subs(a, a_star), 0)
    done.equal("Cor 1.3: its value to the 4th power is 256 r²LΔ₀/T", sympy.expand(leading.subs(a, a_star) ** 4), 256 * r**2 * L * D / T)
    eta_star = sympy.sqrt(D * a / (2 * L * T))
    relative = (tau * L * eta_star).subs(a, a_star) / leading.subs(a, a_star)
    done.equal("Cor 1.3: the delay's share is ατ/8", relative**2, (a_star * tau / 8) ** 2)
    done.assume("Lemma 1: A2 along the segment from x to x⁺, and duality of the norms")
    done.assume("‖x_t − x_s‖ ≤ η|t − s| because ‖u‖ ≤ 1")
    done.assume("f(x_T) ≥ f_* (A1); expectations as in Lemma 2 (A3, A4, A5)")
    return done


def check_numeric(count: int = 1000, seed: int = 1) -> list[Rows]:
    """Random instances: in expectation (mean over noise seeds) and along each single path, with that path's own noise norms."""
    rows = []
    for sample in instances(count, seed):
        for momentum in ("first-gradient", "zero"):
            path = sample.run(replace(sample.rule, momentum=momentum))
            for metric, points in (("average", path.x[:-1]), ("average-stale", path.stale())):
                rows += sample.compare(f"Theorem 1 {metric}, {momentum} start", path, points, bound, metric=metric, momentum=momentum)
            if momentum == "first-gradient":
                rows += _shifted(sample, path)
    return Sample.merge(rows) + check_corollaries(20 * count, seed)


def _shifted(sample: Sample, path) -> list[Rows]:
    """(c): the measured points are x_{t−τ−k} with each instance's own best k."""
    T, size = path.steps, path.x.shape[1]
    shift = np.array([best_shift(a)[0] for a in sample.alpha])
    index = np.maximum(np.arange(T)[:, None] - path.rule.delay - shift, 0)
    points = path.x[index, np.arange(size)[None, :]]
    return sample.compare("Theorem 1 average-shifted", path, points, bound, metric="average-shifted")


def check_corollaries(count: int, seed: int) -> list[Rows]:
    """Corollary 1.2: the bound at the recommended parameters is at most ε, for `count` random problem constants and τ ≤ 8."""
    rng = np.random.default_rng(seed)
    epsilon, Delta, L, r = 10.0 ** rng.uniform(-2, 2, (4, count))
    delay = rng.integers(0, 9, count)
    chosen = recommended(epsilon, Delta, L, r, 1.0, delay)
    value = bound(Delta, L, chosen["eta"], chosen["alpha"], r, 1.0, chosen["steps"], delay).total
    alphas = np.geomspace(1e-4, 1, 400)
    spread = np.array([best_shift(a)[1] for a in alphas])
    return [
        Rows("Corollary 1.2: bound at the recommended parameters ≤ ε", value, epsilon),
        Rows("Theorem 1(c): best D_k ≤ (ln 2)/α", spread, np.log(2) / alphas),
    ]


def check_sharp() -> list[Sharp]:
    """Monotone descent of a quadratic to its minimum in T steps: the bound exceeds the measured average by about Lη/T."""
    found = []
    for geometry in (Spectral(3, 4), MaxNorm(4), Euclidean(4)):
        for delay, term in ((0, "curvature"), (1, "delay"), (3, "delay"), (1, "start")):
            T = 20 * (delay + 1)
            problem = line_quadratic(geometry, start=float(T))
            path = run(problem, geometry, Rule(eta=1.0, alpha=1.0, delay=delay), T)
            measured = np.mean([geometry.dual(problem.grad(x))[0] for x in path.stale()])
            value = bound(problem.f(problem.x0)[0], 1.0, 1.0, 1.0, 0.0, geometry.rho, T, delay)
            found.append(Sharp.of(f"Theorem 1(b), {geometry.name}, delay {delay}", term, measured, value))
    return found
