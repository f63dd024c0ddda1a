"""Does high momentum protect from the delay, or expose to it? Two predictions with numbers, and where one turns into the other. Ours.

Bounds (Corollary 1.1): the delay adds τLη beside 2(1−α)Lη/α: at fixed α the iterations for an equal guarantee grow by the factor 1 +
2ατ/(4−3α): ×3 at β = 0, ×1.054 at β = 0.9, ×1.026 at 0.95: high momentum *protects* (in relative terms: momentum's own lag has become the
larger cost). Linear model (Theorems 8, 9): the stable range falls from ηλ < 2(1+β)/(1−β) to ηλ < 1 at every β: high momentum *exposes*,
by the ratio 2(1+β)/(1−β) = 2, 38, 78 at β = 0, 0.9, 0.95. Below the edge the delay multiplies the stationary variance by about 1/(1−ηλ),
whatever β is.
Which one holds is decided by one number: ηλ_max of the synchronously tuned run, in the optimizer's own metric (λ of P⁻¹H).
  ηλ_max ≪ 1 (noise-limited: large noise or short runs)   the tuned gap is about first order in ηλ and flat in β;
                                                           the correction removes it at z;
  ηλ_max > 1 (curvature-limited: little noise, long runs)  the delayed optimum must step back to ηλ_max < 1, and the gap grows with β.
`exact_loss` computes E f(x_T) of SGD with momentum on a spectrum exactly (second moments by repeated squaring: no simulation, no sampling
error); `tuned_gaps` minimises over η in each scheme. `lmo_gaps` does the same for a Muon-like method by simulation with a linearly decaying step. Predictions for the `momentum` experiment: `predictions`.
"""

from dataclasses import dataclass

import numpy as np
import sympy

from theory.evidence import Identities, Rows
from theory.geometry import polar
from theory.lmo_delay import penalty
from theory.stability import EMA, limit_corrected, limit_plain
from theory.variance import lyapunov, state_space

BETAS = (0.0, 0.5, 0.8, 0.9, 0.95)
SCHEMES = {"sync": (0, 0.0), "delayed": (1, 0.0), "error feedback": (1, 1.0)}


@dataclass(frozen=True)
class Spectrum:
    """A quadratic with curvatures λ_i log-spaced over [1/condition, 1], x₀_i = 1, gradient noise σ in every direction, T steps."""

    sigma: float
    steps: int = 1024
    condition: float = 1e3
    size: int = 8

    @property
    def curvatures(self) -> np.ndarray:
        return np.geomspace(1 / self.condition, 1, self.size)


def second_moment(beta: float, eta_lambda: float, theta: float, delay: int, steps: int, start: float, noise: float, at: str = "x") -> float:
    """E x_T² (or z_T²) exactly, λ = 1, from x_0 = start with zero momentum, gradient noise of standard deviation `noise`; T a power of two.

    S_{2k} = S_k + A_k S_k A_kᵀ, A_{2k} = A_k² for S_k = Σ_{i<k} F^i GGᵀ F^{iT}, A_k = F^k.
    """
    if steps & (steps - 1):
        raise ValueError(f"second_moment: steps must be a power of two, got {steps}")
    F, G, z = state_space(EMA, beta, (1 - beta) * eta_lambda, theta, delay)
    A, S = F, G @ G.T
    for _ in range(steps.bit_length() - 1):
        S, A = S + A @ S @ A.T, A @ A
        if not np.isfinite(S).all() or np.abs(S).max() > 1e100:
            return np.inf
    s0 = np.zeros(len(F))
    s0[: delay + 1] = start
    mean = A @ s0
    read = z if at == "z" else np.eye(len(F))[0]
    return float((read @ mean) ** 2 + noise**2 * (read @ S @ read))


def exact_loss(problem: Spectrum, beta: float, eta: float, scheme: str, at: str = "x") -> float:
    """E f(x_T) − f_* of SGD with EMA momentum on the spectrum."""
    delay, theta = SCHEMES[scheme]
    total = 0.0
    for curvature in problem.curvatures:
        # in units where λ = 1: x is unchanged, gradients and their noise are divided by λ
        total += 0.5 * curvature * second_moment(beta, eta * curvature, theta, delay, problem.steps, 1.0, problem.sigma / curvature, at)
    return total


def tuned_gaps(problem: Spectrum, beta: float, grid: np.ndarray | None = None) -> dict[str, float]:
    """Best loss of each scheme over η (relative to sync) and sync's best ηλ_max. Error feedback is read at z, where the theory reads it."""
    top = float(limit_plain(beta, 0)) / (1 - beta)
    grid = np.geomspace(1e-3, top, 60) if grid is None else grid
    best, where = {}, {}
    for scheme in SCHEMES:
        losses = [exact_loss(problem, beta, eta, scheme, "z" if scheme == "error feedback" else "x") for eta in grid]
        best[scheme], where[scheme] = min(losses), float(grid[int(np.argmin(losses))])
    return {
        "beta": beta,
        "sigma": problem.sigma,
        "edge": where["sync"],
        **{name: best[name] / best["sync"] for name in ("delayed", "error feedback")},
    }


