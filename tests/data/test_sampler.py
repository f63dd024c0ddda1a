"""The sampler over shapes: without replacement, replicas, even validation windows; and its stream pinned."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onelag.data import Sampler, validation_batches


@st.composite
def setups(draw):
    length, batch = draw(st.integers(1, 9)), draw(st.integers(1, 6))
    tokens = np.arange(draw(st.integers((batch + 1) * length + 1, (batch + 9) * length + 40)), dtype=np.uint16)
    return tokens, batch, length, draw(st.integers(0, 2**32))


@given(setups())
def test_no_token_twice_within_an_epoch(setup):
    tokens, batch, length, seed = setup
    sampler = Sampler(tokens, batch, length, seed)
    seen = []
    for step in range(sampler.batches_per_epoch):
        inputs, targets = sampler.batch(step)
        assert inputs.shape == targets.shape == (batch, length) and inputs.dtype == targets.dtype == torch.int64
        assert torch.equal(targets, inputs + 1), "the tokens count up: the target is the next one"
        assert torch.equal(inputs, inputs[:, :1] + torch.arange(length))
        seen += inputs.flatten().tolist()
    assert len(set(seen)) == len(seen)
    left_out = len(tokens) - len(seen)
    assert left_out <= (batch - 1) * length + 2 * length, "an epoch leaves out less than a batch and the two ends"


@settings(max_examples=25)
@given(setups(), st.integers(0, 20), st.sampled_from([1, 2, 3, 4]))
def test_replicas_take_the_rows_of_one_global_batch(setup, step, replicas):
    tokens, _, length, seed = setup
    batch = 12
    tokens = np.arange(20 * length + 60, dtype=np.uint16)
    sampler = Sampler(tokens, batch, length, seed)
    parts = [sampler.batch(step, replica, replicas) for replica in range(replicas)]
    whole = sampler.batch(step)
    for index in (0, 1):
        assert torch.equal(torch.cat([part[index] for part in parts]), whole[index])
    with pytest.raises(ValueError, match="batch_size=12 cannot be shared by 5 replicas"):
        sampler.batch(step, 0, 5)


def test_the_stream_is_pinned():
    """A change here changes every run of the study: it must not come by accident."""
    inputs, _ = Sampler(np.arange(1001, dtype=np.uint16), 3, 7, 1).batch(100)
    assert inputs[:, 0].tolist() == [851, 452, 228]


@given(st.integers(1, 5), st.integers(1, 8), st.integers(1, 400), st.integers(0, 300))
def test_validation_windows(batch, length, wanted, extra):
    tokens = np.arange(batch * length + 1 + extra, dtype=np.uint16)
    batches = validation_batches(tokens, batch, length, wanted)
    starts = torch.cat([inputs[:, 0] for inputs, _ in batches])
    assert all(inputs.shape == (batch, length) and torch.equal(targets, inputs + 1) for inputs, targets in batches)
    assert len(starts.unique()) == len(starts) and (starts % length == 0).all(), "no window twice"
    possible = (len(tokens) - 1) // length // batch
    assert len(batches) == min(possible, -(-wanted // (batch * length)))
    gaps = (starts[1:] - starts[:-1]) // length
    assert not len(gaps) or gaps.max() - gaps.min() <= 1, "spread evenly"
