"""Bytes on one GPU of one stage, item by item, at the worst moment of a training step.

The items are those that the engine holds (pipeline/stage.py, update.py, replicas.py, channel.py). They are held against the live tensors of real
pipelines in tests/planner.
"""

from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from torch import nn

from onelag.models.dense import DenseConfig
from onelag.models.stages import Split, StageModule
from onelag.optim.newton_schulz import _CACHED_ELEMENTS
from onelag.optim.routing import route
from onelag.pipeline.order import FLUSHING, in_flight, stage_order
from onelag.pipeline.replicas import assign_owners, step_costs
from onelag.pipeline.timeline import postpone_updates
from onelag.planner.activations import GPU, Kernels, block, block_backward, head

# Bytes of optimizer state per parameter in float32: momentum alone, or two moments. SOAP's preconditioners depend on shapes: not offered here.
STATE = {"muon": 4, "normuon": 4, "adamw": 8, "nadam": 8, "adan": 16, "mars": 12, "lion": 4, "sgd": 4}
MATRIX_OPTIMIZERS = ("muon", "normuon")


@dataclass(frozen=True)
class Layout:
    """How a model is trained: everything that memory and time depend on besides the model.

    Attributes:
        stages, replicas: GPUs = stages · replicas.
        microbatches: per replica and step; `rows` sequences of `length` tokens each.
        schedule, depth, recompute: as in PipelineConfig.
        correction: "none", "update" (a buffer of its own) or "lookahead" (no persistent memory).
        optimizer: one of STATE.
        slot_bytes: of a weight in the slots: 2 with bfloat16 computation, 4 without.
    """

    stages: int
    replicas: int
    microbatches: int
    rows: int
    length: int
    schedule: str = "2bw"
    depth: str | int = "paper"
    recompute: bool = False
    correction: str = "none"
    optimizer: str = "muon"
    slot_bytes: int = 2
    kernels: Kernels = GPU

    @property
    def tokens(self) -> int:
        """Per micro-batch."""
        return self.rows * self.length

    @property
    def tokens_per_step(self) -> int:
        return self.tokens * self.microbatches * self.replicas


@dataclass(frozen=True)
class StageMemory:
    """Bytes at the worst moment. `items` lists what lies there then; `total` is their sum."""

    stage: int
    parameters: int
    items: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(self.items.values())


def versions_kept(stage: int, stages: int, schedule: str) -> int:
    """Weight slots: the delay + 1."""
    return {"2bw": 2, "pipedream": stages - stage}.get(schedule, 1)


def microbatches_kept(stage: int, layout: Layout) -> int:
    """Micro-batches between forward and backward at the most."""
    flight = in_flight(stage, layout.stages, layout.depth if layout.schedule in ("2bw", "pipedream") else "paper")
    return layout.microbatches if layout.schedule == "gpipe" else min(flight, layout.microbatches) if layout.schedule == "1f1b" else flight


class Moment(NamedTuple):
    """Something that a stage does, and what it keeps then: micro-batches between forward and backward, and sets of gradients."""

    kind: str
    microbatches: int
    gradients: int


def moments(stage: int, layout: Layout) -> set[Moment]:
    """The moments of a steady state that may be the worst: backwards (B), the reduction after a batch's last one (R), and updates (U)."""
    batches = layout.stages + 4
    actions = postpone_updates(stage_order(stage, layout.stages, layout.microbatches, batches, layout.schedule, layout.depth))
    last_forward = max(place for place, action in enumerate(actions) if action.kind == "F")
    flying, waiting, begun, found = 0, 0, 0, set()
    for action in actions if layout.schedule in FLUSHING else actions[: last_forward + 1]:
        if action.kind == "F":
            flying += 1
        elif action.kind == "B":
            found.add(Moment("B", flying, waiting + begun))
            flying, begun = flying - 1, 1
            if (action.index + 1) % layout.microbatches == 0:
                found.add(Moment("R", flying, waiting + 2 if layout.replicas > 1 else waiting + 1))  # summed up, and flat for the replicas
                waiting, begun = waiting + 1, 0
        else:
            found.add(Moment("U", flying, waiting + begun))
            waiting -= 1
    return found


def stage_memory(config: DenseConfig, layout: Layout, split: Split, stage: int, module: nn.Module | None = None) -> StageMemory:
    """Memory of `stage`, of the replica that holds the most. `module`: the stage on the meta device, if it is at hand."""
    module = module if module is not None else meta_stage(config, layout.stages, stage, split)
    sizes = {name: p.numel() for name, p in module.named_parameters()}
    parameters = sum(sizes.values())
    kept, worst = _activations(config, layout, split[stage], stage)
    steps = max((_optimizer(part, module, layout) for part in owned_by_replica(module, layout)), key=lambda found: found.state + found.temporary + 4 * found.owned)
    edge = layout.tokens * config.width * layout.kernels.activation
    backward = worst + max(sizes.values(), default=0) * layout.slot_bytes  # and one parameter's gradient, before it is added up
    recompute = layout.recompute and microbatches_kept(stage, layout) > 1
    candidates = []
    for kind, flying, gradients in moments(stage, layout):
        if recompute:
            activations, temporary = 0.0, {"B": kept + backward, "U": steps.temporary, "R": 0.0}[kind]
        else:
            activations, temporary = kept * flying, {"B": backward, "U": steps.temporary, "R": 0.0}[kind]
        boundaries = edge * _boundary_tensors(layout, stage, flying, recompute)
        candidates.append((activations, boundaries, float(temporary), 4.0 * gradients * parameters))
    activations, boundaries, temporary, gradients = max(candidates, key=sum)
    items = {
        "master weights": 4.0 * steps.owned,
        "weight versions": float(versions_kept(stage, layout.stages, layout.schedule) * layout.slot_bytes * parameters),
        "gradients": gradients,
        "optimizer": float(steps.state),
        "correction": 4.0 * steps.owned if layout.correction == "update" else 0.0,
        "activations": float(activations),
        "boundaries": float(boundaries),
        "temporary": temporary,
    }
    return StageMemory(stage, parameters, items)


