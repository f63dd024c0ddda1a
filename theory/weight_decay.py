"""Theorem 2. Decoupled weight decay = a constrained problem; delay, with and without the correction. Ours (proved here); base: Kovalev's
ε⁻³.

Setting. Assumptions of theory/lmo_delay.py; y_{t+1} = (1−ηλ)y_t − ηu_t, ηλ ≤ 1, D := 1/λ, ‖y_0‖ ≤ D, first-gradient start. Gradients at
x_{t−τ}, where x_s = y_s − θ(y_{s−1} − y_s): θ = 0 is the plain method (x = y), θ > 0 the correction in its lookahead form
(theory/equivalence.py, E5), x_0 = y_0. G(y) := max_{‖v‖≤D}⟨∇f(y), y − v⟩ = ⟨∇f(y), y⟩ + D‖∇f(y)‖_* (Frank–Wolfe gap). δ̄ := (1/T)Σ_t Σ_j
w_{t,j} E‖y_{t−j} − x_{t−j−τ}‖/η: always ≤ 2(τ + θ), and ≤ 2τ without correction. Then ‖y_t‖ ≤ D for all t, and
 (a) (1/T)Σ E[λG(y_t)] ≤ Δ₀/(ηT) + 2ρσ√(α/(2−α)) + 2ρσ/(αT) + 2Lη + 2Lη[2(1−α)/α + δ̄]                                        metric "gap"
 (b) if f is star-convex around a minimiser y_*, ‖y_*‖ ≤ D (f(y_*) ≥ f(y) + ⟨∇f(y), y_* − y⟩), with δ_max ≥ every
     Σ_j w_{t,j}E‖y_{t−j} − x_{t−j−τ}‖/η:                                                                                  metric "last"
     E f(y_T) − f_* ≤ (1−ηλ)^TΔ₀ + D{2ρσ√(α/(2−α)) + 2Lη + 2Lη[2(1−α)/α + δ_max]} + 2ηρσΣ_{t<T}(1−ηλ)^{T−1−t}(1−α)^t
     and the last sum is ≤ (1−ηλ)^T/(α−ηλ) for ηλ < α.
Proof. y_{t+1} = y_t + ηλ(v_t − y_t) with v_t = −Du_t, ‖v_t‖ ≤ D: convexity gives ‖y_{t+1}‖ ≤ D, and ‖y_{t+1} − y_t‖ ≤ 2η. The drift of
the gradient of age j against ∇f(y_t) is ≤ L(‖y_t − y_{t−j}‖ + ‖y_{t−j} − x_{t−j−τ}‖) ≤ Lη(2j + ‖y_{t−j} − x_{t−j−τ}‖/η). A2: f(y_{t+1}) ≤
f(y_t) + ηλ⟨∇f(y_t), v_t − y_t⟩ + L(2η)²/2. For v* = argmin_{‖v‖≤D}⟨∇f(y_t), v⟩ in (a), v* = y_* in (b): ⟨∇f(y_t), v_t − v*⟩ = ⟨M_t, v_t −
v*⟩ + ⟨∇f(y_t) − M_t, v_t − v*⟩ ≤ 0 + 2D‖M_t − ∇f(y_t)‖_*, because v_t minimises ⟨M_t, ·⟩ over the ball. So f(y_{t+1}) ≤ f(y_t) +
ηλ⟨∇f(y_t), v* − y_t⟩ + 2η‖M_t − ∇f(y_t)‖_* + 2Lη². (a): the middle term is −ηλG(y_t); telescope. (b): it is ≤ −ηλ(f(y_t) − f_*); unroll
with Σ_s(1−ηλ)^s ≤ D/η. ∎ (Muon's decay 0.1 makes D = 10 in units of the layer's step: the ball that training is really confined to.)
"""

import numpy as np
import sympy

from theory.evidence import Bound, Identities, Rows, Sharp
from theory.geometry import GEOMETRIES, Euclidean, MaxNorm, Spectral
from theory.kernels import mean_age
from theory.problems import LOGARITHM, QUADRATIC, STAR, Problems, random_problems

SEEDS = 4


