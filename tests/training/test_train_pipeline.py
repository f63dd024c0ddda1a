"""`torchrun -m onelag train` against `onelag train`: the same configuration, trained by real processes, gives the same run."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

FLAGS = (
    "--schedule.steps 12 --evaluation.every 6 --evaluation.tokens 2048 --evaluation.final-tokens 4096 --data.batch-size 8 --optimizer.name muon "
    "--optimizer.learning-rate 0.01 --optimizer.fallback-learning-rate 0.004 --delay.correction error-feedback --delay.form lookahead"
).split()
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def torchrun(processes, *flags):
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    return subprocess.Popen(
        [sys.executable, *launch, "-m", "onelag", "train", *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )


def finish(process, limit=150):
    try:
        out, errors = process.communicate(timeout=limit)
    finally:
        process.terminate()  # torchrun ends its children
    return process.returncode, out, errors


def outcome(folder):
    return json.loads((folder / "outcome.json").read_text())


@pytest.fixture(scope="module")
def simulation(tmp_path_factory):
    folder = tmp_path_factory.mktemp("simulation")
    command = [sys.executable, "-m", "onelag", "train", *FLAGS, "--delay.steps", "1", "--data.accumulate", "4", "--run-dir", str(folder)]
    subprocess.run(command, check=True, capture_output=True, env=ENVIRONMENT, timeout=120)
    return outcome(folder)["curve"]


def close(curve, other):
    for name in ("validation_loss", "validation_loss_base", "train_loss", "gradient_norm"):
        assert curve[name] == pytest.approx(other[name], rel=2e-5), name
    assert curve["step"] == other["step"] and curve["tokens"] == other["tokens"]
    assert curve["learning_rate"] == other["learning_rate"]


def test_two_stages_equal_the_simulation_and_are_traced(simulation, tmp_path):
    """Loss at x and y, gradient norm and learning rate at every validation are the simulation's; every F and B is in the trace."""
    longer = ["--pipeline.microbatches", "4", "--run-dir", str(tmp_path), "--pipeline.trace", str(tmp_path / "trace.json")]
    code, out, errors = finish(torchrun(2, *FLAGS, *longer))
    assert code == 0, errors[-3000:]
    close(outcome(tmp_path)["curve"], simulation)
    assert out.count("bubble") == 12 and "validation loss" in out
    events = [event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if event["ph"] == "X"]
    assert sum(name.startswith("F") for name in events) == sum(name.startswith("B") for name in events) == 2 * 12 * 4


def test_sigterm_drains_and_checkpoints_with_exit_0(tmp_path):
    slow = [flag if flag != "12" else "400" for flag in FLAGS]
    process = torchrun(2, *slow, "--pipeline.microbatches", "4", "--run-dir", str(tmp_path))
    try:
        deadline = time.monotonic() + 90
        while not (tmp_path / "log.jsonl").exists() or len((tmp_path / "log.jsonl").read_text().splitlines()) < 8:
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1][-3000:]
            time.sleep(0.1)
        for child in subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split():
            os.kill(int(child), signal.SIGTERM)
    finally:
        code, out, errors = finish(process)
    assert code == 0 and "drained and checkpointed" in out, errors[-3000:]
    steps = [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    newest = max(int(path.name.split("-")[1]) for path in (tmp_path / "checkpoints").glob("step-*"))
    assert 6 <= newest == max(steps) < 400


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--pipeline.microbatches", "3"], "data.batch_size=8"),
        (["--delay.steps", "2", "--pipeline.microbatches", "4"], "the delay is real"),
        (["--pipeline.replicas", "3", "--pipeline.microbatches", "1"], "data.batch_size=8"),
        (["--delay.correction", "delay-compensation", "--pipeline.microbatches", "4"], "simulation only"),
    ],
)
def test_what_does_not_fit_is_one_line_before_any_communication(flags, words, tmp_path):
    """One process stands for all: the check comes before the processes meet."""
    environment = {**ENVIRONMENT, "RANK": "0", "WORLD_SIZE": "2"}
    base = [flag for flag in FLAGS if flag not in ("--delay.correction", "error-feedback")] if "--delay.correction" in flags else FLAGS
    command = [sys.executable, "-m", "onelag", "train", *base, *flags, "--run-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 2 and words in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr
