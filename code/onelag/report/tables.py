"""Tables of a study, in Markdown, CSV and LaTeX (booktabs), all from the same cells; the paper's numbers stand in columns of their own."""

import csv
import io
import math
from collections.abc import Sequence

from onelag.report.reported import Reported, ReportedLoss
from onelag.report.scale import describe, seeds
from onelag.report.statistics import Estimate, Ratio, detectable_difference
from onelag.report.study import DELAYED, SYNC, Study, TuningRow, label
from onelag.report.summary import Cell

PROTOCOLS = {
    "kept": "learning rate tuned for sync and kept in every mode",
    "retuned": "learning rate tuned in each mode",
}
_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        **{character: f"\\{character}" for character in "%&_#${}"},
        **{">": "$>$", "<": "$<$", "±": r"$\pm$", "−": "$-$", "–": "--", "∞": r"$\infty$", "×": r"$\times$"},
    }
)
HEADER = ("optimizer", "mode", "lr", "n", "loss", "spread", "gap to sync", "p", "recovered", "loss at y")


def markdown_table(study: Study, cells: Sequence[Cell], reported: Reported | None, tuning: Sequence[TuningRow] = ()) -> str:
    """One section per protocol: the table and, below it, what a reader needs to judge it."""
    sections = [f"# {study.experiment} ({study.tier})", f"{describe(study.results)}; {seeds(cell.n for cell in cells)} per cell."]
    if study.tier == "smoke":
        sections.append("**Smoke tier: proves that the plumbing works, and nothing else.**")
    for protocol in study.protocols:
        chosen = [cell for cell in cells if cell.protocol == protocol]
        paper = ("paper: loss", "paper: gap", "paper: recovered") if reported else ()
        lines = [_row((*HEADER, *paper)), _row(["---"] * (len(HEADER) + len(paper)))]
        lines += [_row((*_ours(cell), *(_paper(cell, reported) if reported else ()))) for cell in chosen]
        sections += [f"## {PROTOCOLS.get(protocol, protocol)}", "\n".join(lines)]
    sections.append("\n".join(f"- {note}" for note in notes(cells, reported, tuning)))
    return "\n\n".join(sections) + "\n"


def notes(cells: Sequence[Cell], reported: Reported | None, tuning: Sequence[TuningRow] = ()) -> list[str]:
    """What stands under a table."""
    found = [
        "loss: final validation loss in nats at the newest weights, mean ± half a 95 % t interval over seeds; at y: at the point without extrapolation",
        "spread: standard deviation over seeds, the noise floor of one run",
        "gap to sync: paired by seed, 95 % t interval; p: two-sided, Holm over the optimizers of a protocol and mode",
        "recovered: (delayed − corrected) / (delayed − sync), Fieller's 95 % interval from paired seeds",
    ]
    found += [
        f"{label(c.optimizer)} {c.mode} ({c.protocol}): {c.diverged} of {c.n} runs diverged and count as infinitely bad"
        for c in cells
        if c.diverged
    ]
    gaps = [(cell, cell.gap) for cell in cells if cell.mode == DELAYED and cell.gap.n >= 2 and cell.gap.sd > 0]
    if gaps:
        sizes = ", ".join(f"{label(c.optimizer)} {detectable_difference(gap.sd, gap.n):.4f} (n = {gap.n}, {c.protocol})" for c, gap in gaps)
        found.append(f"smallest gap seen with 80 % power: {sizes}")
    edges = sorted({(label(row.optimizer), row.mode, f"{row.learning_rate:g}") for row in tuning if row.chosen and row.at_edge})
    if edges:
        listed = ", ".join(f"{name} {mode} ({rate})" for name, mode, rate in edges)
        found.append(f"the chosen learning rate lies at the edge of its grid, so a better one may lie outside: {listed}")
    if reported:
        found.append(
            f"paper: {reported.citation}; {reported.scales['360m']}. Another scale: compare signs and ratios, not losses. Its recovered share is computed from "
            "its losses. A: abstract or two independent sources; B: one careful transcription; C: one summary, may be wrong"
        )
    else:
        found.append("the paper's numbers (results/reported/paper.json) were not at hand")
    return found