def bound(Delta, L, eta, alpha, sigma, rho, T, delay=1, *, decay, theta=0.0, staleness=None, metric="gap") -> Bound:
    """Theorem 2, term by term. decay: λ. staleness: δ̄ (metric "gap") or δ_max ("last"); None: the worst case 2τ or 2(τ + θ)."""
    staleness = 2 * (delay + theta) if staleness is None else staleness
    parts = {
        "noise": 2 * rho * sigma * np.sqrt(alpha / (2 - alpha)),
        "curvature": 2 * L * eta,
        "momentum": 4 * L * eta * mean_age(alpha),
        "delay": 2 * L * eta * staleness,
    }
    if metric == "gap":
        return Bound({"start": Delta / (eta * T), "start noise": 2 * rho * sigma / (alpha * T), **parts})
    if metric != "last":
        raise ValueError(f"metric must be 'gap' or 'last', but got {metric!r}")
    shrink, forget = 1 - eta * decay, 1 - np.asarray(alpha, float)
    start_noise = 2 * eta * rho * sigma * sum(shrink ** (T - 1 - t) * forget**t for t in range(T))
    return Bound({"start": shrink**T * Delta, "start noise": start_noise, **{name: part / decay for name, part in parts.items()}})


def recommended(epsilon, Delta, L, sigma, rho, radius, delay=1) -> dict:
    """Corollary 2.1 (ε ≤ 8LD²): parameters with E f(y_T) − f_* ≤ ε, no correction; T = Õ(1024 D⁴Lρ²σ²/ε³ + 16D²L(1+τ)/ε).

    α = min{1, ε²/(64D²ρ²σ²)}, η = ε/(16DL(1/α+τ)), T = ⌈(D/η) ln max{4Δ₀/ε, ρσ/(DL), 1}⌉.
    Proof. 2Dρσ√(α/(2−α)) ≤ ε/4; DLη(2 + 4(1−α)/α + 4τ) ≤ 4DLη(1/α+τ) = ε/4; (1−ηλ)^TΔ₀ ≤ ε/4; ηλ ≤ εα/(16D²L) ≤ α/2, so the last term is
       at most 4ηρσ(1−ηλ)^T/α ≤ ρσε(1−ηλ)^T/(4DL) ≤ ε/4. ∎
    """
    if np.any(epsilon > 8 * L * radius**2):
        raise ValueError("Corollary 2.1 needs epsilon <= 8 L D^2")
    noise = 64 * (radius * rho * sigma) ** 2
    alpha = np.where(noise > epsilon**2, epsilon**2 / np.maximum(noise, 1e-300), 1.0)
    eta = epsilon / (16 * radius * L * (1 / alpha + delay))
    steps = np.ceil(radius / eta * np.log(np.maximum(np.maximum(4 * Delta / epsilon, rho * sigma / (radius * L)), 1.0)))
    return {"alpha": alpha, "eta": eta, "steps": steps}


def run_decayed(problem: Problems, geometry, eta, alpha, decay, delay: int, theta, sigma, steps: int, seed: int) -> dict:
    """The recursion of the theorem for a batch; y (T+1, B, m, n), noise norms (T, B), weighted staleness per step (T, B)."""
    column = lambda v: np.broadcast_to(np.asarray(v, float), problem.x0.shape[:1])[:, None, None]  # noqa: E731
    rng, step, a = np.random.default_rng(seed), column(eta), column(alpha)
    spread = column(sigma) / np.sqrt(problem.x0[0].size)
    y, x, noise, stale, M, m_noise, D = [problem.x0], [problem.x0], [], [], None, None, np.zeros(len(problem.x0))
    for t in range(steps):
        seen = x[max(t - delay, 0)]
        if t:  # the gradients at x_0 are at distance ≤ 2ηt of y_t by themselves
            D = (1 - a[:, 0, 0]) * D + a[:, 0, 0] * geometry.norm(y[t] - seen) / step[:, 0, 0]
        stale.append(D)
        n = spread * rng.standard_normal(problem.x0.shape)
        g = problem.grad(seen) + n
        M, m_noise = (g, n) if M is None else ((1 - a) * M + a * g, (1 - a) * m_noise + a * n)
        noise.append(geometry.dual(m_noise))
        y.append((1 - step * column(decay)) * y[-1] - step * geometry.lmo(M))
        x.append(y[-1] - column(theta) * (y[-2] - y[-1]))
    return {"y": np.stack(y), "noise": np.stack(noise), "staleness": np.stack(stale)}


