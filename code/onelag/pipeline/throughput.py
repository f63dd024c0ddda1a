"""From a measured run to other sizes: costs out of a trace, step times and bubbles for p = 2 … 64 out of the timeline, and their picture."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import fmean, median

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from onelag.pipeline.order import Depth, Schedule
from onelag.pipeline.timeline import Costs, simulate
from onelag.pipeline.trace import Lane, Recorded


def calibrate(lanes: Iterable[Lane], first_microbatch: int = 0) -> Costs:
    """The costs that a traced run had, per stage, in seconds; from `first_microbatch` on, so that a warm-up does not count.

    Medians of F, B and U. The engine's own time between two actions, where nothing was waited for, is added to both. The latency is what passes from the
    end of an action to the start of its successor on the next stage where that one was already waiting for it.

    Raises:
        ValueError: a stage without a complete F and B.
    """
    of_stage = {lane.stage: lane for lane in sorted(lanes, key=lambda lane: -lane.rank)}
    stages = range(len(of_stage))
    if sorted(of_stage) != list(stages):
        raise ValueError(f"the trace has stages {sorted(of_stage)}: one lane per stage is needed")
    spans = {(s, a.kind, a.number): a for s in stages for a in of_stage[s].spans}
    times = {
        (s, kind): [_length(a) for a in of_stage[s].spans if a.kind == kind and _counts(a, first_microbatch)]
        for s in stages
        for kind in "FBU"
    }
    for s in stages:
        if not times[s, "F"] or not times[s, "B"]:
            raise ValueError(f"the trace has no forward or backward on stage {s} from micro-batch {first_microbatch} on")
    waits, gaps = [], []
    for s in stages:
        computed = [a for a in of_stage[s].spans if a.kind in "FBU"]
        for before, after in pairwise(computed):
            if after.kind == "U" or before.kind == "U" or not _counts(after, first_microbatch):
                continue
            source = spans.get((s - 1, "F", after.number) if after.kind == "F" else (s + 1, "B", after.number))
            if source is not None and source.end > before.end:
                waits.append((after.start - source.end) / 1e9)
            elif source is None or after.start - before.end < _length(after) * 1e9:
                gaps.append((after.start - before.end) / 1e9)
    overhead = max(0.0, median(gaps)) if gaps else 0.0
    latency = max(0.0, median(waits) - overhead) if waits else 0.0
    each = {kind: tuple(median(times[s, kind]) if times[s, kind] else 0.0 for s in stages) for kind in "FBU"}
    return Costs(tuple(t + overhead for t in each["F"]), tuple(t + overhead for t in each["B"]), latency, each["U"])


def _length(span: Recorded) -> float:
    return (span.end - span.start) / 1e9


def _counts(span: Recorded, first_microbatch: int) -> bool:
    return span.kind == "U" or span.number >= first_microbatch


def even(costs: Costs) -> Costs:
    """The same with every stage's time the mean over stages, so that it can be used for another number of them."""

    def mean(value: float | tuple[float, ...]) -> float:
        return fmean(value) if isinstance(value, tuple) else value

    return replace(costs, forward=mean(costs.forward), backward=mean(costs.backward), update=mean(costs.update))


@dataclass(frozen=True)
class Prediction:
    """One size of pipeline; times in the unit of the costs. `rate` is micro-batches per unit of time."""

    schedule: str
    depth: Depth
    num_stages: int
    num_microbatches: int
    step_time: float
    bubble: float
    rate: float

    def as_dict(self) -> dict:
        return asdict(self)


def predict(
    costs: Costs, num_stages: Sequence[int], microbatches_per_stage: int = 1, schedule: Schedule = "2bw", depth: Depth = "paper"
) -> list[Prediction]:
    """Every stage has the same costs at every size: the model grows with the pipeline. m = microbatches_per_stage · p."""
    rows = []
    for p in num_stages:
        m = microbatches_per_stage * p
        line = simulate(p, m, costs, 6, schedule, depth)
        rows.append(Prediction(schedule, depth, p, m, line.step_time, line.bubble, m / line.step_time))
    return rows


@dataclass(frozen=True)
class Curve:
    """Predictions for several p, and how they are drawn."""

    label: str
    predictions: tuple[Prediction, ...]


@dataclass(frozen=True)
class Measured:
    """A measured point; `curve` is the label of the curve that it should lie on."""

    curve: str
    num_stages: int
    rate: float


_LOOKS = (
    ("#1f4e8c", "-", "o"),
    ("#5b9bd5", "--", "s"),
    ("#b33c3c", "-", "^"),
    ("#e08a8a", "--", "v"),
    ("#555555", ":", "D"),
    ("#999999", "-.", "P"),
)


def draw_throughput(curves: Sequence[Curve], measured: Sequence[Measured], ideal_rate: float, unit: str = "s", note: str = "") -> Figure:
    """Rate and bubble, 1 − rate/ideal_rate, against the number of stages: lines are predicted, large open markers measured.

    Args:
        ideal_rate: micro-batches per unit of time that a stage could compute if it never waited.
        note: below the axes: where the costs come from.
    """
    with mpl.rc_context(
        {"font.size": 7, "font.family": "DejaVu Sans", "axes.titlesize": 8, "axes.spines.top": False, "axes.spines.right": False}
    ):
        figure = Figure(figsize=(7.0, 2.7), layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2)
        for curve, (colour, line, marker) in zip(curves, _LOOKS):
            stages = [row.num_stages for row in curve.predictions]
            points = [point for point in measured if point.curve == curve.label]
            for axis, value in ((left, lambda rate: rate), (right, lambda rate: 1 - rate / ideal_rate)):
                shown, seen = [value(row.rate) for row in curve.predictions], [value(point.rate) for point in points]
                axis.plot(stages, shown, line, color=colour, marker=marker, markersize=2.5, linewidth=1.2, label=curve.label)
                axis.plot([p.num_stages for p in points], seen, marker, color=colour, markersize=7, fillstyle="none", linewidth=0)
        left.axhline(ideal_rate, color="0.7", linewidth=0.7, zorder=0)
        left.text(2, ideal_rate, "no bubble", fontsize=6, color="0.45", va="bottom")
        left.set(ylabel=f"micro-batches per {unit}", ylim=(0, 1.12 * ideal_rate), title="throughput at equal time per stage")
        right.set(ylabel="part of the time lost", ylim=(-0.02, None), title="bubble")
        for axis in (left, right):
            axis.set_xscale("log", base=2)
            ticks = sorted({row.num_stages for curve in curves for row in curve.predictions})
            axis.set_xticks(ticks, [str(p) for p in ticks])
            axis.set_xlabel("stages p")
        handles, labels = left.get_legend_handles_labels()
        handles.append(mpl.lines.Line2D([], [], color="0.3", marker="o", markersize=7, fillstyle="none", linewidth=0))
        figure.legend(handles, [*labels, "measured"], loc="outside lower center", ncols=4, frameon=False, fontsize=6.5)
        if note:
            figure.suptitle(note, fontsize=6, color="0.35")
    return figure
