"""Theorem 5. Everything together: inexact LMO (Newton–Schulz), any nonnegative kernel inside (Nesterov), U(θ) outside, delay. Ours
(proved here).

Setting. As theory/update_correction.py, with directions that satisfy ‖u_t‖ ≤ κ and ⟨M_t, u_t⟩ ≥ q‖M_t‖_* (exact LMO: κ = q = 1), and the
kernel of Lemma 4 with 0 ≤ φ ≤ (1−α)/α inside (Nesterov φ = 1−α): mean age ā = (1−α)/α − φ, Σw² ≤ s² + (1−α)^{2t}. δ̄ is measured with the
actual directions. Then
  q (1/T)Σ E‖∇f(z_t)‖_* ≤ Δ_z/(ηT) + (q + κ)[ρσ(s + 1/(αT)) + Lη(κā + δ̄)] + Lκ²η/2           metric "average" (at z)
 Muon as shipped (Nesterov, exact LMO) with error feedback, τ = 1: ā = (1−α)²/α.
 start="first" as in Theorem 3, with Δ_z = (√Δ₀ + κkθη√(L/2))².
Proof. Lemma 1 (theory/lmo_delay.py) on the chain z with these q, κ and y = z_t; drift as in Theorem 3 with ‖u‖ ≤ κ. ∎

Constants of Muon's quintic p(x) = ax + bx³ + cx⁵, (a, b, c) = (3.4445, −4.7750, 2.0315), five steps on M/‖M‖_F (singular values in [0,
1]): κ = max_{[0,1]} p = p(x₁) = 1.2024…, x₁² = (−3b − √(9b² − 20ac))/(10c): after one step all values are in [0, κ], p(κ) < κ, and p > 0
there (its other factor a + bx² + cx⁴ has no real root), so κ bounds every further step: an exact algebraic number, `kappa()`.
q: singular values σ_i = s_i‖M‖_F give q = Σ s_i p⁵(s_i)/Σ s_i. With m = min_{[s₀,1]} p⁵ and r values, the small ones hold at most (r−1)s₀ of Σ s_i ≥ 1: q ≥ m(1 −
 (r−1)s₀) (`quality_floor`). Measured q is better: 0.8 on Gaussian matrices, 0.7 along optimisation runs. An Adam-like rule on the other
 parameters is an inexact LMO of ℓ_∞: |m|/√v ≤ κ_A = (1−β₁)/√((1−β₂)(1−β₁²/β₂)) by Cauchy–Schwarz (1.165 at (0.9, 0.95)); its q is
 measured.
"""

from dataclasses import replace

import numpy as np
import sympy

from theory.evidence import Bound, Identities, Rows, Sharp
from theory.geometry import Euclidean, Layers, MaxNorm, Spectral
from theory.kernels import mean_age, square_sum
from theory.problems import line_quadratic
from theory.recursion import Rule, run, weighted_staleness
from theory.sampling import Sample, instances

QUINTIC = (3.4445, -4.7750, 2.0315)
STEPS = 5


def bound(
    Delta, L, eta, alpha, sigma, rho, T, delay=1, *, quality=1.0, kappa=1.0, inner=0.0, theta=1.0, staleness=None, lag=1, start="zero"
) -> Bound:
    """Right side of Theorem 5 (it bounds q times the average), term by term. staleness: δ̄; None: the worst case κ(τ + kθ)."""
    staleness = kappa * (delay + lag * theta) if staleness is None else staleness
    gap = Delta if start == "zero" else (np.sqrt(Delta) + kappa * lag * theta * eta * np.sqrt(L / 2)) ** 2
    both = quality + kappa
    return Bound(
        {
            "start": gap / (eta * T),
            "noise": both * rho * sigma * np.sqrt(square_sum(alpha, inner)),
            "start noise": both * rho * sigma / (alpha * T),
            "curvature": L * eta * kappa**2 / 2,
            "momentum": both * L * eta * kappa * mean_age(alpha, inner),
            "delay": both * L * eta * staleness,
        }
    )


def newton_schulz(M: np.ndarray, steps: int = STEPS) -> np.ndarray:
    """Muon's iteration in float64: X ← aX + (bA + cA²)X, A = XXᵀ, from M/(‖M‖_F + 1e-7); shape (..., m, n)."""
    a, b, c = QUINTIC
    X = M / (np.sqrt((M * M).sum((-2, -1), keepdims=True)) + 1e-7)
    wide = X if X.shape[-2] <= X.shape[-1] else np.swapaxes(X, -1, -2)
    for _ in range(steps):
        A = wide @ np.swapaxes(wide, -1, -2)
        wide = a * wide + (b * A + c * A @ A) @ wide
    return wide if X.shape[-2] <= X.shape[-1] else np.swapaxes(wide, -1, -2)