def meta_stage(config: DenseConfig, stages: int, stage: int, split: Split) -> StageModule:
    """The stage without memory."""
    import torch

    with torch.device("meta"):
        return StageModule(config, stage, stages, split)


def _boundary_tensors(layout: Layout, stage: int, flying: int, recompute: bool) -> int:
    """Hidden states that came from or go to another stage, with `flying` micro-batches under way (pipeline/engine.py, channel.py)."""
    tensors = 0
    if stage > 0:
        norm_keeps_it = (layout.kernels.fused_norm or layout.kernels.activation == 4) and not recompute
        tensors += 1 + (0 if norm_keeps_it else flying)  # the next input on its way, and those that are here
        tensors += microbatches_kept(stage - 1, layout)  # gradients that may not have arrived yet
    if stage < layout.stages - 1:
        tensors += max(2 * flying - 1, 0) + 2  # outputs, and their copies until the gradient comes; this gradient and the next one
    return tensors


def owned_by_replica(module: nn.Module, layout: Layout) -> list[list[str]]:
    """Names by replica, as the engine deals them out."""
    shapes = {name: p.shape for name, p in module.named_parameters()}
    routing = route(module.named_parameters())
    matrices = {name for name in shapes if layout.optimizer in MATRIX_OPTIMIZERS and routing[name] == "matrix"}
    tied = {name for name in getattr(module, "tied_names", ()) if name in shapes}
    own = {name: shape for name, shape in shapes.items() if name not in tied}
    owners: dict[str, int] = {}
    for costs in (*step_costs(own, matrices), {name: float(shapes[name].numel()) for name in tied}):
        owners |= assign_owners(costs, layout.replicas)
    return [[name for name in shapes if owners[name] == replica] for replica in range(layout.replicas)]


class _Steps(NamedTuple):
    """What a replica's optimizer takes."""

    owned: int
    state: int
    temporary: float


def _optimizer(names: list[str], module: nn.Module, layout: Layout) -> _Steps:
    """For a replica that steps `names`."""
    own = {name: p for name, p in module.named_parameters() if name in set(names)}
    routing = route(own.items())
    state = owned = rest = 0
    alike: dict[tuple, int] = {}
    for name, parameter in own.items():
        owned += parameter.numel()
        if layout.optimizer in MATRIX_OPTIMIZERS and routing[name] == "matrix":
            state += STATE[layout.optimizer] * parameter.numel()
            alike[tuple(parameter.shape)] = alike.get(tuple(parameter.shape), 0) + 1
        else:
            state += STATE["adamw" if layout.optimizer in MATRIX_OPTIMIZERS else layout.optimizer] * parameter.numel()
            rest += parameter.numel()
    temporary = max((_newton_schulz(shape, number, layout.kernels) for shape, number in alike.items()), default=0)
    temporary = max(temporary, 4 * rest)  # foreach AdamW keeps one list of temporaries: the denominators
    # A correction needs the weights from before the step. In the lookahead form with slots of the master's own type they wait in the slot that is dead.
    if layout.correction == "update" or (layout.correction == "lookahead" and layout.slot_bytes != 4):
        temporary += 4 * owned
    if layout.replicas > 1:
        temporary = max(temporary, layout.slot_bytes * sum(p.numel() for p in module.parameters()))  # the new version, flat, to the other replicas
    return _Steps(owned, state, temporary)


def _newton_schulz(shape: tuple, number: int, kernels: Kernels) -> float:
    """All matrices of one shape at once (optim/newton_schulz.py, muon.py): the directions, and beside them the largest of the moments named here."""
    rows, columns = shape[-2:]
    matrices, size, short = number * prod(shape[:-2]), rows * columns, min(rows, columns)
    at_once = matrices if kernels.batched_products else min(matrices, max(1, _CACHED_ELEMENTS // size))
    elements, low = matrices * size, kernels.products
    divided = 4 * elements + (low * elements if low != 4 else 0)  # M/‖M‖ in float32, and rounded
    turned = 2 * low * elements if rows > columns else 0
    iterating = low * (elements + at_once * (size + 2 * short**2))  # the iterates; one more of those under way, and two Gram matrices
    result = (low + 4) * elements if low != 4 else low * elements
    return 4 * elements + max(divided, turned, iterating, result)


def _activations(config: DenseConfig, layout: Layout, layers: tuple[int, int], stage: int) -> tuple[float, float]:
    """(kept per micro-batch, beyond that at the worst moment of a backward, which frees layer after layer from the end)."""
    tokens, kernels = layout.tokens, layout.kernels
    kept, worst = 0.0, 0.0
    for index in range(*layers):
        kept += block(config, index, tokens, kernels)
        worst = max(worst, kept + block_backward(config, index, tokens, kernels))
    if stage == layout.stages - 1:
        more, moment = head(config, tokens, kernels)
        kept += more
        worst = max(worst, kept + moment)
    return kept, max(worst - kept, 0.0)
