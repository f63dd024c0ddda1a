r"""LaTeX macros of a study's numbers, so that no number in the paper is typed.

Names are letters only: \ + tier + experiment + protocol + optimizer + mode + quantity, each in CamelCase with digits as words,
e.g. \CpuFullTableTwoKeptAdamwDelayedGap. Quantities: Loss, LossCI (half width), Gap, GapLow, GapHigh, GapP, Share, ShareLow, ShareHigh (in percent), Rate, N,
Diverged; per verdict \…Verdict<Key>; per study \…Scale and \…N; of the paper \PaperAdamwDelayedLoss, …Gap, …Share. Every macro's line ends in a comment that says what it is.
A quantity without a value (one seed, no bounded interval) gets no macro, so that using it fails loudly in LaTeX.
"""

import math
import re
from collections.abc import Iterable, Sequence

from onelag.report.reported import Reported
from onelag.report.scale import describe, seeds
from onelag.report.study import CORRECTED, DELAYED, SYNC, Study, label
from onelag.report.summary import Cell
from onelag.report.tables import latex, show_p
from onelag.report.verdicts import Verdict

DIGITS = ("Zero", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine")


def macro_name(*parts: str) -> str:
    """("cpu-full", "table-2", "adamw") → "CpuFullTableTwoAdamw"."""
    words = [word for part in parts for word in re.findall(r"[A-Za-z]+|[0-9]", part)]
    return "".join(DIGITS[int(word)] if word.isdigit() else word[0].upper() + word[1:] for word in words)


def study_macros(study: Study, cells: Sequence[Cell], verdicts: Iterable[Verdict]) -> str:
    """The file's text, sorted as the tables are."""
    prefix = (study.tier, study.experiment)
    lines = [_define(macro_name(*prefix, "scale"), latex(describe(study.results)), "size of the runs")]
    lines.append(_define(macro_name(*prefix, "n"), latex(seeds(cell.n for cell in cells)), "seeds per cell"))
    for cell in cells:
        where = f"{label(cell.optimizer)} {cell.mode}, {cell.protocol}"
        for quantity, value, about in _quantities(cell):
            lines.append(_define(macro_name(*prefix, cell.protocol, cell.optimizer, cell.mode, quantity), value, f"{where}: {about}"))
    for verdict in verdicts:
        name = macro_name(*prefix, verdict.protocol, "verdict", verdict.key)
        lines.append(_define(name, latex(verdict.words), f"{verdict.claim} ({verdict.protocol})"))
    return "% Generated from result files; do not edit.\n" + "\n".join(lines) + "\n"


def paper_macros(reported: Reported) -> str:
    """The paper's own numbers; \\Paper… at 360M, \\PaperTenB… at 10B."""
    prefix = {"360m": ("paper",), "10b": ("paper", "TenB")}
    lines = []
    for (scale, optimizer, mode), loss in reported.losses.items():
        about = f"{label(optimizer)} {mode} as the paper reports it, {scale}, confidence {loss.confidence}"
        if loss.value is not None:
            lines.append(_define(macro_name(*prefix[scale], optimizer, mode, "loss"), f"{loss.value:.3f}", about))
        if mode != SYNC and (gap := reported.gap(optimizer, mode, scale)) is not None:
            lines.append(_define(macro_name(*prefix[scale], optimizer, mode, "gap"), _number(gap, 3), f"gap of {about}"))
        if mode == CORRECTED and (share := reported.share(optimizer, scale)) is not None:
            lines.append(
                _define(
                    macro_name(*prefix[scale], optimizer, mode, "share"),
                    rf"{100 * share:.0f}\,\%",
                    f"share recovered, from the losses: {about}",
                )
            )
    return "% Generated from results/reported/paper.json; do not edit.\n" + "\n".join(lines) + "\n"


def _quantities(cell: Cell) -> Iterable[tuple[str, str, str]]:
    yield "n", str(cell.n), "runs"
    yield "diverged", str(cell.diverged), "runs that diverged"
    yield "rate", ", ".join(f"{rate:g}" for rate in cell.learning_rates), "peak learning rate"
    values = [
        ("loss", cell.loss.value, "final validation loss, nats"),
        ("lossCI", cell.loss.high - cell.loss.value, "half its 95 % interval"),
    ]
    if cell.gap:
        values += [
            ("gap", cell.gap.value, "loss minus that of sync, nats"),
            ("gapLow", cell.gap.low, "lower end of its 95 % interval"),
            ("gapHigh", cell.gap.high, "upper end of its 95 % interval"),
        ]
    for name, value, about in values:
        if math.isfinite(value):
            yield name, _number(value, 4), about
    if cell.gap and not math.isnan(cell.gap_p):
        yield "gapP", latex(show_p(cell.gap_p)), "p of the gap, Holm"
    if cell.share and cell.mode not in (SYNC, DELAYED):
        for name, value, about in (
            ("share", cell.share.value, "share of the gap recovered"),
            ("shareLow", cell.share.low, "lower end of Fieller's 95 % interval"),
            ("shareHigh", cell.share.high, "upper end of Fieller's 95 % interval"),
        ):
            if math.isfinite(value):
                yield name, rf"{_number(100 * value, 0)}\,\%", about


def _number(value: float, digits: int) -> str:
    text = f"{value:.{digits}f}"
    return rf"\ensuremath{{-}}{text[1:]}" if text.startswith("-") else text


def _define(name: str, value: str, about: str) -> str:
    return rf"\newcommand{{\{name}}}{{{value}}} % {about}"
