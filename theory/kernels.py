"""Momentum as a weighted sum of past gradients: M_t = Σ_{j=0}^t w_{t,j} g_{t−j}, Σ_j w_{t,j} = 1 (Lemmas 2 and 4).

EMA m_{t+1} = (1−α)m_t + αg_t, M_t = m_{t+1}:
  first-gradient start m₀ := g₀ (Kovalev):      w_{t,j} = α(1−α)^j (j < t),  w_{t,t} = (1−α)^t
  zero start m₀ := 0 (practice; u(cM) = u(M)):   w_{t,j} = α(1−α)^j / (1 − (1−α)^{t+1})
Gradient-level correction M_t + θ(M_t − M_{t−1}) of the first-gradient kernel (Lemma 4; Nesterov is θ = 1−α): w_0 = (1+θ)α,  w_j =
α(1−α)^{j−1}(1−α−αθ)  (1 ≤ j < t),  w_{t,t} = (1−α)^{t−1}(1−α−αθ) (t ≥ 1),  w_{0,0} = 1.

Lemma 2. Σ_j w_{t,j} j ≤ (1−α)/α for both starts. Σ_j w_{t,j}² ≤ α/(2−α) + (1−α)^{2t} (first gradient), and for the zero start exactly
(α/(2−α))(1+q)/(1−q), q = (1−α)^{t+1}. With noise n_i (martingale differences, E‖n_i‖₂² ≤ σ²) E‖Σ_j w_{t,j} n_{t−j}‖_* ≤ ρσ(Σ_j w²)^{1/2}.
Proof. The tail {j ≥ t} of the geometric law (mass (1−α)^t) is moved to age t, or cut off and the rest rescaled: both lower the mean age.
Sums of squares are geometric. Noise: A4, Jensen, and E⟨n_i, n_j⟩ = 0 for i ≠ j because x_{t−τ} depends on earlier samples only. ∎

Lemma 4. The corrected kernel sums to 1, is nonnegative iff θ ≤ (1−α)/α, has mean age (1−α)/α − θ and Σw² = (α/(2−α))(1 + 2αθ(1+θ)) in the
stationary limit; at finite t the mean age is smaller, and Σw² ≤ the limit + (1−α)^{2t}.
Proof. Geometric sums. At finite t the weight of g₀ is the limit's whole tail mass, put at age t: the mean age falls; and it is ≤ (1−α)^t. ∎
"""

import numpy as np
import sympy
from numpy import ndarray

from theory.evidence import Identities

START_NOISE = np.pi / 4 + np.log(2) / 2  # C₀ = ∫₀^∞ (√coth y − 1) dy = 1.1320…


def weights(alpha: float, t: int, theta: float = 0.0, start: str = "first-gradient") -> ndarray:
    """w_{t,0} … w_{t,t}, shape (t+1,), exactly as printed above; the independent reference is `weights_by_recursion`."""
    j = np.arange(t + 1)
    if start == "zero":
        if theta:
            raise ValueError("weights: the gradient-level correction is stated for the first-gradient start only")
        return alpha * (1 - alpha) ** j / (1 - (1 - alpha) ** (t + 1))
    w = alpha * (1 - alpha) ** np.maximum(j - 1, 0) * (1 - alpha - alpha * theta)
    w[0] = (1 + theta) * alpha
    w[t] = 1.0 if t == 0 else (1 - alpha) ** (t - 1) * (1 - alpha - alpha * theta)
    return w


def weights_by_recursion(alpha: float, t: int, theta: float = 0.0, start: str = "first-gradient") -> ndarray:
    """The same weights by running the recursion on unit impulses g_i = e_i."""
    unit = np.eye(t + 1)
    m = unit[0].copy() if start == "first-gradient" else np.zeros(t + 1)
    before = m
    for i in range(t + 1):
        before = m if i or start == "zero" else unit[0]
        m = (1 - alpha) * m + alpha * unit[i]
    M = m + theta * (m - before)
    if start == "zero":
        M = M / M.sum()
    return M[::-1]


def mean_age(alpha, theta=0.0):
    """Mean age of the stationary kernel, in steps."""
    return (1 - alpha) / alpha - theta


