"""The training loss."""

import torch.nn.functional as F
from torch import Tensor


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats, computed in float32 (float64 stays); targets of −100 do not count.

    Args:
        logits: (B, T, V).
        targets: (B, T) int64: the token that follows each input token.
    """
    logits = logits if logits.dtype.itemsize >= 4 else logits.float()
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=-100)
