"""Runs many configurations, a few at a time, each in its own process and thread; reuses every result that is already there.

Ctrl-C (or SIGTERM) checkpoints the runs under way; the same command continues them. A worker that dies is reported by run, and the rest goes on.
"""

import multiprocessing
import os
import queue
import signal
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from onelag.data import load_source
from onelag.experiments.provenance import provenance
from onelag.report.store import Result, find_result, write_result
from onelag.training.config import TrainConfig
from onelag.training.fingerprint import resolved, run_identity


@dataclass(frozen=True)
class Job:
    """One run that is wanted: `label` is for people."""

    label: str
    config: TrainConfig


class RunsFailed(RuntimeError):
    """Some runs ended with an error; the message names each and its cause in one line."""


def run_all(
    jobs: Sequence[Job], experiment: str, tier: str, workers: int, results: Path, runs: Path, console: Console | None = None
) -> list[Result]:
    """The results of `jobs`, in their order; those that are missing are computed, `workers` at a time.

    Args:
        jobs: what is wanted; equal configurations are computed once.
        experiment, tier: where new results are filed: results/<tier>/<experiment>/<run id>.json.
        workers: processes, one thread each.
        results, runs: the folders of result files and of checkpoints and logs.

    Raises:
        KeyboardInterrupt: after the runs under way have checkpointed.
        RunsFailed: after everything else is done.
    """
    console = console or Console()
    wanted = {}
    for job in jobs:
        wanted.setdefault(_run_id(job.config), job)
    found = {run_id: find_result(results / tier, run_id) for run_id in wanted}
    missing = [(run_id, job) for run_id, job in wanted.items() if found[run_id] is None]
    if missing:
        console.print(f"{experiment}: {len(wanted) - len(missing)} of {len(wanted)} runs are there, computing {len(missing)}")
        _compute(missing, experiment, tier, min(workers, len(missing)), results, runs, console)
        found |= {run_id: find_result(results / tier, run_id) for run_id, _ in missing}
    return [found[_run_id(job.config)] for job in jobs]


def _run_id(config: TrainConfig) -> str:
    source = load_source(config.data.corpus, config.data.tokenizer)
    return run_identity(config, source.corpus_sha256, source.tokenizer_sha256)


def _compute(missing, experiment, tier, workers, results, runs, console) -> None:
    context = multiprocessing.get_context("spawn")
    tasks, news = context.Queue(), context.Queue()
    for run_id, job in missing:
        tasks.put((run_id, job))
    for _ in range(workers):
        tasks.put(None)
    threads_before = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")  # read by the children when they import torch
    processes = [
        context.Process(target=_work, args=(tasks, news, experiment, tier, results, runs), daemon=True) for _ in range(workers)
    ]
    for process in processes:
        process.start()
    for name, value in threads_before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})
    failures, running, finished = {}, {}, set()
    total = sum(job.config.schedule.steps for _, job in missing)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    try:
        with _terminate_as_interrupt(), Progress(*columns, console=console, speed_estimate_period=300) as bars:
            whole = bars.add_task(f"{experiment} ({len(missing)} runs, in steps)", total=total)
            while len(finished) < len(missing):
                try:
                    kind, run_id, label, value = news.get(timeout=1.0)
                except queue.Empty:
                    if not any(process.is_alive() for process in processes) and news.empty():
                        break
                    continue
                if kind == "start":
                    running[run_id] = (bars.add_task(f"  {label}", total=value[1], completed=value[0]), label)
                    bars.advance(whole, value[0])
                elif kind == "step":
                    bars.advance(running[run_id][0], value)
                    bars.advance(whole, value)
                else:
                    bars.remove_task(running.pop(run_id)[0])
                    finished.add(run_id)
                    if kind == "failed":
                        failures[label] = value
                        console.print(f"  {label}: failed: {value}")
                    elif not console.is_terminal:
                        console.print(f"  [{len(finished)}/{len(missing)}] {label}: {value}")
    except KeyboardInterrupt:
        for process in processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGTERM)
        console.print("stopping: the runs under way write their checkpoints …")
        raise
    finally:
        for process in processes:
            process.join(timeout=60)
            if process.is_alive():
                process.kill()
    for run_id, job in missing:
        if run_id not in finished:
            failures[job.label] = "its process died (killed, out of memory, or it could not start)"
    if failures:
        raise RunsFailed("; ".join(f"{label}: {cause}" for label, cause in failures.items()) + " (the other results are kept; run again)")


def _work(tasks, news, experiment, tier, results, runs) -> None:
    """The life of a worker process."""
    import torch

    from onelag.training.loop import Interrupted, interruptible, train

    torch.set_num_threads(1)
    with interruptible() as stop:
        while not stop() and (task := tasks.get()) is not None:
            run_id, job = task
            news.put(("start", run_id, job.label, (0, job.config.schedule.steps)))
            seen = 0

            def report(progress):
                nonlocal seen
                if progress.step - seen >= 20 or progress.step == progress.steps:
                    news.put(("step", run_id, job.label, progress.step - seen))  # noqa: B023
                    seen = progress.step

            try:
                source = load_source(job.config.data.corpus, job.config.data.tokenizer)
                record = provenance(job.config, source)
                outcome = train(job.config, source, runs / tier / run_id, report, stop)
                record |= {"wall_seconds": outcome.wall_seconds, "tokens": outcome.tokens}
                write_result(
                    results / tier / experiment,
                    Result(
                        run_id=run_id,
                        experiment=experiment,
                        tier=tier,
                        config=resolved(job.config),
                        metrics=outcome.metrics(),
                        provenance=record,
                    ),
                )
                (runs / tier / run_id / "checkpoint.pt").unlink(missing_ok=True)
                final = outcome.final["validation_loss"]
                verdict = f"diverged at step {outcome.diverged_at}" if final is None else f"validation loss {final:.4f}"
                news.put(("done", run_id, job.label, f"{verdict}, {outcome.wall_seconds:.0f} s"))
            except Interrupted:
                break
            except Exception as error:
                (runs / tier / run_id).mkdir(parents=True, exist_ok=True)
                (runs / tier / run_id / "error.txt").write_text(traceback.format_exc(), encoding="utf-8")
                news.put(("failed", run_id, job.label, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"))


class _terminate_as_interrupt:
    """SIGTERM to the parent ends it as Ctrl-C does."""

    def __enter__(self):
        def interrupt(number, frame):
            raise KeyboardInterrupt

        self.before = signal.signal(signal.SIGTERM, interrupt)

    def __exit__(self, *error):
        signal.signal(signal.SIGTERM, self.before)
