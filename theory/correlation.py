"""Proposition 10. How much consecutive directions agree when momentum is noise: what decides δ̄ of Theorem 3. Ours; proved for ℓ₂ (d → ∞)
and sign, numeric for Muon.

Statement. M_t stationary Gaussian AR(1) with coefficient 1−α (i.i.d. entries), c := E⟨u_t, u_{t−1}⟩/r with r = ‖u‖₂². Then c = 1−α +
O(1/d) for normalised SGD, c = (2/π)arcsin(1−α) for sign (exact), and for Muon m×n with n/m → ∞ c → 1−α; square matrices lie between.
E‖u_t − θu_{t−1}‖₂²/r = 1 + θ² − 2θc, so the best θ is c, leaving √(1−c²); θ = 1 leaves √(2−2c), which is under 1 iff c > 1/2 (ℓ₂: iff α <
1/2).
Proof. ℓ₂: ‖M_t‖²/d → 1 and ⟨M_t, M_{t−1}⟩/d → 1−α. sign: Sheppard, E sign(a)sign(b) = (2/π)arcsin(corr). Muon: MMᵀ ≈ nσ²I, so polar(M) ≈
M/(σ√n). ∎
Consequences. In Muon's own norm δ̄ < 1 holds for wide or tall matrices with α ≤ 0.05 and fails for square ones, whose polar factor is
unstable in its smallest singular directions (there use
(a_N): √(2−2c)). In ℓ_∞ a single flipped coordinate makes ‖u_t − u_{t−1}‖_∞ = 2: Theorem 3(a) never certifies the correction for sign-like
methods; that is the formal content of "coordinate-wise normalisation suffers". Adam with slow v is m/√v with v nearly constant: c =
1−β₁-like, as ℓ₂.
"""

import numpy as np
import sympy

from theory.evidence import Identities, Rows, Sharp
from theory.geometry import polar

SHAPES = ((16, 16), (16, 32), (16, 64))


def cosine(alpha, geometry: str):
    """c in closed form: "euclidean" (large d) or "sign"."""
    if geometry == "euclidean":
        return 1 - np.asarray(alpha)
    if geometry == "sign":
        return 2 / np.pi * np.arcsin(1 - np.asarray(alpha))
    raise ValueError(f"geometry must be 'euclidean' or 'sign', but got {geometry!r}; for Muon use `muon`")


def pair(shape: tuple, alpha: float, rng) -> tuple[np.ndarray, np.ndarray]:
    """Two consecutive momenta (…, m, n) of the stationary process, unit variance."""
    first = rng.standard_normal(shape)
    return first, (1 - alpha) * first + np.sqrt(1 - (1 - alpha) ** 2) * rng.standard_normal(shape)


def muon(alpha: float, m: int, n: int, samples: int = 60, seed: int = 0) -> dict[str, float]:
    """Mean cosine, mean ‖u_t − u_{t−1}‖_op and RMS staleness √(2−2c) of polar factors, by simulation."""
    A, B = pair((samples, m, n), alpha, np.random.default_rng(seed))
    P, Q = polar(A), polar(B)
    c = float((P * Q).sum((-2, -1)).mean() / min(m, n))
    return {"cosine": c, "operator": float(np.linalg.norm(P - Q, 2, (-2, -1)).mean()), "rms": float(np.sqrt(2 - 2 * c))}


def check_symbolic() -> Identities:
    done = Identities()
    th, c, a = sympy.symbols("theta c alpha", positive=True)
    loss = 1 + th**2 - 2 * th * c
    done.equal("best θ = c", sympy.solve(sympy.diff(loss, th), th)[0], c)
    done.equal("what it leaves", loss.subs(th, c), 1 - c**2)
    done.equal("ℓ₂: 1 − c² = α(2−α)", 1 - (1 - a) ** 2, a * (2 - a))
    done.equal("θ = 1 leaves 2 − 2c = 2α", loss.subs({th: 1, c: 1 - a}), 2 * a)
    r = sympy.symbols("r", real=True)
    done.equal(
        "Sheppard: d/dr of the orthant formula is the density's",
        sympy.diff(2 / sympy.pi * sympy.asin(r), r),
        2 / (sympy.pi * sympy.sqrt(1 - r**2)),
    )
    done.assume("Sheppard's formula; law of large numbers for ‖M‖²/d; MMᵀ/n → σ²I as n/m → ∞")
    return done


def check_numeric(count: int = 1000, seed: int = 14) -> list[Rows]:
    """Simulated cosines against the closed forms within five standard errors, and Li's bound for square polar factors."""
    rng = np.random.default_rng(seed)
    alphas = rng.uniform(0.01, 0.9, count)
    off, allowed = {"euclidean": [], "sign": []}, {"euclidean": [], "sign": []}
    for alpha in alphas:
        A, B = pair((20, 400), alpha, rng)
        cosines = (A * B).sum(1) / np.linalg.norm(A, axis=1) / np.linalg.norm(B, axis=1)
        signs = (np.sign(A) * np.sign(B)).mean(1)
        for name, values in (("euclidean", cosines), ("sign", signs)):
            off[name].append(abs(values.mean() - cosine(alpha, name)))
            allowed[name].append(5 * values.std(ddof=1) / np.sqrt(20) * 1.4 + (2 / 400 if name == "euclidean" else 0))
    rows = [Rows(f"Proposition 10: cosine, {name}", np.array(off[name]), np.array(allowed[name])) for name in off]
    between, lowest = [], []
    for alpha in (0.5, 0.2, 0.1, 0.05, 0.02):
        for m, n in SHAPES:
            c = muon(alpha, m, n)["cosine"]
            between.append(c - cosine(alpha, "euclidean"))
            lowest.append(cosine(alpha, "sign") - c)
    rows.append(Rows("Proposition 10: Muon's cosine ≤ 1 − α", np.array(between), np.full(len(between), 5e-3)))
    rows.append(Rows("Proposition 10: Muon's cosine ≥ sign's", np.array(lowest), np.full(len(lowest), 5e-3)))
    left, right = [], []
    for _ in range(count):
        n = int(rng.integers(2, 8))
        A = rng.standard_normal((n, n))
        B = A + rng.standard_normal((n, n)) * 10.0 ** rng.uniform(-3, 0)
        small = np.linalg.svd(A, compute_uv=False)[-1] + np.linalg.svd(B, compute_uv=False)[-1]
        left.append(np.linalg.norm(polar(A) - polar(B)))
        right.append(2 * np.linalg.norm(A - B) / small)
    return [*rows, Rows("Li: ‖polar A − polar B‖_F ≤ 2‖A−B‖_F/(σ_min A + σ_min B)", np.array(left), np.array(right))]


def check_sharp() -> list[Sharp]:
    """Li's constant 2 is met by rotations, B = RA with A orthogonal."""
    angle = 0.2
    R = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    left = float(np.linalg.norm(R - np.eye(2)))
    return [Sharp("Li's bound on a rotation", "constant 2", left, 2 * left / 2, 1.6 * left / 2)]
