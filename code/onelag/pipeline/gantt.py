"""The picture of a pipeline, as in the papers: a row per stage, forwards blue, backwards green, updates orange, the micro-batch's number inside.

A weight version is a shade: F and B on an even version are light, on an odd one dark, and each update is marked with the version that it makes. So one
sees at a glance that a micro-batch goes forward and back on one version, and that two versions are alive. Works on predicted and measured spans.
"""

from collections.abc import Sequence

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from rich.text import Text

from onelag.pipeline.timeline import Span

# (even version, odd version); F and B differ in lightness in each pair, so that a grey print tells them apart.
COLOURS = {"F": ("#9ecae8", "#2f78b7"), "B": ("#c3e6b4", "#2e8b57"), "U": ("#f28e2b", "#f28e2b")}
_INK = ("#1a1a1a", "#ffffff")
Panel = tuple[str, Sequence[Span]]


def draw_gantt(panels: Sequence[Panel], unit: str = "", until: float | None = None, width: float = 7.0) -> Figure:
    """One panel under another on one time axis, e.g. predicted and measured.

    Args:
        panels: (title, spans); spans of kinds other than F, B, U are not drawn. Times begin at 0.
        unit: of the times, for the axis.
        until: cuts the picture there; None draws everything.
        width: inches.

    Raises:
        ValueError: no span to draw.
    """
    drawn = [(title, [s for s in spans if s.kind in COLOURS and (until is None or s.start < until)]) for title, spans in panels]
    if not all(spans for _, spans in drawn):
        raise ValueError(f"nothing to draw in {[title for title, spans in drawn if not spans]}: no F, B or U before {until}")
    stages = [1 + max(span.stage for span in spans) for _, spans in drawn]
    end = until or max(span.end for _, spans in drawn for span in spans)
    # A small font of its own, not the user's rcParams: the numbers have to fit into the boxes.
    with mpl.rc_context({"font.size": 7, "font.family": "DejaVu Sans", "axes.titlesize": 8}):
        figure = Figure(figsize=(width, 0.55 + sum(0.33 + 0.3 * n for n in stages)), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(len(drawn), 1, squeeze=False, sharex=True, gridspec_kw={"height_ratios": stages})[:, 0]
        for axis, (title, spans), rows in zip(axes, drawn, stages):
            _panel(axis, title, spans, rows, end, width)
        axes[-1].set_xlabel(f"time ({unit})" if unit else "time")
        names = {"F": "forward", "B": "backward"}
        handles = [
            Patch(facecolor=COLOURS[k][v], label=f"{name}, {'odd' if v else 'even'} version") for k, name in names.items() for v in (0, 1)
        ]
        handles.append(Patch(facecolor=COLOURS["U"][0], label="update (makes the version on it)"))
        figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=6, handlelength=1.2)
    return figure


def _panel(axis, title: str, spans: Sequence[Span], rows: int, end: float, width: float) -> None:
    boxes, colours = [], []
    character = 0.06 * end / width  # about how wide a digit is, in the unit of time
    for span in sorted(spans, key=lambda span: span.kind == "U"):  # updates over their neighbours
        length = min(span.end, end) - span.start
        shade = span.version % 2
        if span.kind != "U":
            boxes.append(Rectangle((span.start, span.stage - 0.37), length, 0.74))
            colours.append(COLOURS[span.kind][shade])
            label = str(span.index)
            if length > character * len(label):
                axis.text(
                    span.start + length / 2, span.stage, label, ha="center", va="center", fontsize=5.5, color=_INK[shade], clip_on=True
                )
            continue
        # A short update is a mark between two boxes, not a box that nobody can see.
        shown = max(length, 0.3 * character)
        boxes.append(Rectangle((span.start - (shown - length) / 2, span.stage - 0.37), shown, 0.74))
        colours.append(COLOURS["U"][0])
        fits = length > 2.5 * character
        place = (span.start + length / 2, span.stage if fits else span.stage - 0.39)
        axis.text(
            *place,
            f"W{span.version}",
            ha="center",
            va="center" if fits else "bottom",
            fontsize=4.5,
            color=_INK[0] if fits else "#b35900",
            clip_on=True,
        )
    axis.add_collection(PatchCollection(boxes, facecolors=colours, edgecolors="white", linewidths=0.3))
    axis.set(xlim=(0, end), ylim=(rows - 0.45, -0.75), yticks=range(rows), yticklabels=[f"stage {s}" for s in range(rows)])
    axis.set_title(title, loc="left", pad=3)
    axis.grid(False)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)


def starting_at(spans: Sequence[Span], microbatch: int) -> list[Span]:
    """The spans from the moment on when stage 0 starts forward `microbatch`, which becomes time 0; one under way then is cut."""
    zero = next((s.start for s in spans if (s.stage, s.kind, s.index) == (0, "F", microbatch)), None)
    if zero is None:
        raise ValueError(f"micro-batch {microbatch} has no forward on stage 0 among these spans")
    return [s._replace(start=max(0.0, s.start - zero), end=s.end - zero) for s in spans if s.end > zero or s.start >= zero]


def text_gantt(spans: Sequence[Span], columns: int = 100, until: float | None = None) -> list[Text]:
    """The same as coloured lines for a terminal; without colour F and B still read as numbers and letters.

    A column shows what runs in the middle of its time: the last digit of a forward's micro-batch, a letter a … j for a backward's, U, or · for nothing.
    """
    shown = [span for span in spans if span.kind in COLOURS]
    if not shown or columns < 1:
        raise ValueError("nothing to draw: no F, B or U, or columns < 1")
    end = until or max(span.end for span in shown)
    lines = []
    for stage in range(1 + max(span.stage for span in shown)):
        line = Text(f"{stage:>3} ")
        row = sorted((s for s in shown if s.stage == stage and s.end > s.start), key=lambda s: s.start)
        place = 0
        for column in range(columns):
            time = (column + 0.5) * end / columns
            while place < len(row) and row[place].end <= time:
                place += 1
            span = row[place] if place < len(row) and row[place].start <= time else None
            if span is None:
                line.append("·", style="dim")
                continue
            letter = {"F": str(span.index % 10), "B": "abcdefghij"[span.index % 10], "U": "U"}[span.kind]
            line.append(letter, style=f"{_INK[span.version % 2 if span.kind != 'U' else 0]} on {COLOURS[span.kind][span.version % 2]}")
        lines.append(line)
    return lines
