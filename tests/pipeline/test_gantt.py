"""The picture shows what the timeline says: every box at its place, in its colour, with its number; and the command that draws it."""

import io

import pytest
from matplotlib.colors import to_rgb
from rich.console import Console

from onelag.pipeline.command import TimelineCommand, timeline_command
from onelag.pipeline.gantt import COLOURS, draw_gantt, starting_at, text_gantt
from onelag.pipeline.timeline import Costs, Span, simulate


def spans_of(line):
    return [span for row in line.spans for span in row]


def boxes(axis):
    (collection,) = axis.collections
    found = []
    for path, colour in zip(collection.get_paths(), collection.get_facecolors()):
        box = path.get_extents()
        found.append((round((box.y0 + box.y1) / 2), round(box.x0, 6), round(box.x1, 6), tuple(round(c, 4) for c in colour[:3])))
    return sorted(found)


def test_every_span_is_a_box_at_its_time_in_the_colour_of_its_version():
    spans = spans_of(simulate(3, 4, Costs(1, 2, 0.25, 1), 4))
    (axis,) = draw_gantt([("predicted", spans)], "ms", width=14).axes
    expected = [
        (s.stage, round(s.start, 6), round(s.end, 6), tuple(round(c, 4) for c in to_rgb(COLOURS[s.kind][s.version % 2]))) for s in spans
    ]
    assert boxes(axis) == sorted(expected)
    written = sorted((round(t.get_position()[1]), round(t.get_position()[0], 6), t.get_text()) for t in axis.texts)
    assert written == sorted((s.stage, round((s.start + s.end) / 2, 6), f"W{s.version}" if s.kind == "U" else str(s.index)) for s in spans)
    assert [label.get_text() for label in axis.get_yticklabels()] == ["stage 0", "stage 1", "stage 2"]
    assert axis.get_ylim()[0] > axis.get_ylim()[1], "stage 0 is on top"
    assert len({*COLOURS["F"], *COLOURS["B"], COLOURS["U"][0]}) == 5


def test_an_update_of_no_length_is_still_seen_and_named():
    (axis,) = draw_gantt([("", [Span(0, "F", 0, 0, 0.0, 1.0), Span(0, "U", 0, 1, 1.0, 1.0)])]).axes
    (update,) = [box for box in boxes(axis) if box[3] == tuple(round(c, 4) for c in to_rgb(COLOURS["U"][0]))]
    assert update[1] < 1.0 < update[2]
    assert "W1" in [t.get_text() for t in axis.texts]


def test_panels_share_the_time_axis_and_until_cuts():
    fast, slow = spans_of(simulate(2, 2, num_batches=4)), spans_of(simulate(2, 2, num_batches=4, schedule="gpipe"))
    first, second = draw_gantt([("a", fast), ("b", slow)], until=10.0).axes
    assert first.get_xlim() == second.get_xlim() == (0, 10.0)
    assert max(box[2] for box in boxes(first) + boxes(second)) <= 10.0
    assert len(boxes(first)) == sum(s.start < 10.0 for s in fast)


def test_starting_in_the_steady_state():
    spans = spans_of(simulate(2, 2, Costs(1, 2), 4))  # stage 0: F0 0-1, F1 1-2, B0 4-6, F2 6-7, B1 7-9, F3 9-10, …; stage 1: B1 5-7
    later = starting_at(spans, 2)
    assert Span(0, "F", 2, 0, 0.0, 1.0) in later and Span(1, "B", 1, 0, 0.0, 1.0) in later
    assert not any(s.kind in "FB" and s.stage == 0 and s.index < 1 for s in later)
    assert len(later) == sum(s.end > 6 for s in spans)
    with pytest.raises(ValueError, match="micro-batch 99"):
        starting_at(spans, 99)


def test_terminal_picture():
    lines = text_gantt(spans_of(simulate(2, 2, Costs(1, 2, 0, 1), 1, "1f1b", update="inline")), columns=10)
    assert [line.plain for line in lines] == ["  0 01··aa·bbU", "  1 ·0aa1bbU··"]
    assert any(COLOURS["F"][0] in str(piece.style) for piece in lines[0].spans)


def test_nothing_to_draw_is_an_error():
    for panels in ([("empty", [])], [("late", [Span(0, "F", 0, 0, 5.0, 6.0)])], [("sends", [Span(0, "send", 0, 0, 0.0, 1.0)])]):
        with pytest.raises(ValueError, match=panels[0][0]):
            draw_gantt(panels, until=2.0)
    with pytest.raises(ValueError):
        text_gantt([])


def test_the_command_prints_and_draws(tmp_path):
    told = io.StringIO()
    settings = TimelineCommand(num_microbatches=4, forward=(20.0,), backward=(40.0,), unit="ms", output=tmp_path / "new" / "gantt.png")
    ours, theirs = timeline_command(settings, Console(file=told, width=120))
    assert (ours.step_time, theirs.step_time) == (240.0, 420.0)
    words = told.getvalue()
    for expected in ("step 240 ms", "bubble 0.0%", "step 420 ms", "bubble 42.9%", "2bw is 1.75 times as fast as 1f1b"):
        assert expected in words
    assert settings.output.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"num_microbatches": 2}, "num_microbatches=2"),
        ({"forward": (1.0, 2.0)}, "forward"),
        ({"backward": ()}, "backward"),
        ({"forward": (-1.0,)}, "forward"),
        ({"forward": (0.0,), "backward": (0.0,)}, "above 0"),
        ({"latency": -1.0}, "latency"),
        ({"num_batches": 2}, "num_batches=2"),
        ({"drawn_batches": 0.0}, "drawn-batches"),
    ],
)
def test_the_command_refuses(settings, word):
    with pytest.raises(ValueError, match=word):
        timeline_command(TimelineCommand(**settings), Console(file=io.StringIO()))
