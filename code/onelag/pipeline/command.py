"""`onelag timeline`: what a pipeline costs before there is one. Prints step time, bubble, memory and slack (how long after a batch its weights are needed), and draws the Gantt picture."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from onelag.pipeline.order import FLUSHING, Depth, Schedule
from onelag.pipeline.timeline import Costs, Timeline, UpdatePlace, simulate


@dataclass(frozen=True)
class TimelineCommand:
    """Predict step time, bubble, memory and slack of a pipeline schedule, and draw it. Trains nothing."""

    num_stages: int = 4
    """stages of the pipeline"""
    num_microbatches: int = 8
    """micro-batches per batch"""
    schedule: Schedule = "2bw"
    """2bw, pipedream, 1f1b, gpipe or paci"""
    depth: Depth = "paper"
    """micro-batches in flight: paper (p−s), eager (2(p−s)−1, hides a slow link), or how many more than p on the first stage"""
    forward: tuple[float, ...] = (1.0,)
    """time of a forward: one number, or one per stage"""
    backward: tuple[float, ...] = (2.0,)
    """time of a backward: one number, or one per stage"""
    latency: float = 0.0
    """time from the end of a forward or backward until its tensor is on the next stage"""
    update_time: float = 0.0
    """time of an optimizer step"""
    update: UpdatePlace = "slack"
    """where it runs: slack (where its weights are first needed), inline (after the last backward), stream (beside the computation)"""
    agreement: float | None = None
    """every update waits for all stages and then this long (global gradient clipping)"""
    unit: str = ""
    """name of the time unit, for the picture, e.g. ms"""
    num_batches: int = 16
    """batches in the prediction"""
    drawn_batches: float = 3.5
    """batches in the picture"""
    against: Schedule | Literal["none"] = "1f1b"
    """a second schedule, for comparison"""
    output: Path | None = None
    """file for the picture (.png, .pdf, .svg); none draws in the terminal alone"""

    def run(self) -> None:
        timeline_command(self, Console())


def timeline_command(settings: TimelineCommand, console: Console) -> list[Timeline]:
    """Runs the model for the schedule and the one it is compared with, prints both, draws both."""
    for name in ("forward", "backward"):
        if not getattr(settings, name) or min(getattr(settings, name)) < 0:
            raise ValueError(f"{name}={getattr(settings, name)}: give one number, or one per stage, none below 0")
    if min(settings.latency, settings.update_time, settings.agreement or 0.0) < 0:
        raise ValueError("latency, update-time and agreement must not be below 0")
    if settings.drawn_batches <= 0 or max(*settings.forward, *settings.backward) <= 0:
        raise ValueError("drawn-batches and the time of a forward or backward must be above 0")
    costs = Costs(_one_or_all(settings.forward), _one_or_all(settings.backward), settings.latency, settings.update_time, settings.agreement)
    schedules = [settings.schedule] + [settings.against] * (settings.against not in ("none", settings.schedule))
    lines = [
        simulate(settings.num_stages, settings.num_microbatches, costs, settings.num_batches, schedule, settings.depth, settings.update)
        for schedule in schedules
    ]
    until = settings.drawn_batches * lines[0].step_time
    for line in lines:
        _tell(line, settings.unit, console)
        _show(line, until, console)
    if len(lines) == 2:
        console.print(f"{schedules[0]} is {lines[1].step_time / lines[0].step_time:.2f} times as fast as {schedules[1]}")
    if settings.output is not None:
        from onelag.pipeline.gantt import draw_gantt

        panels = [(f"{_title(line)}: bubble {line.bubble:.1%}", [span for row in line.spans for span in row]) for line in lines]
        settings.output.parent.mkdir(parents=True, exist_ok=True)
        draw_gantt(panels, settings.unit, until).savefig(settings.output, dpi=200)
        console.print(f"picture: {settings.output}")
    return lines


def _one_or_all(values: tuple[float, ...]) -> float | tuple[float, ...]:
    return values[0] if len(values) == 1 else values


def _title(line: Timeline) -> str:
    depth = "" if line.schedule in FLUSHING else f", depth {line.depth}"
    return f"{line.schedule}, {line.num_stages} stages, {line.num_microbatches} micro-batches{depth}"


def _tell(line: Timeline, unit: str, console: Console) -> None:
    console.print(f"\n[bold]{_title(line)}[/bold]")
    console.print(
        f"step {line.step_time:g} {unit}".rstrip()
        + f", bubble {line.bubble:.1%} ({line.run_bubble:.1%} with the ramps of {line.num_batches} batches)"
    )
    table = Table("stage", "in flight", "weight versions", "W(t+1) needed after", box=None, header_style="dim", pad_edge=False)
    for stage in range(line.num_stages):
        memory = line.memory(stage)
        table.add_row(str(stage), str(memory.microbatches), str(memory.versions), f"{line.slack(stage):g} {unit}".rstrip())
    console.print(table)


def _show(line: Timeline, until: float, console: Console) -> None:
    from onelag.pipeline.gantt import text_gantt

    for text in text_gantt([span for row in line.spans for span in row], min(160, max(20, console.width - 5)), until):
        console.print(text, no_wrap=True)
