"""`onelag launch`: start runs at scale, or print exactly what would be started."""

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console

from onelag.configs import ScaleConfig, get_config
from onelag.launch.scripts import Cluster, Run, sbatch_script, torchrun_command
from onelag.launch.tasks import submit, submitit_parameters
from onelag.planner.plan import make_plan


@dataclass(frozen=True)
class LaunchCommand:
    """Start a run at scale on a Slurm cluster or on one GPU node; several modes, seeds or learning rates become a job array. Resumes by itself."""

    config: tyro.conf.Positional[str]
    """smollm2-135m, smollm2-360m, dense-1b, moe-2b, moe-10b or dense-10b"""
    modes: tuple[str, ...] = ("2bw+ef",)
    """any of sync, 2bw, 2bw+ef"""
    seeds: tuple[int, ...] = (0,)
    """of initialization and data order"""
    learning_rates: tuple[float, ...] = ()
    """peak learning rates; none is the configuration's own"""
    launcher: Literal["torchrun", "srun", "submitit", "local"] = "torchrun"
    """torchrun and srun write a script for sbatch, submitit submits by itself, local is torchrun on this machine"""
    gpus: int | None = None
    """how many in all; decides the replicas, gpus / stages"""
    gpus_per_node: int = 8
    """GPUs in a node"""
    corpus: str | None = None
    """folder of shards, instead of the configuration's own"""
    cluster: Cluster = field(default_factory=Cluster)
    """the cluster's own words"""
    runs: Path = Path("runs")
    """logs and checkpoints, one folder per run"""
    output: Path = Path("runs/scripts")
    """where scripts are written"""
    dry_run: bool = False
    """print the scripts or commands; start and write nothing"""

    def planned(self) -> list[Run]:
        """Every combination of mode, learning rate and seed.

        Raises:
            ValueError: an unknown name, or a layout that cannot be.
        """
        base = replace(get_config(self.config), gpus_per_node=self.gpus_per_node)
        if self.gpus is not None:
            if self.gpus < 1 or self.gpus % base.stages:
                raise ValueError(f"gpus={self.gpus} is no multiple of stages={base.stages}: every stage needs as many replicas as the others")
            base = replace(base, pipeline=replace(base.pipeline, replicas=self.gpus // base.stages))
        if self.corpus is not None:
            base = replace(base, train=replace(base.train, data=replace(base.train.data, corpus=self.corpus)))
        plan = make_plan(base)
        if not plan.fits:
            worst = max(stage.total for stage in plan.memory)
            raise ValueError(f"{base.name} takes {worst / 1e9:.1f} GB on a {plan.gpu.name} with {plan.gpu.usable / 1e9:.1f} GB usable: {plan.advice[0]}")
        return list(self._combined(base))

    def _combined(self, base: ScaleConfig) -> Iterator[Run]:
        for mode in self.modes:
            for rate in self.learning_rates or (base.train.optimizer.learning_rate,):
                for seed in self.seeds:
                    config = base.in_mode(mode)
                    train = replace(config.train, seed=seed, optimizer=replace(config.train.optimizer, learning_rate=rate))
                    name = f"{base.name}-{mode}" + (f"-lr{rate:g}" if self.learning_rates else "") + f"-seed{seed}"
                    yield Run(replace(config, train=train), self.runs / name)

    def run(self) -> None:
        runs, console = self.planned(), Console(soft_wrap=True, highlight=False)
        if self.launcher == "submitit":
            self._submitit(runs, console)
        elif self.launcher == "local":
            commands = [torchrun_command(run) for run in runs]
            if self.dry_run:
                for command in commands:
                    console.print(shlex.join(command), markup=False)
                return
            for run, command in zip(runs, commands):
                console.print(f"{run.directory}", markup=False)
                subprocess.run(command, check=True, env={"OMP_NUM_THREADS": "1", **os.environ})
        else:
            script = sbatch_script(runs, self.cluster, self.launcher)
            if self.dry_run:
                print(script, end="")
                return
            self._sbatch(script, runs[0].directory.parent, console)

    def _sbatch(self, script: str, logs: Path, console: Console) -> None:
        self.output.mkdir(parents=True, exist_ok=True)
        logs.mkdir(parents=True, exist_ok=True)
        path = self.output / f"{self.config}.sbatch"
        path.write_text(script, encoding="utf-8")
        if shutil.which("sbatch") is None:
            raise ValueError(f"there is no sbatch here: the script is {path}; copy it to the cluster and run sbatch {path.name}")
        told = subprocess.run(["sbatch", str(path)], check=True, capture_output=True, text=True).stdout.strip()
        console.print(f"{path}: {told}", markup=False)

    def _submitit(self, runs: list[Run], console: Console) -> None:
        if self.dry_run:
            for run in runs:
                console.print(f"{run.directory}: python {shlex.join(run.command)}", markup=False)
                console.print(json.dumps(submitit_parameters(run, self.cluster), indent=1), markup=False)
            return
        for run, job in zip(runs, submit(runs, self.cluster, self.runs / "submitit")):
            console.print(f"{run.directory}: job {job}", markup=False)
