"""Why AdamW suffers from the delay: a model of coordinate-wise normalisation. Ours: proved in the limit of a slow second moment, checked
by simulation.

Setting. One coordinate, f = (λ/2)x², gradients λx_{t−τ} + n_t, n_t of variance σ²; Adam without bias correction and ε: m EMA(β₁), v =
EMA(β₂) of g², x_{t+1} = x_t − ηm/√v (or corrected, U(θ)). K* := the stability limit of ηλ for the same momentum, delay and correction
(theory/stability.py, h*/(1−β₁)): sync 2(1+β₁)/(1−β₁) (38 at 0.9), delayed 1 at every β₁, error feedback 2.70 at 0.9.
A1 (no noise, β₂ → 1). √v is a constant gain on the time scale of m, so the loop is theory/stability.py's with ηλ/√v for ηλ. It grows
while ηλ/√v > K* and shrinks while it is smaller, and v follows λ²·mean x²: the only stationary state is ηλ/√v = K*, i.e.
   rms(x) = η/K*.
   Adam without noise never settles at fixed η: it sits at the edge of stability. One step of delay multiplies that floor by
   K*_sync/K*_delay = 2(1+β₁)/(1−β₁): ×2 at β₁ = 0, ×38 at 0.9, ×78 at 0.95 (the loss floor by its square); error feedback leaves ×14 at
   0.9. High β₁ *exposes* Adam.
A2 (noise). v = σ² + λ²V, and V is the stationary variance of Theorem 9 at h = (1−β₁)ηλ/√v, noise (1−β₁)ησ/√v: a scalar fixed point
(`predicted_variance`). Quiet while ηλ/σ < K*, then ηλ/√v sticks to K*. So for ηλ/σ in (1, 38) (β₁ = 0.9) synchronous Adam is quiet in
that direction and delayed Adam oscillates: the band of directions that the delay destroys.
A3 (rotation). d coordinates, a steep eigendirection of curvature λ_s spread evenly over them (e_i² = 1/d). Its oscillation enters every
v_i: v_i = σ² + λ_s²V_s/d, so √v = ηλ_s/K* once it oscillates, and every *flat* direction moves slower by √v_delayed/√v_sync: up to
K*_sync/K*_delay. Aligned with the axes the steep direction spoils its own coordinate only. (This is the basis misalignment of arXiv
2602.03515, from our model.)
A4 (lag of v). v averages 1/(1−β₂) steps: computing it from fresh instead of stale gradients changes nothing to first order in 1−β₂; what
hurts is the delay of m. So the first moment is to blame, as the paper suspects. β₂ is no cure: at β₂ = 0.5 the model's delayed Adam is
still worse than its synchronous one by as much (`ablation`; measured, outside A1–A4).
Caveat. With exactly no noise A1's state can be reached through bursts (x shrinks to nothing while v forgets, then grows back); any small
noise removes them, and the checks carry some. Not covered: weight decay, ε, changing curvature, many coupled steep directions. What Muon
does instead: one bounded direction per matrix, floor ηα^{−1/2} (theory/limit_cycle.py).
"""

from dataclasses import dataclass

import numpy as np
import sympy
from scipy.optimize import brentq

from theory.evidence import Identities, Rows, Sharp
from theory.stability import EMA, limit_corrected, limit_plain
from theory.variance import variance

SCHEMES = {"sync": (0, 0.0), "delayed": (1, 0.0), "error feedback": (1, 1.0)}


def edge(beta1: float, scheme: str) -> float:
    """K*: the largest stable ηλ of the linear loop."""
    delay, theta = SCHEMES[scheme]
    return float((limit_corrected(beta1, theta) if theta else limit_plain(beta1, delay)) / (1 - beta1))


def floor_ratio(beta1: float, scheme: str = "delayed") -> float:
    """A1: by how much the scheme multiplies the rms of a noiseless coordinate, relative to sync."""
    return edge(beta1, "sync") / edge(beta1, scheme)


def predicted_variance(eta_lambda: float, beta1: float, sigma: float, scheme: str, d: int = 1) -> float:
    """Stationary λ²·E x² of the steep direction, spread over d coordinates (A2: d = 1, A3), for λ = 1, η = eta_lambda, in the slow-v limit.

    Solves v = σ² + V(gain)/d for gain = ηλ/√v; σ = 0 gives A1's d·(η/K*)².
    """
    delay, theta = SCHEMES[scheme]
    top = edge(beta1, scheme)
    if sigma == 0:
        return d * (eta_lambda / top) ** 2

    def excess(gain: float) -> float:  # v as the loop makes it, minus v as the gain means it
        h = (1 - beta1) * gain
        driven = (h * sigma) ** 2 * variance(EMA, beta1, h, theta, delay)
        return sigma**2 + driven / d - (eta_lambda / gain) ** 2

    nearest = top * (1 - 1e-11)
    if excess(nearest) <= 0:  # so little noise that the state is within 1e-11 of the edge: A1's limit, to that accuracy
        return d * (eta_lambda / top) ** 2
    gain = brentq(excess, 1e-9 * top, nearest, xtol=1e-14)
    return d * ((eta_lambda / gain) ** 2 - sigma**2)


