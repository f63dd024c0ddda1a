"""The recorder keeps the newest spans, the trace is what Chrome's format asks for, and a real run's trace tells the order that `order.py` promises."""

import json

import pytest
import torch
from torch import nn

from onelag.pipeline.order import stage_order
from onelag.pipeline.trace import Lane, Recorded, Recorder, chrome_trace, gather, measured_spans, write_trace
from tests.pipeline.worlds import run


def test_spans_nest_and_close_after_an_exception():
    recorder = Recorder()
    with pytest.raises(KeyError), recorder.span("U", 0, 1), recorder.span("reduce", 0, 1):
        raise KeyError
    recorder.begin("F", 3, 1)
    recorder.end()
    outer, inner, last = recorder.spans()
    assert [(s.kind, s.number, s.version) for s in (outer, inner, last)] == [("U", 0, 1), ("reduce", 0, 1), ("F", 3, 1)]
    assert outer.start <= inner.start <= inner.end <= outer.end <= last.start <= last.end
    with pytest.raises(RuntimeError, match="no span is open"):
        recorder.end()


def test_memory_is_bounded_and_the_newest_stay():
    recorder = Recorder(limit=3)
    for k in range(10):
        with recorder.span("F", k, 0):
            pass
    assert [s.number for s in recorder.spans()] == [7, 8, 9] and recorder.dropped == 7
    recorder.clear()
    assert recorder.spans() == [] and recorder.dropped == 0
    with pytest.raises(ValueError, match="limit=0"):
        Recorder(limit=0)


def test_recorders_share_a_clock():
    first, second = Recorder(), Recorder()
    for k in range(5):
        for recorder in (first, second):
            with recorder.span("F", k, 0):
                pass
    merged = sorted([(s.start, s.number, 0) for s in first.spans()] + [(s.start, s.number, 1) for s in second.spans()])
    # Anchored by separate readings: they agree to far less than a millisecond, the shortest action that a picture shows.
    a, b = first.spans()[0].start, second.spans()[0].start
    assert abs(a - b) < 1_000_000 and len(merged) == 10


LANES = [
    Lane(0, 0, [Recorded("F", 0, 0, 1000, 3000), Recorded("send", 0, 0, 3000, 3500), Recorded("U", 0, 1, 9000, 9500)], 2),
    Lane(1, 1, [Recorded("recv", 0, 0, 2000, 3500), Recorded("F", 0, 0, 3500, 5000), Recorded("B", 0, 0, 5000, 8000)], 0),
]


def test_chrome_format(tmp_path):
    write_trace(tmp_path / "deep" / "trace.json", LANES)
    trace = json.loads((tmp_path / "deep" / "trace.json").read_text())
    assert trace == chrome_trace(LANES) and trace["otherData"]["dropped"] == {"0": 2, "1": 0}
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert [(e["name"], e["pid"], e["tid"], e["ts"], e["dur"]) for e in spans] == [
        ("F0", 0, 0, 0.0, 2.0), ("send 0", 0, 1, 2.0, 0.5), ("U0", 0, 0, 8.0, 0.5), ("recv 0", 1, 1, 1.0, 1.5), ("F0", 1, 0, 2.5, 1.5), ("B0", 1, 0, 4.0, 3.0)
    ]  # fmt: skip
    assert spans[2]["args"] == {"batch": 0, "version": 1, "stage": 0} and spans[5]["args"] == {"microbatch": 0, "version": 0, "stage": 1}
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert named == {(0, 0): "compute", (0, 1): "messages", (1, 0): "compute", (1, 1): "messages"}
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["trace.json"], "no half-written file stays"
    assert chrome_trace([])["traceEvents"] == []


def test_spans_for_the_picture():
    spans = measured_spans(LANES)
    assert [(s.stage, s.kind, s.index, s.version) for s in spans] == [(0, "F", 0, 0), (0, "U", 0, 1), (1, "F", 0, 0), (1, "B", 0, 0)]
    assert spans[0].start == 0.0 and spans[-1].end == pytest.approx(7e-6)
    replica = Lane(2, 1, [Recorded("F", 0, 0, 0, 9)], 0)
    assert measured_spans([replica, *LANES]) == spans, "one replica per stage, the lowest rank"
    assert measured_spans([]) == []


M, BATCHES = 3, 4


def _train(rank: int, world: int):
    from onelag.pipeline.schedules import Schedule2BW

    torch.manual_seed(rank)
    module = nn.Linear(4, 4)
    recorder = Recorder()
    pipe = Schedule2BW(
        module, lambda out, target: (out - target).square().mean(), torch.optim.SGD(module.parameters(), lr=0.1), M, recorder=recorder
    )
    for _ in range(BATCHES):
        pipe.step(torch.ones(2 * M, 4), torch.zeros(2 * M, 4))
    pipe.flush()
    return gather(recorder, pipe.here.stage)


def test_a_real_run_is_traced_in_its_order():
    gathered = run(_train, 3)
    assert gathered[1] is gathered[2] is None, "the trace is on rank 0"
    lanes = gathered[0]
    for lane in lanes:
        order = stage_order(lane.stage, 3, M, BATCHES)
        kinds = {kind: [(s.kind, s.number, s.version) for s in lane.spans if s.kind == kind] for kind in ("F", "B", "U")}
        for kind, done in kinds.items():
            assert done == [tuple(action) for action in order if action.kind == kind]
        computed = [(s.kind, s.number, s.version) for s in lane.spans if s.kind in ("F", "B")]
        assert computed == [tuple(action) for action in order if action.kind != "U"]
        sends = sum(s.kind == "send" for s in lane.spans)
        assert sends == M * BATCHES * ((lane.stage > 0) + (lane.stage < 2))
    begin = {(lane.stage, s.kind, s.number): s for lane in lanes for s in lane.spans}
    for s in range(2):  # one clock: nothing arrives before it was computed
        assert all(begin[s + 1, "F", k].start >= begin[s, "F", k].end for k in range(M * BATCHES))
        assert all(begin[s, "B", k].start >= begin[s + 1, "B", k].end for k in range(M * BATCHES))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_a_span_lasts_as_long_as_the_device_works():
    recorder = Recorder(device="cuda")
    x = torch.randn(4096, 4096, device="cuda")
    x @ x
    torch.cuda.synchronize()
    for k, count in enumerate((5, 50)):
        with recorder.span("F", k, 0):
            for _ in range(count):
                x @ x
    short, long = recorder.spans()
    assert 5 < (long.end - long.start) / (short.end - short.start) < 20 and long.start >= short.end - 100_000
