"""The paper's own numbers, with our confidence in each. Read from results/reported/paper.json; never mixed with what we measured.

Confidence: A, the abstract or two independent sources; B, one careful transcription of a table; C, one summary, may be wrong.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAPER_JSON = Path(__file__).parents[3] / "results" / "reported" / "paper.json"
CONFIDENCE = ("A", "B", "C")


@dataclass(frozen=True)
class ReportedLoss:
    """A final validation loss as the paper reports it.

    Attributes:
        value: nats; None where the sources give words only.
        words: such words ("degrades badly"), or empty.
        confidence: A, B or C.
    """

    value: float | None
    confidence: str
    words: str = ""


@dataclass(frozen=True)
class Reported:
    """What is known of one paper.

    Attributes:
        citation: who, what, where.
        scales: name → description (model, data, tokens).
        losses: (scale, optimizer, mode) → loss.
        statements: everything else, each with its confidence.
    """

    citation: str
    scales: Mapping[str, str]
    losses: Mapping[tuple[str, str, str], ReportedLoss]
    statements: tuple[Mapping[str, Any], ...]

    def loss(self, optimizer: str, mode: str, scale: str = "360m") -> ReportedLoss | None:
        return self.losses.get((scale, optimizer, mode))

    def gap(self, optimizer: str, mode: str, scale: str = "360m") -> float | None:
        """Loss minus that of sync, both as reported, rounded as they are; None unless both are known."""
        loss, sync = self.loss(optimizer, mode, scale), self.loss(optimizer, "sync", scale)
        if mode == "sync" or loss is None or sync is None or loss.value is None or sync.value is None:
            return None
        return round(loss.value - sync.value, 3)

    def share(self, optimizer: str, scale: str = "360m") -> float | None:
        """(delayed − corrected) / (delayed − sync) from the reported losses: not the share that the paper prints, which its losses do not give."""
        delayed, corrected = self.gap(optimizer, "delayed", scale), self.gap(optimizer, "delayed+EF", scale)
        return None if delayed is None or corrected is None or delayed <= 0 else 1 - corrected / delayed


def load_reported(path: Path = PAPER_JSON) -> Reported:
    """Reads and checks the file.

    Raises:
        FileNotFoundError: it is not there (an installed wheel has no results/).
        ValueError: it is not what it should be; the message names the entry.
    """
    content = json.loads(Path(path).read_text(encoding="utf-8"))
    for entry in (*content["losses"], *content["statements"]):
        if entry.get("confidence") not in CONFIDENCE:
            raise ValueError(f"{path}: every entry needs a confidence of A, B or C, but one has {entry.get('confidence')!r}: {entry}")
    losses = {}
    for entry in content["losses"]:
        key = (entry["scale"], entry["optimizer"], entry["mode"])
        if key in losses:
            raise ValueError(f"{path}: {key} is reported twice")
        if entry["scale"] not in content["scales"]:
            raise ValueError(f"{path}: {key} names an unknown scale")
        losses[key] = ReportedLoss(entry.get("value"), entry["confidence"], entry.get("words", ""))
        if losses[key].value is None and not losses[key].words:
            raise ValueError(f"{path}: {key} has neither a value nor words")
    return Reported(content["citation"], content["scales"], losses, tuple(content["statements"]))
