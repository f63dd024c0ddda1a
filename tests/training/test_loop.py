"""The loop: bitwise resume, interruption, divergence as a result, the schedule, validation at the right weights, run identity."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from onelag.data import DataSource, Sampler, validation_batches
from onelag.delay import ErrorFeedback, SimulatedDelay
from onelag.models import DenseConfig, build_model
from onelag.models.loss import next_token_loss
from onelag.optim import build_optimizer
from onelag.training.checkpoint import CheckpointError
from onelag.training.config import DataConfig, DelayConfig, EvaluationConfig, OptimizerConfig, ScheduleConfig, TrainConfig
from onelag.training.evaluate import validation_loss
from onelag.training.fingerprint import deciding_modules, run_identity
from onelag.training.loop import Interrupted, train
from onelag.training.schedule import warmup_cosine

STEPS = 12


def tokens(count, seed):
    """A text with structure: a noisy cycle, so that a few steps lower the loss."""
    random = np.random.default_rng(seed)
    return ((np.arange(count) + random.integers(0, 2, count)) % 13).astype(np.uint16)


SOURCE = DataSource(tokens(4000, 0), tokens(800, 1), tokens(0, 2), 13, "corpus", "tokenizer")
CONFIG = TrainConfig(
    model=DenseConfig(vocab_size=13, num_layers=2, width=12, num_heads=2, num_kv_heads=1, ffn_width=16, dropout=0.1),
    optimizer=OptimizerConfig(name="muon", learning_rate=0.02, fallback_learning_rate=0.01),
    delay=DelayConfig(steps=1, correction="error-feedback"),
    data=DataConfig(sequence_length=8, batch_size=4, accumulate=2),
    schedule=ScheduleConfig(steps=STEPS),
    evaluation=EvaluationConfig(every=4, tokens=64, final_tokens=128),
    seed=3,
)


def test_training_is_the_bare_loop():
    """The same numbers as twenty lines written out: a wrong order of clip, schedule, delay or validation weights fails here."""
    config = replace(CONFIG, model=replace(CONFIG.model, dropout=0.0))
    outcome = train(config, SOURCE)
    model = build_model(config.model, seed=3)
    optimizer = SimulatedDelay(ErrorFeedback(build_optimizer("muon", model, lr=0.02, fallback_lr=0.01)))
    sampler = Sampler(SOURCE.train, 4, 8, 3)
    losses = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * warmup_cosine(step, STEPS)
        inputs, targets = sampler.batch(step)
        total = 0.0
        for half in (slice(0, 2), slice(2, 4)):
            loss = next_token_loss(model(inputs[half]), targets[half]) / 2
            loss.backward()
            total += loss.detach()
        losses.append(float(total))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with optimizer.latest_weights():
        at_x = validation_loss(model, validation_batches(SOURCE.held_out, 4, 8, 128))
    with optimizer.base_weights():
        at_y = validation_loss(model, validation_batches(SOURCE.held_out, 4, 8, 128))
    assert outcome.final["validation_loss"] == at_x and outcome.final["validation_loss_base"] == at_y and at_x != at_y
    assert outcome.curve["train_loss"] == [losses[3], losses[7], losses[11]]
    assert outcome.curve["tokens"] == [128, 256, 384] and outcome.tokens == STEPS * 32


@pytest.mark.parametrize("stop_after", [1, 4, 7, 11])
def test_an_interrupted_run_continues_bitwise(tmp_path, stop_after):
    """With dropout, momentum, delay, correction and accumulation; the log holds each validation once."""
    whole = train(CONFIG, SOURCE, tmp_path / "whole")
    seen = []

    def stop():
        seen.append(1)
        return len(seen) == stop_after

    with pytest.raises(Interrupted, match=f"step {stop_after} of {STEPS}"):
        train(CONFIG, SOURCE, tmp_path / "cut", stop=stop)
    resumed = train(CONFIG, SOURCE, tmp_path / "cut")
    assert resumed.final == whole.final and resumed.curve == whole.curve
    lines = [json.loads(line)["step"] for line in (tmp_path / "cut" / "log.jsonl").read_text().splitlines()]
    assert lines == [4, 8, 12]


def test_a_kill_between_checkpoints_costs_only_the_time(tmp_path):
    """No farewell: the run dies, a torn log line is left behind, and the last checkpoint continues bitwise."""

    class Killed(BaseException):
        pass

    whole = train(CONFIG, SOURCE)

    def die(progress):
        if progress.step == 6:
            raise Killed

    with pytest.raises(Killed):
        train(CONFIG, SOURCE, tmp_path, report=die, checkpoint_seconds=0.0)
    with open(tmp_path / "log.jsonl", "a") as log:
        log.write('{"step": 7, "train')
    resumed = train(CONFIG, SOURCE, tmp_path)
    assert resumed.curve == whole.curve
    assert [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()] == [4, 8, 12]


def test_bf16_runs_beside_fp32_and_keeps_fp32_weights(tmp_path):
    config = replace(CONFIG, model=replace(CONFIG.model, dropout=0.0))
    full, half = train(config, SOURCE), train(replace(config, precision="bf16"), SOURCE, tmp_path)
    assert full.final["validation_loss"] != half.final["validation_loss"]
    assert half.final["validation_loss"] == pytest.approx(full.final["validation_loss"], rel=2e-2)


def test_divergence_is_a_result(tmp_path):
    config = replace(CONFIG, optimizer=OptimizerConfig(name="sgd", learning_rate=1e30), delay=DelayConfig(), clip_norm=0.0)
    outcome = train(config, SOURCE, tmp_path)
    assert outcome.status == "diverged" and 0 < outcome.diverged_at < STEPS
    assert outcome.final == {"validation_loss": None, "validation_loss_base": None, "train_loss": None}
    assert json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])["diverged"] is True


def test_checkpoints_of_other_runs_are_refused(tmp_path):
    with pytest.raises(Interrupted):
        train(CONFIG, SOURCE, tmp_path, stop=lambda: True)
    with pytest.raises(CheckpointError, match="another model, configuration"):
        train(replace(CONFIG, seed=4), SOURCE, tmp_path)
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(CheckpointError, match="cannot be read"):
        train(CONFIG, SOURCE, tmp_path)


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    with pytest.raises(Interrupted):
        train(CONFIG, SOURCE, tmp_path, stop=lambda: True)
    before = (tmp_path / "checkpoint.pt").read_bytes()
    monkeypatch.setattr(torch, "save", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space left"):
        train(CONFIG, SOURCE, tmp_path, stop=lambda: True)
    assert (tmp_path / "checkpoint.pt").read_bytes() == before
    assert not (tmp_path / "checkpoint.tmp").exists()


def test_schedule():
    factors = [warmup_cosine(step, 100) for step in range(100)]
    assert factors[0] == 0.1 and factors[9] == 1.0 and factors[99] == pytest.approx(0.1)
    assert factors[54] == pytest.approx(0.1 + 0.9 * 0.5)
    assert factors[:10] == sorted(factors[:10]) and factors[9:] == sorted(factors[9:], reverse=True)
    assert warmup_cosine(0, 1) == pytest.approx(0.1) and all(math.isfinite(warmup_cosine(s, 3, 0.0)) for s in range(3))


def test_run_identity_changes_with_everything_that_decides_and_with_nothing_else():
    base = run_identity(CONFIG, "c", "t")
    assert base == run_identity(CONFIG, "c", "t")
    others = [
        run_identity(replace(CONFIG, seed=9), "c", "t"),
        run_identity(CONFIG, "other", "t"),
        run_identity(CONFIG, "c", "other"),
        run_identity(replace(CONFIG, delay=DelayConfig(steps=1)), "c", "t"),
        run_identity(replace(CONFIG, optimizer=replace(CONFIG.optimizer, settings={"momentum": 0.9})), "c", "t"),
    ]
    assert len({base, *others}) == 6
    assert "onelag.optim.muon" in deciding_modules(CONFIG)
    assert "onelag.optim.muon" not in deciding_modules(TrainConfig())


def test_refusals():
    for words, config in {
        "choose one of adamw": replace(CONFIG, optimizer=OptimizerConfig(name="x")),
        "future": replace(CONFIG, delay=DelayConfig(steps=-1)),
        "equal parts": replace(CONFIG, data=replace(CONFIG.data, accumulate=3)),
        "max_length": replace(CONFIG, data=replace(CONFIG.data, sequence_length=1024)),
        "at least 1": replace(CONFIG, schedule=ScheduleConfig(steps=0)),
    }.items():
        with pytest.raises(ValueError, match=words):
            train(config, SOURCE)
