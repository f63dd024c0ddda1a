"""From a user's stage module and optimizer to the parts of a running pipeline: checks first, then the handshake, then memory."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from onelag.delay import OptimizerWrapper
from onelag.pipeline.channel import Inbox, Outbox
from onelag.pipeline.clock import Clock
from onelag.pipeline.handshake import (
    ANY,
    Names,
    agree_on_names,
    compare_settings,
    describe,
    flatten,
    gather,
    plain_name,
    refuse_wrappers,
    warm_up,
)
from onelag.pipeline.microbatches import Cutter
from onelag.pipeline.order import Depth, check_feasible
from onelag.pipeline.randomness import ModuleRandomness
from onelag.pipeline.replicas import Replicas, assign_owners, step_costs
from onelag.pipeline.stage import VersionedStage
from onelag.pipeline.topology import Groups, Place, place
from onelag.pipeline.update import MasterUpdate, check_optimizer, refuse_replicated


@dataclass
class Parts:
    """Everything a schedule runs with. `delays` holds every stage's weight delay; `wire` is the device that messages travel on."""

    here: Place
    delays: list[int]
    device: torch.device
    wire: torch.device
    groups: Groups
    names: Names
    stage: VersionedStage
    master: MasterUpdate
    replicas: Replicas
    inboxes: dict[str, Inbox]
    outboxes: dict[str, Outbox]
    cut_inputs: Cutter
    cut_targets: Cutter
    clock: Clock
    settings: dict[str, Any]


def assemble(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    schedule: str,
    num_microbatches: int,
    depth: Depth,
    group: dist.ProcessGroup | None,
    num_stages: int | None,
    num_replicas: int,
    clip_norm: float | None,
    compute_dtype: torch.dtype | None,
    recompute: bool,
    dropout_seed: int | None,
    update: str,
    tied: Iterable[str] | None,
    timeout: float,
    config: Mapping[str, Any] | None,
) -> Parts:
    """See `schedules.Schedule2BW` for the arguments and errors."""
    ranks = _ranks(group)
    rank = dist.get_rank(group) if dist.is_initialized() else 0
    here = place(rank, len(ranks), num_stages, num_replicas)
    check_feasible(here.num_stages, num_microbatches, depth, schedule)
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"clip_norm={clip_norm!r}: use a number above 0, or None not to clip")
    if update not in ("slack", "inline"):
        raise ValueError(f"update={update!r}: use 'slack' or 'inline'")
    if not timeout > 0:
        raise ValueError(f"timeout={timeout!r}: use a number of seconds above 0")
    refuse_wrappers(module)
    if optimizer is None and not any(p.requires_grad for p in module.parameters()):
        optimizer = _NothingToDo([{"params": []}], {})  # a stage without weights, where there are fewer layers than stages
    check_optimizer(optimizer)
    if num_replicas > 1:
        refuse_replicated(optimizer)
    for name, wanted in (("stage", here.stage), ("num_stages", here.num_stages)):
        built_for = getattr(module, name, wanted)
        if isinstance(built_for, int) and built_for != wanted:
            raise ValueError(f"the stage module was built for {name}={built_for}, but rank {rank} is {here}")

    settings = {"schedule": schedule, "num_stages": here.num_stages, "num_replicas": num_replicas, "num_microbatches": num_microbatches, "depth": depth}
    settings |= {"clip_norm": clip_norm, "compute_dtype": str(compute_dtype), "recompute": recompute, "dropout_seed": dropout_seed, "update": update}
    settings |= {"timeout": timeout, **_correction(optimizer)}
    told = gather({"settings": {**settings, **flatten(config or {})}}, len(ranks), group)
    compare_settings([content["settings"] for content in told])
    declared = getattr(module, "tied_names", ()) if tied is None else tied
    names = agree_on_names(here, gather(describe(module, declared), len(ranks), group))
    names = replace(names, global_name={name: names.global_name[plain_name(name)] for name, _ in module.named_parameters()})

    device = next((t.device for t in (*module.parameters(), *module.buffers())), torch.device("cpu"))
    groups = Groups(here, ranks, timeout, names.tied_stages)
    wire = torch.device("cpu") if groups.everyone is None or dist.get_backend(groups.everyone) == "gloo" else device
    warm_up(here, groups, wire, timeout)

    delays = [{"2bw": 1, "pipedream": here.num_stages - 1 - s}.get(schedule, 0) for s in range(here.num_stages)]
    randomness = None if dropout_seed is None else ModuleRandomness(module, dropout_seed, lambda name: names.prefix + plain_name(name))
    tied_here = [name for known in names.tied for name, global_name in names.global_name.items() if global_name == known]
    _start_equal(module, groups, tied_here)
    stage = VersionedStage(module, delays[here.stage] + 1, compute_dtype, randomness)
    replicas = _replicas(here, groups, stage, optimizer, tied_here, counts_tied=here.stage in names.tied_stages[:1])
    return Parts(
        here=here,
        delays=delays,
        device=device,
        wire=wire,
        groups=groups,
        names=names,
        stage=stage,
        master=MasterUpdate(optimizer, stage, replicas.owned),
        replicas=replicas,
        inboxes={key: Inbox(edge, wire, device) for key, edge in groups.edges.items() if key.endswith("in")},
        outboxes={key: Outbox(edge, wire) for key, edge in groups.edges.items() if key.endswith("out")},
        cut_inputs=Cutter("inputs", num_microbatches, device),
        cut_targets=Cutter("targets", num_microbatches, device),
        clock=Clock(),
        settings=settings,
    )


