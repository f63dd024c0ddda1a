"""Proposition 7. The residual of delayed LMO descent does grow linearly in τη: an exact limit cycle. Ours (proved here). And a heuristic
for momentum.

Statement. f = (L/2)x², α = 1, σ = 0, u_t = sign(x_{t−τ}), x₀ > 0 not a multiple of η. The iterates become periodic with period 4τ+2,
between r−(τ+1)η and r+τη, r = x₀ mod η, and
  mean |f'(x_t)| = Lη(2τ²+2τ+1)/(2(2τ+1)) ≥ Lη(2τ+1)/4,     whatever r is: exact, a lower bound for the method.
Proof (η = 1). When x first goes below 0, at r−1, the sign in use stays +1 for τ more steps, so x reaches r−(τ+1); symmetrically up to
r+τ. One period visits the two extremes once and the 2τ points between twice: [(τ+r) + (τ+1−r) + 2Σ_{k=0}^{τ−1}(k+r) +
2Σ_{k=1}^{τ}(k−r)]/(4τ+2). ∎
Theorem 1(b) gives Lη(1/2+τ) as T → ∞: bound/exact = (2τ+1)²/(2τ²+2τ+1) = 1 (τ = 0), 1.8 (τ = 1), → 2. In any geometry whose lmo acts
coordinate by coordinate on a separable f (ℓ_∞; spectral on diagonal matrices) coordinates with different phases r keep *every* iterate at
that mean: the minimum over t is then as bad (theory/separable.py). On this instance error feedback is worse at x (mean|x| = 1.5η against
0.833η at τ = 1); at z the mean depends on the phase r, 0.51η … 0.99η, 0.75η on average over phases.

Heuristic (describing function, not proved). u = sign of the momentum near a sharp valley, curvature λ: the cycle sits where the linear
loop of theory/stability.py is marginal, amplitude A_z = (2η/π)/sin(ω_c/2) with sin²(ω_c/2) = (α + θh*)/4: A_z ≈ (4/π)η/√(α + θh*).
Uncorrected (4/π)ηα^{−1/2}, corrected ~ηα^{−1/4}: a delayed LMO method pays a factor α^{−1/2} in amplitude in sharp, quiet directions,
never stability. (For AdamW the same argument is exact and far worse: theory/adam.py.)
"""

from fractions import Fraction

import numpy as np
import sympy

from theory.evidence import Identities, Rows, Sharp
from theory.stability import limit_corrected


def mean_residual(delay):
    """(2τ²+2τ+1)/(2(2τ+1)): mean |f'|/(Lη) on the cycle; exact (Fraction in, Fraction out)."""
    return (2 * delay * delay + 2 * delay + 1) / (2 * (2 * delay + 1))


def cycle(start: Fraction, delay: int, theta: Fraction = Fraction(0), lag: int = 1, at: str = "x") -> tuple[int, Fraction]:
    """(period, mean |x|) of the eventual cycle of sign descent on x²/2 with η = 1, in exact rational arithmetic (u_s = 0 for s < 0)."""
    if at not in ("x", "z"):
        raise ValueError(f"at must be 'x' or 'z', but got {at!r}")
    x, u = [start], []
    seen, states = {}, []
    for t in range(100000):
        state = (tuple(x[max(t - i, 0)] for i in range(delay + 1)), tuple(u[t - i] if t >= i else 0 for i in range(1, lag + 1)))
        if t > delay + lag and state in seen:
            first = seen[state]
            points = x if at == "x" else states
            return t - first, sum(abs(points[s]) for s in range(first, t)) / (t - first)
        seen[state] = t
        states.append(x[t] + theta * sum(u[t - i] if t >= i else 0 for i in range(1, lag + 1)))
        u.append(1 if x[max(t - delay, 0)] >= 0 else -1)
        x.append(x[-1] - (u[t] + theta * (u[t] - (u[t - lag] if t >= lag else 0))))
    raise RuntimeError("limit_cycle: no period within 100000 steps")


def amplitude(alpha: float, theta: float = 0.0) -> float:
    """Heuristic amplitude of z in units of η at delay 1 (describing function)."""
    return 4 / np.pi / np.sqrt(alpha + (theta * limit_corrected(1 - alpha, theta) if theta else 0.0))