def csv_table(study: Study, cells: Sequence[Cell], reported: Reported | None) -> str:
    """Full precision, one row per cell; infinite and missing values as inf, nan and empty."""
    rows = []
    for cell in cells:
        row = {
            "tier": study.tier,
            "experiment": study.experiment,
            "protocol": cell.protocol,
            "optimizer": cell.optimizer,
            "mode": cell.mode,
            "learning_rate": ";".join(f"{rate:g}" for rate in cell.learning_rates),
            "n": cell.n,
            "diverged": cell.diverged,
            "seeds": ";".join(str(seed) for seed in cell.seeds),
            "spread": cell.spread.sd,
            "loss_at_y": cell.loss_base.value if cell.loss_base else "",
        }
        row |= _interval("loss", cell.loss) | _interval("gap", cell.gap) | {"gap_p_holm": cell.gap_p if cell.gap else ""}
        row |= _interval("recovered", cell.share) | {"recovered_note": cell.share.note if cell.share else ""}
        loss = reported.loss(cell.optimizer, cell.mode) if reported else None
        paper_gap = reported.gap(cell.optimizer, cell.mode) if reported else None
        row |= {"paper_loss": loss.value if loss and loss.value is not None else "", "paper_gap": "" if paper_gap is None else paper_gap}
        row |= {"paper_words": loss.words if loss else "", "paper_confidence": loss.confidence if loss else ""}
        rows.append(row)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else ["optimizer"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def latex_table(study: Study, cells: Sequence[Cell], reported: Reported | None, protocol: str) -> str:
    """A booktabs tabular of one protocol; needs \\usepackage{booktabs}. The caption is the paper's business."""
    columns = ("Optimizer", "Mode", "Learning rate", "$n$", "Loss", "Gap to sync", "Recovered")
    paper = ("Loss", "Gap", "Recovered") if reported else ()
    lines = [
        f"% {study.experiment}, {study.tier}, {protocol}: {describe(study.results)}. Generated; do not edit.",
        rf"\begin{{tabular}}{{ll{'r' * (len(columns) + len(paper) - 2)}}}",
        r"\toprule",
    ]
    if reported:
        lines += [r"& & \multicolumn{5}{c}{ours} & \multicolumn{3}{c}{paper (360M)} \\", r"\cmidrule(lr){3-7}\cmidrule(lr){8-10}"]
    lines += [" & ".join((*columns, *paper)) + r" \\", r"\midrule"]
    last = None
    for cell in (c for c in cells if c.protocol == protocol):
        if last not in (None, cell.optimizer):
            lines.append(r"\addlinespace")
        optimizer, mode, rate, n, loss, _, gap, _, recovered, _ = _ours(cell)
        entries = ["" if cell.optimizer == last else optimizer, mode, rate, n, loss, gap, recovered]
        lines.append(" & ".join(latex(entry) for entry in (*entries, *(_paper(cell, reported) if reported else ()))) + r" \\")
        last = cell.optimizer
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def latex(text: str) -> str:
    """Plain text as LaTeX."""
    return text.translate(_LATEX)


def show_loss(loss: Estimate) -> str:
    """ "1.4231 ± 0.0040", "∞" after a divergence, "1.4231" for one seed."""
    if not math.isfinite(loss.value):
        return "∞" if loss.value > 0 else "–"
    return f"{loss.value:.4f}" + (f" ± {loss.high - loss.value:.4f}" if math.isfinite(loss.high) else "")


def show_gap(gap: Estimate | None) -> str:
    """ "+0.3850 [+0.3701, +0.3999]"; an end that diverged runs leave open is ∞; one seed has no interval."""
    if gap is None or gap.n == 0:
        return "–"
    ends = [f"{_signed(end)}" if math.isfinite(end) else ("−∞" if end < 0 else "∞") for end in (gap.low, gap.high)]
    interval = f" [{ends[0]}, {ends[1]}]" if math.isfinite(gap.low) or math.isfinite(gap.high) else ""
    value = _signed(gap.value) if math.isfinite(gap.value) else "–" if math.isnan(gap.value) else "∞" if gap.value > 0 else "−∞"
    return value + interval


def show_share(share: Ratio | None) -> str:
    """ "81 % [78, 84]", or the value with the reason why it has no interval."""
    if share is None or share.n == 0:
        return "–"
    value = "–" if math.isnan(share.value) else f"{100 * share.value:.0f} %".replace("-", "−")
    return f"{value} [{100 * share.low:.0f}, {100 * share.high:.0f}]".replace("-", "−") if share.bounded else f"{value} ({share.note})"


def show_p(p: float) -> str:
    return "–" if math.isnan(p) else "< 0.0001" if p < 1e-4 else f"{p:.4f}"


def _ours(cell: Cell) -> tuple[str, ...]:
    return (
        label(cell.optimizer),
        cell.mode,
        ", ".join(f"{rate:g}" for rate in cell.learning_rates),
        str(cell.n) + (f" ({cell.diverged} diverged)" if cell.diverged else ""),
        show_loss(cell.loss),
        "–" if math.isnan(cell.spread.sd) else f"{cell.spread.sd:.4f}",
        show_gap(cell.gap),
        show_p(cell.gap_p),
        show_share(cell.share),
        "–" if cell.loss_base is None else f"{cell.loss_base.value:.4f}",
    )


def _paper(cell: Cell, reported: Reported) -> tuple[str, ...]:
    loss, gap = reported.loss(cell.optimizer, cell.mode), reported.gap(cell.optimizer, cell.mode)
    share = reported.share(cell.optimizer) if cell.mode not in (SYNC, DELAYED) else None
    return (_reported(loss), "–" if gap is None else _signed(gap, 3), "–" if share is None else f"{100 * share:.0f} %")


def _reported(loss: ReportedLoss | None) -> str:
    return "–" if loss is None else f"{loss.words if loss.value is None else f'{loss.value:.3f}'} ({loss.confidence})"


def _signed(value: float, digits: int = 4) -> str:
    return f"{value:+.{digits}f}".replace("-", "−")


def _interval(name: str, value: Estimate | Ratio | None) -> dict[str, float | str]:
    return {name: value.value if value else "", f"{name}_low": value.low if value else "", f"{name}_high": value.high if value else ""}


def _row(entries: Sequence[str]) -> str:
    return "| " + " | ".join(entries) + " |"
