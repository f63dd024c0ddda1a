"""torch's schedules, made to train, against the one-process run without delay and against our own synchronous schedules."""

import pytest
import torch
from torch import nn

from tests.pipeline.toys import ROWS, Toy, batch, loss_fn, make_optimizer, merged, oracle
from tests.pipeline.worlds import run

M, BATCHES = 4, 4


def train(pipe, modules, m=M):
    losses = [pipe.step(*batch(t, m * ROWS)) for t in range(BATCHES)]
    pipe.flush()
    return losses, merged([{n: p.detach().clone() for n, p in module.named_parameters()} for module in modules])


def build(schedule, rank, world, kind="adamw", m=M, **more):
    from onelag.pipeline.baselines import TorchPipeline

    places = [rank, 2 * world - 1 - rank] if schedule == "zbv" else [rank]
    modules = [Toy(place, len(places) * world) for place in places]
    named = [(n, p) for module in modules for n, p in module.named_parameters()]
    return TorchPipeline(modules, loss_fn, make_optimizer(kind, named), m, schedule, **more), modules


def _on_three(rank, world):
    from onelag.pipeline.schedules import Schedule1F1B

    results = {}
    for schedule in ("1f1b", "gpipe"):
        for kind in ("sgd", "adamw", "muon"):
            results[schedule, kind] = train(*build(schedule, rank, world, kind))
    results["clipped"] = train(*build("1f1b", rank, world, "sgd", clip_norm=0.05))
    results["shared"] = train(*build("gpipe", rank, world, "sgd", share_loss=True))
    module = Toy(rank, world)
    ours = Schedule1F1B(module, loss_fn, make_optimizer("sgd", module.named_parameters()), M, clip_norm=0.05)
    results["ours, clipped"] = train(ours, [module])

    refused = {}
    pipe, _ = build("1f1b", rank, world)
    wrong = {
        "uneven": lambda: pipe.step(*batch(0, M * ROWS + 1)),
        "clip": lambda: build("1f1b", rank, world, clip_norm=0.0),
        "unknown": lambda: build("2bw", rank, world),
        "micro-batches": lambda: build("zbv", rank, world, m=5),
    }
    if rank == 1:
        del wrong["uneven"]  # it has no batch: it would wait for the others
    for name, call in wrong.items():
        try:
            call()
        except (ValueError, TypeError) as error:
            refused[name] = str(error)
    from onelag.pipeline.baselines import TorchPipeline

    for name, modules in {"tied": Toy(rank, world, tied=True), "too many": [Toy(rank, world), Toy(rank, world)]}.items():
        try:
            TorchPipeline(modules, loss_fn, torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), M)
        except ValueError as error:
            refused[name] = str(error)
    return results, refused


@pytest.fixture(scope="module")
def on_three():
    return run(_on_three, 3)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("kind", ["sgd", "adamw", "muon"])
def test_bitwise_the_run_without_a_pipeline(on_three, schedule, kind):
    """m is a power of two: dividing the sum or each summand by it is the same."""
    losses, expected, _ = oracle(kind, M, BATCHES, delay=0)
    got = merged([results[schedule, kind][1] for results, _ in on_three])
    assert set(got) == set(expected)
    assert all(torch.equal(got[n], expected[n]) for n in expected)
    assert on_three[-1][0][schedule, kind][0] == pytest.approx(losses, rel=1e-6)
    assert all(loss != loss for loss in on_three[0][0][schedule, kind][0]), "only the last stage knows it unless it is shared"


def test_clipping_is_global_and_the_same_as_ours(on_three):
    unclipped = merged([results["1f1b", "sgd"][1] for results, _ in on_three])
    theirs = merged([results["clipped"][1] for results, _ in on_three])
    ours = merged([results["ours, clipped"][1] for results, _ in on_three])
    assert all(torch.allclose(theirs[n], ours[n], atol=1e-7) for n in ours)
    assert not any(torch.allclose(theirs[n], unclipped[n], atol=1e-4) for n in ours if n.endswith("up.weight"))


def test_a_shared_loss_is_known_everywhere(on_three):
    losses, _, _ = oracle("sgd", M, BATCHES, delay=0)
    for results, _ in on_three:
        assert results["shared"][0] == pytest.approx(losses, rel=1e-6)
        assert results["clipped"][0][0] == pytest.approx(losses[0], rel=1e-6)


def test_refusals(on_three):
    words = {
        "clip": "clip_norm=0.0", "unknown": "schedule='2bw'", "micro-batches": "num_microbatches=5", "tied": "embed.weight", "too many": "1 stage module",
    }  # fmt: skip
    for _, refused in on_three:
        for name, word in words.items():
            assert word in refused[name]
    assert "inputs" in on_three[0][1]["uneven"] and "targets" in on_three[2][1]["uneven"]


def _zero_bubble(rank, world):
    return train(*build("zbv", rank, world, "adamw", share_loss=True))


def test_zero_bubble_trains_the_same():
    on_two = run(_zero_bubble, 2)
    losses, expected, _ = oracle("adamw", M, BATCHES, delay=0)
    got = merged([weights for _, weights in on_two])
    assert set(got) == set(expected)
    assert all(torch.allclose(got[n], expected[n], atol=1e-5) for n in expected)
    assert on_two[0][0] == on_two[1][0] == pytest.approx(losses, rel=1e-5)
