"""The runs at scale, complete: model, optimizer, data, schedule, and how the GPUs share the work. One function per run; `CONFIGS` names them.

The paper gives model sizes, tokens (20 per parameter) and ranges of batch sizes; everything else here is a choice of ours: learning rates, layouts,
the mixtures, and all of dense-1b and dense-10b. Time, memory and cost in the headers are the planner's for 2bw with error feedback (`onelag plan NAME`),
not measurements; no run of this size has been made with this code yet.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from onelag.models.presets import PRESETS
from onelag.training.config import DataConfig, DelayConfig, EvaluationConfig, OptimizerConfig, ScheduleConfig, TrainConfig
from onelag.training.pipeline_config import PipelineConfig

MODES = ("sync", "2bw", "2bw+ef")
CORPUS = "data/fineweb-edu"
TOKENIZER = "HuggingFaceTB/SmolLM2-135M"


@dataclass(frozen=True)
class ScaleConfig:
    """One run on a cluster.

    Attributes:
        train: everything that decides its numbers.
        pipeline: how processes share the work; stages × pipeline.replicas GPUs.
        gpu: the GPU that the layout was made for, one of planner.hardware.GPUS.
        gpus_per_node: for launching, and to know which links cross between nodes.
    """

    name: str
    train: TrainConfig
    pipeline: PipelineConfig
    stages: int
    gpu: str = "h100"
    gpus_per_node: int = 8

    @property
    def gpus(self) -> int:
        return self.stages * self.pipeline.replicas

    @property
    def tokens(self) -> int:
        """Of the whole run."""
        return self.train.tokens_per_step * self.train.schedule.steps

    @property
    def rows(self) -> int:
        """Sequences per micro-batch.

        Raises:
            ValueError: the batch cannot be cut evenly.
        """
        rows, rest = divmod(self.train.data.batch_size, self.pipeline.replicas * self.pipeline.microbatches)
        if rest or not rows:
            raise ValueError(
                f"data.batch_size={self.train.data.batch_size} cannot be cut into pipeline.microbatches={self.pipeline.microbatches} "
                f"equal parts on each of pipeline.replicas={self.pipeline.replicas} replicas"
            )
        return rows

    def in_mode(self, mode: str) -> "ScaleConfig":
        """The same run as "sync" (1F1B with a flush), "2bw", or "2bw+ef" (error feedback, lookahead form). Raises ValueError for another mode."""
        if mode not in MODES:
            raise ValueError(f"unknown mode {mode!r}: choose one of {', '.join(MODES)}")
        # The schedule is the delay; `steps` says it for the result file.
        delay = DelayConfig(steps=0 if mode == "sync" else 1)
        if mode == "2bw+ef":
            delay = replace(delay, correction="error-feedback", form="lookahead")
        pipeline = replace(self.pipeline, schedule="1f1b" if mode == "sync" else "2bw")
        return replace(self, train=replace(self.train, delay=delay), pipeline=pipeline)


def _run(name: str, tokens: float, batch: int, learning_rate: float, stages: int, replicas: int, microbatches: int, recompute: bool = False) -> ScaleConfig:
    length = 2048
    train = TrainConfig(
        model=PRESETS[name],
        optimizer=OptimizerConfig(name="muon", learning_rate=learning_rate),
        data=DataConfig(corpus=CORPUS, tokenizer=TOKENIZER, sequence_length=length, batch_size=batch),
        schedule=ScheduleConfig(steps=round(tokens / (batch * length)), warmup=0.1, final=0.1),
        evaluation=EvaluationConfig(every=500, tokens=2**21, final_tokens=2**24),
        clip_norm=1.0,
        precision="bf16",
        device="cuda",
    )
    pipeline = PipelineConfig(replicas=replicas, microbatches=microbatches, recompute=recompute, checkpoint_every=500)
    return ScaleConfig(name, train, pipeline, stages).in_mode("2bw+ef")


def smollm2_135m() -> ScaleConfig:
    """SmolLM2-135M.

    Command   onelag launch smollm2-135m
    Hardware  8 H100: 4 stages × 2 replicas
    Tokens    2.7B in 10,300 steps of 262,144
    Time      0.4 hours
    Memory    6.6 GB
    Loss      the paper trained this size; its losses are not known to us
    """
    return _run("smollm2-135m", 2.7e9, batch=128, learning_rate=3e-3, stages=4, replicas=2, microbatches=16)


def smollm2_360m() -> ScaleConfig:
    """SmolLM2-360M.

    Command   onelag launch smollm2-360m
    Hardware  8 H100: 4 stages × 2 replicas
    Tokens    7.2B in 27,466 steps of 262,144
    Time      2.0 hours
    Memory    12.7 GB
    Loss      the paper: 2.578 sync, 2.590 delayed, 2.583 with error feedback (Muon, its own data order and learning rates)
    """
    return _run("smollm2-360m", 7.2e9, batch=128, learning_rate=2e-3, stages=4, replicas=2, microbatches=16)


def dense_1b() -> ScaleConfig:
    """Dense, 1.1B parameters.

    Command   onelag launch dense-1b
    Hardware  16 H100: 4 stages × 4 replicas
    Tokens    22B in 20,981 steps of 1,048,576
    Time      6.7 hours
    Memory    21.0 GB
    Loss      not in the paper, not known
    """
    return _run("dense-1b", 22e9, batch=512, learning_rate=1e-3, stages=4, replicas=4, microbatches=32)


def moe_2b() -> ScaleConfig:
    """Mixture of experts, 2.0B parameters, 0.38B active.

    Command   onelag launch moe-2b
    Hardware  32 H100: 4 stages × 8 replicas
    Tokens    40B in 38,147 steps of 1,048,576
    Time      3.3 hours
    Memory    20.8 GB
    Loss      the paper's own mixture of this size was trained; its losses are not known to us
    """
    return _run("moe-2b", 40e9, batch=512, learning_rate=1e-3, stages=4, replicas=8, microbatches=16)


def moe_10b() -> ScaleConfig:
    """Mixture of experts, 10.2B parameters, 1.6B active.

    Command   onelag launch moe-10b
    Hardware  64 H100: 8 stages × 8 replicas
    Tokens    200B in 95,367 steps of 2,097,152
    Time      28.0 hours
    Memory    33.1 GB
    Loss      the paper's own mixture of this size: 1.906 sync, 1.911 delayed, 1.906 with error feedback
    """
    return _run("moe-10b", 200e9, batch=1024, learning_rate=6e-4, stages=8, replicas=8, microbatches=64)


def dense_10b() -> ScaleConfig:
    """Dense, 9.9B parameters.

    Command   onelag launch dense-10b
    Hardware  128 H100: 8 stages × 16 replicas
    Tokens    200B in 95,367 steps of 2,097,152
    Time      2.5 days
    Memory    52.5 GB
    Loss      not in the paper, not known
    """
    return _run("dense-10b", 200e9, batch=1024, learning_rate=6e-4, stages=8, replicas=16, microbatches=32)


CONFIGS: dict[str, Callable[[], ScaleConfig]] = {
    "smollm2-135m": smollm2_135m,
    "smollm2-360m": smollm2_360m,
    "dense-1b": dense_1b,
    "moe-2b": moe_2b,
    "moe-10b": moe_10b,
    "dense-10b": dense_10b,
}


def get_config(name: str) -> ScaleConfig:
    """Raises ValueError for an unknown name, listing the choices."""
    if name not in CONFIGS:
        raise ValueError(f"unknown configuration {name!r}: choose one of {', '.join(CONFIGS)}")
    return CONFIGS[name]()
