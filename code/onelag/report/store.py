"""Result files: written whole or not at all, checked when read, found by run id.

A result file is one JSON object, one top-level key per line: schema, run_id, experiment, tier, config, metrics, provenance, and the sha256 of all of that.
The checksum finds a truncated or edited file; a file that fails any check is reported by name and treated as absent, so its run is computed again.
"""

import json
import logging
import math
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

SCHEMA = 1
CONTENT = ("schema", "run_id", "experiment", "tier", "config", "metrics", "provenance")
FINAL = ("validation_loss", "validation_loss_base", "train_loss")

log = logging.getLogger(__name__)


class CorruptResult(ValueError):
    """A result file that cannot be trusted: truncated, edited, of another schema, or incomplete. The message names the file and the cause."""


class CannotWrite(OSError):
    """A file could not be written (full disk, no permission). Whatever was at its place before is untouched."""


@dataclass(frozen=True)
class Result:
    """One finished or diverged run.

    Attributes:
        run_id: hash of configuration, data and deciding code; also the file's name.
        experiment, tier: the folders it lies in.
        config: the full nested configuration.
        metrics: {"status": "finished" | "diverged", "diverged_at": None | step, "final": losses in nats, "curve": name → list}.
        provenance: where it comes from.
        path: the file it was read from; no part of its identity.
    """

    run_id: str
    experiment: str
    tier: str
    config: dict[str, Any]
    metrics: dict[str, Any]
    provenance: dict[str, Any]
    path: Path | None = field(default=None, compare=False)

    @property
    def diverged(self) -> bool:
        return self.metrics["status"] == "diverged"

    @cached_property
    def sha256(self) -> str:
        """Of the content, in canonical JSON."""
        return _checksum(_content(self))


def write_result(folder: Path, result: Result) -> Path:
    """Writes `folder/<run id>.json` atomically and returns its path.

    Values in `metrics` that are not finite become null: JSON has no others, and `status` says that the run diverged.

    Raises:
        ValueError: the result is incomplete, or a value outside `metrics` is not finite or not JSON.
        CannotWrite: full disk, no permission.
    """
    content = _content(result)
    problem = _problem(content, result.run_id)
    if problem:
        raise ValueError(f"result {result.run_id} cannot be stored: {problem}")
    try:
        lines = [f"{json.dumps(key)}: {_canonical(value)}" for key, value in {**content, "sha256": _checksum(content)}.items()]
    except (ValueError, TypeError) as error:
        raise ValueError(f"result {result.run_id} cannot be stored: {error}") from error
    path = Path(folder) / f"{result.run_id}.json"
    write_atomically(path, "{\n" + ",\n".join(lines) + "\n}\n")
    return path


def read_result(path: Path) -> Result:
    """Reads and checks one result file.

    Raises:
        FileNotFoundError: there is no such file.
        CorruptResult: it cannot be trusted.
    """
    path = Path(path)
    try:
        content = json.loads(path.read_bytes().decode("utf-8"))
    except ValueError as error:
        raise CorruptResult(f"{path} is truncated or not JSON ({error}): delete it, and its run is computed again") from error
    if not isinstance(content, dict):
        raise CorruptResult(f"{path} holds no JSON object: delete it, and its run is computed again")
    if content.get("schema") != SCHEMA:
        raise CorruptResult(
            f"{path} has schema {content.get('schema')!r}, this version reads {SCHEMA}: delete it, and its run is computed again"
        )
    stored = content.pop("sha256", None)
    problem = _problem(content, path.stem)
    try:
        if problem is None and stored != _checksum(content):
            problem = "its checksum does not match its content"
    except ValueError as error:  # a changed digit can make a number that JSON reads as infinite and does not write
        problem = str(error)
    if problem:
        raise CorruptResult(f"{path} cannot be trusted ({problem}): delete it, and its run is computed again")
    return Result(**{key: content[key] for key in CONTENT[1:]}, path=path)


def list_results(tier_folder: Path) -> list[Result]:
    """Every trustworthy result of a tier (`results/<tier>`), over its experiment folders, sorted by experiment and run id.

    Corrupt files are logged, one warning line each, and left out.
    """
    return list(_readable(sorted(Path(tier_folder).glob("*/*.json"))))


def find_result(tier_folder: Path, run_id: str) -> Result | None:
    """The result of a run, whichever experiment of the tier filed it; None where there is none that can be trusted (a corrupt one is logged)."""
    return next(_readable(sorted(Path(tier_folder).glob(f"*/{run_id}.json"))), None)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replaces a file whole: temporary file in the same folder, fsync, rename, fsync of the folder.

    Raises:
        CannotWrite: one line with the path and the system's reason; an earlier file at `path` is untouched and no temporary file remains.
    """
    path = Path(path)
    data = content.encode("utf-8") if isinstance(content, str) else content
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes files private; results are for sharing
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        _remove(temporary)
        raise CannotWrite(
            error.errno, f"{error.strerror}; what was there before is untouched, make room and run again", str(path)
        ) from error
    except BaseException:
        _remove(temporary)
        raise


def _remove(temporary: str | None) -> None:
    if temporary is not None:
        Path(temporary).unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Makes the rename itself durable, where the system lets a folder be opened."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _readable(paths: list[Path]) -> Iterator[Result]:
    for path in paths:
        try:
            yield read_result(path)
        except CorruptResult as error:
            log.warning("%s", error)


def _content(result: Result) -> dict[str, Any]:
    values = {key: getattr(result, key) for key in CONTENT[1:]}
    return {"schema": SCHEMA, **values, "metrics": _finite_or_null(result.metrics)}


def _finite_or_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite_or_null(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite_or_null(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _checksum(content: dict[str, Any]) -> str:
    return sha256(_canonical(content).encode()).hexdigest()


def _problem(content: dict[str, Any], name: str) -> str | None:
    """What is wrong with the content of the result called `name`, or None."""
    missing = [key for key in CONTENT if key not in content]
    if missing:
        return f"it lacks {', '.join(missing)}"
    if content["run_id"] != name:
        return f"it is the result of run {content['run_id']}, not of {name}"
    if not all(isinstance(content[key], dict) for key in ("config", "metrics", "provenance")):
        return "config, metrics and provenance must be objects"
    metrics = content["metrics"]
    missing = [key for key in ("status", "diverged_at", "final", "curve") if key not in metrics]
    if missing:
        return f"its metrics lack {', '.join(missing)}"
    final, curve = metrics["final"], metrics["curve"]
    if not isinstance(final, dict) or any(key not in final for key in FINAL):
        return f"its final metrics must be {', '.join(FINAL)}"
    if metrics["status"] == "finished":
        if not isinstance(final["validation_loss"], (int, float)) or isinstance(final["validation_loss"], bool):
            return "it finished without a final validation loss"
    elif metrics["status"] != "diverged":
        return f"its status is {metrics['status']!r}, neither finished nor diverged"
    elif not isinstance(metrics["diverged_at"], int):
        return "it diverged without saying when"
    if not isinstance(curve, dict) or not all(isinstance(values, list) for values in curve.values()):
        return "its curve must be an object of lists"
    if len({len(values) for values in curve.values()}) > 1:
        return "the lists of its curve differ in length"
    return None
