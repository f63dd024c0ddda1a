"""What table-1 and table-2 have in common: tune, train paired seeds, report after every stage that is complete.

Two protocols, both reported. "kept": the learning rate is tuned for synchronous training and kept in every mode, as the paper says that it did.
"retuned": tuned in each mode by itself, so that no mode is handicapped by another's choice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from onelag.experiments.collect import Collector
from onelag.experiments.runner import Job, run_all
from onelag.experiments.tiers import HEADLINE, Tier
from onelag.experiments.tuning import Tuning, tune
from onelag.report.study import Study, StudyRow, TuningRow
from onelag.report.write import write_report


@dataclass(frozen=True)
class Place:
    """Folders of a run of the experiments: result files, checkpoints, and what is drawn from the results."""

    results: Path
    runs: Path
    reports: Path
    console: Console


@dataclass(frozen=True)
class Experiment:
    """One table or figure.

    Attributes:
        name: as on the command line.
        title: what it shows, in one line.
        modes: the columns.
    """

    name: str
    title: str
    modes: tuple[str, ...]

    def reproduce(self, tier: Tier, place: Place) -> None:
        """Computes what is missing, optimizer by optimizer (the headline ones first and together), and reports as soon as there is something to see."""

        def run(jobs: Sequence[Job]):
            return run_all(jobs, self.name, tier.name, tier.workers, place.results, place.runs, place.console)

        rest = [(optimizer,) for optimizer in tier.optimizers if optimizer not in HEADLINE]
        for optimizers in (HEADLINE, *rest):
            kept = tune(tier, optimizers, ("sync",), run)
            for count in range(1, len(tier.seeds) + 1):
                run([job for _, job in self._cells(tier, optimizers, kept, tier.seeds[:count], "kept")])
                self.report(tier, place, draft=True)
            retuned = tune(tier, optimizers, self.modes, run)
            run([job for _, job in self._cells(tier, optimizers, retuned, tier.seeds, "retuned")])
            self.report(tier, place, draft=True)
        self.report(tier, place)

    def report(self, tier: Tier, place: Place, draft: bool = False) -> None:
        """Tables, figures and verdicts from the results that are there (a draft: fewer figures, faster); computes nothing."""
        collector = Collector(place.results / tier.name)
        if not collector:
            return
        rows, tuning_rows = [], []
        for optimizer in tier.optimizers:
            kept = tune(tier, (optimizer,), ("sync",), collector.find)
            retuned = tune(tier, (optimizer,), self.modes, collector.find)
            for protocol, tuning in (("kept", kept), ("retuned", retuned)):
                cells = self._cells(tier, (optimizer,), tuning, tier.seeds, protocol)
                for row, result in zip((row for row, _ in cells), collector.find([job for _, job in cells])):
                    if result is not None:
                        rows.append(StudyRow(result=result, protocol=protocol, **row))
            for o, mode, rate, seed, result in retuned.rows:
                chosen = retuned.chosen.get((o, mode)) == rate
                edge = chosen and (o, mode) in retuned.at_edge
                tuning_rows.append(TuningRow(o, mode, rate, seed, result, chosen=chosen, at_edge=edge))
        if not rows:
            return
        study = Study(tier=tier.name, experiment=self.name, rows=rows)
        verdicts = write_report(study, tuning_rows, place.reports / tier.name / self.name, draft=draft)
        place.console.print(
            f"{self.name} ({tier.name}): {len(rows)} results {'so far ' if draft else ''}→ {place.reports / tier.name / self.name}/table.md", soft_wrap=True
        )
        if not draft:
            for verdict in verdicts:
                if verdict.headline:
                    place.console.print(f"  {verdict}", soft_wrap=True)

    def _cells(self, tier: Tier, optimizers: Sequence[str], tuning: Tuning, seeds: Sequence[int], protocol: str) -> list[tuple[dict, Job]]:
        cells = []
        for seed in seeds:
            for optimizer in optimizers:
                for mode in self.modes:
                    rate = tuning.chosen.get((optimizer, "sync" if protocol == "kept" else mode))
                    if rate is not None:
                        row = {"optimizer": optimizer, "mode": mode, "seed": seed, "learning_rate": rate}
                        label = f"{optimizer} {mode} lr {rate:g} seed {seed}"
                        cells.append((row, Job(label, tier.config(optimizer, mode, rate, seed))))
        return cells


