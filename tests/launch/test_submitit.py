"""submitit for real, on this machine: environment, failure, preemption and requeueing of a task."""

import json
import os
import signal
import sys
import time

import pytest

submitit = pytest.importorskip("submitit")

from onelag.configs import get_config  # noqa: E402
from onelag.launch.command import LaunchCommand  # noqa: E402
from onelag.launch.scripts import Cluster, Run  # noqa: E402
from onelag.launch.tasks import Task, submitit_parameters  # noqa: E402

RECORD = """
import json, os, sys
keys = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NCCL_DEBUG")
open(sys.argv[1] + os.environ["RANK"], "w").write(json.dumps({key: os.environ[key] for key in keys}))
"""


def executor(folder):
    made = submitit.AutoExecutor(folder=folder, cluster="local")
    made.update_parameters(timeout_min=2, tasks_per_node=2)
    return made


def test_every_task_is_a_rank(tmp_path):
    job = executor(tmp_path / "jobs").submit(Task(["-c", RECORD, str(tmp_path / "rank")]))
    job.results()
    said = [json.loads((tmp_path / f"rank{rank}").read_text()) for rank in (0, 1)]
    assert [(s["RANK"], s["LOCAL_RANK"], s["WORLD_SIZE"]) for s in said] == [("0", "0", "2"), ("1", "1", "2")]
    assert said[0]["MASTER_PORT"] == said[1]["MASTER_PORT"] and 20000 <= int(said[0]["MASTER_PORT"]) < 40000
    assert said[0]["MASTER_ADDR"] == said[1]["MASTER_ADDR"] and said[0]["NCCL_DEBUG"] == "WARN"


def test_a_failing_child_fails_the_job(tmp_path):
    job = executor(tmp_path / "jobs").submit(Task(["-c", "raise SystemExit(3)"]))
    with pytest.raises(submitit.core.utils.FailedJobError, match="exit status 3"):
        job.results()


DRAINS = """
import signal, sys, time
def drain(number, frame):
    time.sleep(0.2)
    open(sys.argv[1], "a").write("drained\\n")
    raise SystemExit(0)
signal.signal(signal.SIGTERM, drain)
open(sys.argv[1], "a").write("started\\n")
time.sleep(30)
"""


def start(task, tmp_path):
    """The task in this process, without submitit around it: its child, as `__call__` makes it."""
    import subprocess

    from onelag.launch.tasks import _ignore_preemption

    task._child = subprocess.Popen([sys.executable, *task.command], preexec_fn=_ignore_preemption)
    deadline = time.monotonic() + 20
    while not (tmp_path / "log").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_preemption_lets_the_child_drain_and_queues_the_same_again(tmp_path):
    task = Task(["-c", DRAINS, str(tmp_path / "log")], grace=10)
    start(task, tmp_path)
    os.kill(task._child.pid, signal.SIGUSR2)  # what Slurm sends to every process of the step
    again = task.checkpoint()
    assert (tmp_path / "log").read_text() == "started\ndrained\n" and task._child.returncode == 0
    assert again.function.command == task.command and again.function.grace == 10


def test_a_child_that_does_not_end_is_killed(tmp_path):
    stubborn = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open(sys.argv[1], 'w').close(); time.sleep(30)"
    task = Task(["-c", stubborn, str(tmp_path / "log")], grace=0.2)
    start(task, tmp_path)
    task.checkpoint()
    assert task._child.returncode == -signal.SIGKILL


def test_parameters_and_dry_run(tmp_path, capsys):
    run = Run(get_config("moe-10b"), tmp_path)
    parameters = submitit_parameters(run, Cluster(partition="gpu", hours=2))
    assert (parameters["nodes"], parameters["tasks_per_node"], parameters["gpus_per_node"], parameters["timeout_min"]) == (8, 8, 8, 120)
    assert parameters["slurm_partition"] == "gpu" and "slurm_account" not in parameters
    known = submitit.AutoExecutor(folder=tmp_path, cluster="debug")
    known.update_parameters(**parameters)  # raises for a name that submitit does not know
    LaunchCommand("moe-10b", launcher="submitit", dry_run=True, runs=tmp_path).run()
    out = capsys.readouterr().out
    assert '"slurm_signal_delay_s": 300' in out and "python -m onelag train --model moe-10b" in out
    with pytest.raises(ValueError, match="submitit finds no Slurm here"):
        LaunchCommand("moe-10b", launcher="submitit", runs=tmp_path).run()
