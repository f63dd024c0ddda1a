"""Seconds: of a forward and a backward on each stage, of an update, of a message; and from these, by the timeline, of a step under each schedule.

A roofline without overlap: products at the part of the peak that they reach, everything elementwise at the part of the memory's bandwidth. Elementwise
traffic is counted from what autograd keeps: what is kept was written once and read about once more in the forward, and read again, with a gradient of
its size written and read, in the backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from torch import nn

from onelag.models.dense import DenseConfig
from onelag.models.flops import Flops, backward, block_forward, head_forward
from onelag.models.stages import Split
from onelag.optim.routing import route
from onelag.pipeline.timeline import Costs, Timeline, simulate
from onelag.planner.activations import block, head
from onelag.planner.hardware import GPU, Reached
from onelag.planner.memory import MATRIX_OPTIMIZERS, STATE, Layout, owned_by_replica

NEWTON_SCHULZ_STEPS = 5


@dataclass(frozen=True)
class StageTime:
    """Seconds of one micro-batch's forward and backward, of an update with all its communication, and of a message to the next stage."""

    forward: float
    backward: float
    update: float
    message: float


def stage_flops(config: DenseConfig, layers: tuple[int, int], last: bool, rows: int, length: int) -> Flops:
    """A micro-batch's forward on a stage."""
    total = head_forward(config, length) if last else Flops(0, 0)
    for index in range(*layers):
        total += block_forward(config, index, length)
    return total * rows


def stage_time(config: DenseConfig, layout: Layout, split: Split, stage: int, module: nn.Module, gpu: GPU, reached: Reached, gpus_per_node: int) -> StageTime:
    """From data-sheet numbers."""
    last = stage == layout.stages - 1
    flops = stage_flops(config, split[stage], last, layout.rows, layout.length)
    kept = sum(block(config, index, layout.tokens, layout.kernels) for index in range(*split[stage]))
    kept += head(config, layout.tokens, layout.kernels)[0] if last else 0.0
    forward = _computing(flops, gpu, reached) + 2 * kept / (gpu.bandwidth * reached.bandwidth)
    back = _computing(backward(flops), gpu, reached) + 3 * kept / (gpu.bandwidth * reached.bandwidth)
    if layout.recompute and not last:
        back += forward
    return StageTime(forward, back, update_time(module, layout, gpu, reached, gpus_per_node), message_time(config, layout, stage, gpu, reached, gpus_per_node))


def _computing(flops: Flops, gpu: GPU, reached: Reached) -> float:
    return (flops.products / reached.products + flops.attention / reached.attention + flops.grouped / reached.grouped) / gpu.peak


def message_time(config: DenseConfig, layout: Layout, stage: int, gpu: GPU, reached: Reached, gpus_per_node: int) -> float:
    """Hidden states of a micro-batch to the next stage: rank = stage · replicas + replica, nodes are filled in the order of ranks."""
    if stage == layout.stages - 1:
        return 0.0
    crosses = any((stage * layout.replicas + r) // gpus_per_node != ((stage + 1) * layout.replicas + r) // gpus_per_node for r in range(layout.replicas))
    link = (gpu.network if crosses else gpu.node_link) * reached.network
    return reached.latency + layout.tokens * config.width * layout.kernels.activation / link


def orthogonalization_flops(shape: Sequence[int]) -> float:
    """Newton–Schulz on (…, a, b), a ≤ b: per step X Xᵀ (2a²b), its square (2a³), and the product with X (2a²b)."""
    short, long = sorted(shape[-2:])
    return NEWTON_SCHULZ_STEPS * prod(shape[:-2]) * (4 * short * short * long + 2 * short**3)


def update_time(module: nn.Module, layout: Layout, gpu: GPU, reached: Reached, gpus_per_node: int) -> float:
    """The slowest replica's step, and what replicas send each other. As if nothing of that were hidden: an upper bound."""
    named = dict(module.named_parameters())
    routing = route(named.items())
    slowest = 0.0
    for names in owned_by_replica(module, layout):
        flops, traffic = 0.0, 0.0
        for name in names:
            parameter = named[name]
            count = parameter.numel()
            matrix = layout.optimizer in MATRIX_OPTIMIZERS and routing[name] == "matrix"
            state = STATE[layout.optimizer if matrix or layout.optimizer not in MATRIX_OPTIMIZERS else "adamw"]
            if matrix:
                flops += orthogonalization_flops(parameter.shape)
            # Gradient read, state and master read and written, slot written; for matrices the direction written, read, and the result twice.
            traffic += count * (4 + 2 * state + 8 + layout.slot_bytes + (16 if matrix else 0))
            traffic += count * {"none": 0, "lookahead": 12, "update": 20}[layout.correction]
        slowest = max(slowest, flops / (gpu.peak * reached.orthogonalization) + traffic / (gpu.bandwidth * reached.bandwidth))
    if layout.replicas > 1:
        link = (gpu.node_link if layout.replicas <= gpus_per_node and gpus_per_node % layout.replicas == 0 else gpu.network) * reached.network
        size = sum(parameter.numel() for parameter in named.values())
        slowest += 2 * reached.latency * layout.replicas + size * (4 + layout.slot_bytes) * (layout.replicas - 1) / layout.replicas / link
    return slowest


def step_timeline(times: Sequence[StageTime], layout: Layout, update_in_slack: bool = True) -> Timeline:
    """The steady state of a schedule with these times. Messages take the slowest link's time."""
    costs = Costs(
        forward=tuple(time.forward for time in times),
        backward=tuple(time.backward for time in times),
        latency=max(time.message for time in times),
        update=tuple(time.update for time in times),
    )
    place = "slack" if update_in_slack and layout.schedule in ("2bw", "pipedream") else "inline"
    return simulate(layout.stages, layout.microbatches, costs, num_batches=6, schedule=layout.schedule, depth=layout.depth, update=place)


def measured(times: Sequence[StageTime], forward: float | None, backward_: float | None) -> list[StageTime]:
    """The same with measured seconds of a forward and a backward of the slowest stage: all stages are scaled by the same factor."""
    if forward is None and backward_ is None:
        return list(times)
    by_forward = 1.0 if forward is None else forward / max(time.forward for time in times)
    by_backward = by_forward if backward_ is None else backward_ / max(time.backward for time in times)
    if forward is None:
        by_forward = by_backward
    return [replace(time, forward=time.forward * by_forward, backward=time.backward * by_backward) for time in times]
