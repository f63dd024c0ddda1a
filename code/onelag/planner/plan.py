"""A plan: memory per stage, time per schedule, days and dollars, and what to change if it does not fit."""

from dataclasses import dataclass, replace

from torch import nn

from onelag.configs import MODES, ScaleConfig
from onelag.models.flops import backward, model_forward
from onelag.models.stages import Split, split_by_flops
from onelag.planner.hardware import GPU, Reached, get_gpu
from onelag.planner.memory import STATE, Layout, StageMemory, meta_stage, stage_memory
from onelag.planner.time import StageTime, measured, stage_time, step_timeline


@dataclass(frozen=True)
class ScheduleTime:
    """One schedule's step: seconds, the part in which stages wait, seconds per update (upper bound)."""

    name: str
    step: float
    bubble: float
    update: float


@dataclass(frozen=True)
class Plan:
    """Everything that is known about a run before it starts."""

    config: ScaleConfig
    layout: Layout
    gpu: GPU
    split: Split
    memory: tuple[StageMemory, ...]
    times: tuple[StageTime, ...]
    schedules: tuple[ScheduleTime, ...]
    flops_per_token: float
    advice: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return max(stage.total for stage in self.memory) <= self.gpu.usable

    @property
    def chosen(self) -> ScheduleTime:
        """The schedule that the configuration asks for."""
        return next(one for one in self.schedules if one.name == mode_of(self.config))

    @property
    def mfu(self) -> float:
        """The part of the GPUs' peak that the model's own operations make (recomputation does not count)."""
        return self.flops_per_token * self.layout.tokens_per_step / (self.chosen.step * self.layout.stages * self.layout.replicas * self.gpu.peak)

    @property
    def days(self) -> float:
        return self.config.tokens / self.layout.tokens_per_step * self.chosen.step / 86400

    @property
    def dollars(self) -> float:
        return self.days * 24 * self.layout.stages * self.layout.replicas * self.gpu.price

    @property
    def bytes_per_step(self) -> dict[str, float]:
        """What the busiest GPU sends in a step: hidden states and their gradients, gradients to their owners, new weights to the other replicas."""
        layout = self.layout
        edge = layout.tokens * self.config.train.model.width * layout.kernels.activation * layout.microbatches
        most = max(stage.parameters for stage in self.memory)
        shared = (layout.replicas - 1) / layout.replicas * most
        return {"stages": (2 if layout.stages > 2 else 1) * edge if layout.stages > 1 else 0, "gradients": 4 * shared, "weights": layout.slot_bytes * shared}


def mode_of(config: ScaleConfig) -> str:
    """The row of the table that a configuration is."""
    if config.pipeline.schedule == "2bw":
        return "2bw+ef" if config.train.delay.correction == "error-feedback" else "2bw"
    return config.pipeline.schedule


def layout_of(config: ScaleConfig) -> Layout:
    """Raises ValueError for what cannot be cut, or an optimizer without a memory model."""
    train, pipeline = config.train, config.pipeline
    if train.optimizer.name not in STATE:
        raise ValueError(f"the planner has no memory model of optimizer {train.optimizer.name!r}: it knows {', '.join(STATE)}")
    if pipeline.depth not in ("paper", "eager") and not pipeline.depth.isdigit():
        raise ValueError(f"pipeline.depth={pipeline.depth!r}: use paper, eager or a number")
    correction = {"none": "none", "error-feedback": train.delay.form}.get(train.delay.correction, "none")
    low = train.precision == "bf16"
    return Layout(
        stages=config.stages,
        replicas=pipeline.replicas,
        microbatches=pipeline.microbatches,
        rows=config.rows,
        length=train.data.sequence_length,
        schedule=pipeline.schedule,
        depth=int(pipeline.depth) if pipeline.depth.isdigit() else pipeline.depth,
        recompute=pipeline.recompute,
        correction=correction,
        optimizer=train.optimizer.name,
        slot_bytes=2 if low else 4,
        kernels=replace(Layout.kernels, activation=2 if low else 4),
    )


