"""Theorem P. Weight prediction with any predictor: only the prediction error enters. Ours (proved here; it contains Theorems 1 and 3).

Setting. Assumptions of theory/lmo_delay.py. z_{t+1} = z_t − ηu_t; the gradient that arrives at step t was taken τ steps earlier, at the
predicted point x_{t−τ} = z_{t−τ} − ηp_{t−τ}, where p_s is *any* vector made from what is known at step s. Prediction error e_s :=
Σ_{i=1}^τ u_{s−i} − p_{s−τ} (x_s = z_0 − ηp_0 and u_s = 0 for s < 0), δ̄ := (1/T)Σ_t Σ_j w_{t,j} E‖e_{t−j}‖.
Guarantee.  (1/T)Σ E‖∇f(z_t)‖_* ≤ Δ₀/(ηT) + 2ρσ√(α/(2−α)) + 2ρσ/(αT) + Lη[1/2 + 2(1−α)/α + 2δ̄]      (metric: average at z).
Predictors. none p = 0: δ̄ ≤ τ, Theorem 1(a). last p = τu_{s−1} (SpecTrain, XPipe and onelag.delay.WeightPrediction; at τ = 1 the paper's
error feedback). window p = Σ_{i=1}^τ u_{s−i} (error feedback with lag τ). average p = τ·EMA(u) (PipeMare's discrepancy correction is of
this kind).
Proof. z_t − x_{t−j−τ} = −η[Σ_{i=1}^j u_{t−i} + e_{t−j}], then as Theorem 3(a). ∎
Two directions: a predictor helps the bound iff its δ̄ is under that of p = 0, which is at most τ (and equals it only while directions
repeat). The bound with p = 0 as printed in Theorem 1 uses the worst case τ; `none` here uses the measured ‖Σu‖, which is smaller when
directions turn.
"""

import numpy as np
import sympy

from theory.evidence import Bound, Identities, Rows, Sharp
from theory.geometry import Euclidean, MaxNorm, Spectral
from theory.problems import line_quadratic
from theory.recursion import Rule
from theory.sampling import Sample, instances
from theory.update_correction import bound as corrected_bound

PREDICTORS = ("none", "last", "window", "average", "random")


def bound(Delta, L, eta, alpha, sigma, rho, T, delay=1, *, staleness) -> Bound:
    """Theorem P term by term; `staleness` is δ̄, the weighted mean prediction error."""
    return corrected_bound(Delta, L, eta, alpha, sigma, rho, T, delay, theta=0.0, staleness=staleness)


class PredictedPath:
    """A run in the z-form: z (T+1), points x where gradients are taken (T+1), noise norms' source, and the weighted prediction error."""

    def __init__(self, problem, geometry, rule: Rule, steps: int, predictor: str, sigma=0.0, seed: int = 0):
        if predictor not in PREDICTORS:
            raise ValueError(f"predictor must be one of {PREDICTORS}, but got {predictor!r}")
        column = lambda v: np.broadcast_to(np.asarray(v, float), problem.x0.shape[:1])[:, None, None]  # noqa: E731
        eta, alpha = column(rule.eta), column(rule.alpha)
        spread = column(sigma) / np.sqrt(problem.x0[0].size)
        rng, wild = np.random.default_rng(seed), np.random.default_rng(seed + 1)
        z, u, noises, M, m_noise = [problem.x0], [], [], None, None
        x, average = [problem.x0], np.zeros_like(problem.x0)
        total, weighted = np.zeros(len(problem.x0)), np.zeros(len(problem.x0))
        for t in range(steps):
            stale = x[max(t - rule.delay, 0)]
            error = geometry.norm(z[t] - stale) / eta[:, 0, 0]
            weighted = (1 - alpha[:, 0, 0]) * weighted + alpha[:, 0, 0] * error if t else 0 * error
            total += weighted
            n = spread * rng.standard_normal(problem.x0.shape)
            g = problem.grad(stale) + n
            M, m_noise = (g, n) if M is None else ((1 - alpha) * M + alpha * g, (1 - alpha) * m_noise + alpha * n)
            noises.append(m_noise)
            u.append(geometry.lmo(M))
            average = 0.8 * average + 0.2 * u[-1]
            z.append(z[-1] - eta * u[-1])
            x.append(z[-1] - eta * self._predict(predictor, u, rule.delay, average, wild))
        self.z, self.x, self.noise, self.rule, self.steps = np.stack(z), np.stack(x), np.stack(noises), rule, steps
        self.staleness = total / steps

    @staticmethod
    def _predict(predictor: str, u: list, delay: int, average, rng) -> np.ndarray:
        if predictor == "last":
            return delay * u[-1]
        if predictor == "window":
            return sum(u[-i] for i in range(1, min(delay, len(u)) + 1)) if delay else 0 * u[-1]
        if predictor == "average":
            return delay * average
        if predictor == "random":
            return delay * rng.standard_normal(u[-1].shape)
        return np.zeros_like(u[-1])


def check_symbolic() -> Identities:
    done = Identities()
    eta, p, z = sympy.symbols("eta p z")
    u = sympy.symbols("u0:9")
    t, j, tau = 7, 2, 3
    z_t = z - eta * sum(u[t - j - tau + i] for i in range(j + tau))  # z is z_{t−j−τ}
    error = sum(u[t - j - i] for i in range(1, tau + 1)) - p
    done.equal("z_t − x_{t−j−τ} = −η[Σu + e]", z_t - (z - eta * p), -eta * (sum(u[t - i] for i in range(1, j + 1)) + error))
    done.assume("as Theorem 3(a)")
    return done


def check_numeric(count: int = 1000, seed: int = 6) -> list[Rows]:
    rows = []
    for sample in instances(count, seed):
        for predictor in PREDICTORS:
            path = PredictedPath(sample.problem, sample.geometry, sample.rule, sample.steps, predictor, sample.sigma, sample.seed)
            rows += sample.compare(f"Theorem P, {predictor}", path, path.z[:-1], bound, staleness=path.staleness)
    return Sample.merge(rows)


def check_sharp() -> list[Sharp]:
    """A perfect prediction on a monotone path leaves the undelayed bound, which a quadratic meets: terms start and curvature."""
    found = []
    for geometry in (Spectral(3, 4), MaxNorm(4), Euclidean(4)):
        for term in ("start", "curvature"):
            T = 60
            problem = line_quadratic(geometry, start=float(T))
            path = PredictedPath(problem, geometry, Rule(eta=np.ones(1), alpha=np.ones(1), delay=2), T, "window")
            measured = np.mean([geometry.dual(problem.grad(z))[0] for z in path.z[:-1]])
            value = bound(problem.f(problem.x0)[0], 1.0, 1.0, 1.0, 0.0, geometry.rho, T, 2, staleness=0.0)
            exact = bound(problem.f(problem.x0)[0], 1.0, 1.0, 1.0, 0.0, geometry.rho, T, 2, staleness=path.staleness[0])
            found.append(Sharp(f"Theorem P, {geometry.name}", term, measured, exact.total, value.weakened(term).total))
    return found
