"""Checkpoints of a pipeline through torch.distributed.checkpoint: one directory, any number of stages and replicas.

Every rank writes the parameters that it steps, under their global names, so a run that was saved at p = 4 goes on at p = 2 or 1, and the other
way. A checkpoint is written beside the last one and renamed when it is complete and on the disk: a kill at any moment leaves the last good one.
"""

import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from onelag.pipeline.engine import PipelineSchedule
from onelag.pipeline.handshake import flatten, gather
from onelag.pipeline.state import StateError, buffers, check, take

_NAME = "step-{:08d}"


class CheckpointError(ValueError):
    """A checkpoint that cannot continue this run; the message says why."""


def save(directory: Path | str, pipe: PipelineSchedule, config: Mapping[str, Any] | None = None, extra: Any = None, keep: int = 2) -> Path:
    """Drains and writes `directory`/step-<batches>. Every rank calls it; `directory` is one that all of them see.

    Args:
        config: the run's own settings, nested; a resume with others is refused.
        extra: plain values to get back from `resume`, e.g. the position of a sampler; rank 0's are kept.
        keep: complete checkpoints to keep; older ones are deleted after the new one is safe.

    Raises:
        OSError: disk full, no permission; the earlier checkpoints are untouched.
    """
    directory = Path(directory)
    with pipe.at_rest() as parts:
        name, writing = _NAME.format(pipe.batches), directory / f".{_NAME.format(pipe.batches)}.writing"
        content = _content(pipe, config, extra)
        with _leading(pipe) as leads:
            if leads:
                directory.mkdir(parents=True, exist_ok=True)
                for stale in directory.glob(".*.writing"):  # what a kill left
                    shutil.rmtree(stale)
        group = parts.groups.everyone
        with _quiet():
            dcp.save(content, storage_writer=dcp.FileSystemWriter(writing, sync_files=True), process_group=group, no_dist=group is None)
    with _leading(pipe) as leads:
        if leads:
            _sync(writing)
            if (directory / name).exists():  # of a run that was resumed from an earlier one and came here again
                shutil.rmtree(directory / name)
            os.rename(writing, directory / name)
            _sync(directory)
            for old in committed(directory)[:-keep]:
                shutil.rmtree(old)
    return directory / name


def committed(directory: Path | str) -> list[Path]:
    """The complete checkpoints in a directory, oldest first."""
    return sorted(path for path in Path(directory).glob("step-*") if path.is_dir())


def resume(directory: Path | str, pipe: PipelineSchedule, config: Mapping[str, Any] | None = None) -> Any:
    """Goes on from the newest complete checkpoint of a directory. Every rank calls it, before the first step or after a flush.

    Returns:
        The `extra` that was saved with it, or None where there is no checkpoint. `pipe.batches` says how many batches are done.

    Raises:
        CheckpointError: unreadable, or of another model, configuration or schedule. The message is the same on every rank.
    """
    chosen = [str(found[-1]) if (found := committed(directory)) else None]
    if pipe.parts.groups.everyone is not None:  # one rank looks: a shared file system may show the others an older state
        dist.broadcast_object_list(chosen, src=pipe.parts.groups.ranks[0], group=pipe.parts.groups.everyone)
    return None if chosen[0] is None else load(Path(chosen[0]), pipe, config)


