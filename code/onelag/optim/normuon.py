"""NorMuon: Muon with a second moment per neuron, that is per row (Li et al., arXiv 2510.05491)."""

from collections.abc import Iterable

import torch
from torch import Tensor

from onelag.optim.muon import Muon


class NorMuon(Muon):
    """Divides each row of the orthogonalized direction O by the root of a running mean of its squares, and keeps O's Frobenius norm.

        v_t = β₂ v_{t−1} + (1 − β₂) mean_columns(O ⊙ O),   Ô = O / (√v_t + ε),   O′ = Ô ‖O‖_F / ‖Ô‖_F

    The paper rescales to 0.2 √(rows·columns); keeping ‖O‖_F instead leaves the choice of scale to Muon's `scaling`, and the two differ by a
    constant factor in the learning rate when O is orthogonal. Everything else is Muon's.

    Args:
        beta2: β₂ of the row second moment, in [0, 1).
        eps: ε.
        **muon: the settings of `Muon`.
    """

    def __init__(self, params: Iterable, lr: float = 0.02, beta2: float = 0.95, eps: float = 1e-10, **muon):
        if not 0 <= beta2 < 1:
            raise ValueError(f"NorMuon: beta2 must be in [0, 1), but got {beta2}")
        self._own = dict(beta2=beta2, eps=eps)
        super().__init__(params, lr=lr, **muon)

    def add_param_group(self, param_group: dict) -> None:
        super().add_param_group({**self._own, **param_group})

    def _finish(self, orthogonal: Tensor, parameters: list[Tensor], group: dict) -> Tensor:
        stacked = orthogonal.reshape(len(parameters), *parameters[0].shape)
        result = torch.empty_like(stacked)
        for target, matrix, parameter in zip(result, stacked, parameters):
            state = self.state[parameter]
            if "row_mean_square" not in state:
                state["row_mean_square"] = torch.zeros_like(parameter[..., :1])
            mean_square = state["row_mean_square"]
            mean_square.lerp_(matrix.square().mean(-1, keepdim=True), 1 - group["beta2"])
            torch.div(matrix, mean_square.sqrt().add_(group["eps"]), out=target)
            norm, new_norm = (torch.linalg.matrix_norm(m, keepdim=True) for m in (matrix, target))
            target.mul_(norm / new_norm.clamp_(min=torch.finfo(target.dtype).tiny))
        return result.reshape(orthogonal.shape)