def scalar_map(x, steps: int = STEPS):
    """What Newton–Schulz does to one singular value."""
    a, b, c = QUINTIC
    for _ in range(steps):
        x = a * x + b * x**3 + c * x**5
    return x


def kappa() -> sympy.Expr:
    """sup of the scalar map on [0, 1] after one or more steps, exact."""
    a, b, c = (sympy.Rational(str(v)) for v in QUINTIC)
    x = sympy.sqrt((-3 * b - sympy.sqrt(9 * b**2 - 20 * a * c)) / (10 * c))
    return a * x + b * x**3 + c * x**5


def quality_floor(rank: int, split: float = 0.01, points: int = 200001) -> float:
    """Lower bound of q for matrices of at most `rank` singular values: m(1 − (r−1)s₀) with m = min of p⁵ on [s₀, 1] (grid minus its
    Lipschitz gap).
    """
    x = np.linspace(split, 1, points)
    y, slope = x.copy(), np.ones_like(x)
    a, b, c = QUINTIC
    for _ in range(STEPS):
        slope = slope * (a + 3 * b * y**2 + 5 * c * y**4)
        y = scalar_map(y, 1)
    floor = y.min() - np.abs(slope).max() * (x[1] - x[0])
    return float(max(0.0, floor * (1 - (rank - 1) * split)))


def adam_kappa(beta1: float, beta2: float) -> float:
    """sup |m|/√v over all gradient sequences, without bias correction; needs β₁² < β₂."""
    if not beta1**2 < beta2:
        raise ValueError(f"adam_kappa: |m|/sqrt(v) is unbounded unless beta1^2 < beta2, got beta1={beta1}, beta2={beta2}")
    return (1 - beta1) / np.sqrt((1 - beta2) * (1 - beta1**2 / beta2))


class MuonWithAdam:
    """The direction of a real Muon run on theory.geometry.Layers: Newton–Schulz on the matrix, m/√v on the row (stateful: one path only).

    The gradient is recovered from the EMA: g_t = (M_t − (1−α)M_{t−1})/α, M_0 = g_0.
    """

    def __init__(self, geometry: Layers, alpha: np.ndarray, beta2: float = 0.95):
        self.geometry, self.alpha, self.beta2 = geometry, np.asarray(alpha)[:, None, None], beta2
        self.before = self.v = None

    def __call__(self, M: np.ndarray) -> np.ndarray:
        matrix, row = self.geometry.split(M)
        g = row if self.before is None else (row - (1 - self.alpha) * self.before) / self.alpha
        self.v = g * g if self.v is None else self.beta2 * self.v + (1 - self.beta2) * g * g
        self.before = row
        return np.concatenate(
            [self.geometry.radius_matrix * newton_schulz(matrix), self.geometry.radius_vector * row / np.sqrt(self.v + 1e-300)], axis=-2
        )


def check_symbolic() -> Identities:
    done = Identities()
    x = sympy.symbols("x", positive=True)
    a, b, c = (sympy.Rational(str(v)) for v in QUINTIC)
    p = a * x + b * x**3 + c * x**5
    top = kappa()
    done.true("κ = 1.2024 to 1e-4", bool(abs(sympy.N(top, 30) - sympy.Rational("1.2024")) < sympy.Rational(1, 10**4)))
    critical = [root for root in sympy.Poly(sympy.diff(p, x), x).real_roots() if root > 0]
    done.true("two positive critical points", len(critical) == 2)
    done.true("the first one is the maximum κ", bool(abs(sympy.N(p.subs(x, critical[0]) - top, 30)) < sympy.Float("1e-25")))
    done.true("a + bx² + cx⁴ has no real root (discriminant < 0)", bool(b**2 - 4 * a * c < 0))
    done.true("p(κ) < κ: [0, κ] is mapped into itself", bool(sympy.N(p.subs(x, top), 30) < sympy.N(top, 30)))
    done.true("p(1) < κ", bool(p.subs(x, 1) < sympy.N(top, 30)))
    b1, b2 = sympy.symbols("beta1 beta2", positive=True)
    done.equal("Adam: Cauchy–Schwarz sum", (1 - b1) ** 2 * (1 / (1 - b1**2 / b2)) / (1 - b2), (1 - b1) ** 2 / ((1 - b2) * (1 - b1**2 / b2)))
    al = sympy.symbols("alpha", positive=True)
    done.equal("Nesterov: ā = (1−α)²/α", (1 - al) / al - (1 - al), (1 - al) ** 2 / al)
    done.assume("Lemma 1 with q and κ; q and δ̄ are measured on the run")
    return done


