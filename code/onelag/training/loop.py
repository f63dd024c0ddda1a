"""The training loop around `training_step`: validation, log, checkpoint, resume, interruption."""

import json
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from onelag.data import DataSource, Sampler, validation_batches
from onelag.models import build_model
from onelag.training import checkpoint
from onelag.training.build import build_delayed_optimizer
from onelag.training.config import TrainConfig
from onelag.training.evaluate import validate
from onelag.training.fingerprint import run_identity
from onelag.training.step import training_step

CURVE = ("step", "tokens", "train_loss", "validation_loss", "validation_loss_base", "learning_rate", "gradient_norm")


class Interrupted(Exception):
    """The run was asked to stop; its checkpoint is written and `train` continues from it."""


@dataclass
class Progress:
    """Where a run is; given to the `report` callback after every step."""

    step: int
    steps: int
    train_loss: float
    tokens_per_second: float


@dataclass
class Outcome:
    """What a run found.

    Attributes:
        status: "finished" or "diverged" (a loss that is not finite).
        diverged_at: the step whose loss was not finite, or None.
        final: validation_loss at the newest weights x, validation_loss_base at y (None without a correction), train_loss (mean of the last tenth).
        curve: one list per name in CURVE, one entry per validation.
    """

    status: str = "finished"
    diverged_at: int | None = None
    final: dict[str, float | None] = field(default_factory=dict)
    curve: dict[str, list] = field(default_factory=lambda: {name: [] for name in CURVE})
    tokens: int = 0
    wall_seconds: float = 0.0

    def metrics(self) -> dict[str, Any]:
        return {"status": self.status, "diverged_at": self.diverged_at, "final": self.final, "curve": self.curve}


def train(
    config: TrainConfig,
    source: DataSource,
    run_dir: Path | None = None,
    report: Callable[[Progress], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
    checkpoint_seconds: float = 60.0,
) -> Outcome:
    """Trains one model from a seed to the last step.

    Args:
        config: the complete configuration.
        source: the tokenized corpus (`onelag.data.load_source(config.data)`).
        run_dir: where log.jsonl and checkpoint.pt live; None keeps nothing. A checkpoint there is resumed, bitwise on CPU.
        report: called after every step.
        stop: asked after every step; True writes the checkpoint and raises Interrupted.
        checkpoint_seconds: time between checkpoints.

    Raises:
        ValueError: a configuration that cannot be run, or a corpus shorter than one sequence.
        CheckpointError: a checkpoint of another run in `run_dir`.
        Interrupted: see `stop`; also on SIGINT and SIGTERM inside `interruptible()`.
    """
    config.check()
    if source.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"the tokenizer has {source.vocab_size} entries, but the model's vocab_size is {config.model.vocab_size}: use a larger one"
        )
    fingerprint = run_identity(config, source.corpus_sha256, source.tokenizer_sha256)
    torch.manual_seed(config.seed)
    model = build_model(config.model, seed=config.seed).to(config.device)
    optimizer = build_delayed_optimizer(config.optimizer, config.delay, model)
    sampler = Sampler(source.train, config.data.batch_size, config.data.sequence_length, config.seed)
    validation = _validation_sets(config, source)
    outcome, recent, first = Outcome(), [], 0
    path = run_dir / "checkpoint.pt" if run_dir else None
    if path and path.exists():
        saved = checkpoint.load(path, fingerprint)
        first, recent = saved["step"], saved["recent"]
        outcome.curve, outcome.wall_seconds = saved["curve"], saved["wall_seconds"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["rng"])
    log = _Log(run_dir / "log.jsonl" if run_dir else None, first)
    steps = config.schedule.steps
    wall_before, started, last_saved = outcome.wall_seconds, time.perf_counter(), time.perf_counter()

    def save(step: int) -> None:
        outcome.wall_seconds = wall_before + time.perf_counter() - started
        if path:
            content = {"fingerprint": fingerprint, "step": step, "recent": recent, "curve": outcome.curve, "wall_seconds": outcome.wall_seconds}
            content |= {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
            checkpoint.save(path, content)

    for step in range(first, steps):
        loss, norm, factor = training_step(step, model, optimizer, *sampler.batch(step), config)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            outcome.status, outcome.diverged_at = "diverged", step
            log.write({"step": step, "diverged": True, "train_loss": repr(loss), "gradient_norm": repr(norm)})
            break
        recent.append(loss)
        recent = recent[-max(1, steps // 10) :]
        done = step + 1
        if done == steps or done % config.evaluation.every == 0:
            kind = "final" if done == steps else "during"
            row = validate(model, optimizer, validation[kind], config)
            row |= {"step": done, "tokens": done * config.tokens_per_step, "train_loss": loss}
            row |= {"learning_rate": config.optimizer.learning_rate * factor, "gradient_norm": norm}
            for name in CURVE:
                outcome.curve[name].append(row[name])
            log.write(row)
            if not math.isfinite(row["validation_loss"]):
                outcome.status, outcome.diverged_at = "diverged", done
                break
        if report:
            elapsed = time.perf_counter() - started
            report(Progress(done, steps, loss, (done - first) * config.tokens_per_step / elapsed))
        if stop():
            save(done)
            raise Interrupted(f"stopped after step {done} of {steps}; the checkpoint continues from there")
        if path and time.perf_counter() - last_saved > checkpoint_seconds and done < steps:
            save(done)
            last_saved = time.perf_counter()

    outcome.wall_seconds = wall_before + time.perf_counter() - started
    outcome.tokens = steps * config.tokens_per_step if outcome.status == "finished" else outcome.diverged_at * config.tokens_per_step
    if outcome.status == "finished":
        last = {name: outcome.curve[name][-1] for name in ("validation_loss", "validation_loss_base")}
        outcome.final = {**last, "train_loss": sum(recent) / len(recent)}
    else:
        outcome.final = {"validation_loss": None, "validation_loss_base": None, "train_loss": None}
    return outcome


def _validation_sets(config: TrainConfig, source: DataSource) -> dict[str, list]:
    tokens, length = source.split(config.evaluation.split), config.data.sequence_length
    return {
        kind: validation_batches(tokens, config.data.batch_size, length, count)
        for kind, count in (("during", config.evaluation.tokens), ("final", config.evaluation.final_tokens))
    }


class _Log:
    """log.jsonl, one line per validation; on resume the lines after the checkpoint are dropped, since they come again."""

    def __init__(self, path: Path | None, first: int):
        self.path = path
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = []
        if first and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    if json.loads(line)["step"] <= first:
                        kept.append(line)
                except (json.JSONDecodeError, KeyError):
                    break  # a kill cut this line short; what follows the checkpoint is written again anyway
        path.write_text("".join(line + "\n" for line in kept), encoding="utf-8")

    def write(self, row: dict) -> None:
        if self.path:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Gives a `stop` for `train` that the first Ctrl-C or SIGTERM turns on; a second one ends the program at once."""
    asked = []

    def ask(number, frame):
        signal.signal(number, before[number])
        asked.append(number)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