class _NothingToDo(torch.optim.Optimizer):
    """The optimizer of a stage without parameters."""

    def __init__(self, groups: list[dict[str, Any]], defaults: dict[str, Any]):
        torch.optim.Optimizer.__init__(self, groups, defaults)

    def step(self, closure=None) -> None:
        """Nothing."""


def _correction(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    if isinstance(optimizer, _NothingToDo):
        return {"correction": ANY, "correction.coefficient": ANY, "correction.form": ANY}
    return {
        "correction": type(optimizer).__name__ if isinstance(optimizer, OptimizerWrapper) else None,
        "correction.coefficient": getattr(optimizer, "coefficient", None),
        "correction.form": getattr(optimizer, "form", None),
    }


def _ranks(group: dist.ProcessGroup | None) -> list[int]:
    """Global ranks in the order of the group."""
    if not dist.is_initialized():
        return [0]
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    if len(ranks) != dist.get_world_size():
        raise ValueError(
            f"group= holds {len(ranks)} of {dist.get_world_size()} processes: a pipeline's group must hold all of them, since torch makes groups collectively"
        )
    return ranks


@torch.no_grad()
def _start_equal(module: nn.Module, groups: Groups, tied: list[str]) -> None:
    """Replicas start from replica 0's values, tied copies from the first stage's."""
    parameters = dict(module.named_parameters())
    for group, names in ((groups.replicas, list(parameters)), (groups.tied, tied)):
        for name in names if group is not None else ():
            values = parameters[name].detach().clone(memory_format=torch.contiguous_format)
            dist.broadcast(values, src=dist.get_process_group_ranks(group)[0], group=group)
            parameters[name].copy_(values)


def _replicas(here: Place, groups: Groups, stage: VersionedStage, optimizer: torch.optim.Optimizer, tied: list[str], counts_tied: bool) -> Replicas:
    """Decides who steps what. Tied parameters are dealt out by themselves: their owner must be the same on every stage that holds them."""
    orthogonalized = {id(p) for g in optimizer.param_groups if {"orthogonalization", "ns_steps"} & set(g) for p in g["params"]}
    matrices = {name for name, p in stage.master.items() if id(p) in orthogonalized}
    tied = [name for name in tied if name in stage.master]
    own = {name: p.shape for name, p in stage.master.items() if name not in tied}
    owners = {}
    for costs in (*step_costs(own, matrices), {name: float(stage.master[name].numel()) for name in tied}):
        owners |= assign_owners(costs, here.num_replicas)
    return Replicas(here, groups, {name: owners[name] for name in stage.master}, stage.master, tied, counts_tied)