def gap(problem, geometry, Y, decay) -> np.ndarray:
    """λG(y) = λ⟨∇f(y), y⟩ + ‖∇f(y)‖_*, (B,)."""
    g = problem.grad(Y)
    return decay * (g * Y).sum((-2, -1)) + geometry.dual(g)


def check_symbolic() -> Identities:
    done = Identities()
    eta, lam, y, u, a, p, q = sympy.symbols("eta lambda y u alpha p q", positive=True)
    D = 1 / lam
    done.equal("y_{t+1} = y_t + ηλ(v − y_t), v = −Du", (1 - eta * lam) * y - eta * u, y + eta * lam * (-D * u - y))
    done.equal("ηλ · 2D = 2η", eta * lam * 2 * D, 2 * eta)
    done.equal("Σ_t q^{T−1−t}p^t, T = 6", sum(q ** (5 - t) * p**t for t in range(6)) * (q - p), q**6 - p**6)
    done.equal("q − p = α − ηλ", (1 - eta * lam) - (1 - a), a - eta * lam)
    eps, L, tau, r, K = sympy.symbols("epsilon L tau r D", positive=True)
    step = eps / (16 * K * L * (1 / a + tau))
    done.equal("Cor 2.1: 4DLη(1/α+τ) = ε/4", 4 * K * L * step * (1 / a + tau), eps / 4)
    done.equal("Cor 2.1: 2 + 4(1−α)/α + 4τ = 4(1/α+τ) − 2", 2 + 4 * (1 - a) / a + 4 * tau, 4 * (1 / a + tau) - 2)
    done.equal("Cor 2.1: 2Dr√α = ε/4", 2 * K * r * sympy.sqrt(eps**2 / (64 * K**2 * r**2)), eps / 4)
    done.equal(
        "Cor 2.1: 4ηr/α ≤ rε/(4DL): difference", r * eps / (4 * K * L) - 4 * step * r / a, r * eps * a * tau / (4 * K * L * (1 + a * tau))
    )
    done.assume("v_t minimises ⟨M_t, ·⟩ over the ball of radius D; star-convexity in (b)")
    return done


