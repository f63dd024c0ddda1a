"""The command line. Every flag has its help; a wrong value exits 2 with one line, Ctrl-C exits 130 with everything kept."""

import contextlib
import io
import itertools
import logging
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Union

import tyro
from rich.console import Console

from onelag.data.download import DownloadCommand
from onelag.launch.command import LaunchCommand
from onelag.pipeline.command import TimelineCommand
from onelag.planner.command import PlanCommand
from onelag.training.config import DataConfig, DelayConfig, EvaluationConfig, OptimizerConfig, ScheduleConfig, TrainConfig
from onelag.training.pipeline_config import PipelineConfig


@dataclass(frozen=True)
class Reproduce:
    """Reproduce tables and figures: computes what is missing, reuses the rest, can be interrupted and resumed."""

    experiments: tyro.conf.Positional[tuple[str, ...]] = ()
    """names of experiments; none is all of them"""
    tier: str = "cpu"
    """smoke (minutes), cpu (half an hour on 2 cores), cpu-full (hours), gpu"""
    results: Path = Path("results")
    """result files, one per run"""
    runs: Path = Path("runs")
    """checkpoints and logs of runs under way"""
    reports: Path = Path("results/reports")
    """tables and figures"""

    def run(self) -> None:
        from onelag.experiments.main import reproduce

        reproduce(self.experiments, self.tier, self.results, self.runs, self.reports, Console())


@dataclass(frozen=True)
class Report:
    """Tables, figures and CLAIMS.md again from the result files that are there; trains nothing."""

    results: Path = Path("results")
    """result files, one per run"""
    reports: Path = Path("results/reports")
    """tables and figures"""
    claims: Path = Path("CLAIMS.md")
    """the list of claims"""
    readme: Path = Path("README.md")
    """its part between the "generated" marks is renewed"""

    def run(self) -> None:
        from onelag.experiments.main import report

        report(self.results, self.reports, self.claims, self.readme, Console())


@dataclass(frozen=True)
class Train:
    """Train one model. Under torchrun with more than one process: as a pipeline."""

    model: str = "byte-0.3m"
    """a preset of onelag/models/presets.py"""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    delay: DelayConfig = field(default_factory=DelayConfig)
    data: DataConfig = field(default_factory=DataConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    clip_norm: float = 1.0
    """global gradient norm; 0 does not clip"""
    seed: int = 0
    """initialization and data order"""
    precision: str = "fp32"
    """fp32 or bf16"""
    device: str = "cpu"
    """cpu or cuda"""
    threads: int = 1
    """CPU threads; a run is bitwise repeatable at one"""
    run_dir: Path = Path("runs/train")
    """log, checkpoints, outcome.json; an unfinished run there is continued"""
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    """under torchrun only: torchrun --nproc-per-node 4 -m onelag train …"""

    def config(self) -> TrainConfig:
        from onelag.models.presets import PRESETS

        if self.model not in PRESETS:
            raise ValueError(f"unknown model {self.model!r}: choose one of {', '.join(PRESETS)}")
        for name, choices in {"precision": ("fp32", "bf16"), "device": ("cpu", "cuda")}.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, but got {getattr(self, name)!r}")
        same = {name: getattr(self, name) for name in ("optimizer", "delay", "data", "schedule", "evaluation", "clip_norm", "seed")}
        return TrainConfig(model=PRESETS[self.model], precision=self.precision, device=self.device, **same)

    def run(self) -> None:
        if "WORLD_SIZE" in os.environ:  # torchrun
            import torch

            from onelag.training.pipeline import train_pipeline

            torch.set_num_threads(self.threads)
            train_pipeline(self.config(), self.pipeline, self.run_dir, Console())
        else:
            from onelag.training.single import train_with_progress

            train_with_progress(self.config(), self.run_dir, self.threads, Console())


COMMANDS = {"train": Train, "reproduce": Reproduce, "report": Report, "timeline": TimelineCommand, "plan": PlanCommand, "launch": LaunchCommand, "download": DownloadCommand}


def main(arguments: list[str] | None = None) -> None:
    """Parses and runs; never shows a traceback for a wrong value, a file problem or Ctrl-C."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")  # libraries speak at INFO of things that no user asked for
    logging.getLogger("onelag").setLevel(logging.INFO)
    command = _parse(arguments)
    try:
        command.run()
    except KeyboardInterrupt:
        _fail("interrupted; everything so far is kept, the same command continues", 130)
    except (ValueError, KeyError) as error:
        _fail(str(error), 2)
    except (OSError, RuntimeError) as error:
        _fail(str(error), 1)


def _parse(arguments: list[str] | None):
    kinds = [Annotated[cls, tyro.conf.subcommand(name, prefix_name=False)] for name, cls in COMMANDS.items()]
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(Union[tuple(kinds)], args=arguments, prog="onelag", description=__doc__)  # noqa: UP007
    except SystemExit as error:
        if not error.code:
            raise
        # tyro draws a box with the reason, a rule, then hints: the reason alone is the one line that we promise.
        lines = [line.strip("│ ").strip() for line in complaint.getvalue().splitlines() if line.startswith("│")]
        reason = " ".join(itertools.takewhile(lambda line: not line.startswith("──"), lines)) or complaint.getvalue()
        _fail(f"{reason} (see onelag --help)", 2)


def _fail(message: str, code: int) -> None:
    print(f"onelag: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(code)
