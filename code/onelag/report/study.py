"""What a report is made from: the results of one experiment at one tier, each with its place in the table."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from onelag.report.store import Result

Protocol = Literal["kept", "retuned"]
SYNC, DELAYED, CORRECTED = "sync", "delayed", "delayed+EF"
HEADLINE = ("adamw", "muon")

# How optimizers are called in print.
LABELS = {
    "adamw": "AdamW",
    "nadam": "NAdam",
    "adan": "Adan",
    "mars": "MARS",
    "lion": "Lion",
    "soap": "SOAP",
    "normuon": "NorMuon",
    "muon": "Muon",
    "sgd": "SGD",
}


def label(optimizer: str) -> str:
    """An optimizer's name in print."""
    return LABELS.get(optimizer, optimizer)


@dataclass(frozen=True)
class StudyRow:
    """One run of a study.

    Attributes:
        result: the loaded result.
        protocol: "kept": the learning rate was tuned for sync and kept in every mode; "retuned": tuned in each mode.
        optimizer, mode, seed, learning_rate: its cell; mode is "sync", "delayed" or "delayed+EF" (other experiments may name others).
    """

    result: Result
    protocol: Protocol
    optimizer: str
    mode: str
    seed: int
    learning_rate: float


@dataclass(frozen=True)
class TuningRow:
    """One run of the search for learning rates, on a seed that no table uses.

    Attributes:
        chosen: this learning rate won for its (optimizer, mode).
        at_edge: it won at the edge of the grid, so a better one may lie outside.
    """

    optimizer: str
    mode: str
    learning_rate: float
    seed: int
    result: Result
    chosen: bool = False
    at_edge: bool = False


@dataclass(frozen=True)
class Study:
    """The runs of one experiment at one tier; any part of the grid may be missing.

    Raises:
        ValueError: two runs in the same cell (optimizer, mode, protocol, seed).
    """

    tier: str
    experiment: str
    rows: Sequence[StudyRow]

    def __post_init__(self):
        seen = set()
        for row in self.rows:
            cell = (row.protocol, row.optimizer, row.mode, row.seed)
            if cell in seen:
                raise ValueError(
                    f"{self.experiment}: two results for {row.optimizer}, {row.mode}, seed {row.seed} in protocol {row.protocol!r}"
                )
            seen.add(cell)

    @cached_property
    def protocols(self) -> list[str]:
        return _ordered(("kept", "retuned"), (row.protocol for row in self.rows))

    @cached_property
    def optimizers(self) -> list[str]:
        """The headline ones first, then as they come."""
        return _ordered(HEADLINE, (row.optimizer for row in self.rows))

    @cached_property
    def modes(self) -> list[str]:
        return _ordered((SYNC, DELAYED, CORRECTED), (row.mode for row in self.rows))

    def cell(self, protocol: str, optimizer: str, mode: str) -> list[StudyRow]:
        """The runs of one cell, by seed."""
        found = (row for row in self.rows if (row.protocol, row.optimizer, row.mode) == (protocol, optimizer, mode))
        return sorted(found, key=lambda row: row.seed)

    def losses(self, protocol: str, optimizer: str, mode: str, at: str = "validation_loss") -> dict[int, float]:
        """Seed → final loss in nats; a diverged run counts as infinitely bad.

        Args:
            at: "validation_loss" (newest weights x) or "validation_loss_base" (y, corrected runs only; seeds without it are left out).
        """
        found = {}
        for row in self.cell(protocol, optimizer, mode):
            loss = math.inf if row.result.diverged else row.result.metrics["final"][at]
            if loss is not None:
                found[row.seed] = loss
        return found

    def paired(self, protocol: str, *cells: tuple[str, str]) -> list[np.ndarray]:
        """Final losses of several (optimizer, mode) cells over the seeds that all of them have: one float64 array (n,) per cell, in the order of the seeds."""
        losses = [self.losses(protocol, *cell) for cell in cells]
        seeds = sorted(set.intersection(*(set(entry) for entry in losses)))
        return [np.array([entry[seed] for seed in seeds], dtype=np.float64) for entry in losses]

    @cached_property
    def uniform_loss(self) -> float:
        """ln(vocabulary): the loss in nats of a uniform guess, below which no diverged model can be said to be."""
        return math.log(max(row.result.config["model"]["vocab_size"] for row in self.rows)) if self.rows else math.nan

    @property
    def results(self) -> list[Result]:
        """Every distinct result (the protocols share runs), by run id."""
        return unique_results(row.result for row in self.rows)


def unique_results(results: Iterable[Result]) -> list[Result]:
    """Without repetition, by run id."""
    return [result for _, result in sorted({result.run_id: result for result in results}.items())]


def _ordered(first: Sequence[str], names: Iterable[str]) -> list[str]:
    names = list(dict.fromkeys(names))
    return [name for name in first if name in names] + [name for name in names if name not in first]
