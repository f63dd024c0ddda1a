"""The order of every schedule for all p ≤ 12, m ≤ 24 and depths, against an independent replay of what a stage may read and must keep."""

import re
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onelag.pipeline.order import (
    SCHEDULES,
    Action,
    check_feasible,
    drain_actions,
    in_flight,
    smallest_num_microbatches,
    stage_actions,
    stage_order,
    version_of,
)
from onelag.pipeline.timeline import StageMemory, peak_memory

DEPTHS = ("paper", "eager", 1, 2, 5)
BATCHES = 4


def replay(actions, m, consistent=True):
    """Runs the actions as a stage would: each weight must exist when it is read, each backward follows its forward, each update its batch."""
    made, open_forwards, forward_reads, backwards = 0, {}, {}, 0
    for kind, index, version in actions:
        if kind == "U":
            assert (index, version) == (made, made + 1)
            assert backwards == (index + 1) * m, "an update before the last backward of its batch, or not directly after it"
            made += 1
            continue
        assert version <= made, f"{kind}{index} reads W({version}), but only {made} updates have run"
        if kind == "F":
            assert index == len(forward_reads)
            open_forwards[index] = forward_reads[index] = version
        else:
            assert index == backwards
            read = open_forwards.pop(index)
            assert not consistent or read == version, f"micro-batch {index} goes forward on W({read}) and back on W({version})"
            backwards += 1
    assert not open_forwards
    return forward_reads, made


def feasible_cases(schedule):
    for p in range(1, 13):
        for depth in DEPTHS if schedule not in ("1f1b", "gpipe") else ("paper",):
            for m in range(1, 25):
                if m >= smallest_num_microbatches(p, depth, schedule):
                    yield p, m, depth


def test_every_action_once_and_in_an_order_that_can_run():
    for schedule in SCHEDULES:
        for p, m, depth in feasible_cases(schedule):
            for s in range(p):
                actions = stage_order(s, p, m, BATCHES, schedule, depth)
                reads, made = replay(actions, m, consistent=schedule != "paci")
                assert (len(reads), made, len(actions)) == (BATCHES * m, BATCHES, BATCHES * (2 * m + 1))


