"""The real pipeline against torch's schedules: bubble, throughput, memory, and what the timeline predicts.   make bench-pipeline   (about 5 minutes)

Everything that is compared runs in the same processes, in turns; medians over the rounds. Stages that sleep show the schedule and nothing else (any number of
stages fits on two cores), real stages on two cores show what is left of it. Writes results/bench/bench-pipeline.json and the figures beside it.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

from pipeline_parts import BACKWARD, FORWARD, UPDATE, computing, memory, sleeping, traced
from rich.console import Console
from rich.table import Table
from world import in_processes

from onelag.experiments.provenance import machine
from onelag.pipeline.gantt import draw_gantt, starting_at
from onelag.pipeline.throughput import Curve, Measured, calibrate, draw_throughput, even, predict
from onelag.pipeline.timeline import simulate
from onelag.pipeline.trace import measured_spans, write_trace

OUT = Path(__file__).parents[2] / "results" / "bench"
SLEEPING = [(kind, p, m, update) for p in (2, 4) for m in (p, 2 * p) for kind in ("2bw", "1f1b", "gpipe") for update in (0.0,)]
SLEEPING += [("2bw", 4, 8, UPDATE), ("1f1b", 4, 8, UPDATE)]


PARTS = ("sleeping", "computing", "memory")


def measure(rounds: int, parts: Sequence[str], say: Callable[[str], None]) -> dict:
    found = {}
    if "sleeping" in parts:
        found["sleeping"] = {}
        for p in sorted({case[1] for case in SLEEPING}):
            say(f"sleeping stages, p={p}")
            times = in_processes(sleeping, p, [case for case in SLEEPING if case[1] == p], rounds)[-1]
            found["sleeping"] |= {case: median(of_rounds) for case, of_rounds in times.items()}
        say("a traced run, p=4")
        found["lanes"] = in_processes(traced, 4, 8, 6)[0]
    if "computing" in parts:
        say("computing stages, p=2")
        found["computing"] = in_processes(computing, 2, (2, 4), rounds)
    if "memory" in parts:
        say("memory, p=4")
        found["memory"] = {name: in_processes(memory, 4, 4, corrected) for name, corrected in (("plain", False), ("error-feedback", True))}
    return found


def sleeping_rows(slept: dict) -> list[tuple[str, float, str, bool | None]]:
    """(what, measured, goal, reached); without a goal, for comparison."""
    work = FORWARD + BACKWARD
    rows = []
    for m in (4, 8):
        period = {kind: slept[kind, 4, m, 0.0] for kind in ("2bw", "1f1b", "gpipe")}
        bubble = {kind: 1 - m * work / t for kind, t in period.items()}
        rows.append((f"sleeping, p=4, m={m}: bubble of 2BW", bubble["2bw"], "≤ 0.05", bubble["2bw"] <= 0.05))
        rows.append((f"sleeping, p=4, m={m}: bubble of torch's 1F1B", bubble["1f1b"], "≥ 0.27", bubble["1f1b"] >= 0.27))
        rows.append((f"sleeping, p=4, m={m}: bubble of torch's GPipe", bubble["gpipe"], "", None))
        part = period["1f1b"] / period["2bw"] / ((m + 3) / m)
        rows.append((f"sleeping, p=4, m={m}: speed-up over torch's 1F1B / (m+p−1)/m", part, "≥ 0.97", part >= 0.97))
    bubble = 1 - (8 * work + UPDATE) / slept["2bw", 4, 8, UPDATE]
    rows.append(("sleeping, p=4, m=8, update of 120 ms: bubble of 2BW", bubble, "≤ 0.08", bubble <= 0.08))
    rows.append(
        ("sleeping, p=4, m=8, update of 120 ms: bubble of torch's 1F1B", 1 - (8 * work + UPDATE) / slept["1f1b", 4, 8, UPDATE], "", None)
    )
    return rows


def computing_rows(computed: list) -> list[tuple]:
    rows, times = [], computed[-1][0]
    alone = {m: max(median(of_rank[0]["no messages", m]) for of_rank in computed) for m in (2, 4)}
    for m, goal in ((2, 1.42), (4, 1.22)):
        # Rounds in pairs: a machine whose speed drifts does not decide.
        ratio = median(a / b for a, b in zip(times["1f1b", m], times["2bw", m]))
        rows.append((f"computing, p=2, m={m}: throughput of 2BW / torch's 1F1B", ratio, f"≥ {goal}", ratio >= goal))
        ratio = alone[m] / median(times["2bw", m])
        rows.append((f"computing, p=2, m={m}: throughput of 2BW / without messages", ratio, "≥ 0.95", ratio >= 0.95))
    return rows


def memory_rows(remembered: dict) -> list[tuple]:
    rows = []
    for name, of_ranks in remembered.items():
        early, late = ([seen[step] for seen in of_ranks] for step in (3, 300))
        most = max(seen["weight_shaped"] for seen in late)
        rows.append((f"memory, {name}: live weight-shaped tensors per stage (2 versions, master, gradient)", most, "≤ 4", most <= 4))
        kept = max(seen["weights"] for seen in late)
        rows.append((f"memory, {name}: live weights per stage (2 versions, master)", kept, "= 3", kept == 3))
        flying = [seen["microbatches"] for seen in late]
        rows.append((f"memory, {name}: micro-batches in flight on stage 0, p=4", flying[0], "= 4", flying == [4, 3, 2, 1]))
        growth = max(b["bytes"] - a["bytes"] for a, b in zip(early, late))
        rows.append((f"memory, {name}: bytes of live tensors, batch 300 − batch 3", growth, "≤ 0", growth <= 0))
        process = max(b["peak_rss_kib"] / a["peak_rss_kib"] for a, b in zip(early, late))
        rows.append((f"memory, {name}: largest process size, batch 300 / batch 3", process, "≤ 1.05", process <= 1.05))
    return rows


def predictions(slept: dict, lanes: list) -> tuple[list[tuple], dict]:
    """Calibrated on the traced run at p=4, m=8; held against every other measured size, then p = 2 … 64."""
    costs = even(calibrate(lanes, first_microbatch=16))
    rows, errors = [], []
    for (kind, p, m, update), period in slept.items():
        if update:
            continue
        expected = simulate(p, m, costs, 8, kind).step_time
        errors.append(abs(expected / period - 1))
        rows.append((f"predicted / measured step, {kind}, p={p}, m={m}", expected / period, "0.9 … 1.1", errors[-1] <= 0.1))
    sizes = (2, 4, 8, 16, 32, 64)
    shapes = [
        ("2BW, m = p", "2bw", "paper", 1),
        ("2BW, eager, m = 2p", "2bw", "eager", 2),
        ("1F1B, m = p", "1f1b", "paper", 1),
        ("1F1B, m = 2p", "1f1b", "paper", 2),
    ]
    shapes += [("1F1B, m = 8p", "1f1b", "paper", 8)]
    curves = [Curve(label, tuple(predict(costs, sizes, factor, schedule, depth))) for label, schedule, depth, factor in shapes]
    measured = []
    for (kind, p, m, update), period in slept.items():
        label = {("2bw", 1): "2BW, m = p", ("1f1b", 1): "1F1B, m = p", ("1f1b", 2): "1F1B, m = 2p"}.get((kind, m // p))
        if label and not update:
            measured.append(Measured(label, p, m / period))
    note = f"lines: timeline calibrated on a traced run (p=4, m=8; t_F {1e3 * costs.forward:.1f} ms, t_B {1e3 * costs.backward:.1f} ms, latency {1e3 * costs.latency:.2f} ms)"
    figure = draw_throughput(curves, measured, 1 / (FORWARD + BACKWARD), note=note)
    _save(figure, "throughput")
    predicted = starting_at([s for row in simulate(4, 8, costs, 6).spans for s in row], 16)
    measured_part = starting_at(measured_spans(lanes), 16)
    _save(draw_gantt([("predicted, from micro-batch 16 on", predicted), ("measured", measured_part)], "s", until=0.9), "gantt")
    write_trace(OUT / "bench-pipeline-trace.json", lanes)
    content = {
        "costs": asdict(costs),
        "largest_error": max(errors),
        "curves": {c.label: [row.as_dict() for row in c.predictions] for c in curves},
    }
    content["measured"] = [asdict(point) for point in measured]
    return rows, content


def _save(figure, name: str) -> None:
    for kind, metadata in (("png", {"Software": None}), ("pdf", {"CreationDate": None, "Producer": None, "Creator": None})):
        figure.savefig(OUT / f"bench-pipeline-{name}.{kind}", dpi=200, metadata=metadata)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=3, help="how often everything takes its turn")
    arguments.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure; the result holds that alone")
    chosen = arguments.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    console, start, load = Console(), time.perf_counter(), os.getloadavg()[0]
    found = measure(chosen.rounds, chosen.parts, lambda what: console.print(f"[dim]{time.perf_counter() - start:4.0f} s  {what}[/dim]"))
    content = {
        "machine": machine(),
        "threads": 1,
        "rounds": chosen.rounds,
        "load_at_start": round(load, 2),
        "load_at_end": round(os.getloadavg()[0], 2),
    }
    rows = []
    if "sleeping" in found:
        more, content["throughput"] = predictions(found["sleeping"], found["lanes"])
        rows += sleeping_rows(found["sleeping"]) + more
        keys = ("schedule", "num_stages", "num_microbatches", "update_seconds")
        content["sleeping"] = [dict(zip(keys, case)) | {"step_seconds": t} for case, t in found["sleeping"].items()]
    if "computing" in found:
        rows += computing_rows(found["computing"])
        steps = found["computing"][-1][0]
        content["computing"] = [{"schedule": kind, "num_microbatches": m, "step_seconds": t} for (kind, m), t in steps.items()]
        content["computing_parameters"] = sum(of_rank[1] for of_rank in found["computing"])
    if "memory" in found:
        rows += memory_rows(found["memory"])
    table = Table("what", "measured", "goal", "reached")
    for what, value, goal, reached in rows:
        table.add_row(what, f"{value:.3f}" if isinstance(value, float) else str(value), goal, {True: "yes", False: "no", None: ""}[reached])
    console.print(table)
    if load > 0.5:
        console.print(
            f"[yellow]The machine was busy when this began (load {load:.1f}): the times above are worth less than on a quiet one.[/yellow]"
        )
    content["rows"] = [dict(zip(("what", "measured", "goal", "reached"), row)) for row in rows]
    (OUT / "bench-pipeline.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
