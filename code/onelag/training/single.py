"""`onelag train` in one process: progress bar with ETA, resume, Ctrl-C."""

import json
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from onelag.data import load_source
from onelag.training.config import TrainConfig
from onelag.training.loop import Interrupted, Outcome, interruptible, train


def train_with_progress(config: TrainConfig, run_dir: Path, threads: int, console: Console) -> Outcome:
    """Trains, shows where it is, and leaves outcome.json in `run_dir`.

    Raises:
        KeyboardInterrupt: after the checkpoint is written.
    """
    torch.set_num_threads(threads)
    source = load_source(config.data.corpus, config.data.tokenizer)
    columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with interruptible() as stop, Progress(*columns, console=console) as bars:
        task = bars.add_task("", total=config.schedule.steps)

        def show(progress):
            text = f"loss {progress.train_loss:.4f}, {progress.tokens_per_second:,.0f} tokens/s"
            bars.update(task, completed=progress.step, description=text)

        try:
            outcome = train(config, source, run_dir, show, stop)
        except Interrupted as error:
            console.print(str(error))
            raise KeyboardInterrupt from error
    (run_dir / "outcome.json").write_text(json.dumps({"config": config.to_dict(), **outcome.metrics()}, indent=1) + "\n", encoding="utf-8")
    (run_dir / "checkpoint.pt").unlink(missing_ok=True)
    if outcome.status == "diverged":
        console.print(f"diverged at step {outcome.diverged_at}: the loss or its gradient is not finite (a result, not an error; see {run_dir}/log.jsonl)")
    else:
        base = outcome.final["validation_loss_base"]
        at_y = "" if base is None else f" (at y: {base:.4f})"
        console.print(f"validation loss {outcome.final['validation_loss']:.4f}{at_y} after {config.schedule.steps} steps, {outcome.wall_seconds:.0f} s")
    return outcome
