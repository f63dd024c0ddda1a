"""A corpus as tokens."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from onelag.data.corpus import load_corpus
from onelag.data.shards import ShardedTokens, open_shards
from onelag.data.tokenizer import build_tokenizer


@dataclass(frozen=True)
class DataSource:
    """Tokens by split, each a one-dimensional array (in memory, or shards on disk), and the hashes that identify them."""

    train: np.ndarray | ShardedTokens
    held_out: np.ndarray | ShardedTokens
    shift: np.ndarray
    vocab_size: int
    corpus_sha256: str
    tokenizer_sha256: str

    def split(self, name: str) -> np.ndarray | ShardedTokens:
        """ "held-out" or "shift". Raises ValueError where the corpus has no such split."""
        tokens = {"held-out": self.held_out, "shift": self.shift}[name]
        if not len(tokens):
            raise ValueError(f"this corpus has no {name!r} split: use 'held-out'")
        return tokens


@cache
def load_source(corpus: str, tokenizer: str) -> DataSource:
    """Reads, tokenizes and hashes, once per process; a folder is opened as shards that `onelag download` prepared.

    Raises:
        ValueError: with one line, for anything wrong with the text or the shards (see `load_corpus`, `build_tokenizer`, `open_shards`), or shards that
            were prepared with another tokenizer.
    """
    if Path(corpus).is_dir():
        manifest, tokens = open_shards(Path(corpus))
        if manifest.tokenizer != tokenizer:
            raise ValueError(f"the shards in {corpus} were prepared with the tokenizer {manifest.tokenizer!r}: use data.tokenizer={manifest.tokenizer}")
        nothing = np.empty(0, dtype=manifest.dtype)
        return DataSource(tokens["train"], tokens["held-out"], nothing, manifest.vocab_size, manifest.sha256, manifest.tokenizer_sha256)
    texts = load_corpus(corpus)
    built = build_tokenizer(tokenizer, texts.train)
    train, held_out, shift = (built.encode(documents) for documents in (texts.train, texts.held_out, texts.shift))
    return DataSource(train, held_out, shift, built.vocab_size, texts.sha256, built.sha256)
