"""Synthetic results: a study whose every loss is known, without a training run."""

import hashlib
import json

import numpy as np
import pytest

from onelag.report.store import Result
from onelag.report.study import Study, StudyRow, TuningRow

MODEL = {
    "vocab_size": 256,
    "num_layers": 3,
    "width": 96,
    "num_heads": 3,
    "num_kv_heads": 1,
    "ffn_width": 256,
    "max_length": 256,
    "tie_embeddings": True,
}
# (sync, gap of delayed, gap of delayed+EF, rate): losses like those of a trial at 0.37M parameters
TRUTH = {
    "adamw": (1.423, 0.385, 0.074, 4e-3),
    "muon": (1.360, 0.028, 0.012, 2e-2),
    "lion": (1.45, 0.12, 0.05, 1e-3),
    "soap": (1.37, 0.05, 0.02, 4e-3),
}


def _make_result(
    optimizer="adamw", mode="sync", seed=0, rate=4e-3, loss=1.5, steps=1200, tier="cpu-full", experiment="table-2", diverged_at=None
):
    config = {
        "model": MODEL,
        "optimizer": {"name": optimizer, "learning_rate": rate},
        "delay": {"steps": 0 if mode == "sync" else 1, "correction": "error-feedback" if mode == "delayed+EF" else "none"},
        "data": {"corpus": "sotu", "tokenizer": "bytes", "sequence_length": 64, "batch_size": 32, "accumulate": 1},
        "schedule": {"steps": steps, "warmup": 0.1, "final": 0.1},
        "seed": seed,
        "device": "cpu",
    }
    last = steps if diverged_at is None else diverged_at
    points = [step for step in range(150, steps + 1, 150) if step < last or diverged_at is None]
    wiggle = np.random.default_rng(seed + 17).normal(0, 0.004, len(points))
    validation = [loss + 2.2 * float(np.exp(-4 * step / steps) - np.exp(-4)) + float(w) for step, w in zip(points, wiggle)]
    if diverged_at is None:
        validation[-1] = loss
    base = [value + 0.001 for value in validation] if mode == "delayed+EF" else [None] * len(points)
    curve = {
        "step": points,
        "tokens": [step * 2048 for step in points],
        "train_loss": validation,
        "validation_loss": validation,
        "validation_loss_base": base,
        "learning_rate": [rate] * len(points),
        "gradient_norm": [0.5] * len(points),
    }
    final = {"validation_loss": loss, "validation_loss_base": base[-1] if base else None, "train_loss": loss}
    if diverged_at is not None:
        final = dict.fromkeys(final)
    metrics = {"status": "finished" if diverged_at is None else "diverged", "diverged_at": diverged_at, "final": final, "curve": curve}
    provenance = {
        "commit": "0" * 40,
        "dirty": False,
        "corpus_sha256": "c",
        "tokenizer_sha256": "t",
        "code_sha256": "k",
        "start": "2026-01-01T00:00:00+00:00",
        "wall_seconds": 90.0,
        "tokens": last * 2048,
    }
    identity = hashlib.sha256(json.dumps([config, mode]).encode()).hexdigest()[:16]
    return Result(run_id=identity, experiment=experiment, tier=tier, config=config, metrics=metrics, provenance=provenance)


def _make_study(
    optimizers=("adamw", "muon"),
    modes=("sync", "delayed", "delayed+EF"),
    seeds=range(5),
    protocols=("kept", "retuned"),
    noise=0.004,
    pair_noise=0.003,
    diverged=(),
    tier="cpu-full",
    experiment="table-2",
    truth=TRUTH,
):
    """A study with known means; `diverged`: cells (optimizer, mode, seed) that diverge."""
    rng = np.random.default_rng(3)
    common = {seed: rng.normal(0, noise) for seed in seeds}
    runs = {}
    for optimizer in optimizers:
        sync, delayed, corrected, rate = truth[optimizer]
        for mode in modes:
            for seed in seeds:
                loss = sync + {"sync": 0.0, "delayed": delayed, "delayed+EF": corrected}[mode] + common[seed] + rng.normal(0, pair_noise)
                at = 310 if (optimizer, mode, seed) in diverged else None
                runs[optimizer, mode, seed] = _make_result(
                    optimizer, mode, seed, rate, float(loss), tier=tier, experiment=experiment, diverged_at=at
                )
    rows = [
        StudyRow(result=result, protocol=protocol, optimizer=o, mode=m, seed=s, learning_rate=result.config["optimizer"]["learning_rate"])
        for protocol in protocols
        for (o, m, s), result in runs.items()
    ]
    return Study(tier=tier, experiment=experiment, rows=rows)


def _make_tuning(optimizers=("adamw", "muon"), modes=("sync", "delayed", "delayed+EF"), tier="cpu-full"):
    """A bowl in log learning rate for each mode; delayed modes have theirs at the grid's left edge; the highest rate diverges for delayed AdamW."""
    rows = []
    for optimizer in optimizers:
        sync, delayed, corrected, rate = TRUTH[optimizer]
        for mode in modes:
            best = {"sync": rate, "delayed": rate / 2, "delayed+EF": rate}[mode]
            offset = {"sync": 0.0, "delayed": delayed / 2, "delayed+EF": corrected}[mode]
            for factor in (0.5, 1, 2):
                lr = rate * factor
                gone = optimizer == "adamw" and mode == "delayed" and factor == 2
                loss = sync + offset + 0.03 * np.log2(lr / best) ** 2
                result = _make_result(optimizer, mode, 100, lr, float(loss), tier=tier, diverged_at=200 if gone else None)
                rows.append(TuningRow(optimizer, mode, lr, 100, result, chosen=lr == best, at_edge=lr == best and factor != 1))
    return rows


@pytest.fixture(scope="session")
def make_result():
    return _make_result


@pytest.fixture(scope="session")
def make_study():
    return _make_study


@pytest.fixture(scope="session")
def make_tuning():
    return _make_tuning