def load(path: Path, pipe: PipelineSchedule, config: Mapping[str, Any] | None = None) -> Any:
    """Goes on from one checkpoint; see `resume`."""
    parts = pipe.parts
    rank, num_ranks = parts.here.rank_of(parts.here.stage), parts.here.num_stages * parts.here.num_replicas
    with _all_or_none(pipe, path):
        known = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        about = _from_tensor(_read(path, known, ["about"])["about"])
    with _all_or_none(pipe, path):
        check(parts, about)
        _same_config(about["config"], config)
    owned = {parts.names.global_name[name]: tuple(parts.stage.slots[0][name].shape) for name in parts.replicas.owned}
    everywhere = {name for names in gather(list(owned), num_ranks, parts.groups.everyone) for name in names}
    with _all_or_none(pipe, path):
        _same_model(known, owned, everywhere)
        for age in range(1, min(len(parts.stage.slots), about["batches"] + 1)):
            if any(f"version-{age}/{name}" not in known for name in owned):
                raise StateError(f"holds no W({about['batches'] - age}) for stage {parts.here.stage}: resume with the num_stages={about['num_stages']} that saved it")
        keys = [key for key in known if not key.startswith(("buffer/", "rng/")) and _named(key) in owned]
        keys += [key for name in buffers(parts) if (key := f"buffer/{name}") in known]
        keys += [f"rng/{rank}"] * (about["num_ranks"] == num_ranks)  # with another split there is nobody whose generator it was
        content = _read(path, known, keys)
        parameters = {name: _parameter(name, content) for name in owned}
        found = {name: content[key] for name in buffers(parts) if (key := f"buffer/{name}") in content}
    pipe.load_state_dict({"progress": about, "parameters": parameters, "buffers": found})
    if f"rng/{rank}" in content:
        torch.set_rng_state(content[f"rng/{rank}"])
    return about["extra"]


# -- what is compared ------------------------------------------------------------------------------------------------------------------
@contextmanager
def _all_or_none(pipe: PipelineSchedule, path: Path) -> Iterator[None]:
    """An error on one rank becomes the same CheckpointError on all: none goes on alone, none waits for one that is gone."""
    problem = None
    try:
        yield
    except StateError as error:
        problem = f"{path}: {error}"
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        problem = f"{path} cannot be read ({reason}): delete it to go on from an earlier one"
    here = pipe.parts.here
    problems = gather(problem, here.num_stages * here.num_replicas, pipe.parts.groups.everyone)
    for problem in problems:
        if problem:
            raise CheckpointError(problem)


def _same_config(saved: Mapping[str, Any], config: Mapping[str, Any] | None) -> None:
    mine = saved if config is None else _from_tensor(_as_tensor(flatten(config)))
    for key in dict.fromkeys([*saved, *mine]):
        if saved.get(key, "(absent)") != mine.get(key, "(absent)"):
            raise StateError(f"saved with {key}={saved.get(key, '(absent)')!r}, this run has {key}={mine.get(key, '(absent)')!r}")


def _same_model(known: Mapping[str, Any], owned: Mapping[str, tuple[int, ...]], everywhere: set[str]) -> None:
    saved = {_named(key): tuple(entry.size) for key, entry in known.items() if key.startswith("master/")}
    for name, shape in owned.items():
        if name not in saved:
            raise StateError(f"holds no parameter {name!r} ({len(saved)} others, this model has {len(everywhere)}): it belongs to another model or split")
        if saved[name] != shape:
            raise StateError(f"holds {name!r} with shape {saved[name]}, this model has {shape}: it belongs to another model")
    surplus = sorted(set(saved) - everywhere)
    if surplus:
        raise StateError(f"holds {len(surplus)} parameters that this model has not, e.g. {surplus[0]!r}: it belongs to another model or split")


# -- how it is stored --------------------------------------------------------------------------------------------------------------------
def _read(path: Path, known: Mapping[str, Any], keys: list[str]) -> dict[str, Tensor]:
    content = {key: torch.empty(known[key].size, dtype=known[key].properties.dtype) for key in keys}
    with _quiet():
        dcp.load(content, storage_reader=dcp.FileSystemReader(path), no_dist=True)  # every rank reads what it needs
    return content