def square_sum(alpha, theta=0.0):
    """Σ_j w_j² of the stationary kernel."""
    return alpha / (2 - alpha) * (1 + 2 * alpha * theta * (1 + theta))


def best_shift(alpha: float) -> tuple[int, float]:
    """(k, Σ_j α(1−α)^j |j−k|) at the best integer k: k − (1−α)/α + 2(1−α)^{k+1}/α at the smallest k with (1−α)^{k+1} ≤ 1/2; → (ln 2)/α."""
    k = 0
    while (1 - alpha) ** (k + 1) > 0.5:
        k += 1
    return k, k - (1 - alpha) / alpha + 2 * (1 - alpha) ** (k + 1) / alpha


def check_symbolic() -> Identities:
    a, q, th = sympy.symbols("alpha q theta", positive=True)
    geometric, first_moment = 1 / (1 - q), q / (1 - q) ** 2  # Σ q^j, Σ j q^j for 0 < q < 1
    at = {q: 1 - a}
    done = Identities()
    done.equal("EMA weights sum to 1", a * geometric.subs(at), 1)
    done.equal("EMA mean age (1−α)/α", a * first_moment.subs(at), (1 - a) / a)
    done.equal("EMA Σw² = α/(2−α)", a**2 * geometric.subs(q, (1 - a) ** 2), a / (2 - a))
    w0, w1 = (1 + th) * a, a * (1 - a - a * th)
    done.equal("corrected w_1", (1 + th) * a * (1 - a) - th * a, w1)
    done.equal("corrected weights sum to 1", w0 + w1 * geometric.subs(at), 1)
    done.equal("corrected mean age (1−α)/α − θ", w1 * (geometric.subs(at) + first_moment.subs(at)), (1 - a) / a - th)
    done.equal("corrected Σw²", w0**2 + w1**2 * geometric.subs(q, (1 - a) ** 2), a / (2 - a) * (1 + 2 * a * th * (1 + th)))
    done.equal("weight of g₀ at t = 2", (1 + th) * (1 - a) ** 2 - th * (1 - a), (1 - a) * (1 - a - a * th))
    # zero start, with 1 − α = p: (1−p)²(1−Q²)/((1−p²)(1−Q)²), Q = p^T
    p, Q = sympy.symbols("p Q", positive=True)
    done.equal("zero start Σw²", (1 - p) ** 2 * (1 - Q**2) / ((1 - p**2) * (1 - Q) ** 2), (1 - p) / (1 + p) * (1 + Q) / (1 - Q))
    S = sympy.symbols("S", positive=True)
    primitive = -sympy.log(S + 1) + sympy.log(S**2 + 1) / 2 + sympy.atan(S)
    done.equal("C₀: primitive", sympy.diff(primitive, S), 2 * S / ((S + 1) * (S**2 + 1)))
    done.equal("C₀ = π/4 + (ln 2)/2", sympy.limit(primitive, S, sympy.oo) - primitive.subs(S, 1), sympy.pi / 4 + sympy.log(2) / 2)
    y = sympy.symbols("y", positive=True)
    done.equal("C₀: dy under S = √coth y", sympy.diff(sympy.acoth(S**2), S), 2 * S / (1 - S**4))
    done.equal(
        "tanh(c/2) = α/(2−α) at c = −ln(1−α)",
        sympy.tanh(y / 2)
        .rewrite(sympy.exp)
        .subs(sympy.exp(y), 1 / (1 - a))
        .subs(sympy.exp(y / 2), 1 / sympy.sqrt(1 - a))
        .subs(sympy.exp(-y / 2), sympy.sqrt(1 - a)),
        a / (2 - a),
    )
    k = sympy.symbols("k", integer=True, nonnegative=True)
    mad = k - (1 - a) / a + 2 * (1 - a) ** (k + 1) / a
    done.equal("best shift: increment in k is 1 − 2(1−α)^{k+1}", mad.subs(k, k + 1) - mad, 1 - 2 * (1 - a) ** (k + 1))
    done.assume("A5 and the order of sampling make the noise a martingale difference sequence (Lemma 2)")
    return done
