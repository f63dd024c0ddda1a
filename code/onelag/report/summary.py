"""The numbers of a table: per protocol, optimizer and mode, from the results of a study. Tables, figures and macros all read these."""

import math
from dataclasses import dataclass, replace

from onelag.report.statistics import Estimate, Ratio, Spread, contrast, holm, mean_interval, noise_floor, share_recovered
from onelag.report.study import CORRECTED, DELAYED, SYNC, Study


@dataclass(frozen=True)
class Cell:
    """One row of a table.

    Attributes:
        learning_rates: those of its runs, sorted; more than one only if they differ over seeds.
        n: runs; diverged: how many of them diverged.
        loss: mean final validation loss at the newest weights x, with its (unpaired) interval; infinite where a run diverged.
        loss_base: the same at y, of the runs that diverged not; None without a correction.
        spread: the noise floor of the cell, over its finite losses.
        gap: loss − loss of sync, paired; None for sync. gap_p: its p-value after Holm over the optimizers of this protocol and mode.
        share: of the delayed gap that this mode recovers; None for sync and delayed.
    """

    protocol: str
    optimizer: str
    mode: str
    learning_rates: tuple[float, ...]
    seeds: tuple[int, ...]
    n: int
    diverged: int
    loss: Estimate
    loss_base: Estimate | None
    spread: Spread
    gap: Estimate | None = None
    gap_p: float = math.nan
    share: Ratio | None = None


def summarize(study: Study) -> list[Cell]:
    """Every cell that has at least one run, in the order protocol, optimizer, mode."""
    cells = []
    for protocol in study.protocols:
        of_protocol = [
            _cell(study, protocol, optimizer, mode)
            for optimizer in study.optimizers
            for mode in study.modes
            if study.cell(protocol, optimizer, mode)
        ]
        adjusted = {}
        for mode in study.modes:
            family = [cell for cell in of_protocol if cell.mode == mode and cell.gap is not None]
            adjusted |= {id(cell): p for cell, p in zip(family, holm([cell.gap.p for cell in family]))}
        cells += [replace(cell, gap_p=adjusted[id(cell)]) if id(cell) in adjusted else cell for cell in of_protocol]
    return cells


def gap(study: Study, protocol: str, optimizer: str, mode: str, reference: str = SYNC) -> Estimate:
    """Loss of a mode minus that of another, over paired seeds."""
    losses, base = study.paired(protocol, (optimizer, mode), (optimizer, reference))
    return contrast([(1, losses), (-1, base)], study.uniform_loss)


def share(study: Study, protocol: str, optimizer: str, mode: str = CORRECTED) -> Ratio:
    """Of the delayed gap that a mode recovers, over the seeds that all three modes have."""
    return share_recovered(*study.paired(protocol, (optimizer, SYNC), (optimizer, DELAYED), (optimizer, mode)))


def _cell(study: Study, protocol: str, optimizer: str, mode: str) -> Cell:
    rows = study.cell(protocol, optimizer, mode)
    losses = list(study.losses(protocol, optimizer, mode).values())
    finite = [loss for loss in losses if math.isfinite(loss)]
    base = [loss for loss in study.losses(protocol, optimizer, mode, "validation_loss_base").values() if math.isfinite(loss)]
    return Cell(
        protocol=protocol,
        optimizer=optimizer,
        mode=mode,
        learning_rates=tuple(sorted({row.learning_rate for row in rows})),
        seeds=tuple(row.seed for row in rows),
        n=len(rows),
        diverged=len(losses) - len(finite),
        loss=contrast([(1, losses)], study.uniform_loss),
        loss_base=mean_interval(base) if base else None,
        spread=noise_floor(finite),
        gap=None if mode == SYNC else gap(study, protocol, optimizer, mode),
        share=None if mode in (SYNC, DELAYED) else share(study, protocol, optimizer, mode),
    )
