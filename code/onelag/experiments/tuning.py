"""Learning rates: a grid per optimizer and mode, on seeds of their own, grown where the best value is at its edge."""

from dataclasses import dataclass, field

from onelag.experiments.runner import Job
from onelag.experiments.tiers import GRID, Tier
from onelag.report.store import Result


@dataclass
class Tuning:
    """What a grid search found.

    Attributes:
        rows: every run of the grid: (optimizer, mode, learning rate, seed, result).
        chosen: (optimizer, mode) → the learning rate with the lowest mean final validation loss; a diverged run counts as infinitely bad.
        at_edge: (optimizer, mode) whose chosen value is still the smallest or largest tried.
    """

    rows: list[tuple[str, str, float, int, Result]] = field(default_factory=list)
    chosen: dict[tuple[str, str], float] = field(default_factory=dict)
    at_edge: set[tuple[str, str]] = field(default_factory=set)


def tune(tier: Tier, optimizers: tuple[str, ...], modes: tuple[str, ...], run) -> Tuning:
    """Searches the grid of each (optimizer, mode).

    Args:
        run: a function from a list of Jobs to their Results, in order (None where a result is missing and may not be computed).
    """
    grids = {(optimizer, mode): list(GRID[optimizer]) for optimizer in optimizers for mode in modes}
    for round_number in range(tier.extend + 1):
        tuning = _search(tier, grids, run)
        if round_number == tier.extend:
            break
        grown = False
        for cell, best in tuning.chosen.items():
            grid = grids[cell]
            if best == grid[0]:
                grid.insert(0, best / 2)
                grown = True
            elif best == grid[-1]:
                grid.append(best * 2)
                grown = True
        if not grown:
            break
    return tuning


def _search(tier: Tier, grids: dict, run) -> Tuning:
    tuning = Tuning()
    cells = [(o, m, lr, seed) for (o, m), grid in grids.items() for lr in grid for seed in tier.tuning_seeds]
    results = run([Job(f"tune {o} {m} lr {lr:g} seed {seed}", tier.config(o, m, lr, seed)) for o, m, lr, seed in cells])
    tuning.rows = [(*cell, result) for cell, result in zip(cells, results) if result is not None]
    for (optimizer, mode), grid in grids.items():
        mean = {}
        for lr in grid:
            losses = [final_loss(r) for o, m, rate, _, r in tuning.rows if (o, m, rate) == (optimizer, mode, lr)]
            if losses:
                mean[lr] = sum(losses) / len(losses)
        if not mean:
            continue
        best = min(mean, key=mean.get)
        tuning.chosen[(optimizer, mode)] = best
        if best in (min(mean), max(mean)):
            tuning.at_edge.add((optimizer, mode))
    return tuning


def final_loss(result: Result) -> float:
    """The final validation loss at the newest weights, in nats; infinite for a diverged run."""
    loss = result.metrics["final"]["validation_loss"]
    return float("inf") if loss is None else loss
