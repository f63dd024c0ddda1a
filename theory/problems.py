"""Random test functions with exactly known or proved constants, in batches: f (B, m, n) → (B,), grad (B, m, n) → (B, m, n), float64.

f(X) = scale · Σ_ij φ((S(X − C))_ij) with S symmetric, P = S², |φ''| ≤ 1, φ ≥ φ(0) = 0, so f_* = 0 at X = C. Kinds φ: QUADRATIC u²/2
(convex), LOGARITHM ½ log(1 + u²) (non-convex), STAR 0.2u² + 0.6(1 − cos u) (non-convex, but star-convex around 0: uφ' − φ = ∫₀^u sφ''(s)
ds > 0, checked in tests). For all, ⟨Z, ∇f(X) − ∇f(Y)⟩ = scale ⟨SZ, W∘S(X−Y)⟩ with |W| ≤ 1, hence |…| ≤ scale ‖SZ‖_F ‖S(X−Y)‖_F ≤ scale
(max_{‖D‖≤1} ‖SD‖_F²) ‖X − Y‖ for ‖Z‖ ≤ 1: A2 holds with L = scale max_{‖D‖≤1} ⟨D, P D⟩.
"""

from dataclasses import dataclass

import numpy as np
from numpy import ndarray

from theory.geometry import Layers, Spectral

QUADRATIC, LOGARITHM, STAR = 0, 1, 2


def phi(kind: ndarray, u: ndarray) -> ndarray:
    return np.choose(kind, [0.5 * u * u, 0.5 * np.log1p(u * u), 0.2 * u * u + 0.6 * (1 - np.cos(u))])


def phi_slope(kind: ndarray, u: ndarray) -> ndarray:
    return np.choose(kind, [u, u / (1 + u * u), 0.4 * u + 0.6 * np.sin(u)])


@dataclass(frozen=True)
class Problems:
    """A batch of B functions: S (B, m, m), kind (B,) int, x0 and centre C (B, m, n), L (B,), scale (B,) > 0."""

    S: ndarray
    kind: ndarray
    x0: ndarray
    centre: ndarray
    L: ndarray
    scale: ndarray

    def f(self, X: ndarray) -> ndarray:
        return self.scale * phi(self.kind[:, None, None], self.S @ (X - self.centre)).sum((-2, -1))

    def grad(self, X: ndarray) -> ndarray:
        slope = phi_slope(self.kind[:, None, None], self.S @ (X - self.centre))
        return self.scale[:, None, None] * (self.S @ slope)

    @property
    def delta0(self) -> ndarray:
        """Δ₀ = f(x₀) − f_*, with f_* = 0 (B,)."""
        return self.f(self.x0)

    def repeated(self, times: int) -> "Problems":
        """Every function `times` times in a row: one for each noise seed."""
        return Problems(*(np.repeat(getattr(self, name), times, axis=0) for name in ("S", "kind", "x0", "centre", "L", "scale")))


def random_problems(geometry, count: int, rng: np.random.Generator, kinds=(QUADRATIC, LOGARITHM)) -> Problems:
    """`count` functions with condition numbers 10^U(0,3), scales 10^U(−2,2), minimiser 0 and starts at distance 10^U(−1,1)."""
    m, n = geometry.shape
    P = _positive_definite(geometry, count, rng)
    scale = 10.0 ** rng.uniform(-2, 2, count)
    x0 = rng.standard_normal((count, m, n)) * (10.0 ** rng.uniform(-1, 1, count))[:, None, None]
    kind = rng.choice(kinds, count)
    return Problems(_root(P), kind, x0, np.zeros_like(x0), scale * smoothness(geometry, P), scale)


def smoothness(geometry, P: ndarray) -> ndarray:
    """L of ½‖SX‖² with P = S² (B, m, m). Layers: P is block diagonal, and the layers' constants add with the squares of the radii."""
    if isinstance(geometry, Layers):
        m = geometry.matrix.m
        matrix = geometry.radius_matrix**2 * geometry.matrix.quadratic_constant(P[:, :m, :m])
        # the vector layer is one row x of n entries with f = P_mm‖x‖²/2: max over |x_i| ≤ r is P_mm · n · r²
        return matrix + geometry.radius_vector**2 * geometry.matrix.n * P[:, m, m]
    return geometry.quadratic_constant(P)


def _positive_definite(geometry, count: int, rng: np.random.Generator) -> ndarray:
    m = geometry.shape[0]
    Q, _ = np.linalg.qr(rng.standard_normal((count, m, m)))
    spectrum = 10.0 ** (-rng.uniform(0, 3, count)[:, None] * np.linspace(0, 1, m))
    P = (Q * spectrum[:, None, :]) @ np.swapaxes(Q, -1, -2)
    if isinstance(geometry, Layers):
        P[:, -1, :-1] = 0.0
        P[:, :-1, -1] = 0.0
    return P


def _root(P: ndarray) -> ndarray:
    values, vectors = np.linalg.eigh(P)
    return (vectors * np.sqrt(np.maximum(values, 0))[:, None, :]) @ np.swapaxes(vectors, -1, -2)


@dataclass(frozen=True)
class Line:
    """f(x) = φ(⟨A, x⟩) for one instance (B = 1): the one-dimensional function φ laid into any geometry, with ‖A‖_* = 1, so L_f = L_φ.

    With x₀ = s·lmo(A) the recursion stays on that line and is one-dimensional: what is exact in one dimension is exact in every geometry.
    """

    A: ndarray
    value: object
    slope: object
    x0: ndarray

    def f(self, X: ndarray) -> ndarray:
        return self.value(np.sum(self.A * X, axis=(-2, -1)))

    def grad(self, X: ndarray) -> ndarray:
        return self.slope(np.sum(self.A * X, axis=(-2, -1)))[:, None, None] * self.A


def line_quadratic(geometry, start: float, curvature: float = 1.0) -> Line:
    """φ(s) = curvature · s²/2 from s = start; f_* = 0."""
    m, n = geometry.shape
    A = np.zeros((1, m, n))
    A[0, 0, 0] = 1.0
    if isinstance(geometry, Spectral):
        A[0] = np.eye(m, n)  # full rank: the polar factor has no arbitrary part, and the path is exactly one-dimensional
    A /= geometry.dual(A)[:, None, None]
    x0 = start * geometry.lmo(A)
    return Line(A, lambda s: 0.5 * curvature * s * s, lambda s: curvature * s, x0)