def check_numeric(count: int = 1000, seed: int = 8) -> list[Rows]:
    rows = []
    samples = [s for s in instances(2 * count, seed) if s.geometry.name in ("spectral", "layers")]
    for sample in samples:
        for theta, nesterov in ((0.0, False), (1.0, False), (1.0, True)):
            inner = np.minimum(1 - sample.alpha, 1.0) if nesterov else 0.0
            rule = replace(sample.rule, theta=theta, inner=inner, start="first" if theta else "zero")
            if sample.geometry.name == "layers":
                if nesterov:
                    continue  # MuonWithAdam recovers g from the plain EMA
                rows.append(_row("Theorem 5, Muon with Adam rows", sample, rule, MuonWithAdam(sample.geometry, sample.alpha)))
            else:
                label = "Theorem 5, Newton–Schulz" + (" + Nesterov" if nesterov else "") + (" + error feedback" if theta else "")
                rows.append(_row(label, sample, rule, newton_schulz))
    rng = np.random.default_rng(seed)
    g = rng.standard_normal((count, 60)) * 10.0 ** rng.uniform(-2, 2, (count, 60))
    return [*Sample.merge(rows), _adam_rows(g), _kappa_rows(rng, count)]


def _row(label: str, sample: Sample, rule: Rule, lmo) -> Rows:
    """q·average against the right side, path by path, with the path's own q, κ, δ̄ and noise norms."""
    geometry = sample.geometry
    path = sample.run(rule, lmo)
    duals = np.array([geometry.dual(M) for M in path.M])
    quality = ((path.M * path.u).sum((-2, -1)) / np.maximum(duals, 1e-300)).min(axis=0)
    size = np.max([geometry.norm(u) for u in path.u], axis=0)
    silent = bound(
        sample.problem.delta0, sample.problem.L, rule.eta, rule.alpha, 0.0, geometry.rho, path.steps, rule.delay,
        quality=quality, kappa=size, inner=rule.inner, theta=rule.theta, staleness=weighted_staleness(path, geometry), start=rule.start,
    )  # fmt: skip
    return Rows(label, quality * sample.measured(path.z[:-1]), silent.total + (quality + size) * sample.noise(path))


def _adam_rows(g: np.ndarray) -> Rows:
    """|m|/√v of random heavy-tailed sequences against κ_A, and the worst sequence g_{t−i} ∝ (β₁/β₂)^i, which meets it."""
    beta1, beta2 = 0.9, 0.95
    worst = (beta1 / beta2) ** np.arange(399, -1, -1)
    found = []
    for sequence in (*g, worst):
        i = np.arange(len(sequence) - 1, -1, -1)
        found.append(abs((1 - beta1) * (beta1**i @ sequence)) / np.sqrt((1 - beta2) * (beta2**i @ sequence**2)))
    return Rows("Theorem 5: Adam's |m|/√v ≤ κ_A", np.array(found), np.full(len(found), adam_kappa(beta1, beta2)))


def _kappa_rows(rng, count: int) -> Rows:
    """‖NS(M)‖_op ≤ κ on Gaussian, nearly low-rank and graded matrices."""
    M = rng.standard_normal((count, 4, 6))
    M[: count // 3] = rng.standard_normal((count // 3, 4, 1)) @ rng.standard_normal((count // 3, 1, 6)) + 1e-2 * M[: count // 3]
    M[count // 3 : 2 * count // 3] *= (10.0 ** -np.arange(4.0))[:, None]
    norms = np.linalg.svd(newton_schulz(M), compute_uv=False)[:, 0]
    return Rows("Theorem 5: ‖NS(M)‖_op ≤ κ", norms, np.full(count, float(kappa())))


def check_sharp() -> list[Sharp]:
    """Directions of constant size κ = q = 1.2 along a line: curvature and start are met (κ²/2, not κ/2). Adam's κ_A is met by its worst
    sequence.
    """
    found = []
    k, T = 1.2, 50
    for geometry in (Spectral(3, 4), MaxNorm(4), Euclidean(4)):
        problem = line_quadratic(geometry, start=T * k)
        path = run(problem, geometry, Rule(eta=1.0, alpha=1.0, delay=0), T, lmo=lambda M, unit=geometry.lmo: k * unit(M))
        measured = k * np.mean([geometry.dual(problem.grad(x))[0] for x in path.x[:-1]])
        value = bound(problem.f(problem.x0)[0], 1.0, 1.0, 1.0, 0.0, geometry.rho, T, 0, quality=k, kappa=k, theta=0.0)
        found += [Sharp.of(f"Theorem 5, {geometry.name}", term, measured, value) for term in ("curvature", "start")]
    rows = _adam_rows(np.ones((0, 1)))
    found.append(Sharp("Theorem 5, Adam's κ_A", "κ_A", float(rows.measured[0]), float(rows.bound[0]), 0.8 * float(rows.bound[0])))
    return found
