"""Tokenizers: raw bytes, or a byte-level BPE trained on the training split."""

import hashlib
import re
from collections.abc import Sequence

import numpy as np


class ByteTokenizer:
    """UTF-8 bytes, vocabulary 256. Documents are separated by a zero byte, which no text contains."""

    vocab_size = 256
    sha256 = hashlib.sha256(b"utf-8 bytes, zero byte between documents").hexdigest()

    def encode(self, documents: Sequence[str]) -> np.ndarray:
        """All documents in one array of tokens (uint16)."""
        return np.frombuffer(b"".join(document.encode("utf-8") + b"\0" for document in documents), dtype=np.uint8).astype(np.uint16)


class BPETokenizer:
    """Byte-level BPE with `vocab_size` entries, trained on `documents`: deterministic, a few seconds for 10 MB. Entry 0 separates documents."""

    def __init__(self, documents: Sequence[str], vocab_size: int):
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        if not 257 <= vocab_size <= 65536:
            raise ValueError(f"a BPE vocabulary must have 257 … 65536 entries, but got {vocab_size}")
        self.vocab_size = vocab_size
        self._tokenizer = Tokenizer(models.BPE())
        self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=["<|end|>"], initial_alphabet=sorted(alphabet), show_progress=False)
        self._tokenizer.train_from_iterator(documents, trainer)
        self.sha256 = hashlib.sha256(self._tokenizer.to_str().encode()).hexdigest()

    def encode(self, documents: Sequence[str]) -> np.ndarray:
        """All documents in one array of tokens (uint16)."""
        tokens = []
        for encoding in self._tokenizer.encode_batch(list(documents)):
            tokens += encoding.ids
            tokens.append(0)
        return np.array(tokens, dtype=np.uint16)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode([int(token) for token in tokens])


def build_tokenizer(name: str, train: Sequence[str]) -> ByteTokenizer | BPETokenizer:
    """ "bytes" or "bpe-N". Raises ValueError for another name."""
    if name == "bytes":
        return ByteTokenizer()
    if match := re.fullmatch(r"bpe-(\d+)", name):
        return BPETokenizer(train, int(match[1]))
    raise ValueError(f"unknown tokenizer {name!r}: use 'bytes' or 'bpe-N', for example 'bpe-4096'")