def simulated_amplitude(alpha: float, theta: float, nesterov: bool = False, delay: int = 1, steps: int = 6000) -> float:
    """√2 · rms of z over the second half of a run with sign(momentum), mean over 24 starts, η = λ = 1."""
    x0 = 3 + np.linspace(0.01, 0.98, 24)
    x, m, before, size = [x0] * (delay + 1), x0, 0 * x0, []
    for t in range(steps):
        old = m
        m = (1 - alpha) * m + alpha * x[0]
        u = np.sign(m + ((1 - alpha) * (m - old) if nesterov else 0.0))
        x = [*x[1:], x[-1] - ((1 + theta) * u - theta * before)]
        before = u
        if t >= steps // 2:
            size.append((x[-1] + theta * u) ** 2)
    return float(np.sqrt(2 * np.mean(size)))


def check_symbolic() -> Identities:
    done = Identities()
    tau, r, k = sympy.symbols("tau r k", integer=True, positive=True)
    total = (tau + r) + (tau + 1 - r) + 2 * sympy.summation(k + r, (k, 0, tau - 1)) + 2 * sympy.summation(k - r, (k, 1, tau))
    done.equal("mean over one period", total / (4 * tau + 2), mean_residual(tau))
    done.equal("at least (2τ+1)/4: the difference", mean_residual(tau) - (2 * tau + 1) / sympy.Integer(4), 1 / (4 * (2 * tau + 1)))
    done.equal("bound over exact", (tau + sympy.Rational(1, 2)) / mean_residual(tau), (2 * tau + 1) ** 2 / (2 * tau**2 + 2 * tau + 1))
    done.equal("bound over exact at τ = 1", ((2 * tau + 1) ** 2 / (2 * tau**2 + 2 * tau + 1)).subs(tau, 1), sympy.Rational(9, 5))
    return done


def check_numeric(count: int = 1000, seed: int = 11) -> list[Rows]:
    """Exact rational simulation: |measured − formula| must be 0 (bound 0), the period 4τ+2, for random rational starts and τ ≤ 6."""
    rng = np.random.default_rng(seed)
    difference, period = [], []
    for i in range(count):
        delay = i % 7
        denominator = int(rng.integers(2, 1000))
        start = Fraction(int(rng.integers(0, 5))) + Fraction(int(rng.integers(1, denominator)), denominator) + delay
        found, mean = cycle(start, delay)
        difference.append(float(abs(mean - mean_residual(Fraction(delay)))))
        period.append(float(abs(found - (4 * delay + 2))))
    zero = np.zeros(count)
    return [
        Rows("Proposition 7: |mean − formula| = 0, exactly", np.array(difference), zero),
        Rows("Proposition 7: period 4τ+2", np.array(period), zero),
    ]


def check_sharp() -> list[Sharp]:
    """At τ = 0 Theorem 1(b)'s curvature term Lη/2 is attained for ever; at τ = 1 the residual 0.8333 forbids a delay term under 1/3."""
    _, undelayed = cycle(Fraction(33, 10), 0)
    _, delayed = cycle(Fraction(33, 10), 1)
    return [
        Sharp("Theorem 1 at τ = 0 for ever", "curvature", float(undelayed), 0.5, 0.4),
        Sharp("Proposition 7 at τ = 1, formula as a bound", "constant 5/6", float(delayed), 5 / 6, 0.8 * 5 / 6),
    ]


def corrected_cycles(phases: int = 41) -> list[dict[str, float]]:
    """Exact mean|x| and mean|z| over η at τ = 1 with θ = 0, 1/2, 1: smallest, largest and mean over `phases` − 1 equally spaced phases."""
    rows = []
    for theta in (Fraction(0), Fraction(1, 2), Fraction(1)):
        for at in ("x", "z"):
            values = [float(cycle(3 + Fraction(k, phases), 1, theta, at=at)[1]) for k in range(1, phases)]
            rows.append({"theta": float(theta), "at": at, "least": min(values), "most": max(values), "mean": float(np.mean(values))})
    return rows
