"""The cut of a model: every layer once, the best contiguous split, and stages that together are the model, bitwise."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onelag.models import DenseConfig, build_model
from onelag.models.stages import build_stage, split_by_cost, split_by_count, split_by_flops


@settings(max_examples=60, deadline=None)
@given(
    costs=st.lists(st.integers(0, 9), min_size=1, max_size=7), stages=st.integers(1, 5), first=st.integers(0, 9), last=st.integers(0, 9)
)
def test_the_split_is_the_best_there_is(costs, stages, first, last):
    """Against all contiguous splits, by brute force."""
    split = split_by_cost(costs, stages, first, last)
    assert [layer for start, end in split for layer in range(start, end)] == list(range(len(costs))) and len(split) == stages

    def slowest(bounds):
        extra = [first if s == 0 else 0 for s in range(stages)]
        extra[-1] += last
        return max(sum(costs[a:b]) + e for (a, b), e in zip(itertools.pairwise(bounds), extra))

    everything = ((0, *cut, len(costs)) for cut in itertools.combinations_with_replacement(range(len(costs) + 1), stages - 1))
    assert slowest((0, *(end for _, end in split))) == min(map(slowest, everything))


def test_counts_differ_by_at_most_one_for_any_number_of_layers_and_stages():
    for layers, stages in itertools.product(range(1, 34), range(1, 13)):
        sizes = [end - start for start, end in split_by_count(layers, stages)]
        assert sum(sizes) == layers and max(sizes) - min(sizes) <= 1


def test_a_heavy_head_lightens_the_last_stage():
    config = DenseConfig(vocab_size=8192, num_layers=12, width=96, num_heads=3, num_kv_heads=1, ffn_width=256)
    sizes = [end - start for start, end in split_by_flops(config, 4, 64)]
    assert sum(sizes) == 12 and sizes[-1] < min(sizes[:-1])


@pytest.mark.parametrize("tied, stages", [(True, 1), (True, 2), (True, 3), (False, 4), (True, 5)])
def test_the_stages_together_are_the_model(tied, stages):
    """Same names, same values, same output, bitwise; also where a stage holds no layer."""
    config = DenseConfig(num_layers=3, width=24, num_heads=2, num_kv_heads=1, ffn_width=32, tie_embeddings=tied)
    whole, parts = build_model(config, 7), [build_stage(config, s, stages, 7) for s in range(stages)]
    parameters = dict(whole.named_parameters())
    seen = [name for part in parts for name, _ in part.named_parameters()]
    assert set(seen) == set(parameters)
    assert len(seen) == len(parameters) + (1 if tied and stages > 1 else 0)
    for part in parts:
        for name, parameter in part.named_parameters():
            assert torch.equal(parameter, parameters[name])
    tokens = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(0))
    x = tokens
    for part in parts:
        x = part(x)
    assert torch.equal(x, whole(tokens))


def test_impossible_splits_are_refused():
    for costs, stages in (([], 1), ([1.0], 0), ([-1.0], 1)):
        with pytest.raises(ValueError, match="cannot split"):
            split_by_cost(costs, stages)
