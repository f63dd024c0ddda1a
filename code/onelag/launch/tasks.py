"""What submitit runs on every GPU: one rank as a child process, told to drain when the scheduler wants the node back."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onelag.launch.scripts import ENVIRONMENT, Cluster, Run, nodes_of


@dataclass
class Task:
    """submitit calls it once per task; `checkpoint` when the job is preempted or at its time limit.

    Args:
        command: after the Python interpreter, e.g. ["-m", "onelag", "train", …].
        grace: seconds that the child gets to drain before it is killed.
    """

    command: Sequence[str]
    grace: float = 300.0

    def __call__(self) -> None:
        """Raises CalledProcessError if the child fails."""
        import submitit

        job = submitit.JobEnvironment()
        rank = {"RANK": job.global_rank, "LOCAL_RANK": job.local_rank, "WORLD_SIZE": job.num_tasks}
        where = {"MASTER_ADDR": job.hostnames[0], "MASTER_PORT": _port(job.job_id)}
        self._child = subprocess.Popen(
            [sys.executable, *self.command],
            env={**os.environ, **ENVIRONMENT, **{key: str(value) for key, value in (rank | where).items()}},
            # Slurm signals every process of the step, not only this one: what submitit listens to would kill the child.
            preexec_fn=_ignore_preemption,
        )
        code = self._child.wait()
        if code:
            raise subprocess.CalledProcessError(code, self._child.args)

    def checkpoint(self) -> Any:
        """Called by submitit on the first rank only: its child drains, and so do all others (the ranks agree on stopping). Then the job is queued again."""
        import submitit

        self._child.send_signal(signal.SIGTERM)
        try:
            self._child.wait(self.grace)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        return submitit.helpers.DelayedSubmission(Task(self.command, self.grace))


def _ignore_preemption() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def _port(job_id: str) -> int:
    """The same on every rank of a job, another for the next job."""
    return 20000 + int("".join(c for c in job_id if c.isdigit()) or 0) % 20000


def submitit_parameters(run: Run, cluster: Cluster) -> dict[str, Any]:
    """For AutoExecutor.update_parameters."""
    nodes, gpus = nodes_of(run.config)
    parameters = {
        "name": run.config.name,
        "nodes": nodes,
        "tasks_per_node": gpus,
        "gpus_per_node": gpus,
        "cpus_per_task": cluster.cpus_per_gpu,
        "timeout_min": round(cluster.hours * 60),
        "slurm_signal_delay_s": cluster.grace,
        "slurm_setup": list(cluster.setup),
    }
    parameters |= {"slurm_partition": cluster.partition} if cluster.partition else {}
    parameters |= {"slurm_account": cluster.account} if cluster.account else {}
    return parameters


def submit(runs: Sequence[Run], cluster: Cluster, folder: Path) -> list[str]:
    """Submits one job per run; returns their ids. Raises ValueError without Slurm, or without the package submitit."""
    try:
        import submitit
    except ImportError as error:
        raise ValueError('--launcher submitit needs the package submitit: pip install "onelag[cluster]"') from error
    try:
        executor = submitit.AutoExecutor(folder=folder, cluster="slurm", slurm_max_num_timeout=1000)
    except RuntimeError as error:
        raise ValueError(f"submitit finds no Slurm here ({error}): run this where sbatch exists, or use --dry-run") from error
    ids = []
    for run in runs:
        executor.update_parameters(**submitit_parameters(run, cluster))
        ids.append(executor.submit(Task(run.command, cluster.grace)).job_id)
    return ids
