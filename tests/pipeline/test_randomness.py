"""The seeded dropout draws what dropout should, and disturbs nobody."""

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from onelag.pipeline.randomness import ModuleRandomness


class Twice(nn.Module):
    """Two dropouts, the first used twice, on top of a vector of ones."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Dropout(0.5), nn.Dropout(0.5)

    def forward(self, x):
        return torch.stack([self.first(x), self.first(x), self.second(x)])


@settings(deadline=None, max_examples=20, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.integers(0, 2**40), st.integers(0, 10**6))
def test_masks_differ_between_micro_batches_seeds_modules_and_calls_and_repeat(seed, k):
    ones, module = torch.ones(256), Twice()
    randomness = ModuleRandomness(module, seed)

    def masks(randomness, k):
        with randomness.of(k):
            return module(ones)

    drawn = masks(randomness, k)
    assert torch.equal(drawn, masks(randomness, k))
    rows = [*drawn, *masks(randomness, k + 1)]
    randomness.remove()
    rows += list(masks(ModuleRandomness(module, seed + 1), k))
    for i, left in enumerate(rows):
        assert 60 < int((left == 0).sum()) < 196  # half of them, by six standard deviations
        for right in rows[:i]:
            assert not torch.equal(left, right)


def test_the_generators_outside_are_left_alone_and_evaluation_draws_nothing():
    module = Twice()
    randomness = ModuleRandomness(module, 0)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with randomness.of(1):
        module(torch.ones(4))
    assert torch.equal(torch.rand(3), expected)
    torch.manual_seed(5)
    module(torch.ones(4))
    assert randomness.microbatch is None and not torch.equal(torch.rand(3), expected)  # outside nothing is seeded
    module.eval()
    with randomness.of(1):
        assert torch.equal(module(torch.ones(4)), torch.ones(3, 4))
