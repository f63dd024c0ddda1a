"""Theorem L. Layers with their own norms, step sizes and delays: Muon as it is really used, and PipeDream's stages. Ours (proved here).

Setting. x = (x^1, …, x^m), layer l with norm ‖·‖_(l) (spectral for hidden matrices, ℓ_∞ for the rest) and step multiplier r_l. Put ‖x‖ =
max_l ‖x^l‖_(l)/r_l, ‖g‖_* = Σ_l r_l‖g^l‖_(l)*; its lmo is the layers' own, times r_l: one LMO method, so Theorems 1–5 hold as printed,
with ρ² = Σ_l r_l²ρ_l² and L ≤ Σ_{l,k} r_l L_lk r_k whenever ‖∇_l f(x) − ∇_l f(y)‖_(l)* ≤ Σ_k L_lk‖x^k − y^k‖_(k).
If layer k's weights are τ_k steps old when gradients are taken (PipeDream: stage s of p is p−1−s late; 2BW: all 1), then
  (1/T)Σ E‖∇f(x_t)‖_* ≤ Δ₀/(ηT) + 2ρσ√(α/(2−α)) + 2ρσ/(αT) + Lη[1/2 + 2(1−α)/α] + 2ηΣ_{l,k} r_l L_lk r_k τ_k
 with L = Σ r_l L_lk r_k (metric "average"), so the delay that counts is the curvature-weighted mean τ̄ = Σ_k (Σ_l r_l L_lk r_k)τ_k / L. With all τ_k = τ it is Theorem 1(a).
Proof. ‖Σ_j w_{t,j}(∇f(x-stale_{t−j}) − ∇f(x_t))‖_* ≤ Σ_l r_l Σ_k L_lk Σ_j w_{t,j}‖x^k_{t−j−τ_k} − x^k_t‖_(k) ≤ ηΣ_{l,k}
r_lL_lkr_k[(1−α)/α + τ_k], since ‖x^k_t − x^k_s‖_(k) ≤ ηr_k(t−s). Then the proof of Theorem 1(a). ∎
"""

from dataclasses import dataclass

import numpy as np
import sympy

from theory.evidence import Bound, Identities, Rows, Sharp
from theory.geometry import polar
from theory.kernels import mean_age


def bound(Delta, coupling, eta, alpha, sigma, rho, T, delays) -> Bound:
    """Theorem L. coupling: r_l L_lk r_k, shape (B, layers, layers); delays: τ_k, shape (layers,) or (B, layers)."""
    L = np.sum(coupling, axis=(-2, -1))
    return Bound(
        {
            "start": Delta / (eta * T),
            "noise": 2 * rho * sigma * np.sqrt(alpha / (2 - alpha)),
            "start noise": 2 * rho * sigma / (alpha * T),
            "curvature": L * eta / 2,
            "momentum": L * eta * 2 * mean_age(alpha),
            "delay": 2 * eta * np.sum(coupling * np.asarray(delays)[..., None, :], axis=(-2, -1)),
        }
    )


def effective_delay(coupling, delays):
    """τ̄: the one delay with the same bound."""
    return np.sum(coupling * np.asarray(delays)[..., None, :], axis=(-2, -1)) / np.sum(coupling, axis=(-2, -1))


@dataclass(frozen=True)
class Blocks:
    """f(X) = ½ tr(XᵀPX) on stacked matrix layers X (B, layers·m, n), n ≥ m: ‖P_lk D‖_nuc ≤ ‖P_lk‖_nuc ‖D‖_op, so L_lk = ‖P_lk‖_nuc."""

    P: np.ndarray
    layers: int
    radii: np.ndarray

    def cut(self, X):
        return np.split(X, self.layers, axis=-2)

    def f(self, X):
        return 0.5 * (X * (self.P @ X)).sum((-2, -1))

    def grad(self, X):
        return self.P @ X

    def dual(self, G):
        return sum(r * np.linalg.svd(g, compute_uv=False).sum(-1) for r, g in zip(self.radii, self.cut(G)))

    def lmo(self, M):
        return np.concatenate([r * polar(g) for r, g in zip(self.radii, self.cut(M))], axis=-2)

    def coupling(self):
        rows = [[self.radii[i] * self.radii[j] * np.linalg.svd(block, compute_uv=False).sum(-1) for j, block in enumerate(np.split(row, self.layers, axis=-1))] for i, row in enumerate(self.cut(self.P))]  # fmt: skip
        return np.moveaxis(np.array(rows), -1, 0)


