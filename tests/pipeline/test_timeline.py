"""The event model against closed forms, a hand-made picture and orders in which it must refuse or wait."""

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onelag.pipeline import timeline
from onelag.pipeline.order import SCHEDULES, Action, in_flight, smallest_num_microbatches, stage_order
from onelag.pipeline.timeline import Costs, flush_bubble, postpone_updates, simulate, slack_slots, steady_step_time

COSTS = st.integers(1, 9)


@given(p=st.integers(1, 8), extra=st.integers(0, 9), forward=COSTS, backward=COSTS)
@settings(max_examples=40)
def test_2bw_has_no_bubble_and_one_ramp_for_the_whole_run(p, extra, forward, backward):
    m, batches = max(1, p - 1) + extra, 6
    line = simulate(p, m, Costs(forward, backward), batches)
    assert line.step_time == m * (forward + backward) and line.bubble == 0.0
    assert line.makespan == (batches * m + p - 1) * (forward + backward)
    assert math.isclose(line.run_bubble, (p - 1) / (batches * m + p - 1))


@given(p=st.integers(1, 8), m=st.integers(1, 16), forward=COSTS, backward=COSTS, update=st.integers(0, 20), latency=st.integers(0, 5))
@settings(max_examples=40)
def test_flush_schedules_pay_a_ramp_per_batch(p, m, forward, backward, update, latency):
    costs = Costs(forward, backward, update=update)
    for schedule in ("1f1b", "gpipe"):
        line = simulate(p, m, costs, 6, schedule)
        assert line.step_time == (m + p - 1) * (forward + backward) + update == steady_step_time(p, m, costs, schedule) + update
        if not update:
            assert math.isclose(line.bubble, flush_bubble(p, m), abs_tol=1e-12)
    slow = Costs(forward, backward, latency)
    gpipe, one = simulate(p, m, slow, 6, "gpipe").step_time, simulate(p, m, slow, 6, "1f1b").step_time
    assert gpipe == steady_step_time(p, m, slow, "gpipe")
    assert one >= gpipe, "1F1B waits for the link in every round, GPipe once"


