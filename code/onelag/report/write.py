"""Everything that is made from a study, in one call."""

import json
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from onelag.report.claims import verdict_record
from onelag.report.figures import gap_bars, learning_rates, loss_curves
from onelag.report.macros import paper_macros, study_macros
from onelag.report.reported import PAPER_JSON, Reported, load_reported
from onelag.report.store import write_atomically
from onelag.report.study import SYNC, Study, TuningRow
from onelag.report.style import COLUMN, FULL, save_figure
from onelag.report.summary import summarize
from onelag.report.tables import csv_table, latex_table, markdown_table
from onelag.report.verdicts import Verdict, verdicts

log = logging.getLogger(__name__)


def write_report(
    study: Study, tuning_rows: Sequence[TuningRow], out_dir: Path, reported_json: Path = PAPER_JSON, draft: bool = False
) -> list[Verdict]:
    """Writes tables, figures, macros and verdicts of a study, however incomplete, and returns the verdicts (headline claims first in each protocol).

    Files in `out_dir`: table.md, table.csv, table-<protocol>.tex, verdicts.json (what CLAIMS.md is made from), macros.tex, paper-macros.tex, and per figure .png, .pdf and .json
    (its inputs): loss-curves-<protocol>, gaps-<protocol>, learning-rates, each at full and (…-column) at column width.

    Args:
        draft: between two stages of a study: figures as .png at full width only, which takes a quarter of the time.

    Raises:
        CannotWrite: full disk or no permission; files already there stay whole.
    """
    out_dir = Path(out_dir)
    cells, found, reported = summarize(study), verdicts(study), _reported(reported_json)
    write_atomically(out_dir / "table.md", markdown_table(study, cells, reported, tuning_rows))
    write_atomically(out_dir / "table.csv", csv_table(study, cells, reported))
    for protocol in study.protocols:
        write_atomically(out_dir / f"table-{protocol}.tex", latex_table(study, cells, reported, protocol))
    write_atomically(out_dir / "macros.tex", study_macros(study, cells, found))
    if reported:
        write_atomically(out_dir / "paper-macros.tex", paper_macros(reported))
    write_atomically(out_dir / "verdicts.json", json.dumps(verdict_record(study, tuning_rows, found), indent=1, ensure_ascii=False) + "\n")
    for suffix, width in (("", FULL), ("-column", COLUMN))[: 1 if draft else 2]:
        for protocol in study.protocols:
            rows = [row for row in study.rows if row.protocol == protocol]
            save_figure(out_dir / f"loss-curves-{protocol}{suffix}", partial(loss_curves, study, protocol, width), rows, study.tier, draft)
            if any(cell.protocol == protocol and cell.mode != SYNC and cell.gap.n for cell in cells):
                save_figure(out_dir / f"gaps-{protocol}{suffix}", partial(gap_bars, study, protocol, cells, width), rows, study.tier, draft)
        if tuning_rows:
            save_figure(
                out_dir / f"learning-rates{suffix}", partial(learning_rates, study, tuning_rows, width), tuning_rows, study.tier, draft
            )
    return found


def _reported(path: Path) -> Reported | None:
    try:
        return load_reported(path)
    except FileNotFoundError:
        log.warning("%s is not there: the tables come without the paper's numbers", path)
        return None
