"""A cross-check by somebody else: our orders as torch.distributed.pipelining's IR, through its validator, its send/receive lowering and its simulator.

These are names that torch does not promise to keep: when a torch release moves them, this file alone is to be mended.
"""

import pytest

from onelag.pipeline.order import FLUSHING, SCHEDULES, smallest_num_microbatches, stage_order

schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
pytestmark = pytest.mark.torch_private


def as_ir(p, m, batches, schedule, depth="paper"):
    """{rank: [torch actions]}; updates have no counterpart before a batch is complete, so the order of F and B alone."""
    action, kinds = schedules._Action, schedules._ComputationType
    of = {"F": kinds.FORWARD, "B": kinds.FULL_BACKWARD}
    return {s: [action(s, of[a.kind], a.index) for a in stage_order(s, p, m, batches, schedule, depth) if a.kind != "U"] for s in range(p)}


def cases():
    for schedule in SCHEDULES:
        for p in (1, 2, 3, 4, 6, 8):
            for depth in ("paper",) if schedule in FLUSHING else ("paper", "eager", 2):
                smallest = smallest_num_microbatches(p, depth, schedule)
                for m in sorted({smallest, smallest + 1, smallest + 5}):
                    yield schedule, p, m, depth


def test_torch_accepts_every_order_and_sees_no_deadlock():
    for schedule, p, m, depth in cases():
        order = as_ir(p, m, 3, schedule, depth)
        assert schedules._validate_schedule(order, p, p, 3 * m) == {s: s for s in range(p)}
        with_messages = schedules._add_send_recv({s: list(actions) for s, actions in order.items()}, lambda s: s, p)
        simulated = schedules._simulate_comms_compute({s: list(actions) for s, actions in with_messages.items()}, lambda s: s, p)
        compute = (schedules._ComputationType.FORWARD, schedules._ComputationType.FULL_BACKWARD)
        for s in range(p):
            ran = [action for action in simulated[s] if action is not None and action.computation_type in compute]
            assert ran == order[s], "lowering and simulation keep the order"
            assert len(with_messages[s]) == 2 * 3 * m * (1 + (s > 0) + (s < p - 1))


def test_torch_refuses_an_order_that_cannot_run():
    """The validator is no rubber stamp: it sees a backward before its forward, and a lost micro-batch."""
    order = as_ir(3, 4, 2, "2bw")
    order[1][0], order[1][2] = order[1][2], order[1][0]
    with pytest.raises(AssertionError, match="without first running Forward"):
        schedules._validate_schedule(order, 3, 3, 8)
    order = as_ir(3, 4, 2, "2bw")
    order[0].pop()
    with pytest.raises(AssertionError, match="expected 8"):
        schedules._validate_schedule(order, 3, 3, 8)
    swapped = as_ir(2, 2, 1, "2bw")
    swapped[0] = [swapped[0][i] for i in (0, 2, 3, 1)]  # stage 0 waits for gradient 1 before it sends activation 1
    with pytest.raises((AssertionError, ValueError)):
        schedules._add_send_recv(swapped, lambda s: s, 2)


@pytest.mark.parametrize(("ours", "theirs"), [("1f1b", "Schedule1F1B"), ("gpipe", "ScheduleGPipe")])
def test_our_flush_schedules_are_torchs(ours, theirs):
    kinds = schedules._ComputationType
    for p in (1, 2, 3, 4, 8):
        for m in (p, p + 3, 2 * p):
            rival = object.__new__(getattr(schedules, theirs))  # the order alone: no process group, no stage
            rival._num_stages, rival._n_microbatches = p, m
            order = rival._get_pipeline_order()
            for s in range(p):
                compute = [a for a in order[s] if a is not None and a.computation_type in (kinds.FORWARD, kinds.FULL_BACKWARD)]
                expected = as_ir(p, m, 1, ours)[s]
                if theirs == "Schedule1F1B" and s == p - 1:
                    # torch 2.13 numbers the last stage's forwards from 1 in this listing (its run does not): the kinds are compared alone.
                    assert [a.computation_type for a in compute] == [a.computation_type for a in expected]
                else:
                    assert compute == expected, (p, m, s)


def test_torchs_simulator_needs_fewer_steps_without_a_flush():
    """Its steps have no durations and count messages too, but a flush per batch shows."""

    def steps(schedule, p=4, m=8, batches=4):
        with_messages = schedules._add_send_recv(as_ir(p, m, batches, schedule), lambda s: s, p)
        return max(map(len, schedules._simulate_comms_compute(with_messages, lambda s: s, p).values()))

    assert steps("2bw") < steps("1f1b")
    assert steps("2bw", batches=1) == steps("1f1b", batches=1), "one batch is the same order in both"
