"""Ranks that die, hang or are told to stop."""

import os
import random
import signal
import time

import pytest
import torch

from onelag.pipeline.checkpoint import committed, resume, save
from onelag.pipeline.errors import PipelineError
from onelag.pipeline.schedules import Schedule2BW
from tests.pipeline.toys import ROWS, Toy, batch, differing, loss_fn, make_optimizer, merged, oracle
from tests.pipeline.worlds import run, run_to_the_end

M = 4


def build(rank, world, timeout=4.0, kind="adamw+lookahead", **options):
    module = Toy(rank, world)
    return module, Schedule2BW(module, loss_fn, make_optimizer(kind, module.named_parameters()), num_microbatches=M, timeout=timeout, **options)


def endless():
    t = 0
    while True:
        yield batch(t, M * ROWS)
        t += 1


def failing(rank, world, how):
    module, pipe = build(rank, world, timeout=3.0 if how == "hangs" else 20.0)
    if rank == 2:

        def fail(*_):
            if pipe._forwards == 9:
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                if how == "hangs":
                    time.sleep(9)
                raise MemoryError("out of memory")

        module.layers["2"].register_forward_hook(fail)
    try:
        pipe.run(endless(), updates=10**9)
    except PipelineError as error:
        if how == "hangs":
            return str(error)  # and keeps its connections: each rank must notice by itself
        raise
    return None


@pytest.mark.parametrize("how", ["killed", "raises"])
def test_a_rank_that_dies_ends_all_with_stage_and_micro_batch(how):
    ended = run_to_the_end(failing, 4, how, limit=40.0)
    assert ended[2].exitcode == (-signal.SIGKILL if how == "killed" else 1)
    if how == "raises":
        assert "stage 2 of 4 (rank 2), forward of micro-batch 9 (batch 2, weights W(1)): MemoryError: out of memory" in ended[2].error
    for rank in (0, 1, 3):
        assert ended[rank].exitcode == 1
        assert f"PipelineError: stage {rank} of 4 (rank {rank}), " in ended[rank].error and "batch" in ended[rank].error, ended[rank].error


def test_a_rank_that_hangs_ends_the_others_within_the_timeout():
    ended = run_to_the_end(failing, 4, "hangs", limit=20.0)
    for rank in (0, 1, 3):
        told = ended[rank].result
        assert f"stage {rank} of 4 (rank {rank}), " in told and "batch" in told and "timed out" in told.lower(), told
    assert "stage 2 of 4 (rank 2), forward of micro-batch 9 (batch 2, weights W(1)): MemoryError" in ended[2].result


def late(rank, world):
    time.sleep(rank * 1.0)
    _, pipe = build(rank, world, timeout=10.0)
    return pipe.run((batch(t, M * ROWS) for t in range(2)), updates=2)[-1].loss


def never(rank, world):
    from onelag.pipeline.handshake import warm_up
    from onelag.pipeline.topology import Groups, place

    here = place(rank, world)
    groups = Groups(here, list(range(world)), 2.0)
    if rank == 1:
        time.sleep(5)
        return None
    with pytest.raises(PipelineError, match=r"edge stage 0 -> stage 1 \(activations\) did not answer within timeout=2 s"):
        warm_up(here, groups, torch.device("cpu"), 2.0)
    return None


def test_ranks_that_start_late_are_waited_for_and_one_that_does_not_answer_is_named():
    assert len(set(run(late, 3))) == 1
    run(never, 2)


def stopping(rank, world):
    asked = []
    module, pipe = build(rank, world, timeout=20.0, kind="adamw")
    signal.signal(signal.SIGTERM, lambda *_: asked.append(True))

    def stop():
        if rank == 1 and pipe.batches == 4:
            os.kill(os.getpid(), signal.SIGTERM)  # one rank only
        return bool(asked)

    reports = pipe.run(endless(), updates=10**9, stop=stop)
    again = pipe.run((batch(t, M * ROWS) for t in range(pipe.batches, pipe.batches + 2)), updates=2)
    return len(reports), [r.batch for r in again], {n: p.detach().clone() for n, p in module.named_parameters()}


def test_a_stop_on_one_rank_drains_all_at_the_same_batch():
    results = run(stopping, 3)
    (count, again, _) = results[0]
    assert all(r[:2] == (count, again) for r in results)
    assert 5 <= count <= 8 and again == [count, count + 1]
    assert differing(merged([r[2] for r in results]), oracle("adamw", M, count + 2)[1]) == []


def jittering(rank, world, batches, seed, most):
    module, pipe = build(rank, world, timeout=30.0, kind="sgd+lookahead", clip_norm=None)
    generator = torch.Generator().manual_seed(seed * 100 + rank)

    def pause(*_):
        time.sleep(most * float(torch.rand((), generator=generator)))

    if most:
        module.register_forward_pre_hook(pause)
        next(iter(module.layers.values())).register_full_backward_hook(pause)
    pipe.run((batch(t, M * ROWS) for t in range(batches)), updates=batches)
    return {n: p.detach().clone() for n, p in module.named_parameters()}


def test_random_delays_change_nothing():
    assert differing(merged(run(jittering, 4, 12, 1, 0.02)), oracle("sgd+lookahead", M, 12)[1]) == []


@pytest.mark.slow
def test_soak_of_two_thousand_batches_with_random_delays():
    calm, rough = (merged(run(jittering, 4, 2000, 1, most, limit=900.0)) for most in (0.0, 0.02))
    assert differing(rough, calm) == []


def persistent(rank, world, directory, until, pace):
    """Goes on from the newest checkpoint, saves every three batches."""
    module, pipe = build(rank, world, timeout=15.0, kind="muon+lookahead")
    module.register_forward_pre_hook(lambda *_: time.sleep(pace))
    resume(directory, pipe)
    started = pipe.batches
    while pipe.batches < until:
        first = pipe.batches
        pipe.run((batch(t, M * ROWS) for t in range(first, min(first + 3, until))), updates=min(3, until - first))
        save(directory, pipe)
    return started, {n: p.detach().clone() for n, p in module.named_parameters()}


def kill_and_resume(directory, kills, until, pace, longest):
    """Kills a random rank at a random moment, `kills` times, then lets the run end; returns its weights and from where each start went on."""
    chance = random.Random(0)

    def kill(processes):
        time.sleep(0.3 + longest * chance.random())
        os.kill(processes[chance.randrange(len(processes))].pid, signal.SIGKILL)

    reached = []
    for _ in range(kills):
        ended = run_to_the_end(persistent, 3, directory, until, pace, limit=60.0, during=kill)
        assert -signal.SIGKILL in [one.exitcode for one in ended] and all(one.exitcode in (1, -signal.SIGKILL) for one in ended), ended
        found = committed(directory)
        reached.append(int(found[-1].name.split("-")[1]) if found else 0)
    results = run(persistent, 3, directory, until, pace)
    assert {started for started, _ in results} == {reached[-1]}
    return merged([weights for _, weights in results]), reached


def test_kills_at_random_moments_lose_nothing_but_the_batches_since_the_last_checkpoint(tmp_path):
    weights, reached = kill_and_resume(str(tmp_path), 3, 90, 0.01, 1.0)
    assert reached == sorted(reached)
    assert differing(weights, oracle("muon+lookahead", M, 90)[1]) == []


@pytest.mark.slow
def test_twenty_kills_at_random_moments(tmp_path):
    weights, reached = kill_and_resume(str(tmp_path), 20, 800, 0.01, 4.0)
    assert reached == sorted(reached) and len(set(reached)) > 10
    assert differing(weights, oracle("muon+lookahead", M, 800)[1]) == []
