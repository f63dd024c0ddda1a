"""The tiers: the same experiments at the size that a machine can afford. All values here are choices of ours."""

from dataclasses import dataclass, replace

from onelag.models.presets import PRESETS
from onelag.training.config import DataConfig, DelayConfig, EvaluationConfig, OptimizerConfig, ScheduleConfig, TrainConfig

MODES: dict[str, DelayConfig] = {
    "sync": DelayConfig(),
    "delayed": DelayConfig(steps=1),
    "delayed+EF": DelayConfig(steps=1, correction="error-feedback"),
}
HEADLINE = ("adamw", "muon")

# Peak learning rates tried first, a factor 2 apart; where the best is at an edge, the grid grows there (see tuning.py).
GRID = {
    "adamw": (2e-3, 4e-3, 8e-3),
    "nadam": (2e-3, 4e-3, 8e-3),
    "adan": (4e-3, 8e-3, 1.6e-2),
    "mars": (2e-3, 4e-3, 8e-3),
    "lion": (5e-4, 1e-3, 2e-3),
    "soap": (2e-3, 4e-3, 8e-3),
    "normuon": (5e-3, 1e-2, 2e-2),
    "muon": (5e-3, 1e-2, 2e-2),
    "sgd": (0.25, 0.5, 1.0),
}
# The AdamW beside a matrix optimizer keeps one rate, so that tuning moves one number per optimizer.
FALLBACK_LEARNING_RATE = 4e-3


@dataclass(frozen=True)
class Tier:
    """One machine size.

    Attributes:
        name: as in `--tier`.
        base: the run that every experiment varies.
        seeds: paired over optimizers and modes: same initialization, same data order.
        tuning_seeds: for learning rates only, never in a table.
        optimizers: those of table-1 and table-2.
        extend: how often a learning-rate grid may grow past its edge.
        workers: runs at a time, one thread each.
        about: machine and time, for people.
    """

    name: str
    base: TrainConfig
    seeds: tuple[int, ...]
    tuning_seeds: tuple[int, ...]
    optimizers: tuple[str, ...]
    extend: int
    workers: int
    about: str

    def config(self, optimizer: str, mode: str, learning_rate: float, seed: int) -> TrainConfig:
        """The run of one cell of a table."""
        from onelag.optim import OPTIMIZERS

        fallback = FALLBACK_LEARNING_RATE if OPTIMIZERS[optimizer].matrices_only else None
        chosen = OptimizerConfig(name=optimizer, learning_rate=learning_rate, fallback_learning_rate=fallback)
        return replace(self.base, optimizer=chosen, delay=MODES[mode], seed=seed)


def _byte_model(steps: int, every: int, final_tokens: int) -> TrainConfig:
    return TrainConfig(
        model=PRESETS["byte-0.3m"],
        data=DataConfig(corpus="sotu", tokenizer="bytes", sequence_length=64, batch_size=32),
        schedule=ScheduleConfig(steps=steps),
        evaluation=EvaluationConfig(every=every, tokens=16384, final_tokens=final_tokens),
    )


def _token_model(preset: str, batch: int, sequence: int, tokens: float, accumulate: int = 1) -> TrainConfig:
    return TrainConfig(
        model=PRESETS[preset],
        data=DataConfig(corpus="sotu", tokenizer="bpe-4096", sequence_length=sequence, batch_size=batch, accumulate=accumulate),
        schedule=ScheduleConfig(steps=int(tokens / (batch * sequence))),
        evaluation=EvaluationConfig(every=200, tokens=131072, final_tokens=524288),
        precision="bf16",
        device="cuda",
    )


ALL = ("adamw", "muon", "lion", "normuon", "soap", "nadam", "adan", "mars", "sgd")
TIERS = {
    "smoke": Tier("smoke", _byte_model(40, 20, 8192), (0, 1), (100,), HEADLINE, 0, 2, "2 CPU cores, under 3 minutes: proves the plumbing"),
    "cpu": Tier("cpu", _byte_model(600, 100, 131072), (0, 1, 2), (100,), HEADLINE, 1, 2, "2 CPU cores, about 30 minutes"),
    "cpu-full": Tier("cpu-full", _byte_model(1200, 150, 131072), (0, 1, 2, 3, 4), (100,), ALL, 2, 2, "2 CPU cores, several hours"),
    "gpu": Tier("gpu", _token_model("10m", 64, 512, 2e8), (0, 1, 2), (100,), ALL, 2, 1, "one GPU, hours: 10M parameters, 200M tokens"),
}
