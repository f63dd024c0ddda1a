"""Checkpoints of a one-process run: written beside the last one and renamed over it, so the last good one survives a kill at any moment."""

import os
from pathlib import Path
from typing import Any

import torch

FORMAT = 1


class CheckpointError(ValueError):
    """A checkpoint that cannot continue this run; the message says why."""


def save(path: Path, content: dict[str, Any]) -> None:
    """Raises OSError (disk full, no permission) with the earlier checkpoint untouched."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save({"format": FORMAT, **content}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def load(path: Path, fingerprint: str) -> dict[str, Any]:
    """The content of a checkpoint that this configuration wrote.

    Raises:
        CheckpointError: unreadable, of another format, or written by another configuration, corpus or version of the code.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}): delete it to start this run afresh") from error
    if content.get("format") != FORMAT:
        raise CheckpointError(f"{path} has format {content.get('format')}, this version reads {FORMAT}: delete it to start this run afresh")
    if content.get("fingerprint") != fingerprint:
        raise CheckpointError(f"{path} belongs to another model, configuration or version of the code: delete it, or use another --run-dir")
    return content
