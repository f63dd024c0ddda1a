"""Theorem 9. Stationary variance of the quadratic model under gradient noise, with momentum, delay and correction. Ours (proved here).

Setting. As theory/stability.py, with gradients λx_{t−τ} + n_t, n_t independent of variance σ²; s := (1−β)ησ, h = (1−β)ηλ. Stationary Var,
h below the stability limit:
  EMA τ=0:  s²(1+β)/((1−β)h(2(1+β)−h))                      EMA τ=1:  s²(1+β+h)/((1−β−h)h(2(1+β)+h))
  ratio τ=1 : τ=0 is (1 − x²/(2+x))/(1−ηλ), x = h/(1+β): about 1/(1−ηλ), at every β
  EMA τ=1, U(θ), with 𝒟 = h(2(1+β) + h(1+2θ))·[(1−β) − (1−βθ)h − θ²h²]:
    at z  s²(1+β+h−βθh−θ²h²)/𝒟            at x  s²(1+β+h−βθh+2θh+2θ²h+θ²h²+2θ³h²)/𝒟
  Nesterov τ=0:  s²(1+β+βh+2β²h)/(h(1−β+βh)(2(1+β)−(1+2β)h))
First-order law. For any direction filter F(z) = Σ_j w_j z^{−j}, Σw = 1, exponentially decaying (EMA, Nesterov, …), any τ, lag-1
correction θ:
  Var_z/Var_0 = 1 + (τ − θ)ηλ + O((ηλ)²), Var_0 undelayed with the same F.   U(1) cancels the first-order excess of a one-step delay at z.
  At x (EMA, τ=1): 1 + ηλ[(1+β) + θ(1−3β) + 2θ²(1−β)]/(1+β) + O: at θ = 1 1 + 4ηλ(1−β)/(1+β), better than uncorrected iff β > 3/5. Proof
  of the law. With ε = ηλ, C = (1+θ) − θz⁻¹: H_z = −ηF/𝔇, 𝔇(z) = z−1+εFCz^{−τ}, Var = σ²∮H(z)H(1/z)dz/(2πiz). Slow pole z_* = 1−ε+O(ε²).
  FC(1+δ) = 1−μδ+O(δ²), μ = μ_F − θ the mean age
of FC. 𝔇'(z_*) = 1−ε(μ+τ)+O(ε²); 𝔇(1/z_*) = 2ε+ε²+O(ε³), the (μ+τ) terms cancel; F(z_*)F(1/z_*) = 1+O(ε²); 1/z_* = 1+ε+O(ε²). Slow
residue: (η²σ²/2ε)[1 + ε(μ_F−θ+τ+1/2) + O(ε²)]. All other poles stay inside a circle |z| = r < 1 on which 𝔇 → z−1 uniformly, and give
η²σ²c(F) + O(ε) with c(F) free of τ, θ. Divide by the case τ = θ = 0. ∎ (At x the numerator is FC and c depends on θ: hence the other
slope.)
"""

import numpy as np
import sympy
from scipy.linalg import solve_discrete_lyapunov

from theory.evidence import Identities, Rows, Sharp
from theory.stability import EMA, NESTEROV, limit_corrected, limit_nesterov, limit_plain


def variance(direction: str, beta, h, theta=0, delay: int = 1, at: str = "x"):
    """Var/s² in closed form (EMA with delay 0 or 1 and U(θ); Nesterov with delay 0). Numbers or sympy symbols."""
    if direction == NESTEROV:
        if delay or theta:
            raise ValueError("variance: the closed form of Nesterov momentum is for delay 0; use `lyapunov`")
        return (1 + beta + beta * h + 2 * beta**2 * h) / (h * (1 - beta + beta * h) * (2 * (1 + beta) - (1 + 2 * beta) * h))
    if delay == 0:
        if theta:
            raise ValueError("variance: the closed form with a correction is for delay 1; use `lyapunov`")
        return (1 + beta) / ((1 - beta) * h * (2 * (1 + beta) - h))
    if delay != 1:
        raise ValueError("variance: closed forms are for delay 0 and 1; use `lyapunov`")
    D = h * (2 * (1 + beta) + h * (1 + 2 * theta)) * ((1 - beta) - (1 - beta * theta) * h - theta**2 * h**2)
    at_z = 1 + beta + h - beta * theta * h - theta**2 * h**2
    if at == "z":
        return at_z / D
    return (at_z + 2 * theta * h + 2 * theta**2 * h + 2 * theta**2 * h**2 + 2 * theta**3 * h**2) / D


def slope(beta, theta=0.0, delay: int = 1, at: str = "z"):
    """d(Var/Var_0)/d(ηλ) at 0: the law. `at="x"`: EMA, delay 1."""
    if at == "z":
        return delay - theta
    return ((1 + beta) + theta * (1 - 3 * beta) + 2 * theta**2 * (1 - beta)) / (1 + beta)