def _content(pipe: PipelineSchedule, config: Mapping[str, Any] | None, extra: Any) -> dict[str, Tensor]:
    """This rank's part, by reference: {"kind/parameter[/path]": tensor}."""
    parts = pipe.parts
    state = take(parts, pipe.batches)
    content: dict[str, Tensor] = {f"rng/{parts.here.rank_of(parts.here.stage)}": torch.get_rng_state()}
    if _leads(pipe):
        about = {"config": flatten(config or {}), "extra": extra, "num_ranks": parts.here.num_stages * parts.here.num_replicas}
        content["about"] = _as_tensor({**state["progress"], **about})
    content |= {f"buffer/{known}": value for known, value in state["buffers"].items()}
    for known, saved in state["parameters"].items():
        tensors: dict[str, Tensor] = {}
        skeleton = _encode(saved["optimizer"], f"optimizer/{known}", tensors)
        content |= tensors | {f"master/{known}": saved["master"]} | {f"version-{age}/{known}": value for age, value in saved["versions"].items()}
        content[f"about/{known}"] = _as_tensor({"optimizer": skeleton, "group": saved["group"], "extrapolated": saved["extrapolated"]})
    return content


def _named(key: str) -> str:
    """The parameter in "kind/parameter" or "kind/parameter/path"."""
    return key.partition("/")[2].partition("/")[0]


def _parameter(name: str, content: Mapping[str, Tensor]) -> dict[str, Any]:
    """One parameter's part of `state.take`."""
    told = _from_tensor(content[f"about/{name}"])
    ages = [int(key.split("/")[0].removeprefix("version-")) for key in content if key.startswith("version-") and _named(key) == name]
    return {
        "master": content[f"master/{name}"],
        "versions": {age: content[f"version-{age}/{name}"] for age in ages},
        "optimizer": _decode(told["optimizer"], content),
        "group": told["group"],
        "extrapolated": told["extrapolated"],
    }


def _encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Optimizer state as JSON with its tensors put aside under their paths. Raises TypeError for what is neither plain nor a tensor."""
    if isinstance(value, Tensor):
        tensors[path] = value.detach()
        return {"tensor": path}
    if isinstance(value, Mapping):
        return {"dict": [[key, _encode(part, f"{path}/{key}", tensors)] for key, part in value.items()]}
    if isinstance(value, (list, tuple)):
        return {type(value).__name__: [_encode(part, f"{path}/{i}", tensors) for i, part in enumerate(value)]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"plain": value}
    raise TypeError(f"optimizer state {path} is a {type(value).__name__}, which cannot be written to a checkpoint")


def _decode(skeleton: dict[str, Any], content: Mapping[str, Tensor]) -> Any:
    ((kind, value),) = skeleton.items()
    if kind == "tensor":
        return content[value]
    if kind == "dict":
        return {key: _decode(part, content) for key, part in value}
    if kind in ("list", "tuple"):
        parts = [_decode(part, content) for part in value]
        return parts if kind == "list" else tuple(parts)
    return value


def _as_tensor(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _from_tensor(content: Tensor) -> Any:
    return json.loads(content.numpy().tobytes())


def _leads(pipe: PipelineSchedule) -> bool:
    return pipe.here.stage == 0 and pipe.here.replica == 0


@contextmanager
def _leading(pipe: PipelineSchedule) -> Iterator[bool]:
    """What one rank does for all while they wait for it; if it fails, all fail."""
    problem = None
    try:
        yield _leads(pipe)
    except OSError as error:
        problem = str(error)
    problem = gather(problem, pipe.here.num_stages * pipe.here.num_replicas, pipe.parts.groups.everyone)[0]
    if problem:
        raise OSError(f"the checkpoint could not be written: {problem}; the earlier ones are untouched")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warning that one rank works for itself, and with its failures as OSError: torch's are no Exception and carry whole tracebacks."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        try:
            yield
        except CheckpointException as error:
            rank, (cause, _) = next(iter(error.failures.items()))
            raise OSError(f"{type(cause).__name__} on rank {rank}: {cause}") from error


def _sync(directory: Path) -> None:
    """Makes names in a directory survive a power failure."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
