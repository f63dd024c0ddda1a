"""Norms, their duals and their linear minimization oracles, for batches of points of shape (B, m, n), float64.

A geometry answers `norm`, `dual` (both (B, m, n) → (B,)), `lmo` (the direction u with ‖u‖ ≤ 1 and ⟨M, u⟩ = ‖M‖_*; the step is x − ηu),
and the constants of assumption A4, ‖v‖_* ≤ ρ‖v‖₂. Muon is Spectral, sign descent MaxNorm, normalised SGD Euclidean; Layers is what a run
with Muon on hidden matrices and an Adam-like rule on the rest really uses.
"""

from dataclasses import dataclass

import numpy as np
from numpy import ndarray


def polar(M: ndarray) -> ndarray:
    """Orthogonal polar factor U Vᵀ of M = U S Vᵀ, shape (..., m, n)."""
    U, _, Vt = np.linalg.svd(M, full_matrices=False)
    return U @ Vt


def frobenius(M: ndarray) -> ndarray:
    return np.sqrt(np.sum(M * M, axis=(-2, -1)))


@dataclass(frozen=True)
class Spectral:
    """Spectral norm, dual nuclear norm, lmo = polar factor: Muon without Newton–Schulz error."""

    m: int
    n: int
    name: str = "spectral"

    @property
    def shape(self) -> tuple[int, int]:
        return self.m, self.n

    @property
    def rho(self) -> float:
        return float(np.sqrt(min(self.m, self.n)))

    def norm(self, X: ndarray) -> ndarray:
        return np.linalg.svd(X, compute_uv=False)[..., 0]

    def dual(self, X: ndarray) -> ndarray:
        return np.linalg.svd(X, compute_uv=False).sum(-1)

    def lmo(self, M: ndarray) -> ndarray:
        return polar(M)

    def quadratic_constant(self, P: ndarray) -> ndarray:
        """max over ‖D‖_op ≤ 1 of ⟨D, P D⟩ for P (B, m, m) positive semidefinite: tr P, reached at D = [I 0] (m ≤ n)."""
        if self.m > self.n:
            raise ValueError(f"Spectral: quadratic_constant needs m <= n, got {self.shape}")
        return np.trace(P, axis1=-2, axis2=-1)


@dataclass(frozen=True)
class MaxNorm:
    """ℓ_∞, dual ℓ₁, lmo = sign (sign(0) := +1): sign descent, the geometry of coordinate-wise normalisation. Points are (B, d, 1)."""

    d: int
    name: str = "max"

    @property
    def shape(self) -> tuple[int, int]:
        return self.d, 1

    @property
    def rho(self) -> float:
        return float(np.sqrt(self.d))

    def norm(self, X: ndarray) -> ndarray:
        return np.abs(X).max((-2, -1))

    def dual(self, X: ndarray) -> ndarray:
        return np.abs(X).sum((-2, -1))

    def lmo(self, M: ndarray) -> ndarray:
        return np.where(M >= 0, 1.0, -1.0)

    def quadratic_constant(self, P: ndarray) -> ndarray:
        """max over ‖v‖_∞ ≤ 1 of vᵀPv, exactly: a convex function is largest at a corner, and there are 2^(d−1) of them up to sign."""
        corners = 1.0 - 2.0 * ((np.arange(2 ** (self.d - 1))[:, None] >> np.arange(self.d)) & 1)
        return np.einsum("ki,bij,kj->bk", corners, P, corners, optimize=True).max(-1)


@dataclass(frozen=True)
class Euclidean:
    """ℓ₂ with itself: normalised SGD. Points are (B, d, 1)."""

    d: int
    name: str = "euclidean"
    rho: float = 1.0

    @property
    def shape(self) -> tuple[int, int]:
        return self.d, 1

    def norm(self, X: ndarray) -> ndarray:
        return frobenius(X)

    def dual(self, X: ndarray) -> ndarray:
        return frobenius(X)

    def lmo(self, M: ndarray) -> ndarray:
        return M / np.maximum(frobenius(M), 1e-300)[..., None, None]

    def quadratic_constant(self, P: ndarray) -> ndarray:
        return np.linalg.eigvalsh(P)[..., -1]


@dataclass(frozen=True)
class Layers:
    """Product of layers, one norm each: ‖x‖ = max_l ‖x_l‖_(l) / r_l, dual Σ_l r_l ‖g_l‖_(l)*, lmo_l = r_l · lmo of the layer.

    The radius r_l is the layer's multiplier of the learning rate. A4 holds with ρ² = Σ_l r_l² ρ_l². Layers are stacked as rows of one
    array of n columns: a matrix layer (m_l, n) takes m_l rows, a vector layer of n entries takes one row (handled as its transpose).
    """

    matrix: Spectral
    radius_matrix: float
    radius_vector: float
    name: str = "layers"

    @property
    def shape(self) -> tuple[int, int]:
        return self.matrix.m + 1, self.matrix.n

    @property
    def rho(self) -> float:
        return float(np.hypot(self.radius_matrix * self.matrix.rho, self.radius_vector * np.sqrt(self.matrix.n)))

    def split(self, X: ndarray) -> tuple[ndarray, ndarray]:
        return X[..., : self.matrix.m, :], X[..., self.matrix.m :, :]

    def norm(self, X: ndarray) -> ndarray:
        matrix, vector = self.split(X)
        return np.maximum(self.matrix.norm(matrix) / self.radius_matrix, np.abs(vector).max((-2, -1)) / self.radius_vector)

    def dual(self, X: ndarray) -> ndarray:
        matrix, vector = self.split(X)
        return self.radius_matrix * self.matrix.dual(matrix) + self.radius_vector * np.abs(vector).sum((-2, -1))

    def lmo(self, M: ndarray) -> ndarray:
        matrix, vector = self.split(M)
        return np.concatenate(
            [self.radius_matrix * self.matrix.lmo(matrix), self.radius_vector * np.where(vector >= 0, 1.0, -1.0)], axis=-2
        )


GEOMETRIES = (Spectral(3, 4), MaxNorm(6), Euclidean(8))
