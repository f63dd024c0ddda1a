"""Corpus, tokenizers and sampler: the vendored text, splits, determinism, and batches as a pure function of (seed, step)."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onelag.data import Sampler, load_corpus, load_source, validation_batches
from onelag.data.tokenizer import BPETokenizer, ByteTokenizer, build_tokenizer


def test_the_vendored_corpus_is_whole_and_split_as_said():
    corpus = load_corpus("sotu")
    assert (len(corpus.train), len(corpus.held_out), len(corpus.shift)) == (190, 21, 22)
    assert len(set(corpus.train) | set(corpus.held_out) | set(corpus.shift)) == 233  # no document twice, none in two splits
    text = "".join(corpus.train + corpus.held_out + corpus.shift)
    assert len(text.encode()) == 10_761_202
    assert corpus.train[0].startswith("Fellow-Citizens of the Senate") and "\0" not in text
    assert corpus.sha256 == load_corpus("sotu").sha256


def test_a_users_text_is_split_and_bad_text_refused(tmp_path):
    lines = tmp_path / "mine.jsonl"
    lines.write_text("".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(20)) + "\n", encoding="utf-8")
    corpus = load_corpus(str(lines))
    assert corpus.held_out == ("document 9", "document 19") and len(corpus.train) == 18
    single = tmp_path / "one.txt"
    single.write_text("abcdefghij" * 10, encoding="utf-8")
    corpus = load_corpus(str(single))
    assert "".join(corpus.train + corpus.held_out) == "abcdefghij" * 10 and len(corpus.held_out[0]) == 10
    with pytest.raises(ValueError, match="no 'shift' split"):
        load_source(str(single), "bytes").split("shift")
    for name in ("nothing.txt", "table.csv", "folder"):
        with pytest.raises(ValueError):
            load_corpus(str(tmp_path / name))


def test_bytes_are_bytes():
    tokens = ByteTokenizer().encode(["Größe", "x"])
    assert bytes(tokens.astype(np.uint8)) == "Größe\0x\0".encode() and tokens.dtype == np.uint16


def test_bpe_is_deterministic_and_reversible():
    documents = list(load_corpus("sotu").train[:6])
    first, second = BPETokenizer(documents, 400), BPETokenizer(documents, 400)
    assert first.sha256 == second.sha256 != BPETokenizer(documents, 401).sha256
    tokens = first.encode(["the United States — “quoted” Größe 日本"])
    assert tokens[-1] == 0 and first.decode(tokens[:-1]) == "the United States — “quoted” Größe 日本"
    assert tokens.max() < 400 and len(first.encode(documents)) < 0.75 * len(ByteTokenizer().encode(documents))
    for bad in ("bpe-100", "bpe-x", "words"):
        with pytest.raises(ValueError):
            build_tokenizer(bad, documents)


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(60, 400), batch=st.integers(1, 4), length=st.integers(1, 9), seed=st.integers(0, 5), steps=st.lists(st.integers(0, 300), min_size=1)
)
def test_a_batch_is_a_pure_function_of_seed_and_step(count, batch, length, seed, steps):
    """Asked in any order, by fresh samplers or an old one, whole or in replicas' parts: the same rows, and targets are the next tokens."""
    tokens = np.arange(count, dtype=np.uint16)
    if (count - 1) // length - 1 < batch:
        return
    old = Sampler(tokens, batch, length, seed)
    for step in steps:
        inputs, targets = old.batch(step)
        fresh = Sampler(tokens, batch, length, seed).batch(step)
        assert torch.equal(inputs, fresh[0]) and torch.equal(targets, fresh[1])
        assert inputs.shape == (batch, length) and torch.equal(targets, inputs + 1)
        assert int(targets.max()) < count
        parts = [old.batch(step, replica, batch)[0] for replica in range(batch)]
        assert torch.equal(torch.cat(parts), inputs)


def test_an_epoch_shows_every_window_once_and_epochs_differ():
    sampler = Sampler(np.arange(1001, dtype=np.uint16), 7, 10, 3)
    epochs = []
    for epoch in range(2):
        starts = torch.cat([sampler.batch(epoch * sampler.batches_per_epoch + i)[0][:, 0] for i in range(sampler.batches_per_epoch)])
        assert len(set(starts.tolist())) == len(starts) == 7 * sampler.batches_per_epoch
        assert len({int(s) % 10 for s in starts}) == 1  # end to end from one offset
        epochs.append(starts.tolist())
    assert epochs[0] != epochs[1]
    assert not torch.equal(Sampler(sampler.tokens, 7, 10, 4).batch(0)[0], sampler.batch(0)[0])


def test_validation_windows_are_fixed_even_and_whole():
    tokens = np.arange(10_001, dtype=np.uint16)
    batches = validation_batches(tokens, 4, 10, 200)
    assert len(batches) == 5 and all(inputs.shape == (4, 10) for inputs, _ in batches)
    starts = torch.cat([inputs[:, 0] for inputs, _ in batches])
    assert starts[0] == 0 and starts[-1] == 9_990 and len(starts.unique()) == 20
    assert torch.equal(batches[3][1], batches[3][0] + 1)
    assert len(validation_batches(tokens, 4, 10, 10**9)) == 250  # no more than there is


def test_texts_that_are_too_short_say_what_is_needed():
    with pytest.raises(ValueError, match=r"has 30 tokens.*need 41"):
        Sampler(np.zeros(30, dtype=np.uint16), 3, 10, 0)
    with pytest.raises(ValueError, match="validation split has 30 tokens"):
        validation_batches(np.zeros(30, dtype=np.uint16), 3, 10, 100)
    with pytest.raises(ValueError, match="shared by 2 replicas"):
        Sampler(np.zeros(300, dtype=np.uint16), 3, 10, 0).batch(0, 0, 2)
