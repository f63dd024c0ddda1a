"""Batches: a pure function of (seed, step), so nothing needs to be saved to resume, and the number of workers does not matter."""

import numpy as np
import torch
from torch import Tensor


class Sampler:
    """Windows of `sequence_length` tokens, without replacement within an epoch.

    Epoch e lays windows end to end from an offset that it draws, and visits them in an order that it draws, both from Philox keyed by (seed, e).

    Args:
        tokens: one-dimensional array of token ids.
        batch_size: sequences per batch over all replicas.
        sequence_length: tokens per sequence, in inputs and in targets.
        seed: of the order.

    Raises:
        ValueError: fewer tokens than one batch needs.
    """

    def __init__(self, tokens: np.ndarray, batch_size: int, sequence_length: int, seed: int):
        self.tokens, self.batch_size, self.sequence_length, self.seed = tokens, batch_size, sequence_length, seed
        # One window less than would fit leaves room for the offset; one token more is the last target.
        self.windows = (len(tokens) - 1) // sequence_length - 1
        if self.windows < batch_size:
            need = (batch_size + 1) * sequence_length + 1
            raise ValueError(
                f"the text has {len(tokens):,} tokens, but batch_size={batch_size} sequences of sequence_length={sequence_length} need "
                f"{need:,}: use more text, or a smaller batch or sequence"
            )
        self.batches_per_epoch = self.windows // batch_size
        self._epoch: tuple[int, int, np.ndarray] | None = None

    def batch(self, step: int, replica: int = 0, num_replicas: int = 1) -> tuple[Tensor, Tensor]:
        """inputs and targets of optimizer step `step`, each (batch_size / num_replicas, sequence_length) int64; targets are one token on.

        With replicas, replica r of R has rows r·B/R … (r+1)·B/R of the same global batch.
        """
        if self.batch_size % num_replicas:
            raise ValueError(f"batch_size={self.batch_size} cannot be shared by {num_replicas} replicas")
        epoch, index = divmod(step, self.batches_per_epoch)
        offset, order = self._order(epoch)
        rows = self.batch_size // num_replicas
        first = index * self.batch_size + replica * rows
        starts = offset + order[first : first + rows] * self.sequence_length
        return _windows(self.tokens, starts, self.sequence_length)

    def _order(self, epoch: int) -> tuple[int, np.ndarray]:
        if self._epoch is None or self._epoch[0] != epoch:
            random = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
            self._epoch = (epoch, int(random.integers(self.sequence_length)), random.permutation(self.windows))
        return self._epoch[1:]


def validation_batches(tokens: np.ndarray, batch_size: int, sequence_length: int, num_tokens: int) -> list[tuple[Tensor, Tensor]]:
    """About `num_tokens` tokens (rounded up to whole batches, no more than there are) in fixed windows spread evenly over the split.

    Returns:
        Batches of (inputs, targets), each (batch_size, sequence_length) int64, all of equal size.

    Raises:
        ValueError: fewer tokens than one batch needs.
    """
    available = (len(tokens) - 1) // sequence_length
    if available < batch_size:
        raise ValueError(
            f"the validation split has {len(tokens):,} tokens, but one batch of {batch_size} sequences of {sequence_length} needs "
            f"{batch_size * sequence_length + 1:,}: use more text, or a smaller batch or sequence"
        )
    batches = min(-(-num_tokens // (batch_size * sequence_length)), available // batch_size)
    chosen = np.linspace(0, available - 1, batches * batch_size).round().astype(np.int64)
    return [_windows(tokens, part * sequence_length, sequence_length) for part in np.split(chosen, batches)]


def _windows(tokens: np.ndarray, starts: np.ndarray, length: int) -> tuple[Tensor, Tensor]:
    rows = torch.from_numpy(np.stack([tokens[start : start + length + 1] for start in starts]).astype(np.int64))
    return rows[:, :-1], rows[:, 1:]