def make_plan(
    config: ScaleConfig,
    gpu: GPU | None = None,
    reached: Reached = Reached(),  # noqa: B008 (frozen)
    forward_seconds: float | None = None,
    backward_seconds: float | None = None,
) -> Plan:
    """Plans a configuration.

    Args:
        gpu: None is the configuration's own.
        reached: which part of the data sheet's numbers is reached.
        forward_seconds, backward_seconds: measured, of the slowest stage's micro-batch; they replace the roofline.

    Raises:
        ValueError: more stages than layers, a batch that cannot be cut, too few micro-batches for the stages, an unknown GPU.
    """
    gpu, layout, model = gpu or get_gpu(config.gpu), layout_of(config), config.train.model
    split, modules = _stages(config)
    memory = _memory(config, split, modules)

    def times_of(layout: Layout) -> list[StageTime]:
        found = [stage_time(model, layout, split, s, module, gpu, reached, config.gpus_per_node) for s, module in enumerate(modules)]
        return measured(found, forward_seconds, backward_seconds)

    schedules = []
    for name in ("1f1b", "gpipe", "2bw", "2bw+ef"):
        correction = (layout.correction if layout.correction != "none" else "lookahead") if name == "2bw+ef" else "none"
        one = replace(layout, schedule=name.removesuffix("+ef"), correction=correction)
        times = times_of(one)
        timeline = step_timeline(times, one)
        schedules.append(ScheduleTime(name, timeline.step_time, timeline.bubble, max(time.update for time in times)))
    if layout.schedule == "pipedream":
        timeline = step_timeline(times_of(layout), layout)
        schedules.append(ScheduleTime("pipedream", timeline.step_time, timeline.bubble, max(time.update for time in times_of(layout))))
    forward = model_forward(model, layout.length)
    per_token = (forward + backward(forward)).total / layout.length
    plan = Plan(config, layout, gpu, split, memory, tuple(times_of(layout)), tuple(schedules), per_token, ())
    if not plan.fits:
        plan = replace(plan, advice=_advice(config, gpu))
    return plan


def _stages(config: ScaleConfig) -> tuple[Split, list[nn.Module]]:
    layers = config.train.model.num_layers
    if config.stages > layers:
        raise ValueError(f"stages={config.stages} is more than the model's {layers} layers: use at most {layers}")
    split = split_by_flops(config.train.model, config.stages, config.train.data.sequence_length)
    return split, [meta_stage(config.train.model, config.stages, stage, split) for stage in range(config.stages)]


def _memory(config: ScaleConfig, split: Split, modules: list[nn.Module]) -> tuple[StageMemory, ...]:
    layout = layout_of(config)
    return tuple(stage_memory(config.train.model, layout, split, stage, module) for stage, module in enumerate(modules))


def _advice(config: ScaleConfig, gpu: GPU) -> tuple[str, ...]:
    """Changes, each by itself, with which it would fit; the cheapest first."""
    pipeline = config.pipeline
    changes = [("pipeline.recompute=True", replace(config, pipeline=replace(pipeline, recompute=True)))]
    for factor in (2, 4):
        if config.rows % factor == 0:
            more = replace(pipeline, microbatches=pipeline.microbatches * factor)
            changes.append((f"pipeline.microbatches={more.microbatches} ({config.rows // factor} per micro-batch)", replace(config, pipeline=more)))
    for factor in (2, 4):
        if config.stages * factor <= config.train.model.num_layers:
            changes.append((f"stages={config.stages * factor} ({config.gpus * factor} GPUs)", replace(config, stages=config.stages * factor)))
    smallest = replace(config, pipeline=replace(pipeline, recompute=True, microbatches=pipeline.microbatches * config.rows))
    changes.append((f"pipeline.recompute=True and pipeline.microbatches={smallest.pipeline.microbatches} (1 sequence per micro-batch)", smallest))
    found = []
    for name, changed in changes:
        try:
            worst = max(stage.total for stage in _memory(changed, *_stages(changed)))
        except ValueError:  # e.g. too few micro-batches for so many stages: no advice then
            continue
        if worst <= gpu.usable:
            found.append(f"{name}: {worst / 1e9:.1f} GB")
    return tuple(found) or ("no single change that the planner tries is enough: use more stages with recompute, or a GPU with more memory",)


__all__ = ["MODES", "Plan", "ScheduleTime", "layout_of", "make_plan", "mode_of"]
