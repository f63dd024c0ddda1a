"""The runner with real worker processes on tiny runs: order, cache, failures, interruption and resume, nothing left behind."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from onelag.experiments.runner import Job, RunsFailed, run_all
from onelag.models import DenseConfig
from onelag.report.store import list_results
from onelag.training.config import DataConfig, DelayConfig, EvaluationConfig, OptimizerConfig, ScheduleConfig, TrainConfig

TINY = TrainConfig(
    model=DenseConfig(num_layers=1, width=12, num_heads=2, num_kv_heads=1, ffn_width=16),
    data=DataConfig(sequence_length=16, batch_size=2),
    schedule=ScheduleConfig(steps=6),
    evaluation=EvaluationConfig(every=3, tokens=64, final_tokens=64),
)


def job(seed, **changes):
    return Job(f"seed {seed}", replace(TINY, seed=seed, **changes))


def run(jobs, folder, workers=2):
    return run_all(jobs, "table-1", "smoke", workers, folder / "results", folder / "runs", Console(file=open(os.devnull, "w")))


def test_results_come_in_order_and_a_second_call_computes_nothing(tmp_path):
    jobs = [job(2), job(0), job(1), job(0)]
    results = run(jobs, tmp_path)
    assert [r.config["seed"] for r in results] == [2, 0, 1, 0]
    files = sorted((tmp_path / "results" / "smoke" / "table-1").iterdir())
    assert [f.stem for f in files] == sorted({r.run_id for r in results})
    stamps = [f.stat().st_mtime_ns for f in files]
    again = run(jobs, tmp_path)
    assert [f.stat().st_mtime_ns for f in files] == stamps and [r.run_id for r in again] == [r.run_id for r in results]
    assert results[0].provenance["threads"] == 1 and results[0].provenance["tokens"] == 6 * 32
    assert not list((tmp_path / "runs").glob("**/checkpoint.pt"))
    files[0].write_text(files[0].read_text()[:80])  # a torn file is not trusted: its run is computed again
    assert run(jobs, tmp_path)[0].metrics == results[0].metrics
    assert len(list_results(tmp_path / "results" / "smoke")) == 3


def test_a_failing_run_is_named_and_the_others_are_kept(tmp_path):
    bad = job(7, optimizer=OptimizerConfig(settings={"nonsense": 1}))
    with pytest.raises((RunsFailed, ValueError), match="seed 7"):
        run([job(0), bad, job(1)], tmp_path)
    assert {r.config["seed"] for r in list_results(tmp_path / "results" / "smoke")} == {0, 1}
    assert "nonsense" in next((tmp_path / "runs").glob("smoke/*/error.txt")).read_text()


def test_diverged_runs_are_results(tmp_path):
    wild = job(0, optimizer=OptimizerConfig(name="sgd", learning_rate=1e30), clip_norm=0.0, delay=DelayConfig(steps=1))
    result = run([wild], tmp_path, workers=1)[0]
    assert result.diverged and result.metrics["final"]["validation_loss"] is None


SCRIPT = """
import os, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
import test_runner as t
if __name__ == "__main__":
    from dataclasses import replace
    long = replace(t.TINY, schedule=replace(t.TINY.schedule, steps=4000), evaluation=replace(t.TINY.evaluation, every=10))
    t.run([t.Job("long", replace(long, seed=s)) for s in (0, 1)], Path({folder!r}))
"""


def test_sigterm_checkpoints_and_leaves_no_process(tmp_path):
    """The parent alone gets the signal; both workers must write their checkpoints and be gone."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parent), folder=str(tmp_path)))
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 90
        while len(list((tmp_path / "runs").glob("smoke/*/log.jsonl"))) < 2 or not all(
            log.read_text() for log in (tmp_path / "runs").glob("smoke/*/log.jsonl")
        ):
            assert parent.poll() is None and time.monotonic() < deadline, parent.communicate()[1][-2000:]
            time.sleep(0.2)
        parent.send_signal(signal.SIGTERM)
        _, errors = parent.communicate(timeout=60)
    finally:
        parent.kill()
    assert parent.returncode != 0 and "KeyboardInterrupt" in errors
    assert len(list((tmp_path / "runs").glob("smoke/*/checkpoint.pt"))) == 2
    assert not multiprocessing.active_children()
    alive = subprocess.run(["pgrep", "-f", str(script)], capture_output=True, text=True).stdout.split()
    assert alive == []
