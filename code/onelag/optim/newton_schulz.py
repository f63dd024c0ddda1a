"""Orthogonalization: the polar factor U Vᵀ of a matrix M = U S Vᵀ, approximated by matrix products or exact by SVD."""

import torch
from torch import Tensor

# Keller Jordan's quintic (Muon, 2024): slope 3.4445 at zero, singular values end between about 0.68 and 1.20 after five steps.
QUINTIC = (3.4445, -4.7750, 2.0315)
# The classical cubic X ← 1.5 X − 0.5 X Xᵀ X: slower, but it converges to the polar factor.
CUBIC = (1.5, -0.5, 0.0)

_CACHED_ELEMENTS = 2**16

_TINY = 1e-30  # keeps a zero matrix finite; far below any gradient, so the update does not depend on the gradient's scale


def newton_schulz(
    matrices: Tensor, steps: int = 5, coefficients: tuple[float, float, float] = QUINTIC, dtype: torch.dtype | None = None
) -> Tensor:
    """Newton–Schulz iteration X ← a X + b (X Xᵀ) X + c (X Xᵀ)² X from X = M / ‖M‖_F, on the shorter side.

    Args:
        matrices: (..., rows, columns), any number of leading dimensions; every matrix is treated by itself. Not modified.
        steps: number of iterations.
        coefficients: (a, b, c).
        dtype: of the products; None is float32 on CPU (float64 stays float64) and bfloat16 on CUDA.

    Returns:
        A new tensor of the input's shape and dtype with singular values near 1 (exactly 1 in the limit of CUBIC). A zero matrix gives zero.
    """
    if dtype is None:
        dtype = torch.bfloat16 if matrices.is_cuda else torch.promote_types(matrices.dtype, torch.float32)
    scale = torch.linalg.matrix_norm(matrices.to(torch.promote_types(matrices.dtype, torch.float32)), keepdim=True).clamp_(min=_TINY)
    x = (matrices / scale).to(dtype)
    tall = x.size(-2) > x.size(-1)
    if tall:
        x = x.mT.contiguous()
    shape = x.shape
    x = x.reshape(-1, *shape[-2:])
    # On a CPU a chunk's iterates should stay in the cache; a GPU wants all matrices in one launch.
    chunk = x.size(0) if x.is_cuda else max(1, _CACHED_ELEMENTS // (shape[-2] * shape[-1]))
    for part in x.split(chunk):
        part.copy_(_iterate(part, steps, coefficients))
    x = x.reshape(shape)
    return (x.mT if tall else x).to(matrices.dtype)


def _iterate(x: Tensor, steps: int, coefficients: tuple[float, float, float]) -> Tensor:
    a, b, c = coefficients
    gram, polynomial, other = (
        x.new_empty(x.size(0), x.size(1), x.size(1)),
        x.new_empty(x.size(0), x.size(1), x.size(1)),
        torch.empty_like(x),
    )
    for _ in range(steps):
        torch.bmm(x, x.mT, out=gram)
        # b G + c G² and a X + (…) X: the additions ride on the products
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=polynomial) if c else torch.mul(gram, b, out=polynomial)
        torch.baddbmm(x, polynomial, x, beta=a, alpha=1.0, out=other)
        x, other = other, x
    return x


def svd_orthogonalize(matrices: Tensor) -> Tensor:
    """The exact polar factor U Vᵀ by singular value decomposition, in float32 or better; singular directions of value zero are left out.

    Args:
        matrices: (..., rows, columns). Not modified.
    """
    work = matrices.to(torch.promote_types(matrices.dtype, torch.float32))
    u, s, vh = torch.linalg.svd(work, full_matrices=False)
    cutoff = s.amax(-1, keepdim=True) * max(work.shape[-2:]) * torch.finfo(work.dtype).eps
    return ((u * (s > cutoff).unsqueeze(-2)) @ vh).to(matrices.dtype)
