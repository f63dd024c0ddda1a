"""Before the first micro-batch: is this one pipeline? Same settings on every rank, the parameters where they belong, every edge alive."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from onelag.pipeline.errors import PipelineError
from onelag.pipeline.topology import Groups, Place

_WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule")


def refuse_wrappers(module: nn.Module) -> None:
    """Raises TypeError for DDP- or FSDP-wrapped modules.

    Both would go wrong in silence here: DDP reduces nothing under functional_call, and FSDP2's resharding mixes weight versions.
    """
    for name, submodule in module.named_modules():
        for cls in type(submodule).__mro__:
            if cls.__name__ in _WRAPPERS and cls.__module__.startswith("torch."):
                where = f"submodule {name!r}" if name else "the stage module"
                raise TypeError(
                    f"{where} is wrapped in {cls.__name__}: give the bare module, the pipeline has data parallelism of its own (num_replicas=…)"
                )
    for name, parameter in module.named_parameters():
        if type(parameter).__name__ == "DTensor":
            raise TypeError(f"parameter {name!r} is a DTensor: give the bare module, the pipeline has data parallelism of its own (num_replicas=…)")


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested configuration as {"a.b.c": value}."""
    flat = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def gather(content: Any, world_size: int, group: dist.ProcessGroup | None) -> list[Any]:
    """What every rank says, in rank order."""
    if world_size == 1:
        return [content]
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, content, group=group)
    return everyone


ANY = "(any)"
"""The setting of a rank that has no say in it."""


def compare_settings(of_ranks: list[Mapping[str, Any]]) -> None:
    """Raises ValueError, the same on every rank, for the first key that is not equal everywhere."""
    for key in dict.fromkeys(key for settings in of_ranks for key in settings):
        said = [(rank, value) for rank, settings in enumerate(of_ranks) if (value := settings.get(key, "(absent)")) != ANY]
        for rank, value in said:
            if repr(value) != repr(said[0][1]):
                raise ValueError(
                    f"the ranks were given different settings: {key}={said[0][1]!r} on rank {said[0][0]}, {key}={value!r} on rank {rank}"
                )


@dataclass(frozen=True)
class Names:
    """How this rank's parameters are called by everybody.

    Attributes:
        global_name: name on this rank → global name. The same, unless stages use the same names for different parameters ("0.weight" on each of them):
            then with a prefix "stages.<s>.", and a checkpoint can only be resumed with the same split.
        prefix: that prefix, or "".
        tied: global names of parameters that live on more than one stage and are to stay equal.
        tied_stages: the stages that hold them.
    """

    global_name: dict[str, str]
    prefix: str
    tied: tuple[str, ...]
    tied_stages: tuple[int, ...]


def agree_on_names(here: Place, of_ranks: list[Mapping[str, Any]]) -> Names:
    """From what all ranks hold: {"parameters": {name: "shape dtype"}, "tied": names declared as tied}, in rank order.

    Raises:
        ValueError: replicas of a stage differ, a tied parameter lives on one stage only or differs between them, or tied ones live in different places.
    """
    stages = []
    for stage in range(here.num_stages):
        replicas = [of_ranks[here.rank_of(stage, replica)] for replica in range(here.num_replicas)]
        for replica, content in enumerate(replicas):
            if content != replicas[0]:
                raise ValueError(f"stage {stage}: replica {replica} does not hold the same parameters as replica 0: {_first_difference(content, replicas[0])}")
        stages.append(replicas[0])
    tied = tuple(dict.fromkeys(name for content in stages for name in content["tied"])) if here.num_stages > 1 else ()
    holders: dict[str, list[int]] = {}
    for stage, content in enumerate(stages):
        for name in content["parameters"]:
            holders.setdefault(name, []).append(stage)
    for name in tied:
        where = holders.get(name, [])
        if len(where) < 2:
            raise ValueError(f"tied parameter {name!r} is on {len(where)} of the {here.num_stages} stages: it must be on two or more")
        if len({stages[s]["parameters"][name] for s in where}) > 1:
            raise ValueError(f"tied parameter {name!r} differs between stages: {[stages[s]['parameters'][name] for s in where]}")
        if where != holders[tied[0]]:
            raise ValueError(f"tied parameters {tied[0]!r} and {name!r} live on different stages, {holders[tied[0]]} and {where}: this is not supported")
    clash = any(len(where) > 1 for name, where in holders.items() if name not in tied)
    prefix = f"stages.{here.stage}." if clash else ""
    own = stages[here.stage]["parameters"]
    return Names(
        {name: name if name in tied else prefix + name for name in own}, prefix, tied, tuple(holders[tied[0]]) if tied else ()
    )


def _first_difference(left: Mapping[str, Any], right: Mapping[str, Any]) -> str:
    names = dict.fromkeys([*left["parameters"], *right["parameters"]])
    for name in names:
        pair = left["parameters"].get(name, "absent"), right["parameters"].get(name, "absent")
        if pair[0] != pair[1]:
            return f"{name} is {pair[0]} against {pair[1]}"
    return "their order, or what is tied, differs"


def plain_name(name: str) -> str:
    """A parameter's name without what torch.compile puts into it."""
    return name.replace("_orig_mod.", "")


def describe(module: nn.Module, tied: Iterable[str]) -> dict[str, Any]:
    """What a rank says about its parameters."""
    parameters = {plain_name(n): f"{tuple(p.shape)} {str(p.dtype).removeprefix('torch.')}" for n, p in module.named_parameters()}
    return {"parameters": parameters, "tied": [name for name in tied if name in parameters]}


def warm_up(here: Place, groups: Groups, wire: torch.device, timeout: float) -> None:
    """One exchange on every edge, from the first stage to the last and back, so that every connection exists before work depends on it.

    Lazily made connections hang when the peer is not there yet (pytorch PR #160210, NCCL #1691).

    Raises:
        PipelineError: an edge did not answer within `timeout` seconds, or answered with something else.
    """
    for direction in ("down", "up"):
        for ending in ("in", "out") if direction == "down" else ("out", "in"):
            edge = groups.edges.get(f"{direction}_{ending}")
            if edge is None:
                continue
            try:
                if ending == "out":
                    dist.isend(torch.tensor([here.stage], dtype=torch.int64, device=wire), dst=edge.peer, group=edge.group).wait()
                    continue
                greeting = torch.full((1,), -1, dtype=torch.int64, device=wire)
                dist.irecv(greeting, src=edge.peer, group=edge.group).wait()
            except RuntimeError as error:
                raise PipelineError(f"{here}: {edge.name} did not answer within timeout={timeout:g} s: {error}") from error
            expected = here.stage - 1 if direction == "down" else here.stage + 1
            if int(greeting) != expected:
                raise PipelineError(f"{here}: {edge.name} answered for stage {int(greeting)}, expected stage {expected}")
