"""`onelag train` under torchrun: the same configuration as in one process, trained by a real pipeline, one process per stage and replica."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from onelag.data import DataSource, Sampler, load_source, validation_batches
from onelag.models.loss import next_token_loss
from onelag.models.stages import build_stage, split_by_flops
from onelag.pipeline import checkpoint
from onelag.pipeline.clipping import BatchReport
from onelag.pipeline.engine import PipelineSchedule
from onelag.pipeline.schedules import Schedule1F1B, Schedule2BW, ScheduleGPipe, SchedulePipeDream
from onelag.pipeline.topology import place
from onelag.pipeline.trace import Recorder, gather, write_trace
from onelag.training.build import build_delayed_optimizer
from onelag.training.config import TrainConfig
from onelag.training.loop import CURVE, interruptible
from onelag.training.pipeline_config import PipelineConfig
from onelag.training.schedule import set_learning_rate, warmup_cosine

SCHEDULES = {"2bw": Schedule2BW, "pipedream": SchedulePipeDream, "1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


@dataclass
class _Run:
    """What rank 0 keeps: the curve, the log, the console."""

    directory: Path
    leads: bool
    console: Console
    tokens_per_step: int
    curve: dict[str, list] = field(default_factory=lambda: {name: [] for name in CURVE})
    skipped: list[int] = field(default_factory=list)
    last: BatchReport | None = None
    since: float = 0.0
    reported: int = 0

    def begin_segment(self) -> None:
        self.since, self.reported = time.perf_counter(), 0

    def on_report(self, report: BatchReport) -> None:
        # Reports come late and in bunches, as nobody waits for them: the rate is that of the whole segment so far.
        self.last, self.reported = report, self.reported + 1
        rate = self.reported * self.tokens_per_step / (time.perf_counter() - self.since)
        if report.skipped:
            self.skipped.append(report.batch)
        if self.leads:
            words = f"step {report.batch + 1}  loss {report.loss:.4f}  norm {report.gradient_norm:.3f}  {rate:,.0f} tokens/s"
            words += "" if report.bubble is None else f"  bubble {report.bubble:.3f}"
            words += "  skipped by all stages: a gradient was not finite" if report.skipped else ""
            self.console.print(words, soft_wrap=True, highlight=False)
            row = {"step": report.batch + 1, "train_loss": report.loss, "gradient_norm": report.gradient_norm}
            self.write(row | {"tokens_per_second": round(rate, 1), "bubble": report.bubble, "skipped": report.skipped})

    def write(self, row: dict[str, Any]) -> None:
        if self.leads:
            with open(self.directory / "log.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def train_pipeline(config: TrainConfig, pipeline: PipelineConfig, run_dir: Path, console: Console) -> float | None:
    """Trains to the end, or to a SIGTERM, which drains and checkpoints; run again, it goes on from the newest checkpoint in `run_dir`.

    Returns:
        The final validation loss at the newest weights, the same on every rank; None when it was stopped before.

    Raises:
        ValueError: settings that do not fit together, before any communication where that is possible.
        PipelineError: a stage failed; every rank raises within `pipeline.timeout`.
    """
    _check(config, pipeline)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    here = place(rank, world, None, pipeline.replicas)
    with _process_group(config.device, pipeline.timeout):
        source = load_source(config.data.corpus, config.data.tokenizer)
        module = build_stage(
            config.model, here.stage, here.num_stages, config.seed, split_by_flops(config.model, here.num_stages, config.data.sequence_length)
        ).to(config.device)
        if not list(module.parameters()):
            raise ValueError(f"stage {here.stage} of {here.num_stages} would hold no parameter: start fewer processes")
        # No SimulatedDelay here: the schedule is the delay.
        optimizer = build_delayed_optimizer(config.optimizer, replace(config.delay, steps=0), list(module.named_parameters()))
        recorder = Recorder(device=config.device) if pipeline.trace else None
        pipe: PipelineSchedule = SCHEDULES[pipeline.schedule](
            module,
            next_token_loss,
            optimizer,
            num_microbatches=pipeline.microbatches,
            depth=int(pipeline.depth) if pipeline.depth.isdigit() else pipeline.depth,
            num_replicas=pipeline.replicas,
            clip_norm=config.clip_norm or None,
            compute_dtype=torch.bfloat16 if config.precision == "bf16" else None,
            recompute=pipeline.recompute,
            dropout_seed=config.seed if config.model.dropout else None,
            timeout=pipeline.timeout,
            config={**config.to_dict(), "pipeline": {k: str(v) for k, v in asdict(pipeline).items()}},
            recorder=recorder,
        )
        run = _Run(run_dir, rank == 0, console, config.tokens_per_step)
        if run.leads:
            run_dir.mkdir(parents=True, exist_ok=True)
        saved = checkpoint.resume(run_dir / "checkpoints", pipe, config.to_dict())
        if saved is not None:
            run.curve, run.skipped = saved["curve"], saved["skipped"]
            if run.leads:
                console.print(f"going on after step {pipe.batches} of {config.schedule.steps}")
        with interruptible() as stop:
            finished = _loop(config, pipeline, pipe, optimizer, source, run, stop)
        if pipeline.trace:
            lanes = gather(recorder, here.stage)
            if lanes:
                write_trace(pipeline.trace, lanes)
        if not finished:
            if run.leads:
                console.print(f"stopped after step {pipe.batches} of {config.schedule.steps}: drained and checkpointed; the same command continues")
            return None
        loss = run.curve["validation_loss"][-1]
        if run.leads:
            content = {"config": config.to_dict(), "status": "finished", "curve": run.curve, "skipped": run.skipped}
            (run_dir / "outcome.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            base = run.curve["validation_loss_base"][-1]
            console.print(f"validation loss {loss:.4f}" + ("" if base is None else f" (at y: {base:.4f})") + f" after {pipe.batches} steps")
        return loss


def _loop(config: TrainConfig, pipeline: PipelineConfig, pipe: PipelineSchedule, optimizer, source: DataSource, run: _Run, stop: Callable[[], bool]) -> bool:
    """Segments between validations and checkpoints; each is one `pipe.run`, which drains at its end and so changes nothing."""
    sampler = Sampler(source.train, config.data.batch_size, config.data.sequence_length, config.seed)
    held_out, steps = source.split(config.evaluation.split), config.schedule.steps
    rows, length = config.data.batch_size, config.data.sequence_length
    factor = 0.0

    def batches(first: int, end: int) -> Iterator[tuple]:
        nonlocal factor
        for step in range(first, end):
            factor = warmup_cosine(step, steps, config.schedule.warmup, config.schedule.final)
            set_learning_rate(optimizer, factor)
            yield tuple(tensor.to(config.device) for tensor in sampler.batch(step, pipe.here.replica, pipe.here.num_replicas))

    while pipe.batches < steps:
        first = pipe.batches
        end = min(steps, *((first // every + 1) * every for every in (config.evaluation.every, pipeline.checkpoint_every)))
        run.begin_segment()
        done = len(pipe.run(batches(first, end), end - first, stop, run.on_report))
        if first + done == steps or (first + done) % config.evaluation.every == 0:
            count = config.evaluation.final_tokens if first + done == steps else config.evaluation.tokens
            data = [tuple(t.to(config.device) for t in batch) for batch in validation_batches(held_out, rows, length, count)]
            row = {"validation_loss": pipe.evaluate(data), "validation_loss_base": pipe.evaluate(data, base=True) if pipe.corrects else None}
            row |= {"step": first + done, "tokens": (first + done) * config.tokens_per_step, "train_loss": run.last.loss}
            row |= {"learning_rate": config.optimizer.learning_rate * factor, "gradient_norm": run.last.gradient_norm}
            for name in CURVE:
                run.curve[name].append(row[name])
            run.write(row)
        checkpoint.save(run.directory / "checkpoints", pipe, config.to_dict(), {"curve": run.curve, "skipped": run.skipped})
        if first + done < end:
            return False
    return True


def _check(config: TrainConfig, pipeline: PipelineConfig) -> None:
    config.check()
    parts = pipeline.replicas * pipeline.microbatches
    if config.data.batch_size % parts:
        raise ValueError(
            f"data.batch_size={config.data.batch_size} cannot be cut into pipeline.microbatches={pipeline.microbatches} equal parts on each of "
            f"pipeline.replicas={pipeline.replicas} replicas: use a multiple of {parts}"
        )
    if config.delay.pipedream_stages or config.delay.steps not in (0, 1):
        raise ValueError("under torchrun the delay is real (pipeline.schedule decides it): leave delay.steps and delay.pipedream_stages alone")
    if config.delay.correction not in ("none", "error-feedback"):
        raise ValueError(f"delay.correction={config.delay.correction} exists in the simulation only: under torchrun use none or error-feedback")
    if config.data.accumulate != 1:
        raise ValueError("under torchrun a batch is cut by pipeline.microbatches: leave data.accumulate at 1")


@contextmanager
def _process_group(device: str, timeout: float) -> Iterator[None]:
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timedelta(seconds=timeout))
    try:
        yield
    finally:
        dist.destroy_process_group()
