"""The recursions themselves, in the x-form in which they are run, for a batch of instances.

Algorithm D(τ), corrected: for t = 0, 1, …  (x_s := x₀ for s < 0)
    g_t = ∇f(x_{t−τ}) + n_t,   M_t = momentum of g_0 … g_t (theory/kernels.py),   u_t = lmo(M_t),
    x_{t+1} = (1 − ηλ) x_t − η[u_t + θ(u_t − u_{t−k})]
θ: update-level correction U(θ) with lag k (the paper's error feedback is θ = 1, k = 1). The first k steps come in two conventions:
    start="zero":   u_s := 0 for s < 0    (the formula read literally; the first step is (1+θ)ηu₀)
    start="first":  u_s := u_0 for s < 0  (the first step is uncorrected, what onelag.delay and the paper's description do) Virtual
    iterate: z_t = x_t + θη Σ_{i=1}^k u_{t−i}, which obeys z_{t+1} = z_t − ηu_t exactly when λ = 0 (Proposition E2).
"""

from dataclasses import dataclass

import numpy as np
from numpy import ndarray


@dataclass(frozen=True)
class Rule:
    """One rule of the family. Arrays are per instance, shape (B,); scalars are broadcast.

    eta, alpha: step and EMA weight (β = 1 − α). delay: τ. theta, lag: update-level correction. inner: gradient-level correction, M +
    inner·(M − M₋) (Nesterov is inner = 1 − α). momentum: "first-gradient" or "zero" start. start: see above. decay: λ of decoupled weight
    decay.
    """

    eta: ndarray | float
    alpha: ndarray | float
    delay: int = 1
    theta: ndarray | float = 0.0
    lag: int = 1
    inner: ndarray | float = 0.0
    momentum: str = "first-gradient"
    start: str = "zero"
    decay: ndarray | float = 0.0


@dataclass(frozen=True)
class Path:
    """A run of T steps. Iterates (T+1 or T, B, m, n); norms (T, B).

    x, u: iterates and directions; z: virtual iterates (T+1); noise: M's noise part; M: what the lmo saw.
    """

    x: ndarray
    z: ndarray
    u: ndarray
    M: ndarray
    noise: ndarray
    rule: Rule

    @property
    def steps(self) -> int:
        return len(self.u)

    def stale(self) -> ndarray:
        """x_{t−τ}, the points where gradients were taken, (T, B, m, n)."""
        T = self.steps
        return self.x[np.maximum(np.arange(T) - self.rule.delay, 0)]

    def staleness(self, geometry) -> ndarray:
        """‖S_t‖ with z_t − x_{t−τ} = −ηS_t, shape (T, B)."""
        eta = np.broadcast_to(np.asarray(self.rule.eta, float), self.x.shape[1:2])
        return geometry.norm(self.z[:-1] - self.stale()) / eta


def run(problem, geometry, rule: Rule, steps: int, sigma=0.0, rng: np.random.Generator | None = None, lmo=None) -> Path:
    """`steps` steps of the rule from problem.x0 (B, m, n); n_t is Gaussian with E‖n_t‖₂² = σ². `lmo` replaces the geometry's exact one."""
    if rule.momentum not in ("first-gradient", "zero") or rule.start not in ("first", "zero"):
        raise ValueError(f"Rule: unknown momentum={rule.momentum!r} or start={rule.start!r}")
    x0 = problem.x0
    column = lambda value: np.broadcast_to(np.asarray(value, float), x0.shape[:1])[:, None, None]  # noqa: E731
    eta, alpha, theta, inner, decay = map(column, (rule.eta, rule.alpha, rule.theta, rule.inner, rule.decay))
    spread = column(sigma) / np.sqrt(x0[0].size)
    lmo = lmo or geometry.lmo
    x, u, seen, noises = [x0], [], [], []
    m = m_noise = None
    for t in range(steps):
        n = spread * rng.standard_normal(x0.shape) if rng is not None else np.zeros_like(x0)
        g = problem.grad(x[max(t - rule.delay, 0)]) + n
        if m is None:
            m, m_noise = (g, n) if rule.momentum == "first-gradient" else (np.zeros_like(g), np.zeros_like(n))
        before, before_noise = m, m_noise
        m, m_noise = (1 - alpha) * m + alpha * g, (1 - alpha) * m_noise + alpha * n
        mass = 1 - (1 - alpha) ** (t + 1) if rule.momentum == "zero" else 1.0  # the lmo does not see it, the noise norm must
        seen.append((m + inner * (m - before)) / mass)
        noises.append((m_noise + inner * (m_noise - before_noise)) / mass)
        u.append(lmo(seen[-1]))
        x.append((1 - eta * decay) * x[-1] - eta * (u[t] + theta * (u[t] - _earlier(u, t - rule.lag, rule.start))))
    z = [x[t] + theta * eta * sum(_earlier(u, t - i, rule.start) for i in range(1, rule.lag + 1)) for t in range(steps + 1)]
    return Path(np.stack(x), np.stack(z), np.stack(u), np.stack(seen), np.stack(noises), rule)


def _earlier(u: list[ndarray], index: int, start: str) -> ndarray:
    if index >= 0:
        return u[index]
    return u[0] if start == "first" else np.zeros_like(u[0])


def weighted_staleness(path: Path, geometry) -> ndarray:
    """δ̄ of Theorem 3, (B,): the mean over t of Σ_j w_{t,j}‖S_{t−j}‖, with the exact treatment of the first step.

    The kernel's age-t part (the gradients at x₀) is bounded directly: ‖z_t − x₀‖ ≤ η(t + excess_t), with excess 0 for start="zero", and
    for start="first" excess_0 = kθ, excess_t = max(0, |1 − kθ| − 1) later (the path from x₀ to z_t passes u_0 with weight 1 − kθ).
    """
    rule, S = path.rule, path.staleness(geometry)
    alpha, inner, theta = (np.broadcast_to(np.asarray(v, float), S.shape[1:]) for v in (rule.alpha, rule.inner, rule.theta))
    first = rule.lag * theta if rule.start == "first" else np.zeros_like(theta)
    later = np.maximum(0.0, np.abs(1 - first) - 1) if rule.start == "first" else np.zeros_like(theta)
    total, D = first.copy(), later
    for t in range(1, path.steps):
        before = D
        D = (1 - alpha) * D + alpha * S[t]
        total += D + inner * (D - before)
    return total / path.steps
