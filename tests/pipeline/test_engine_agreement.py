"""Pipeline ≡ simulation, bitwise: p = 1, 2, 3, 4 for SGD, AdamW and Muon, with and without ErrorFeedback."""

import random

import pytest

from onelag.pipeline.order import smallest_num_microbatches
from onelag.pipeline.schedules import Schedule1F1B, Schedule2BW, ScheduleGPipe, SchedulePipeDream
from tests.pipeline.toys import ROWS, Toy, batch, differing, loss_fn, make_optimizer, merged, oracle
from tests.pipeline.worlds import run

KINDS = ["sgd", "adamw", "muon", "sgd+lookahead", "adamw+lookahead", "muon+lookahead", "adamw+update"]


def train(rank, world, cases):
    """Every case in one start of the processes: {case: (losses, parameters after the flush)}."""
    results = {}
    for case in cases:
        kind, m, batches, schedule, options = case
        module = Toy(rank, world)
        cls = {"2bw": Schedule2BW, "pipedream": SchedulePipeDream, "1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[schedule]
        pipe = cls(module, loss_fn, make_optimizer(kind, module.named_parameters()), num_microbatches=m, timeout=30, **options)
        reports = pipe.run((batch(t, m * ROWS) for t in range(batches)), updates=batches)
        results[repr(case)] = [r.loss for r in reports], {n: p.detach().clone() for n, p in module.named_parameters()}
    return results


def check(world, cases):
    results = run(train, world, cases)
    for case in cases:
        kind, m, batches, schedule, _ = case
        losses, weights, _ = oracle(kind, m, batches, delay=int(schedule == "2bw"), pipedream=world if schedule == "pipedream" else 0)
        assert differing(merged([r[repr(case)][1] for r in results]), weights) == [], case
        for rank, result in enumerate(results):
            assert result[repr(case)][0] == losses, (case, rank)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_2bw_is_the_simulation_bit_by_bit(world):
    check(world, [(kind, max(2, world - 1), 6, "2bw", {}) for kind in KINDS])


@pytest.mark.parametrize("world", [3, 4])
def test_depth_placement_and_number_of_microbatches_change_no_value(world):
    eager = 2 * world - 2
    cases = [("adamw+lookahead", m, 5, "2bw", options) for m in (world, 8) for options in ({"update": "inline"}, {"depth": 1}, {"recompute": True})]
    check(world, [*cases, ("muon+lookahead", eager, 5, "2bw", {"depth": "eager"})])


def test_pipedream_is_the_simulation_with_a_delay_per_stage():
    check(4, [(kind, m, 7, "pipedream", {}) for kind in ("sgd", "adamw+lookahead", "adamw+update") for m in (1, 4)])


def test_the_flushing_schedules_are_synchronous_training():
    check(3, [("adamw", m, 4, schedule, {}) for schedule in ("1f1b", "gpipe") for m in (2, 4)])


def random_cases(world, count):
    chance = random.Random(world)
    for _ in range(count):
        depth = chance.choice(["paper", "eager", 1, 2])
        m = smallest_num_microbatches(world, depth) + chance.randrange(3)
        options = {"depth": depth, "update": chance.choice(["slack", "inline"]), "recompute": chance.random() < 0.3}
        yield chance.choice(KINDS), m, chance.randrange(1, 7), options, [t for t in range(7) if chance.random() < 0.3]


def train_with_stops(rank, world, cases):
    results = []
    for kind, m, batches, options, stops in cases:
        module = Toy(rank, world)
        pipe = Schedule2BW(module, loss_fn, make_optimizer(kind, module.named_parameters()), num_microbatches=m, timeout=60, **options)
        for t in range(batches):
            pipe.step(*batch(t, m * ROWS))
            if t in stops:
                pipe.flush()
        pipe.flush()
        results.append(([r.loss for r in pipe.reports()], {n: p.detach().clone() for n, p in module.named_parameters()}))
    return results


@pytest.mark.parametrize("world", [2, 3, 4])
def test_any_setting_and_draining_anywhere_agree(world):
    cases = list(random_cases(world, 8))
    results = run(train_with_stops, world, cases)
    for number, case in enumerate(cases):
        losses, weights, _ = oracle(case[0], case[1], case[2])
        assert differing(merged([r[number][1] for r in results]), weights) == [], case
        assert all(r[number][0] == losses for r in results), case
