"""What the wrappers, Muon and the loop cost: ratios within one run, medians, one thread.   make bench   (about 5 minutes on a quiet machine)

Every ratio compares two things in alternation, so that a machine whose speed drifts does not decide it. Writes results/bench/bench.json.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from onelag.data import Sampler, load_source
from onelag.delay import ErrorFeedback, SimulatedDelay
from onelag.experiments.provenance import machine
from onelag.models import build_model
from onelag.models.loss import next_token_loss
from onelag.models.presets import PRESETS
from onelag.optim import Muon, build_optimizer, newton_schulz
from onelag.training.config import DelayConfig, EvaluationConfig, OptimizerConfig, ScheduleConfig, TrainConfig
from onelag.training.loop import train
from onelag.training.schedule import set_learning_rate, warmup_cosine

MUON_SHAPES = [(256, 256), (256, 256), (256, 256), (256, 256), (704, 256), (704, 256), (256, 704)] * 4
OUT = Path(__file__).parents[2] / "results" / "bench" / "bench.json"


def alternate(first, second, rounds: int = 9, inner: int = 2) -> tuple[float, float, float]:
    """Median seconds of each, and the median of the pairwise ratios first/second."""
    first(), second()
    times, ratios = ([], []), []
    for _ in range(rounds):
        pair = []
        for which, function in enumerate((first, second)):
            start = time.perf_counter()
            for _ in range(inner):
                function()
            pair.append((time.perf_counter() - start) / inner)
            times[which].append(pair[-1])
        ratios.append(pair[0] / pair[1])
    return statistics.median(times[0]), statistics.median(times[1]), statistics.median(ratios)


def matrices(shapes, seed=0):
    torch.manual_seed(seed)
    parameters = [torch.nn.Parameter(0.02 * torch.randn(shape)) for shape in shapes]
    for p in parameters:
        p.grad = torch.randn_like(p)
    return parameters


def wrappers(rows):
    """AdamW, bare against wrapped, at 10M parameters in the shapes of a language model."""
    shapes = [(368, 368), (368, 368), (368, 368), (368, 368), (1024, 368), (1024, 368), (368, 1024)] * 6
    for form in ("update", "lookahead"):
        bare_parameters, parameters = matrices(shapes), matrices(shapes)
        bare = torch.optim.AdamW(bare_parameters, lr=1e-3, foreach=True)
        wrapped = SimulatedDelay(ErrorFeedback(torch.optim.AdamW(parameters, lr=1e-3, foreach=True), form=form))
        a, b, ratio = alternate(wrapped.step, bare.step)
        goal = 1.3
        rows.append((f"AdamW + SimulatedDelay + ErrorFeedback({form}) / AdamW foreach, 10M", a, b, ratio, f"≤ {goal}", ratio <= goal))
        size = sum(p.numel() * p.element_size() for p in parameters)
        kept = [t for e in wrapped.state_dict()["state"].values() for k, t in e.items() if "." in k] + list(parameters)
        extra = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}.values()) / size - 1
        rows.append((f"extra parameter-sized buffers, both wrappers ({form})", None, None, extra, "= 2", extra == 2))


def muon(rows):
    """One Muon step at 3M parameters against torch's, and against its Newton–Schulz products alone."""
    shapes = MUON_SHAPES
    ours, theirs, stacks = Muon(matrices(shapes)), torch.optim.Muon(matrices(shapes)), {}
    for p in matrices(shapes):
        stacks.setdefault(tuple(p.shape), []).append(p.grad)
    batches = [torch.stack(group) for group in stacks.values()]
    a, b, ratio = alternate(ours.step, lambda: [newton_schulz(batch) for batch in batches])
    rows.append(("Muon step / its Newton–Schulz alone, fp32, 3M", a, b, ratio, "≤ 1.2", ratio <= 1.2))
    a, b, ratio = alternate(theirs.step, ours.step)
    rows.append(("torch.optim.Muon step (bf16) / ours (fp32), 3M", a, b, ratio, "≥ 8", ratio >= 8))
    rows.append(without_bf16_instructions())
    half = Muon(matrices(shapes), dtype=torch.bfloat16)
    a, b, ratio = alternate(theirs.step, half.step)
    rows.append(("torch.optim.Muon step (bf16) / ours (bf16), 3M", a, b, ratio, "", None))
    reference = Muon(matrices(shapes), implementation="reference")
    a, b, ratio = alternate(reference.step, ours.step)
    rows.append(("Muon reference / fast, fp32, 3M", a, b, ratio, "", None))


def without_bf16_instructions():
    """torch's Muon casts to bf16 always: fast on a CPU with bf16 matrix units, slow on others. The same ratio with oneDNN held to AVX2, in a process of its own."""
    code = (
        "import torch, bench; torch.set_num_threads(1); from onelag.optim import Muon; s = bench.MUON_SHAPES;"
        "o, t = Muon(bench.matrices(s)), torch.optim.Muon(bench.matrices(s)); print(*bench.alternate(t.step, o.step, rounds=3, inner=1))"
    )
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    a, b, ratio = map(float, done.stdout.split())
    return ("the same on a CPU without bf16 instructions (oneDNN held to AVX2)", a, b, ratio, "≥ 8", ratio >= 8)


def loop(rows):
    """`train` against a bare loop of the same model, optimizer and data."""
    steps = 150  # long enough that the one validation at the end does not count
    source = load_source("sotu", "bytes")
    for name in ("adamw", "muon"):
        config = TrainConfig(
            model=PRESETS["byte-0.3m"],
            optimizer=OptimizerConfig(name=name, fallback_learning_rate=3e-3 if name == "muon" else None),
            delay=DelayConfig(steps=1, correction="error-feedback"),
            schedule=ScheduleConfig(steps=steps),
            evaluation=EvaluationConfig(every=10**9, tokens=2048, final_tokens=2048),
        )

        def bare(config=config, name=name):
            torch.manual_seed(0)
            model = build_model(config.model, seed=0)
            fallback = config.optimizer.fallback_learning_rate
            optimizer = SimulatedDelay(ErrorFeedback(build_optimizer(name, model, lr=config.optimizer.learning_rate, fallback_lr=fallback)))
            sampler = Sampler(source.train, 32, 64, 0)
            for step in range(steps):
                inputs, targets = sampler.batch(step)
                next_token_loss(model(inputs), targets).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                set_learning_rate(optimizer, warmup_cosine(step, steps))
                optimizer.step()
                optimizer.zero_grad()

        a, b, ratio = alternate(bare, lambda config=config: train(config, source), rounds=3, inner=1)
        rows.append((f"tokens/s of the training loop / bare loop, {name}, 0.3M", b, a, ratio, "≥ 0.95", ratio >= 0.95))


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for part in (wrappers, muon, loop):
        part(rows)
    table = Table("what", "first, ms", "second, ms", "ratio", "goal", "reached")
    for name, a, b, ratio, goal, reached in rows:
        times = ["" if t is None else f"{1e3 * t:.1f}" for t in (a, b)]
        table.add_row(name, *times, f"{ratio:.2f}", goal, {True: "yes", False: "no", None: ""}[reached])
    Console().print(table)
    keys = ("what", "first_seconds", "second_seconds", "ratio", "goal", "reached")
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps({"machine": machine(), "threads": 1, "rows": [dict(zip(keys, row)) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
