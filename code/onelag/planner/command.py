"""`onelag plan`: will it fit, how long will it take, what will it cost. No GPU needed."""

from dataclasses import dataclass, replace
from pathlib import Path

import tyro
from rich.console import Console

from onelag.configs import CONFIGS, ScaleConfig, get_config
from onelag.planner.hardware import GIB, get_gpu
from onelag.planner.plan import make_plan
from onelag.planner.show import draw_plan, print_plan


@dataclass(frozen=True)
class PlanCommand:
    """Memory, time and cost of a run at scale, stage by stage and schedule by schedule; says what would fit if it does not. Needs no GPU."""

    config: tyro.conf.Positional[str]
    """smollm2-135m, smollm2-360m, dense-1b, moe-2b, moe-10b or dense-10b"""
    mode: str | None = None
    """sync, 2bw or 2bw+ef; none is the configuration's own"""
    gpu: str | None = None
    """h100, h200 or a100; none is the configuration's own"""
    gpus: int | None = None
    """how many in all; decides the replicas, gpus / stages"""
    stages: int | None = None
    """pipeline stages"""
    microbatches: int | None = None
    """per replica and step"""
    batch_size: int | None = None
    """sequences per step, over all replicas"""
    recompute: bool | None = None
    """keep only the stages' inputs between forward and backward"""
    memory: float | None = None
    """GiB on one GPU, instead of the data sheet's"""
    price: float | None = None
    """dollars per GPU hour"""
    measured_forward: float | None = None
    """milliseconds of one micro-batch on the slowest stage, measured, instead of the estimate"""
    measured_backward: float | None = None
    """the same for its backward"""
    figure: Path | None = None
    """draw memory and time there (.png, .pdf, .svg)"""

    def resolved(self) -> ScaleConfig:
        """The configuration with the flags applied.

        Raises:
            ValueError: an unknown name, or numbers that do not fit together.
        """
        config = get_config(self.config)
        if self.mode is not None:
            config = config.in_mode(self.mode)
        stages, pipeline, train = self.stages or config.stages, config.pipeline, config.train
        for name in ("stages", "gpus", "microbatches", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: use 1 or more")
        if self.gpus is not None:
            if self.gpus % stages:
                raise ValueError(f"gpus={self.gpus} is no multiple of stages={stages}: every stage needs as many replicas as the others")
            pipeline = replace(pipeline, replicas=self.gpus // stages)
        if self.microbatches is not None:
            pipeline = replace(pipeline, microbatches=self.microbatches)
        if self.recompute is not None:
            pipeline = replace(pipeline, recompute=self.recompute)
        if self.batch_size is not None:
            tokens = config.tokens
            train = replace(train, data=replace(train.data, batch_size=self.batch_size))
            train = replace(train, schedule=replace(train.schedule, steps=max(1, round(tokens / train.tokens_per_step))))
        return replace(config, train=train, pipeline=pipeline, stages=stages)

    def run(self) -> None:
        config = self.resolved()
        gpu = get_gpu(self.gpu or config.gpu)
        if self.memory is not None:
            gpu = replace(gpu, memory=self.memory * GIB)
        if self.price is not None:
            gpu = replace(gpu, price=self.price)
        seconds = [None if value is None else value / 1000 for value in (self.measured_forward, self.measured_backward)]
        plan = make_plan(config, gpu, forward_seconds=seconds[0], backward_seconds=seconds[1])
        console = Console()
        print_plan(plan, console)
        if self.figure is not None:
            self.figure.parent.mkdir(parents=True, exist_ok=True)
            draw_plan(plan).savefig(self.figure, dpi=220)
            console.print(f"drawn to {self.figure}")


__all__ = ["CONFIGS", "PlanCommand"]
