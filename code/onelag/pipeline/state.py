"""The whole state of a drained pipeline, by global parameter name, so that another split can take it up.

With the newest weights alone a resumed run drifts: the batch in hand runs on the version before.
"""

from typing import Any

import torch
from torch import Tensor

from onelag.pipeline.assembly import Parts
from onelag.pipeline.handshake import ANY, plain_name

FORMAT = 1


class StateError(ValueError):
    """A state that this pipeline cannot take up; the message says why."""


def take(parts: Parts, batches: int) -> dict[str, Any]:
    """What this rank has to keep, after `batches` batches. Tensors by reference.

    Returns:
        {"progress", "parameters": {global name: {"master", "versions": {age: tensor}, "optimizer", "group", "extrapolated"}} of those that this
        rank steps, "buffers": {global name: tensor} (replica 0)}. Age 0 is the newest version; left out where the master gives it.
    """
    groups, states = _optimizer_by_name(parts)
    parameters = {}
    for name in parts.replicas.owned:
        extrapolated = name in parts.master.extrapolated
        versions = {
            age: parts.stage.slot(batches - age)[name].detach()
            for age in range(len(parts.stage.slots))
            if batches - age >= 0 and (age or extrapolated)
        }
        parameters[parts.names.global_name[name]] = {
            "master": parts.stage.master[name].detach(),
            "versions": versions,
            "optimizer": states.get(name, {}),
            "group": groups.get(name, {}),
            "extrapolated": extrapolated,
        }
    progress = {"format": FORMAT, "batches": batches, "schedule": parts.settings["schedule"], "num_stages": parts.here.num_stages}
    progress |= {key: parts.settings.get(key) for key in ("compute_dtype", "correction", "correction.coefficient", "correction.form")}
    return {"progress": progress, "parameters": parameters, "buffers": buffers(parts) if parts.here.replica == 0 else {}}


@torch.no_grad()
def give(parts: Parts, state: dict[str, Any]) -> int:
    """Takes up a state that holds at least what this rank owns; returns the number of batches done.

    Raises:
        StateError: another format, schedule or correction, or a parameter that is missing or has another shape.
    """
    progress = state["progress"]
    check(parts, progress)
    batches = progress["batches"]
    stage = parts.stage
    parts.master.extrapolated.clear()
    states: dict[str, dict] = {}
    groups: dict[str, dict] = {}
    for name in parts.replicas.owned:
        known = parts.names.global_name[name]
        if known not in state["parameters"]:
            raise StateError(f"the saved state has no parameter {known!r}: it belongs to another model")
        saved = state["parameters"][known]
        if saved["master"].shape != stage.master[name].shape:
            raise StateError(f"parameter {known!r} is saved with shape {tuple(saved['master'].shape)}, this model has {tuple(stage.master[name].shape)}")
        stage.master[name].copy_(saved["master"])
        if saved["extrapolated"]:
            parts.master.extrapolated.add(name)
        for age in range(len(stage.slots)):
            if batches - age < 0:
                continue
            values = saved["versions"].get(age, saved["master"] if age == 0 else None)
            if values is None:
                raise StateError(f"parameter {known!r}: W({batches - age}) was not saved; resume with the num_stages={progress['num_stages']} that saved it")
            stage.slot(batches - age)[name].copy_(values)
        states[name], groups[name] = saved["optimizer"], saved["group"]
    for age in range(len(stage.slots)):
        if batches - age >= 0:
            parts.replicas.share(stage.slot(batches - age))
            stage.note(batches - age)
    _restore_optimizer(parts, states, groups)
    for known, buffer in buffers(parts).items():
        if known in state["buffers"]:
            buffer.copy_(state["buffers"][known])
    return batches


def check(parts: Parts, progress: dict[str, Any]) -> None:
    """Raises StateError if this pipeline is set up otherwise than the one that saved."""
    if progress.get("format") != FORMAT:
        raise StateError(f"the saved state has format {progress.get('format')}, this version reads {FORMAT}")
    for key in ("schedule", "compute_dtype", "correction", "correction.coefficient", "correction.form"):
        if progress.get(key) != parts.settings.get(key) and ANY not in (progress.get(key), parts.settings.get(key)):
            raise StateError(f"the saved state has {key}={progress.get(key)!r}, this run has {key}={parts.settings.get(key)!r}")


def buffers(parts: Parts) -> dict[str, Tensor]:
    """The stage's persistent buffers by global name."""
    parameters = {name for name, _ in parts.stage.module.named_parameters(remove_duplicate=False)}
    prefix = parts.names.prefix
    return {prefix + plain_name(name): value for name, value in parts.stage.module.state_dict(keep_vars=True).items() if name not in parameters and isinstance(value, Tensor)}


def _order(parts: Parts) -> list[str | None]:
    """Local names in the order of the optimizer's state_dict indices; None for parameters that do not train."""
    name_of = {id(parameter): name for name, parameter in parts.stage.master.items()}
    return [name_of.get(id(parameter)) for group in parts.master.optimizer.param_groups for parameter in group["params"]]


def _optimizer_by_name(parts: Parts) -> tuple[dict[str, dict], dict[str, dict]]:
    saved, order = parts.master.optimizer.state_dict(), _order(parts)
    groups = {}
    for group in saved["param_groups"]:
        plain = {key: value for key, value in group.items() if key not in ("params", "param_names") and _is_plain(value)}
        groups |= {order[index]: plain for index in group["params"]}
    return groups, {order[index]: entry for index, entry in saved["state"].items()}


def _restore_optimizer(parts: Parts, states: dict[str, dict], groups: dict[str, dict]) -> None:
    optimizer, order = parts.master.optimizer, _order(parts)
    blank = optimizer.state_dict()
    for group in blank["param_groups"]:
        for index in group["params"]:
            group.update({key: tuple(value) if isinstance(group.get(key), tuple) else value for key, value in groups.get(order[index], {}).items() if key in group})
    state = {index: states[name] for index, name in enumerate(order) if states.get(name)}
    optimizer.load_state_dict({**blank, "state": state})


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(part) for part in value)
    return value is None or isinstance(value, (bool, int, float, str))