def flat_slowdown(eta_lambda: float, beta1: float, sigma: float, scheme: str, d: int) -> float:
    """A3: √v_scheme/√v_sync in a rotated basis of d coordinates; steep curvature 1, η = eta_lambda, noise σ per coordinate."""
    root = {name: np.sqrt(sigma**2 + predicted_variance(eta_lambda, beta1, sigma, name, d) / d) for name in (scheme, "sync")}
    return float(root[scheme] / root["sync"])


@dataclass(frozen=True)
class Adam:
    """What to simulate. eta, beta1, sigma: (B,). delay_m and delay_v: how old the gradient in m and in v is; theta: correction."""

    eta: np.ndarray
    beta1: np.ndarray
    sigma: np.ndarray
    beta2: float = 0.999
    delay_m: int = 1
    delay_v: int = 1
    theta: float = 0.0


def simulate(hessian: np.ndarray, rule: Adam, steps: int, seed: int, shared_v: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """(mean of x xᵀ, mean of √v) over the second half, shapes (B, d, d) and (B, d); f = ½xᵀHx. `shared_v`: one v for all coordinates."""
    rng = np.random.default_rng(seed)
    B, d = len(rule.eta), len(hessian)
    column = lambda v: np.broadcast_to(np.asarray(v, float), (B,))[:, None]  # noqa: E731
    eta, beta1, sigma = map(column, (rule.eta, rule.beta1, rule.sigma))
    x = 0.1 * eta * rng.standard_normal((B, d))
    past, m, u_before = [x] * (max(rule.delay_m, rule.delay_v) + 1), np.zeros((B, d)), None
    v = sigma**2 + 0.01 * eta**2 + np.zeros((B, d))
    moments, roots = np.zeros((B, d, d)), np.zeros((B, d))
    for t in range(steps):
        n = sigma * rng.standard_normal((B, d))
        g = past[-1 - rule.delay_m] @ hessian + n
        g_v = g if rule.delay_v == rule.delay_m else past[-1 - rule.delay_v] @ hessian + n
        m = beta1 * m + (1 - beta1) * g
        square = g_v * g_v
        v = rule.beta2 * v + (1 - rule.beta2) * (square.mean(1, keepdims=True) if shared_v else square)
        u = m / np.sqrt(v)
        x = x - eta * (u + rule.theta * (u - (u if u_before is None else u_before)))
        u_before = u
        past = [*past[1:], x]
        if t >= steps // 2:
            moments += x[:, :, None] * x[:, None, :]
            roots += np.sqrt(v)
    kept = steps - steps // 2
    return moments / kept, roots / kept


def rotated(d: int, steep: float, flat: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(H, e): curvature `steep` along e = (±1, …, ±1)/√d and `flat` across it."""
    e = np.where(np.random.default_rng(seed).random(d) < 0.5, -1.0, 1.0) / np.sqrt(d)
    return flat * np.eye(d) + (steep - flat) * np.outer(e, e), e


def ablation(
    beta1: float = 0.9, eta: float = 0.02, sigma: float = 0.005, d: int = 16, beta2: float = 0.999, steps: int = 6000
) -> list[dict]:
    """Steep rms and √v (what divides every flat step), each relative to sync in the same setting, for each possible culprit. Replicas: 8;
    steep curvature 1, flat 1e-3.
    """
    one = np.full(8, eta), np.full(8, beta1), np.full(8, sigma)
    turned, e = rotated(d, 1.0, 1e-3)
    straight, axis = np.diag([1.0] + [1e-3] * (d - 1)), np.eye(d)[0]

    def measure(H, direction, shared=False, **changes):
        rule = {"delay_m": 1, "delay_v": 1, "theta": 0.0, "beta2": beta2} | changes
        moments, roots = simulate(H, Adam(*one, **rule), steps, 1, shared)
        steep = float(np.sqrt(np.mean(direction @ moments @ direction)))
        return steep, float(np.median(roots.mean(0)))

    fresh = {"delay_m": 0, "delay_v": 0}
    settings = (  # name, hessian, steep direction, what changes, and what it is compared with
        ("delayed", turned, e, {}, fresh),
        ("delayed m, fresh v", turned, e, {"delay_v": 0}, fresh),
        ("fresh m, delayed v", turned, e, {"delay_m": 0}, fresh),
        ("delayed + error feedback", turned, e, {"theta": 1.0}, fresh),
        ("delayed, aligned axes", straight, axis, {}, fresh),
        ("delayed, one v for all", turned, e, {"shared": True}, {**fresh, "shared": True}),
        ("delayed, β₂ = 0.5", turned, e, {"beta2": 0.5}, {**fresh, "beta2": 0.5}),
    )
    found = []
    for name, H, direction, changes, base in settings:
        (steep, root), (steep_base, root_base) = measure(H, direction, **changes), measure(H, direction, **base)
        found.append({"case": name, "steep_rms": steep / steep_base, "flat_slowdown": root / root_base})
    return found


def check_symbolic() -> Identities:
    done = Identities()
    b, eta, lam, K, d, sigma, V = sympy.symbols("beta1 eta lambda K d sigma V", positive=True)
    done.equal("A1: ηλ/√(λ²r²) = K at r = η/K", eta * lam / (lam * (eta / K)), K)
    done.equal("A1: ratio of the floors", (2 * (1 + b) / (1 - b)) / 1, 2 * (1 + b) / (1 - b))
    done.equal("A1: 38 at β₁ = 0.9", (2 * (1 + b) / (1 - b)).subs(b, sympy.Rational(9, 10)), 38)
    done.equal(
        "A2 above the edge: λ²V = (ηλ/K)² − σ²",
        (eta * lam / sympy.sqrt(sigma**2 + lam**2 * V)).subs(V, ((eta * lam / K) ** 2 - sigma**2) / lam**2),
        K,
    )
    done.equal(
        "A3: v = σ² + λ²V/d is the one-coordinate v with σ²d, divided by d", (sigma**2 * d + lam**2 * V) / d, sigma**2 + lam**2 * V / d
    )
    done.assume("averaging: v is constant on the time scale of m as β₂ → 1")
    return done


def check_numeric(count: int = 1000, seed: int = 15) -> list[Rows]:
    """Simulated stationary rms against the fixed point: relative difference under 10 % for β₂ = 0.9995, `count` random settings."""
    rng = np.random.default_rng(seed)
    rows, each = [], -(-count // len(SCHEMES))
    for scheme, (delay, theta) in SCHEMES.items():
        beta1 = rng.uniform(0.0, 0.95, each)
        quiet = rng.random(each) < 0.3
        top = np.array([edge(b, scheme) for b in beta1])
        eta = top * 10.0 ** rng.uniform(-1.0, 0.7, each)  # ηλ/σ from a tenth of the edge to five times it
        sigma = np.where(quiet, 0.01 * eta / top, 1.0)  # quiet: noise of 1 % of the floor
        rule = Adam(eta, beta1, sigma, 0.9995, delay, delay, theta)
        moments, _ = simulate(np.ones((1, 1)), rule, 16000, seed)
        predicted = np.array([predicted_variance(*row, scheme) for row in zip(eta, beta1, sigma)])
        rows.append(
            Rows(f"A2, {scheme}: rms against the slow-v prediction", np.abs(np.sqrt(moments[:, 0, 0] / predicted) - 1), np.full(each, 0.1))
        )
    return [*rows, _slowdowns(max(count // 25, 24), seed)]


def _slowdowns(count: int, seed: int) -> Rows:
    """A3: simulated √v (relative to sync) against the prediction, d = 8 rotated coordinates, random β₁, ηλ/σ and scheme."""
    rng = np.random.default_rng(seed)
    H, _ = rotated(8, 1.0, 0.0)
    beta1, sigma = rng.uniform(0, 0.95, count), 10.0 ** rng.uniform(-1.3, 0.3, count)
    eta = np.ones(count)
    roots = {name: simulate(H, Adam(eta, beta1, sigma, 0.9995, d, d, th), 16000, seed)[1].mean(1) for name, (d, th) in SCHEMES.items()}
    off = []
    for name in ("delayed", "error feedback"):
        predicted = np.array([flat_slowdown(1.0, b, s, name, 8) for b, s in zip(beta1, sigma)])
        off.append(np.abs(roots[name] / roots["sync"] / predicted - 1))
    return Rows("A3: slowdown of flat directions against the prediction", np.concatenate(off), np.full(2 * count, 0.1))


def check_sharp() -> list[Sharp]:
    """The prediction of the noiseless floor η/K* with K* 20 % off is refused by the simulation (β₁ = 0.9, delayed)."""
    one = np.ones(4)
    moments, _ = simulate(np.ones((1, 1)), Adam(one, 0.9 * one, 0.01 * one, 0.9995), 24000, 0)
    measured = float(np.sqrt(moments.mean()))
    return [Sharp("Adam's floor under delay", "K* = 1", measured, 1.0 * 1.05, 1.05 * 0.8)]