def lmo_gaps(sigma: float, betas=(0.5, 0.8, 0.9, 0.95), steps: int = 240, seeds: int = 6, seed: int = 0) -> list[dict[str, float]]:
    """A Muon-like method (polar factor, EMA, step decaying linearly to 0) on ½tr(XᵀAX), 4×6, condition 100; each scheme at its own best η
    of a grid of 10.
    """
    rng = np.random.default_rng(seed)
    m, n = 4, 6
    Q, _ = np.linalg.qr(rng.standard_normal((m, m)))
    A = (Q * np.geomspace(1, 1e-2, m)) @ Q.T
    x0 = rng.standard_normal((m, n))
    grid = np.geomspace(3e-3, 0.3, 10)
    names = [(beta, scheme) for beta in betas for scheme in SCHEMES]
    beta = np.array([b for b, _ in names])[:, None, None, None, None]
    delayed = np.array([SCHEMES[s][0] for _, s in names], bool)[:, None, None, None, None]
    theta = np.array([SCHEMES[s][1] for _, s in names])[:, None, None, None, None]
    X = np.broadcast_to(x0, (len(names), len(grid), seeds, m, n)).copy()
    before, M, u_before = X, np.zeros_like(X), None
    for t in range(steps):
        noise = sigma * rng.standard_normal((1, 1, seeds, m, n))  # the same noise for every scheme, β and η: paired
        M = beta * M + (1 - beta) * (A @ np.where(delayed, before, X) + noise)
        u = grid[None, :, None, None, None] * (1 - t / steps) * polar(M)
        before, X = X, X - u - theta * (u - (u if u_before is None else u_before))
        u_before = u
    losses = 0.5 * (X * (A @ X)).sum((-2, -1)).mean(2).min(1)
    table = dict(zip(names, losses))
    return [{"beta": b, "sigma": sigma, **{s: table[b, s] / table[b, "sync"] for s in ("delayed", "error feedback")}} for b in betas]


def predictions(betas=BETAS) -> list[dict[str, float]]:
    """Per β: the bounds' factor of iterations, the linear model's loss of stable range, and what error feedback leaves of that loss."""
    rows = []
    for beta in betas:
        sync = 2 * (1 + beta) / (1 - beta)
        corrected = limit_corrected(beta, 1.0) / (1 - beta)
        rows.append(
            {
                "beta": beta,
                "bound_iterations": float(penalty(1 - beta) ** 2),
                "range_delayed": sync,
                "range_error_feedback": float(sync / corrected),
            }
        )
    return rows


def check_symbolic() -> Identities:
    done = Identities()
    b, a = sympy.symbols("beta alpha", positive=True)
    done.equal("bounds: 1 + 2α/(4−3α) in β", (1 + 2 * a / (4 - 3 * a)).subs(a, 1 - b), (3 + b) / (1 + 3 * b))
    done.true("bounds: the penalty falls with β", sympy.simplify(sympy.diff((3 + b) / (1 + 3 * b), b) * (1 + 3 * b) ** 2) == -8)
    done.equal("linear: 2(1+β)/(1−β) rises with β", sympy.diff(2 * (1 + b) / (1 - b), b), 4 / (1 - b) ** 2)
    return done


def check_numeric(count: int = 1000, seed: int = 16) -> list[Rows]:
    """The exact second moments against the recursion run with its mean and covariance step by step, and against the stationary variance."""
    rng = np.random.default_rng(seed)
    by_steps, stationary = [], []
    for i in range(count):
        scheme = list(SCHEMES)[i % 3]
        delay, theta = SCHEMES[scheme]
        beta = rng.uniform(0, 0.9)
        top = float(limit_corrected(beta, theta) if theta else limit_plain(beta, delay)) / (1 - beta)
        gain = top * rng.uniform(0.05, 0.9)
        found = second_moment(beta, gain, theta, delay, 16, 0.7, 0.3)
        F, G, _ = state_space(EMA, beta, (1 - beta) * gain, theta, delay)
        mean, cov = np.zeros(len(F)), np.zeros((len(F), len(F)))
        mean[: delay + 1] = 0.7
        for _ in range(16):
            mean, cov = F @ mean, F @ cov @ F.T + 0.09 * G @ G.T
        by_steps.append(abs(found / (mean[0] ** 2 + cov[0, 0]) - 1))
        long = second_moment(beta, gain, theta, delay, 2**14, 0.0, 1.0)
        stationary.append(abs(long / (lyapunov(EMA, beta, (1 - beta) * gain, theta, delay) * ((1 - beta) * gain) ** 2) - 1))
    return [
        Rows("Momentum model: doubling against stepping, relative", np.array(by_steps), np.full(count, 1e-9)),
        Rows("Momentum model: long run against the stationary variance, relative", np.array(stationary), np.full(count, 1e-6)),
    ]
