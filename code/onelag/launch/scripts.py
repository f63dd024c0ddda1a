"""Job scripts as text: a function of the runs and of the cluster's settings, nothing else."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from onelag.configs import ScaleConfig
from onelag.launch.arguments import train_arguments


@dataclass(frozen=True)
class Cluster:
    """What a cluster wants to know; the rest follows from the configuration."""

    partition: str | None = None
    """Slurm partition"""
    account: str | None = None
    """Slurm account"""
    hours: float = 24.0
    """time limit of one job; a run that needs longer requeues itself"""
    cpus_per_gpu: int = 8
    """CPU cores per GPU"""
    grace: int = 300
    """seconds before the limit (or a preemption) that the run gets to drain and write its checkpoint"""
    retries: int = 3
    """how often a job that failed after its first ten minutes (a lost node, not a wrong setting) is put back into the queue"""
    setup: tuple[str, ...] = ("source .venv/bin/activate",)
    """shell lines before the run: modules, environment, NCCL_SOCKET_IFNAME"""
    extra: tuple[str, ...] = ()
    """further #SBATCH options, e.g. --exclusive"""


@dataclass(frozen=True)
class Run:
    """One training run and where it lives."""

    config: ScaleConfig
    directory: Path

    @property
    def command(self) -> list[str]:
        """Without the launcher."""
        return ["-m", "onelag", *train_arguments(self.config, self.directory)]


def nodes_of(config: ScaleConfig) -> tuple[int, int]:
    """(nodes, GPUs on each).

    Raises:
        ValueError: a number of GPUs that does not fill its nodes.
    """
    if config.gpus <= config.gpus_per_node:
        return 1, config.gpus
    if config.gpus % config.gpus_per_node:
        raise ValueError(
            f"{config.name} takes stages={config.stages} × pipeline.replicas={config.pipeline.replicas} = {config.gpus} GPUs, "
            f"which do not fill nodes of gpus_per_node={config.gpus_per_node}: change one of the three"
        )
    return config.gpus // config.gpus_per_node, config.gpus_per_node


# Found necessary or useful, with reasons in code/launch/README.md. The first two are torch's defaults, written out because the run depends on them.
ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "TORCH_NCCL_ENABLE_MONITORING": "1",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_FR_BUFFER_SIZE": "2000",
    "NCCL_DEBUG": "WARN",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "OMP_NUM_THREADS": "1",
}


def torchrun_command(run: Run) -> list[str]:
    """On one machine, without Slurm.

    Raises:
        ValueError: it takes more than one node.
    """
    nodes, gpus = nodes_of(run.config)
    if nodes > 1:
        raise ValueError(f"{run.config.name} takes {nodes} nodes: use --launcher torchrun, srun or submitit on a Slurm cluster, or a smaller layout")
    return ["torchrun", "--standalone", "--nproc-per-node", str(gpus), *run.command]


def sbatch_script(runs: Sequence[Run], cluster: Cluster, launcher: str) -> str:
    """A script for sbatch: one run, or an array of runs of the same size.

    Five minutes (`grace`) before the time limit, or when the job is told to go, the trap passes SIGTERM on; the run drains its pipeline, writes a checkpoint
    and ends with 0; the script puts the job back into the queue unless the run's outcome.json says that it is finished. The next start finds the
    checkpoint by itself.

    Args:
        launcher: "torchrun" (one task per node, which starts one process per GPU) or "srun" (one task per GPU).

    Raises:
        ValueError: no run, runs of different sizes, or GPUs that do not fill their nodes.
    """
    if not runs:
        raise ValueError("there is no run to launch")
    sizes = {nodes_of(run.config) for run in runs}
    if len(sizes) > 1:
        raise ValueError("the runs of one array must take equally many GPUs")
    ((nodes, gpus),) = sizes
    name = runs[0].config.name
    tasks = 1 if launcher == "torchrun" else gpus
    options = [f"--job-name={name}", f"--nodes={nodes}", f"--ntasks-per-node={tasks}", f"--gpus-per-node={gpus}"]
    options += [f"--cpus-per-task={cluster.cpus_per_gpu * gpus // tasks}", f"--time={_time(cluster.hours)}", f"--signal=B:USR1@{cluster.grace}"]
    options += ["--requeue", "--open-mode=append", f"--output={runs[0].directory.parent}/slurm-%x-%A{'_%a' if len(runs) > 1 else ''}.out"]
    options += [f"--partition={cluster.partition}"] if cluster.partition else []
    options += [f"--account={cluster.account}"] if cluster.account else []
    options += [f"--array=0-{len(runs) - 1}"] if len(runs) > 1 else []
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in [*options, *cluster.extra]), *cluster.setup, "set -u", ""]
    lines += [f"export {key}={value}" for key, value in ENVIRONMENT.items()]
    lines += [f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={max(cluster.grace - 60, 30)}  # torchrun kills what is not gone by then"] if launcher == "torchrun" else []
    lines += ['export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)', "export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))", ""]
    commands = [" \\\n    ".join(_wrapped(run.command)) for run in runs]
    if len(runs) == 1:
        lines += [f"run_dir={shlex.quote(str(runs[0].directory))}", f"command=({commands[0]})"]
    else:
        lines += ['case "$SLURM_ARRAY_TASK_ID" in']
        lines += [f"{number}) run_dir={shlex.quote(str(run.directory))}\n   command=({text}) ;;" for number, (run, text) in enumerate(zip(runs, commands))]
        lines += ["esac"]
    lines += ["", _body(launcher, gpus, cluster.retries)]
    return "\n".join(lines)


def _body(launcher: str, gpus: int, retries: int) -> str:
    if launcher == "torchrun":
        start = (
            f'srun torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node {gpus} --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" \\\n'
            '    --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT" "${command[@]}" &'
        )
    else:
        start = (
            "srun bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS exec python \"$@\"' onelag \"${command[@]}\" &"
        )
    return f"""asked=
stop() {{
    asked=yes
    echo "$(date): told to stop; the run drains and writes a checkpoint"
    kill -TERM "$child"
}}
trap stop USR1 TERM

{start}
child=$!
wait "$child"
code=$?
while kill -0 "$child" 2>/dev/null; do # a signal ends the wait, not the run
    wait "$child"
    code=$?
done

if [ -e "$run_dir/outcome.json" ]; then
    exit 0
fi
if [ -n "$asked" ] || {{ [ "$code" -ne 0 ] && [ "$SECONDS" -gt 600 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {retries} ]; }}; then
    echo "$(date): back into the queue (exit code $code)"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def _wrapped(command: Sequence[str]) -> list[str]:
    """Flags with their values, quoted, one pair per entry."""
    groups: list[list[str]] = []
    for word in command:
        if word.startswith("--") or not groups:
            groups.append([])
        groups[-1].append(shlex.quote(word))
    return [" ".join(group) for group in groups]


def _time(hours: float) -> str:
    minutes = round(hours * 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:00"
