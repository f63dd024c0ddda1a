"""Calibration gives back the costs of a run that the timeline itself made up, and the predictions follow the closed forms."""

import math

import pytest

from onelag.pipeline.throughput import Curve, Measured, calibrate, draw_throughput, even, predict
from onelag.pipeline.timeline import Costs, flush_bubble, simulate
from onelag.pipeline.trace import Lane, Recorded


def lanes_of(line, pause=0.0):
    """A timeline as if it had been traced, in seconds, each action shortened by `pause` at its end: the time between two actions."""
    lanes = []
    for s, row in enumerate(line.spans):
        spans = [
            Recorded(a.kind, a.index, a.version, round(1e9 * a.start), round(1e9 * (a.end - (pause if a.kind != "U" else 0)))) for a in row
        ]
        lanes.append(Lane(s, s, spans, 0))
    return lanes


@pytest.mark.parametrize("latency", [0.0, 0.25])
def test_calibration_gives_back_the_costs(latency):
    costs = Costs((1.0, 1.5, 1.0, 1.25), (2.0, 3.0, 2.5, 2.0), latency, (0.5, 0.5, 0.75, 0.5))
    found = calibrate(lanes_of(simulate(4, 8, costs, 6)), first_microbatch=16)
    assert found.forward == pytest.approx(costs.forward) and found.backward == pytest.approx(costs.backward)
    assert found.update == pytest.approx(costs.update) and found.latency == pytest.approx(latency, abs=1e-6)


def test_the_time_between_two_actions_counts():
    """A host that needs 0.1 between actions runs as slowly as one whose actions take 0.1 longer."""
    costs = Costs(1.0, 2.0)
    found = even(calibrate(lanes_of(simulate(4, 8, costs, 6), pause=0.1), first_microbatch=16))
    assert simulate(4, 8, found, 8).step_time == pytest.approx(8 * 3.0, rel=0.05)
    assert found.forward + found.backward > 2.95


def test_the_warm_up_does_not_count():
    lanes = lanes_of(simulate(2, 4, Costs(1.0, 2.0), 6))
    slow = [
        lane._replace(spans=[s._replace(start=s.start - 5 * 10**9) if s.kind != "U" and s.number < 16 else s for s in lane.spans])
        for lane in lanes
    ]
    assert calibrate(slow, 16) == calibrate(lanes, 16)
    assert calibrate(slow).forward != calibrate(lanes).forward


def test_predictions_are_the_timelines():
    costs = Costs(1.0, 2.0)
    for row in predict(costs, (2, 8, 64)):
        assert row.bubble == 0.0 and math.isclose(row.rate, 1 / 3) and row.num_microbatches == row.num_stages
    for row in predict(costs, (2, 8, 32), 4, "1f1b"):
        assert math.isclose(row.bubble, flush_bubble(row.num_stages, 4 * row.num_stages))
    slow = Costs(1.0, 2.0, 0.3)
    paper, eager = predict(slow, (16,), 2), predict(slow, (16,), 2, depth="eager")
    assert math.isclose(paper[0].bubble, 1 - 16 * 3 / (16 * 3 + 2 * 15 * 0.3), rel_tol=0.01) and eager[0].bubble == pytest.approx(0.0)


def test_even_keeps_the_mean():
    assert even(Costs((1.0, 3.0), 2.0, 0.5, (0.0, 1.0))) == Costs(2.0, 2.0, 0.5, 0.5)


def test_refusals():
    with pytest.raises(ValueError, match="stages"):
        calibrate(lanes_of(simulate(3, 4, num_batches=2))[:1] + lanes_of(simulate(3, 4, num_batches=2))[2:])
    with pytest.raises(ValueError, match="from micro-batch 99"):
        calibrate(lanes_of(simulate(2, 4, num_batches=4)), 99)


def test_the_figure_holds_every_prediction_and_measurement():
    curve = Curve("2BW", tuple(predict(Costs(1.0, 2.0), (2, 4, 8))))
    figure = draw_throughput([curve], [Measured("2BW", 4, 0.25)], 1 / 3)
    left, right = figure.axes
    assert list(left.lines[0].get_xdata()) == [2, 4, 8] and list(right.lines[0].get_ydata()) == pytest.approx([0, 0, 0])
    assert (list(left.lines[1].get_xdata()), list(left.lines[1].get_ydata())) == ([4], [0.25]) and list(
        right.lines[1].get_ydata()
    ) == pytest.approx([0.25])