def test_2bw_is_one_update_late_with_two_versions_on_every_stage():
    for p, m, depth in feasible_cases("2bw"):
        for s in range(p):
            actions = stage_order(s, p, m, BATCHES, "2bw", depth)
            for kind, index, version in actions:
                assert kind == "U" or version == max(index // m - 1, 0)
            assert peak_memory(actions) == StageMemory(min(in_flight(s, p, depth), BATCHES * m), 2)


def test_2bw_feasible_exactly_from_the_bound():
    """One micro-batch fewer, and some stage reads a weight that does not exist: the bound is neither too strict nor too lax."""

    def runs(p, m, depth):
        for s in range(p):
            made, flying, width, forwards = 0, 0, in_flight(s, p, depth), iter(range(BATCHES * m))
            back = 0
            for k in forwards:
                if flying == width:
                    flying, back = flying - 1, back + 1
                    made += back % m == 0
                if max(k // m - 1, 0) > made:
                    return False
                flying += 1
        return True

    for p in range(1, 13):
        for depth in DEPTHS:
            bound = smallest_num_microbatches(p, depth)
            assert bound == max(1, in_flight(0, p, depth) - 1)
            for m in range(1, 25):
                assert runs(p, m, depth) == (m >= bound), (p, m, depth)
                if m < bound:
                    with pytest.raises(ValueError, match="too small"):
                        stage_order(0, p, m, BATCHES, "2bw", depth)


def test_the_order_of_the_paper_on_the_first_and_last_stage():
    assert " ".join(map(str, stage_order(0, 4, 4, 4)[:21])) == (
        "F0w0 F1w0 F2w0 F3w0 B0w0 F4w0 B1w0 F5w0 B2w0 F6w0 B3w0 U0→w1 F7w0 B4w0 F8w1 B5w0 F9w1 B6w0 F10w1 B7w0 U1→w2"
    )
    assert " ".join(map(str, stage_order(3, 4, 4, 4)[:11])) == "F0w0 B0w0 F1w0 B1w0 F2w0 B2w0 F3w0 B3w0 U0→w1 F4w0 B4w0"


def test_depths():
    assert [in_flight(s, 4, "paper") for s in range(4)] == [4, 3, 2, 1]
    assert [in_flight(s, 4, "eager") for s in range(4)] == [7, 5, 3, 1]
    assert [in_flight(s, 4, 1) for s in range(4)] == [5, 4, 3, 1]
    for p in range(1, 13):
        for s in range(p):
            assert in_flight(s, p, 0) == in_flight(s, p, "paper")
            assert in_flight(s, p, p - 1) == in_flight(s, p, "eager")
            assert in_flight(0, p, 5) == p + (5 if p > 1 else 0)


def test_pipedream_delay_and_stash():
    for p, m, depth in feasible_cases("pipedream"):
        for s in range(p):
            late = p - 1 - s
            actions = stage_order(s, p, m, 2 * late + 3 if m == 1 else BATCHES, "pipedream", depth)
            assert all(a.version == max(a.index // m - late, 0) for a in actions if a.kind != "U")
            # At m = 1 and depth "paper" a stage keeps exactly p − s versions; no setting needs more than one besides.
            kept = peak_memory(actions).versions
            assert kept <= late + 2
            if m == 1 and depth == "paper":
                assert kept == late + 1


def test_pipedream_with_one_microbatch_reads_the_newest_weights_forward():
    """That is what the SOSP 2019 paper does; our constant delay is the same thing there."""
    for p in range(1, 13):
        for s in range(p):
            newest = 0
            for kind, _, version in stage_order(s, p, 1, 20, "pipedream"):
                if kind == "U":
                    newest = version
                elif kind == "F":
                    assert version == newest


@pytest.mark.parametrize("depth", DEPTHS)
def test_pipedream_feasible_exactly_from_the_bound(depth):
    for p in range(1, 9):
        bound = smallest_num_microbatches(p, depth, "pipedream")
        for m in range(1, 12):
            needs = ((p - 1 - s) * m >= in_flight(s, p, depth) - 1 for s in range(p))
            assert all(needs) == (m >= bound)
    if depth == "eager":
        assert smallest_num_microbatches(4, depth, "pipedream") == 2


def test_flush_schedules_never_mix_batches_and_keep_one_version():
    for p, m, _ in feasible_cases("1f1b"):
        for s in range(p):
            for schedule, width in (("1f1b", min(p - s, m)), ("gpipe", m)):
                actions = stage_order(s, p, m, BATCHES, schedule)
                assert all(a.version == a.index // m for a in actions if a.kind != "U")
                assert peak_memory(actions) == StageMemory(width, 1)
                ends = [place for place, a in enumerate(actions) if a.kind == "U"]
                assert ends == [(2 * m + 1) * (t + 1) - 1 for t in range(BATCHES)]


def test_paci_drift_is_bounded_and_one_version_suffices():
    for p, m, depth in feasible_cases("paci"):
        for s in range(p):
            actions, width = stage_order(s, p, m, BATCHES, "paci", depth), in_flight(s, p, depth)
            assert peak_memory(actions).versions == 1
            forward = {a.index: a.version for a in actions if a.kind == "F"}
            drift = [a.version - forward[a.index] for a in actions if a.kind == "B"]
            assert min(drift) >= 0 and max(drift) <= -(-(width - 1) // m)
            if m <= width - 1 < m * (BATCHES - 1) and (width - 1) % m == 0:
                assert max(drift) == (width - 1) // m, "the bound is reached"


@given(
    p=st.integers(1, 12),
    extra=st.integers(0, 12),
    depth=st.sampled_from(DEPTHS),
    schedule=st.sampled_from(SCHEDULES),
    first=st.integers(0, 4),
    data=st.data(),
)
def test_stream_is_the_run_and_draining_anywhere_changes_no_version(p, extra, depth, schedule, first, data):
    m = smallest_num_microbatches(p, depth, schedule) + extra
    s = data.draw(st.integers(0, p - 1))
    whole = stage_order(s, p, m, first + 3, schedule, depth)
    stream = stage_actions(s, p, m, None, schedule, depth)
    forwards = [place for place, a in enumerate(whole) if a.kind == "F"]
    steady = forwards[-1] + 1
    assert list(islice(stream, steady)) == whole[:steady]

    # Stop after the last forward of `first` batches, drain, start again: each micro-batch on the same weights as in one go.
    before, count, stream = [], 0, stage_actions(s, p, m, None, schedule, depth)
    while count < first * m:
        before.append(next(stream))
        count += before[-1].kind == "F"
    rest = drain_actions(count, sum(a.kind == "B" for a in before), s, p, m, schedule)
    again = list(stage_actions(s, p, m, 3, schedule, depth, first_batch=first))
    assert before + rest == stage_order(s, p, m, first, schedule, depth)
    assert all(a.index >= first * (1 if a.kind == "U" else m) for a in again)
    if schedule != "paci":
        assert sorted(before + rest + again) == sorted(whole)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: check_feasible(4, 2), ["num_microbatches=2", "num_stages=4", "depth='paper'", "num_microbatches=3"]),
        (lambda: check_feasible(4, 5, "eager"), ["num_microbatches=5", "depth='eager'", "num_microbatches=6"]),
        (
            lambda: check_feasible(3, 2, "eager", "pipedream") or check_feasible(3, 1, "eager", "pipedream"),
            ["num_microbatches=2", "'pipedream'"],
        ),
        (lambda: check_feasible(0, 2), ["num_stages=0"]),
        (lambda: check_feasible(2, 0), ["num_microbatches=0"]),
        (lambda: check_feasible(2, 2.5), ["num_microbatches=2.5"]),
        (lambda: check_feasible(2, True), ["num_microbatches=True"]),
        (lambda: check_feasible(2, 2, depth=-1), ["depth=-1"]),
        (lambda: check_feasible(2, 2, depth="deep"), ["depth='deep'", "eager"]),
        (lambda: check_feasible(2, 2, depth=True), ["depth=True"]),
        (lambda: stage_order(4, 4, 4, 1), ["stage=4", "0 to 3"]),
        (lambda: stage_order(0, 4, 4, 1, "zigzag"), ["schedule='zigzag'", "2bw"]),
        (lambda: stage_actions(0, 4, 2), ["num_microbatches=2"]),  # at the call, not at the first action
        (lambda: stage_order(0, 4, 4, -1), ["num_batches=-1"]),
        (lambda: version_of(3, 2, "paci"), ["paci"]),
        (lambda: drain_actions(5, 3, 0, 2, 2), ["num_microbatches=2"]),
    ],
)
def test_errors_name_the_setting(call, words):
    with pytest.raises(ValueError) as caught:
        call()
    for word in words:
        assert re.search(re.escape(word), str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)


def test_action_is_a_plain_tuple():
    assert Action("F", 3, 1) == ("F", 3, 1) and str(Action("U", 1, 2)) == "U1→w2"