def check_numeric(count: int = 1000, seed: int = 7) -> list[Rows]:
    rows: dict[str, list] = {}
    each = -(-count // (3 * len(GEOMETRIES)))
    for i, geometry in enumerate(GEOMETRIES):
        for delay in (0, 1, 3):
            for metric, kinds in (("gap", (QUADRATIC, LOGARITHM, STAR)), ("last", (QUADRATIC, STAR))):
                key = seed + 1000 * i + 10 * delay
                for label, measured, value in _batch(geometry, delay, metric, kinds, each, key):
                    rows.setdefault(label, []).append((measured, value))
    found = [Rows(label, np.concatenate([m for m, _ in pairs]), np.concatenate([b for _, b in pairs])) for label, pairs in rows.items()]
    return [*found, _corollary(20 * count, seed)]


def _batch(geometry, delay: int, metric: str, kinds, count: int, seed: int):
    rng = np.random.default_rng(seed)
    steps = 40
    problem = random_problems(geometry, count, rng, kinds)
    radius = 10.0 ** rng.uniform(-0.5, 1, count)
    inside = lambda share: share[:, None, None] * radius[:, None, None]  # noqa: E731
    direction = rng.standard_normal(problem.x0.shape)
    centre = inside(rng.uniform(0, 1, count)) * direction / geometry.norm(direction)[:, None, None]
    start = inside(rng.uniform(0, 1, count)) * problem.x0 / geometry.norm(problem.x0)[:, None, None]
    problem = Problems(problem.S, problem.kind, start, centre, problem.L, problem.scale).repeated(SEEDS)
    repeat = lambda v: np.repeat(v, SEEDS)  # noqa: E731
    decay = repeat(1 / radius)
    alpha = repeat(np.where(rng.random(count) < 0.2, 1.0, rng.uniform(0.05, 1.0, count)))
    eta = repeat(radius * 10.0 ** rng.uniform(-3, -0.3, count))
    theta = repeat(np.where(rng.random(count) < 0.5, 0.0, rng.uniform(0, 1.5, count)))
    gradient = geometry.dual(problem.grad(problem.x0))
    sigma = gradient / geometry.rho * repeat(np.where(rng.random(count) < 0.3, 0.0, 10.0 ** rng.uniform(-1, 1, count)))
    out = run_decayed(problem, geometry, eta, alpha, decay, delay, theta, sigma, steps, seed)
    y, options = out["y"], {"decay": decay, "theta": theta, "metric": metric}
    yield "Theorem 2: ‖y_t‖ ≤ D", np.max([geometry.norm(v) for v in y], axis=0), 1 / decay * (1 + 1e-12)
    inputs = (problem.delta0, problem.L, eta, alpha)
    mean = lambda v: np.asarray(v).reshape(-1, SEEDS).mean(axis=1)  # noqa: E731
    if metric == "gap":
        measured = np.mean([gap(problem, geometry, v, decay) for v in y[:-1]], axis=0)
        path = bound(*inputs, 0.0, geometry.rho, steps, delay, staleness=out["staleness"].mean(0), **options).total + 2 * out["noise"].mean(
            0
        )
        name = "Theorem 2(a) Frank–Wolfe gap"
    else:
        measured = problem.f(y[-1])
        shrink = (1 - eta * decay)[None, :] ** np.arange(steps - 1, -1, -1)[:, None]
        own = 2 * eta * (shrink * out["noise"]).sum(0)
        path = bound(*inputs, 0.0, geometry.rho, steps, delay, staleness=out["staleness"].max(0), **options).total + own
        name = "Theorem 2(b) star-convex, last iterate"
    yield f"{name} (path)", measured, path
    yield f"{name} (mean)", mean(measured), mean(bound(*inputs, sigma, geometry.rho, steps, delay, **options).total)


def _corollary(count: int, seed: int) -> Rows:
    rng = np.random.default_rng(seed)
    L, D, r, eps = 10.0 ** rng.uniform(-1, 1, (4, count))
    keep = eps <= 8 * L * D * D
    L, D, r, eps = L[keep], D[keep], r[keep], eps[keep]
    Delta, delay = rng.uniform(0.01, 1, len(L)) * 2 * L * D * D, rng.integers(0, 6, len(L))
    chosen = recommended(eps, Delta, L, r, 1.0, D, delay)
    eta, alpha, q = chosen["eta"], chosen["alpha"], 1 - chosen["eta"] / D
    drift = 2 * r * np.sqrt(alpha / (2 - alpha)) + 2 * L * eta + 4 * L * eta * (mean_age(alpha) + delay)
    value = q ** chosen["steps"] * Delta + D * drift + 2 * eta * r * q ** chosen["steps"] / (alpha - eta / D)
    return Rows("Corollary 2.1: bound at the recommended parameters ≤ ε", value, eps)


def check_sharp() -> list[Sharp]:
    """A linear f on the ball: (b) is an equality, f(y_T) − f_* = (1−ηλ)^TΔ₀; and λ → 0 with a far minimiser makes (a)'s start term exact."""
    found = []
    for geometry in (Spectral(3, 4), MaxNorm(4), Euclidean(4)):
        rng = np.random.default_rng(1)
        C = rng.standard_normal((1, *geometry.shape))
        plane = _Linear(C, 0.5 * geometry.lmo(C))
        T, eta, decay = 10, 0.05, 1.0
        y = run_decayed(plane, geometry, eta, 1.0, decay, 1, 0.0, 0.0, T, 0)["y"]
        least = -geometry.dual(C)[0] / decay
        Delta = plane.f(y[0])[0] - least
        value = bound(Delta, 0.0, eta, 1.0, 0.0, geometry.rho, T, 1, decay=decay, metric="last")
        found.append(Sharp.of(f"Theorem 2(b), {geometry.name}", "start", plane.f(y[-1])[0] - least, value))
        decay = 1e-6
        far = _Linear(C, 0 * C)
        y = run_decayed(far, geometry, eta, 1.0, decay, 1, 0.0, 0.0, T, 0)["y"]
        measured = np.mean([gap(far, geometry, v, decay)[0] for v in y[:-1]])
        value = bound(far.f(y[0])[0] - far.f(y[-1])[0], 0.0, eta, 1.0, 0.0, geometry.rho, T, 1, decay=decay)
        found.append(Sharp.of(f"Theorem 2(a), {geometry.name}", "start", measured * (1 - 1e-12), value))
    return found


class _Linear:
    """f(Y) = ⟨C, Y⟩: L = 0."""

    def __init__(self, C, x0):
        self.C, self.x0 = C, x0

    def f(self, Y):
        return (self.C * Y).sum((-2, -1))

    def grad(self, Y):
        return np.broadcast_to(self.C, Y.shape)