def state_space(direction: str, beta: float, h: float, theta: float, delay: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(F, G, z) of s_{t+1} = F s_t + G n_t, λ = σ = 1: s = (x_t, …, x_{t−τ}, m, last direction); z reads the virtual iterate off s."""
    a, size = 1 - beta, delay + 3
    eta, m, last = h / a, delay + 1, delay + 2
    momentum = np.zeros(size)
    momentum[m], momentum[delay] = beta, a
    step, noise = momentum.copy(), a
    if direction == NESTEROV:
        step, noise = beta * momentum, beta * a + a
        step[delay] += a
    F, G = np.zeros((size, size)), np.zeros((size, 1))
    F[0, 0] = 1
    F[0] -= eta * (1 + theta) * step
    F[0, last] += eta * theta
    G[0] = -eta * (1 + theta) * noise
    for i in range(1, delay + 1):
        F[i, i - 1] = 1
    F[m], G[m], F[last], G[last] = momentum, a, step, noise
    z = np.zeros(size)
    z[0], z[last] = 1, theta * eta
    return F, G, z


def lyapunov(direction: str, beta: float, h: float, theta: float = 0.0, delay: int = 1, at: str = "x") -> float:
    """Var/s² by the discrete Lyapunov equation of the recursion itself, for any delay."""
    F, G, z = state_space(direction, beta, h, theta, delay)
    V = solve_discrete_lyapunov(F, G @ G.T)
    return float((z @ V @ z if at == "z" else V[0, 0]) / h**2)


def monte_carlo(direction: str, beta: float, h: float, theta: float, delay: int, steps: int, replicas: int, seed: int) -> float:
    """Var/s² at x from `replicas` runs of the recursion, the first quarter discarded."""
    F, G, _ = state_space(direction, beta, h, theta, delay)
    rng, state, total, kept = np.random.default_rng(seed), np.zeros((F.shape[0], replicas)), 0.0, 0
    for t in range(steps):
        state = F @ state + G * rng.standard_normal(replicas)
        if t >= steps // 4:
            total, kept = total + np.mean(state[0] ** 2), kept + 1
    return float(total / kept / h**2)


def _symbolic_variance(autoregression: list, moving: list):
    """Stationary variance of x_{t+1} = Σ a_i x_{t−i} + Σ c_i e_{t−i}, unit noise, by the Lyapunov equation in sympy."""
    n = max(len(autoregression), len(moving))
    F, G = sympy.zeros(n, n), sympy.zeros(n, 1)
    for i in range(n):
        F[i, 0] = autoregression[i] if i < len(autoregression) else 0
        G[i, 0] = moving[i] if i < len(moving) else 0
        if i + 1 < n:
            F[i, i + 1] = 1
    V = sympy.Matrix(n, n, lambda i, j: sympy.Symbol(f"v{min(i, j)}{max(i, j)}"))
    unknown = sorted(V.free_symbols, key=str)
    equations = F * V * F.T + G * G.T - V
    solution = sympy.solve([equations[i, j] for i in range(n) for j in range(i, n)], unknown, dict=True)[0]
    return solution[V[0, 0]]


def check_symbolic() -> Identities:
    done = Identities()
    b, h, th, e = sympy.symbols("beta h theta epsilon", positive=True)
    cases = (
        ("EMA τ=0", [1 + b - h, -b], [1], variance(EMA, b, h, 0, 0)),
        ("EMA τ=1", [1 + b, -(b + h)], [1], variance(EMA, b, h, 0, 1)),
        ("U(θ) at x", [1 + b, -(b + h * (1 + th)), h * th], [1 + th, -th], variance(EMA, b, h, th, 1, "x")),
        ("U(θ) at z", [1 + b, -(b + h * (1 + th)), h * th], [1], variance(EMA, b, h, th, 1, "z")),
        ("Nesterov τ=0", [1 + b - h * (1 + b), -(b - b * h)], [1 + b, -b], variance(NESTEROV, b, h, 0, 0)),
    )
    for name, autoregression, moving, formula in cases:
        done.equal(f"{name}: Lyapunov", sympy.simplify(_symbolic_variance(autoregression, moving)), formula)
    base = variance(EMA, b, h, 0, 0)
    x = h / (1 + b)
    done.equal("ratio τ=1 : τ=0", variance(EMA, b, h, 0, 1) / base, (1 - x**2 / (2 + x)) / (1 - h / (1 - b)))
    first = lambda v: sympy.limit(sympy.diff(sympy.simplify((v / base).subs(h, (1 - b) * e)), e), e, 0)  # noqa: E731
    done.equal("slope at z is 1 − θ", first(variance(EMA, b, h, th, 1, "z")), slope(b, th, 1, "z"))
    done.equal("slope at x", first(variance(EMA, b, h, th, 1, "x")), slope(b, th, 1, "x"))
    done.equal("slope at x, θ = 1: 4(1−β)/(1+β)", slope(b, 1, 1, "x"), 4 * (1 - b) / (1 + b))
    done.equal("crossing β = 3/5", sympy.solve(4 * (1 - b) / (1 + b) - 1, b)[0], sympy.Rational(3, 5))
    mu, tau = sympy.symbols("mu tau")
    slow = 1 - e
    full = lambda z, k: (z - 1) + e * (1 - k * (z - 1)) * (1 - tau * (z - 1))  # noqa: E731  (FC·z^{−τ} to first order at 1)
    ser = sympy.series(full(1 / slow, mu), e, 0, 3).removeO()
    done.equal("law: 𝔇(1/z_*) = 2ε + ε²(1 − μ − τ) + …, before the pole's own correction", sympy.expand(ser), 2 * e + e**2 * (1 - mu - tau))
    pole = 1 - e - (mu + tau) * e**2  # the slow pole to second order
    done.equal("law: 𝔇 vanishes at 1 − ε − (μ+τ)ε² to second order", sympy.series(full(pole, mu), e, 0, 3).removeO(), 0)
    done.equal("law: 𝔇(1/z_*) = 2ε + ε² there", sympy.series(full(1 / pole, mu), e, 0, 3).removeO(), 2 * e + e**2)
    slow_part = sympy.series((1 + e * (mu + tau)) * (1 + e) / (2 * e + e**2) * 2 * e, e, 0, 2).removeO()
    done.equal("law: slow residue 1 + ε(μ + τ + 1/2)", slow_part, 1 + e * (mu + tau + sympy.Rational(1, 2)))
    done.assume("all other poles stay inside a fixed circle for small ηλ (exponentially decaying filter)")
    return done


def check_numeric(count: int = 1000, seed: int = 13) -> list[Rows]:
    rng = np.random.default_rng(seed)
    closed, law = [], []
    for i in range(count):
        beta, share = rng.uniform(0, 0.98), rng.uniform(0.02, 0.95)
        theta = float(rng.choice([0.25, 0.5, 1.0, 1.5]))
        case = i % 4
        if case == 0:
            direction, theta, delay, h = EMA, 0.0, 0, share * limit_plain(beta, 0)
        elif case == 1:
            direction, theta, delay, h = EMA, 0.0, 1, share * limit_plain(beta, 1)
        elif case == 2:
            direction, delay, h = EMA, 1, share * limit_corrected(beta, theta)
        else:
            direction, theta, delay, h = NESTEROV, 0.0, 0, share * limit_nesterov(beta, 0)
        for at in ("x", "z"):
            formula, solved = variance(direction, beta, h, theta, delay, at), lyapunov(direction, beta, h, theta, delay, at)
            closed.append(abs(formula / solved - 1))
        direction, delay, theta = rng.choice([EMA, NESTEROV]), int(rng.integers(0, 5)), float(rng.choice([0.0, 0.5, 1.0, 2.0]))
        beta, small = rng.uniform(0, 0.9), 1e-5
        ratio = lyapunov(direction, beta, (1 - beta) * small, theta, delay, "z") / lyapunov(
            direction, beta, (1 - beta) * small, 0.0, 0, "x"
        )
        law.append(abs((ratio - 1) / small - slope(beta, theta, delay, "z")))
    spread = []
    for k, (beta, theta, delay) in enumerate(((0.9, 0.0, 1), (0.9, 1.0, 1), (0.5, 0.5, 1), (0.0, 1.0, 1))):
        h = 0.5 * (limit_corrected(beta, theta) if theta else limit_plain(beta, 1))
        spread.append(abs(monte_carlo(EMA, beta, h, theta, delay, 12000, 48, seed + k) / variance(EMA, beta, h, theta, delay) - 1))
    return [
        Rows("Theorem 9: closed form against Lyapunov, relative", np.array(closed), np.full(len(closed), 1e-9)),
        Rows("Theorem 9: slope at z is τ − θ (EMA, Nesterov, τ ≤ 4)", np.array(law), np.full(len(law), 5e-3)),
        Rows("Theorem 9: closed form against Monte Carlo, relative", np.array(spread), np.full(len(spread), 0.05)),
    ]


def check_sharp() -> list[Sharp]:
    """The closed forms are equalities: any constant 20 % off is caught by the Lyapunov solution."""
    found = []
    for beta, theta in ((0.9, 0.0), (0.9, 1.0), (0.5, 0.5)):
        h = 0.5 * (limit_corrected(beta, theta) if theta else limit_plain(beta, 1))
        value, solved = variance(EMA, beta, h, theta, 1), lyapunov(EMA, beta, h, theta, 1)
        found.append(Sharp(f"Theorem 9, β = {beta}, θ = {theta}", "whole formula", solved * (1 - 1e-10), value, 0.8 * value))
    return found
