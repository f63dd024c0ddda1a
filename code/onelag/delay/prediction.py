"""A rival correction: predict the weights that the gradient will be applied to (SpecTrain arXiv 1809.02839, XPipe, PipeMare)."""

import torch
from torch import Tensor

from onelag.delay.error_feedback import ErrorFeedback, lookahead


class WeightPrediction(ErrorFeedback):
    """Takes gradients at y_t − τ u_{t−1}: τ steps ahead along the last update, which serves as the velocity.

    The inner optimizer works on y; the model runs on the predicted point. For τ = 1 this is ErrorFeedback(form="lookahead") up to the first
    update, which is predicted here and uncorrected there (theory/equivalence.py, Proposition E2). One buffer, for any τ.

    Args:
        optimizer: any torch optimizer.
        steps: τ ≥ 0, the delay that the prediction is to bridge; 0 is bitwise the inner optimizer.

    Raises:
        ValueError: negative `steps`.
    """

    label = "weight_prediction"

    def __init__(self, optimizer: torch.optim.Optimizer, steps: int = 1):
        if steps < 0:
            raise ValueError(f"WeightPrediction: steps must be 0 or more, but got {steps}")
        super().__init__(optimizer, coefficient=steps, form="lookahead")
        self.steps = steps

    def _first_base(self, parameter: Tensor, start: Tensor) -> Tensor:
        """y_1 = y_0 − u_0 (in the parameter) moves to the buffer, and the model runs on y_1 − τ u_0 at once."""
        base = parameter.detach().clone()
        parameter.copy_(lookahead(base, start, self.coefficient))
        return base
