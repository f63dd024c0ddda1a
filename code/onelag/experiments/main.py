"""What `onelag reproduce` and `onelag report` do."""

from pathlib import Path

from rich.console import Console

from onelag.experiments.readme import update_readme
from onelag.experiments.registry import EXPERIMENTS
from onelag.experiments.study import Place
from onelag.experiments.tiers import TIERS
from onelag.report.claims import write_claims


def reproduce(names: tuple[str, ...], tier_name: str, results: Path, runs: Path, reports: Path, console: Console) -> None:
    """Runs the named experiments (all when none is named) at a tier.

    Raises:
        ValueError: an unknown experiment or tier; the message lists the choices.
        RunsFailed: some runs ended with an error.
        KeyboardInterrupt: interrupted; finished results and checkpoints are kept.
    """
    if tier_name not in TIERS:
        raise ValueError(f"unknown tier {tier_name!r}: choose one of {', '.join(TIERS)}")
    for name in names:
        if name not in EXPERIMENTS:
            raise ValueError(f"unknown experiment {name!r}: choose one of {', '.join(EXPERIMENTS)}")
    tier, place = TIERS[tier_name], Place(results, runs, reports, console)
    for name in names or tuple(EXPERIMENTS):
        experiment = EXPERIMENTS[name]
        console.print(f"[bold]{name}[/bold]: {experiment.title}. Tier {tier.name}: {tier.about}.")
        experiment.reproduce(tier, place)


def report(results: Path, reports: Path, claims: Path, readme: Path, console: Console) -> None:
    """Draws everything from the result files that are there, and renews CLAIMS.md and the generated part of the README."""
    for tier in TIERS.values():
        for experiment in EXPERIMENTS.values():
            experiment.report(tier, Place(results, Path("runs"), reports, console))
    write_claims(results, reports, claims)
    update_readme(readme, reports)
