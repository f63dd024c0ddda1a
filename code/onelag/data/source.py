"""A corpus as tokens."""

from dataclasses import dataclass
from functools import cache

import numpy as np

from onelag.data.corpus import load_corpus
from onelag.data.tokenizer import build_tokenizer


@dataclass(frozen=True)
class DataSource:
    """Tokens by split, each a one-dimensional uint16 array, and the hashes that identify them."""

    train: np.ndarray
    held_out: np.ndarray
    shift: np.ndarray
    vocab_size: int
    corpus_sha256: str
    tokenizer_sha256: str

    def split(self, name: str) -> np.ndarray:
        """ "held-out" or "shift". Raises ValueError where the corpus has no such split."""
        tokens = {"held-out": self.held_out, "shift": self.shift}[name]
        if not len(tokens):
            raise ValueError(f"this corpus has no {name!r} split: use 'held-out'")
        return tokens


@cache
def load_source(corpus: str, tokenizer: str) -> DataSource:
    """Reads, tokenizes and hashes, once per process; ValueError with one line for anything wrong with the text (see `load_corpus`, `build_tokenizer`)."""
    texts = load_corpus(corpus)
    built = build_tokenizer(tokenizer, texts.train)
    train, held_out, shift = (built.encode(documents) for documents in (texts.train, texts.held_out, texts.shift))
    return DataSource(train, held_out, shift, built.vocab_size, texts.sha256, built.sha256)