def run_stages(problem: Blocks, x0, eta, alpha, delays, sigma, steps: int, seed: int) -> dict:
    """Each layer k is τ_k versions old when the gradient is taken. x (T+1, B, …), noise norms (T, B)."""
    rng = np.random.default_rng(seed)
    column = lambda v: np.broadcast_to(np.asarray(v, float), x0.shape[:1])[:, None, None]  # noqa: E731
    x, noise, M, m_noise, a = [x0], [], None, None, column(alpha)
    for t in range(steps):
        stale = np.concatenate([problem.cut(x[max(t - delay, 0)])[k] for k, delay in enumerate(delays)], axis=-2)
        n = column(sigma) / np.sqrt(x0[0].size) * rng.standard_normal(x0.shape)
        g = problem.grad(stale) + n
        M, m_noise = (g, n) if M is None else ((1 - a) * M + a * g, (1 - a) * m_noise + a * n)
        noise.append(problem.dual(m_noise))
        x.append(x[-1] - column(eta) * problem.lmo(M))
    return {"x": np.stack(x), "noise": np.stack(noise)}


def check_symbolic() -> Identities:
    done = Identities()
    tau, eta = sympy.symbols("tau eta")
    c = sympy.symbols("c0:9")
    done.equal("equal delays give Theorem 1(a)", 2 * eta * sum(v * tau for v in c), 2 * eta * tau * sum(c))
    r = sympy.symbols("r0:2", positive=True)
    v = sympy.symbols("v0:2", nonnegative=True)
    done.equal(
        "ρ² = Σ r²ρ²: Cauchy–Schwarz defect is a square",
        (r[0] ** 2 + r[1] ** 2) * (v[0] ** 2 + v[1] ** 2) - (r[0] * v[0] + r[1] * v[1]) ** 2,
        (r[0] * v[1] - r[1] * v[0]) ** 2,
    )
    done.assume("dual of a maximum of norms is the sum of the duals; Theorem 1's proof")
    return done


def check_numeric(count: int = 1000, seed: int = 9) -> list[Rows]:
    rows = []
    rng = np.random.default_rng(seed)
    layers, m, n, T, repeats = 3, 2, 3, 30, 4
    rho = lambda radii: np.sqrt(np.sum(radii**2) * m)  # noqa: E731
    plans = ((2, 1, 0), (1, 1, 1), (0, 0, 4), (3, 0, 1))
    for k, delays in enumerate(plans):
        size = -(-count // len(plans))
        root = rng.standard_normal((size, layers * m, layers * m)) * (10.0 ** rng.uniform(-1, 0, (size, 1, layers * m)))
        problem = Blocks(np.repeat(root @ np.swapaxes(root, -1, -2), repeats, axis=0), layers, np.array([1.0, 0.5, 2.0]))
        x0 = np.repeat(rng.standard_normal((size, layers * m, n)), repeats, axis=0)
        coupling, Delta = problem.coupling(), problem.f(x0)
        L = coupling.sum((-2, -1))
        alpha = np.repeat(np.where(rng.random(size) < 0.2, 1.0, rng.uniform(0.05, 1, size)), repeats)
        eta = np.sqrt(Delta / (L * T * (2 / alpha + 1))) * np.repeat(10.0 ** rng.uniform(-1, 1, size), repeats)
        sigma = np.repeat(10.0 ** rng.uniform(-2, 1, size), repeats)
        out = run_stages(problem, x0, eta, alpha, delays, sigma, T, seed + k)
        measured = np.mean([problem.dual(problem.grad(x)) for x in out["x"][:-1]], axis=0)
        silent = bound(Delta, coupling, eta, alpha, 0.0, rho(problem.radii), T, delays).total + 2 * out["noise"].mean(0)
        printed = bound(Delta, coupling, eta, alpha, sigma, rho(problem.radii), T, delays).total
        mean = lambda v: v.reshape(-1, repeats).mean(1)  # noqa: E731
        rows += [
            Rows("Theorem L, delays per layer (path)", measured, silent),
            Rows("Theorem L, delays per layer (mean)", mean(measured), mean(printed)),
        ]
    return [Rows(label, np.concatenate([r.measured for r in rows if r.label == label]), np.concatenate([r.bound for r in rows if r.label == label])) for label in dict.fromkeys(r.label for r in rows)]  # fmt: skip


def check_sharp() -> list[Sharp]:
    """Two uncoupled layers that descend one quadratic each, undelayed: start and curvature are met."""
    P = np.diag([1.0, 1.0, 4.0, 4.0])[None] / 2
    problem = Blocks(P, 2, np.array([1.0, 1.0]))
    T = 50
    x0 = T * np.concatenate([np.eye(2, 3), np.eye(2, 3)])[None]
    out = run_stages(problem, x0, 1.0, 1.0, (0, 0), 0.0, T, 0)
    measured = np.mean([problem.dual(problem.grad(x))[0] for x in out["x"][:-1]])
    value = bound(problem.f(x0), problem.coupling(), 1.0, 1.0, 0.0, 2.0, T, (0, 0))
    return [
        Sharp.of("Theorem L, two layers", term, measured, Bound({k: np.squeeze(v) for k, v in value.terms.items()}))
        for term in ("start", "curvature")
    ]