@given(
    p=st.integers(1, 7), extra=st.integers(0, 9), depth=st.sampled_from(["paper", "eager", 1, 2, 5]), forward=COSTS, backward=COSTS,
    latency=st.integers(0, 12), schedule=st.sampled_from(["2bw", "pipedream", "paci"]),
)  # fmt: skip
@settings(max_examples=80)
def test_latency_against_the_closed_form(p, extra, depth, forward, backward, latency, schedule):
    m, batches = smallest_num_microbatches(p, depth, schedule) + extra, 40
    costs = Costs(forward, backward, latency)
    line = simulate(p, m, costs, batches, schedule, depth)
    # The window cuts a round of d + 1 stages somewhere: both ends together differ by one round at most.
    window = batches - 2 - (batches // 2 - 1)
    one_round = p * (forward + backward) + 2 * (p - 1) * latency
    assert abs(line.step_time - steady_step_time(p, m, costs, schedule, depth)) * window <= one_round + 1e-9


def test_the_rates_that_the_closed_form_promises():
    for p in (2, 4, 8):
        T, c = 3.0, 0.3
        costs = Costs(1.0, 2.0, c)
        utilisation = 16 * T / steady_step_time(p, 16, costs)
        assert math.isclose(utilisation, p * T / (p * T + 2 * (p - 1) * c))
        assert steady_step_time(p, 16, Costs(1.0, 2.0, T / 2), depth="eager") == 16 * T
        assert steady_step_time(p, 16, Costs(1.0, 2.0, T / 2 + 0.1), depth="eager") > 16 * T


@given(
    p=st.integers(1, 6),
    extra=st.integers(0, 6),
    update=st.integers(1, 40),
    schedule=st.sampled_from(["2bw", "pipedream", "paci"]),
    data=st.data(),
)
@settings(max_examples=40)
def test_an_update_in_the_slack_costs_its_own_time_and_no_more(p, extra, update, schedule, data):
    m = max(1, p - 1) + extra
    line = simulate(p, m, Costs(1, 2, update=update), 24, schedule)
    assert line.step_time == m * 3 + update and abs(line.bubble) < 1e-12


def test_waiting_for_the_global_norm_stalls_inline_and_not_in_the_slack():
    for m in (4, 8):
        costs = Costs(20, 40, update=120, agreement=0.0)
        assert simulate(4, m, costs, 20, update="slack").step_time == m * 60 + 120
        assert simulate(4, m, costs, 20, update="inline").step_time == m * 60 + 120 + 120
    # On a stream of its own the update vanishes where the slack holds it, and not where it does not: at m = 4 stage 0 has one slot.
    beside = simulate(4, 8, Costs(20, 40, update=120), 20, update="stream")
    assert beside.step_time == 8 * 60 and beside.bubble == 0.0
    assert simulate(4, 4, Costs(20, 40, update=120), 20, update="stream").step_time == 4 * 60 + 60
    # Last stage to first: p − 1 backwards; a sum that takes longer than the slack is waited for.
    assert simulate(4, 8, Costs(20, 40, agreement=300.0), 20).step_time == 8 * 60
    assert simulate(4, 8, Costs(20, 40, agreement=361.0), 20).step_time > 8 * 60


def test_slack_is_what_the_formula_says():
    for p in range(1, 9):
        for depth in ("paper", "eager", 2):
            m = smallest_num_microbatches(p, depth) + 3
            line = simulate(p, m, Costs(1, 2), 10, depth=depth)
            for s in range(p):
                assert line.slack(s) == 3 * slack_slots(s, p, m, depth)
    assert [slack_slots(s, 4, 8) for s in range(4)] == [8 - 4 + s + 1 for s in range(4)]


def test_two_stages_by_hand():
    line = simulate(2, 2, Costs(1, 2, latency=0.5, update=0.25), 1, "1f1b", update="inline")
    first = [(a.kind, a.index, a.start, a.end) for a in line.spans[0]]
    last = [(a.kind, a.index, a.start, a.end) for a in line.spans[1]]
    assert first == [("F", 0, 0, 1), ("F", 1, 1, 2), ("B", 0, 5, 7), ("B", 1, 8, 10), ("U", 0, 10, 10.25)]
    assert last == [("F", 0, 1.5, 2.5), ("B", 0, 2.5, 4.5), ("F", 1, 4.5, 5.5), ("B", 1, 5.5, 7.5), ("U", 0, 7.5, 7.75)]


@given(
    p=st.integers(1, 6), extra=st.integers(0, 6), schedule=st.sampled_from(SCHEDULES), depth=st.sampled_from(["paper", "eager", 1]),
    update=st.sampled_from(["slack", "inline", "stream"]), agreement=st.sampled_from([None, 0.0, 7.0]), data=st.data(),
)  # fmt: skip
@settings(max_examples=80)
def test_every_picture_respects_what_must_come_before(p, extra, schedule, depth, update, agreement, data):
    m, batches = smallest_num_microbatches(p, depth, schedule) + extra, 4
    per_stage = st.tuples(*[COSTS] * p)
    costs = Costs(data.draw(per_stage), data.draw(per_stage), data.draw(st.integers(0, 4)), data.draw(per_stage), agreement)
    line = simulate(p, m, costs, batches, schedule, depth, update)
    when = {(a.stage, a.kind, a.index): a for row in line.spans for a in row}
    assert len(when) == sum(len(row) for row in line.spans) == p * batches * (2 * m + 1)
    for (s, kind, k), action in when.items():
        assert action.end - action.start == costs.of(kind, s, p)
        before = {("F",): [(s - 1, "F", k)], ("B",): [(s, "F", k), (s + 1, "B", k)], ("U",): [(s, "B", k * m + m - 1)]}[(kind,)]
        for source in before:
            if source in when and source != (s, kind, k):
                wait = costs.latency if source[0] != s else 0
                assert action.start >= when[source].end + wait
        if kind != "U" and action.version:
            assert action.start >= when[s, "U", action.version - 1].end, "read before it was made"
        if kind == "U" and agreement is not None:
            assert action.start >= max(when[q, "B", k * m + m - 1].end for q in range(p)) + agreement
    for row in line.spans:
        own = [a for a in row if not (a.kind == "U" and update == "stream")]
        assert all(a.end <= b.start for a, b in pairwise(own)), "a stage does two things at once"


def test_unequal_stages_run_at_the_slowest_ones_pace():
    line = simulate(3, 6, Costs((1, 3, 1), (2, 6, 2)), 12)
    assert line.step_time == 6 * 9
    assert math.isclose(line.bubble, 1 - (3 + 9 + 3) / 27)


def test_memory_is_the_orders():
    line = simulate(4, 8)
    assert [(line.memory(s).microbatches, line.memory(s).versions) for s in range(4)] == [(in_flight(s, 4), 2) for s in range(4)]
    assert [simulate(4, 8, schedule="gpipe").memory(s).microbatches for s in range(4)] == [8] * 4


def test_postponing_moves_updates_only():
    actions = stage_order(1, 3, 4, 5)
    moved = postpone_updates(actions)
    assert [a for a in moved if a.kind != "U"] == [a for a in actions if a.kind != "U"] and sorted(moved) == sorted(actions)
    assert moved[moved.index(("U", 0, 1)) + 1] == ("F", 8, 1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: simulate(4, 2), "num_microbatches=3"),
        (lambda: simulate(3, 4, Costs(forward=(1.0, 2.0))), "forward has 2 values, but num_stages=3"),
        (lambda: simulate(2, 4, update="never"), "update='never'"),
        (lambda: simulate(2, 4, num_batches=3).step_time, "num_batches=3"),
        (lambda: steady_step_time(2, 4, Costs(latency=1.0), "1f1b"), "1f1b"),
        (lambda: steady_step_time(2, 4, Costs(forward=(1.0, 2.0))), "equal stages"),
    ],
)
def test_refusals(call, words):
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        call()


def test_pipedream_with_an_update_for_all_stages_together_stalls():
    """The last stage needs W(t+1) at once, but the global norm is there only after stage 0's last backward, p − 1 backwards later."""
    assert simulate(3, 4, Costs(agreement=0.0), 8, "pipedream").step_time == 4 * 3 + 2 * 2.0
    assert simulate(3, 4, Costs(), 8, "pipedream").step_time == 4 * 3


def test_an_order_that_waits_for_itself_is_named(monkeypatch):
    """Stage 0 wants the second gradient before it has sent the second activation: that would hang, and must not come out as a short timeline."""
    right = timeline.stage_order
    wrong = [Action("F", 0, 0), Action("B", 0, 0), Action("B", 1, 0), Action("F", 1, 0), Action("U", 0, 1)]
    monkeypatch.setattr(timeline, "stage_order", lambda s, *rest: wrong if s == 0 else right(s, *rest))
    with pytest.raises(ValueError, match=r"wait for themselves.*stage 0 at B1w0, stage 1 at F1w0"):
        simulate(2, 2, num_batches=1, update="inline")
