"""The complete configuration of a run. Frozen, nested, plain values only: it is stored whole in the result file, and its hash names the run."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, Literal

from onelag.models.dense import DenseConfig
from onelag.models.presets import PRESETS


@dataclass(frozen=True)
class OptimizerConfig:
    """What `build_optimizer` needs."""

    name: str = "adamw"
    """one of onelag.optim.OPTIMIZERS"""
    learning_rate: float = 3e-3
    """peak, after warmup"""
    weight_decay: float | None = None
    """decoupled; none is 0.1 (0 for sgd)"""
    fallback_learning_rate: float | None = None
    """of the AdamW beside a matrix optimizer; none is the same as learning-rate"""
    settings: dict[str, Any] = field(default_factory=dict)
    """overrides of the recipe in onelag/optim/recipes.py, e.g. momentum 0.9"""


@dataclass(frozen=True)
class DelayConfig:
    """The gradient delay and what is done about it."""

    steps: int = 0
    """τ: every gradient is this many weight versions old; 0 trains synchronously"""
    correction: Literal["none", "error-feedback", "weight-prediction", "delay-compensation"] = "none"
    """what is done about the delay"""
    coefficient: float = 1.0
    """of error-feedback"""
    form: Literal["update", "lookahead"] = "update"
    """of error-feedback"""
    pipedream_stages: int = 0
    """p > 0 replaces steps by PipeDream's stage-dependent delays p − 1 − s, layers split evenly"""


@dataclass(frozen=True)
class DataConfig:
    """Text, tokens, batches."""

    corpus: str = "sotu"
    """"sotu", or the path of a .txt or .jsonl file"""
    tokenizer: str = "bytes"
    """"bytes", or "bpe-N" for a byte-level BPE with N entries trained on the training split"""
    sequence_length: int = 64
    """tokens per sequence"""
    batch_size: int = 32
    """sequences per optimizer step"""
    accumulate: int = 1
    """micro-batches that a batch is cut into"""


@dataclass(frozen=True)
class ScheduleConfig:
    """Linear warmup, then cosine to a fraction of the peak."""

    steps: int = 1200
    """optimizer steps"""
    warmup: float = 0.1
    """fraction of the steps"""
    final: float = 0.1
    """learning rate at the end, as a fraction of the peak"""


@dataclass(frozen=True)
class EvaluationConfig:
    """Validation on fixed windows of a held-out split."""

    split: Literal["held-out", "shift"] = "held-out"
    """held-out: every tenth document; shift: a later time, where the corpus has one"""
    every: int = 150
    """steps between validations during training"""
    tokens: int = 16384
    """per validation during training"""
    final_tokens: int = 131072
    """of the last validation, the one that the tables report"""


@dataclass(frozen=True)
class TrainConfig:
    """One run, complete."""

    model: DenseConfig = field(default_factory=lambda: PRESETS["byte-0.3m"])
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    delay: DelayConfig = field(default_factory=DelayConfig)
    data: DataConfig = field(default_factory=DataConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    clip_norm: float = 1.0
    """global gradient norm; 0 does not clip"""
    seed: int = 0
    """initialization and data order"""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: forward and backward under autocast"""
    device: Literal["cpu", "cuda"] = "cpu"

    def check(self) -> None:
        """Raises ValueError with one line for a configuration that cannot be run."""
        from onelag.optim import OPTIMIZERS

        if self.optimizer.name not in OPTIMIZERS:
            raise ValueError(f"unknown optimizer {self.optimizer.name!r}: choose one of {', '.join(OPTIMIZERS)}")
        if self.delay.steps < 0:
            raise ValueError(f"delay.steps must be 0 or more, but got {self.delay.steps}: a gradient cannot come from the future")
        if self.data.batch_size % self.data.accumulate:
            raise ValueError(f"data.batch_size={self.data.batch_size} cannot be cut into data.accumulate={self.data.accumulate} equal parts")
        if self.data.sequence_length > self.model.max_length:
            raise ValueError(f"data.sequence_length={self.data.sequence_length} exceeds the model's max_length={self.model.max_length}")
        for name in ("steps",):
            if getattr(self.schedule, name) < 1:
                raise ValueError(f"schedule.{name} must be at least 1, but got {getattr(self.schedule, name)}")

    def to_dict(self) -> dict[str, Any]:
        return json.loads(json.dumps(dataclasses.asdict(self)))  # tuples become lists, as they will when read back

    @property
    def tokens_per_step(self) -> int:
        return self.data.batch_size * self.data.sequence_length


def digest(value: Any) -> str:
    """sha256 of a value's canonical JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
