"""Tables and macros: the numbers of the study, each once, apart from the paper's; safe for Markdown, CSV and LaTeX."""

import csv
import io
import math
import re

import pytest

from onelag.report.macros import macro_name, paper_macros, study_macros
from onelag.report.reported import load_reported
from onelag.report.statistics import holm, mean_interval, paired_difference
from onelag.report.study import Study
from onelag.report.summary import summarize
from onelag.report.tables import csv_table, latex, latex_table, markdown_table, show_gap, show_loss, show_share
from onelag.report.verdicts import verdicts


@pytest.fixture(scope="module")
def reported():
    return load_reported()


def markdown_rows(text):
    lines = [
        line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| ---") and not line.startswith("| optimizer")
    ]
    return [[entry.strip() for entry in line.strip("|").split("|")] for line in lines]


def test_cells_hold_the_paired_statistics(make_study):
    study = make_study(optimizers=("adamw", "muon", "lion"))
    cells = {(c.protocol, c.optimizer, c.mode): c for c in summarize(study)}
    assert len(cells) == 2 * 3 * 3
    ps = []
    for optimizer in study.optimizers:
        sync, delayed = (list(study.losses("kept", optimizer, m).values()) for m in ("sync", "delayed"))
        cell = cells["kept", optimizer, "delayed"]
        assert cell.loss == mean_interval(delayed) and cell.gap == paired_difference(delayed, sync) and cell.n == 5
        ps.append(cell.gap.p)
    assert [cells["kept", o, "delayed"].gap_p for o in study.optimizers] == holm(ps)
    assert cells["kept", "adamw", "sync"].gap is None and cells["kept", "adamw", "delayed"].share is None
    corrected = cells["kept", "muon", "delayed+EF"]
    assert corrected.share.bounded and corrected.loss_base.value == pytest.approx(corrected.loss.value + 0.001)


def test_markdown_shows_every_cell_beside_the_papers_number(make_study, make_tuning, reported):
    study = make_study(
        optimizers=("adamw", "muon", "mars"),
        truth={"adamw": (1.4, 0.4, 0.1, 4e-3), "muon": (1.3, 0.03, 0.01, 2e-2), "mars": (1.5, 0.5, 0.2, 4e-3)},
    )
    text = markdown_table(study, summarize(study), reported, make_tuning())
    rows = markdown_rows(text)
    assert len(rows) == 2 * 3 * 3 and len({len(row) for row in rows}) == 1
    adamw = next(row for row in rows if row[:2] == ["AdamW", "delayed"])
    assert adamw[2:4] == ["0.004", "5"] and adamw[-3:] == ["2.890 (A)", "+0.278", "–"] and adamw[6].startswith("+0.3")
    muon = next(row for row in rows if row[:2] == ["Muon", "delayed+EF"])
    assert muon[-3:] == ["2.583 (B)", "+0.005", "58 %"]
    assert next(row for row in rows if row[:2] == ["MARS", "delayed"])[-3:] == ["degrades badly (C)", "–", "–"]
    for needed in (
        "320K parameters, 2.46M tokens, State of the Union addresses (bytes)",
        "n = 5 seeds",
        "arXiv 2606.30634",
        "80 % power",
        "edge of its grid",
    ):
        assert needed in text
    without = markdown_table(study, summarize(study), None)
    assert "2.890" not in without and "not at hand" in without
    assert "plumbing" in markdown_table(make_study(tier="smoke"), summarize(make_study(tier="smoke")), reported)


def test_an_incomplete_study_has_fewer_rows_and_no_invented_number(make_study, reported):
    study = make_study()
    rows = [r for r in study.rows if r.protocol == "kept" and (r.seed == 0 or r.optimizer == "adamw") and r.mode != "sync"]
    study = Study(study.tier, study.experiment, rows)
    shown = {(row[0], row[1]): row for row in markdown_rows(markdown_table(study, summarize(study), reported))}
    assert set(shown) == {(o, m) for o in ("AdamW", "Muon") for m in ("delayed", "delayed+EF")}
    assert shown["AdamW", "delayed"][6] == "–" and "±" in shown["AdamW", "delayed"][4] and "±" not in shown["Muon", "delayed"][4]
    assert shown["Muon", "delayed"][3] == "1" and shown["AdamW", "delayed"][3] == "5"


def test_divergence_is_written_down(make_study, reported):
    study = make_study(diverged={("adamw", "delayed", 2)})
    text = markdown_table(study, summarize(study), reported)
    row = next(row for row in markdown_rows(text) if row[:2] == ["AdamW", "delayed"])
    assert row[3] == "5 (1 diverged)" and row[4] == "∞" and row[6].startswith("∞ [+0.3")
    assert "AdamW delayed (kept): 1 of 5 runs diverged" in text
    assert r"$\infty$" in latex_table(study, summarize(study), reported, "kept")


def test_csv_has_full_precision(make_study, reported):
    study = make_study()
    rows = list(csv.DictReader(io.StringIO(csv_table(study, summarize(study), reported))))
    cells = summarize(study)
    assert len(rows) == len(cells)
    for row, cell in zip(rows, cells):
        assert float(row["loss"]) == cell.loss.value and int(row["n"]) == cell.n
        assert (row["gap"] == "") == (cell.gap is None)
        if cell.gap:
            assert (float(row["gap_low"]), float(row["gap_high"]), float(row["gap_p_holm"])) == (cell.gap.low, cell.gap.high, cell.gap_p)
        if cell.share:
            assert float(row["recovered_high"]) == cell.share.high
    assert rows[0]["paper_loss"] == "2.612" and rows[0]["paper_confidence"] == "A"


def test_latex_is_a_whole_tabular(make_study, reported):
    study = make_study()
    for paper, columns in ((reported, 10), (None, 7)):
        text = latex_table(study, summarize(study), paper, "retuned")
        body = [line for line in text.splitlines() if line.endswith(r"\\") and "multicolumn" not in line]
        assert len(body) == 1 + 6 and all(len(re.findall(r"(?<!\\)&", line)) == columns - 1 for line in body)
        assert re.search(r"\\begin\{tabular\}\{(\w+)\}", text).group(1) == "ll" + "r" * (columns - 2)
        assert not re.search(r"(?<!\\)%", "\n".join(body)) and text.isascii()
        assert text.count("\\begin") == text.count("\\end") == 1


def test_latex_escapes():
    assert latex("50 % of a_b & {c} ± ∞ −1") == r"50 \% of a\_b \& \{c\} $\pm$ $\infty$ $-$1"
    assert latex("\\x~^#$") == r"\textbackslash{}x\textasciitilde{}\textasciicircum{}\#\$"


def test_numbers_as_printed(make_study):
    e = mean_interval([1.0, 1.0, 1.0])
    assert show_loss(e) == "1.0000 ± 0.0000" and show_loss(mean_interval([1.23456])) == "1.2346"
    assert show_gap(mean_interval([-0.01, -0.01])) == "−0.0100 [−0.0100, −0.0100]" and show_gap(mean_interval([0.5])) == "+0.5000"
    assert show_gap(None) == show_gap(mean_interval([])) == "–" and show_share(None) == "–"


def parse_macros(text):
    lines = [line for line in text.splitlines() if line.startswith("\\")]
    found = dict(re.fullmatch(r"\\newcommand\{\\([A-Za-z]+)\}\{(.*)\} % .+", line).groups() for line in lines)
    assert len(found) == len(lines)  # LaTeX refuses a second \newcommand of one name
    return found


def test_macros_are_letters_unique_and_the_tables_numbers(make_study):
    study = make_study(optimizers=("adamw", "muon", "lion"))
    cells = summarize(study)
    found = parse_macros(study_macros(study, cells, verdicts(study)))
    cell = next(c for c in cells if (c.protocol, c.optimizer, c.mode) == ("kept", "adamw", "delayed"))
    assert found["CpuFullTableTwoKeptAdamwDelayedGap"] == f"{cell.gap.value:.4f}"
    assert found["CpuFullTableTwoKeptAdamwDelayedN"] == "5" and found["CpuFullTableTwoKeptAdamwDelayedRate"] == "0.004"
    share = next(c for c in cells if (c.protocol, c.optimizer, c.mode) == ("retuned", "muon", "delayed+EF")).share
    assert found["CpuFullTableTwoRetunedMuonDelayedEFShare"] == rf"{100 * share.value:.0f}\,\%"
    assert found["CpuFullTableTwoKeptVerdictAdamwDegrades"] == "holds"
    assert macro_name("table-12", "x9y") == "TableOneTwoXNineY"


def test_a_number_that_is_not_there_has_no_macro(make_study):
    study = make_study(seeds=(0,), diverged={("adamw", "delayed", 0)})
    found = parse_macros(study_macros(study, summarize(study), verdicts(study)))
    assert "CpuFullTableTwoKeptMuonDelayedGap" in found and "CpuFullTableTwoKeptMuonDelayedGapLow" not in found
    assert "CpuFullTableTwoKeptAdamwDelayedLoss" not in found and found["CpuFullTableTwoKeptAdamwDelayedDiverged"] == "1"
    assert not any(math.isinf(float(v)) for v in found.values() if re.fullmatch(r"-?(inf|nan|[0-9.]+)", v))


def test_the_papers_macros_are_the_papers_numbers(reported):
    found = parse_macros(paper_macros(reported))
    assert found["PaperAdamwDelayedGap"] == "0.278" and found["PaperMuonDelayedEFShare"] == r"58\,\%"
    assert found["PaperTenBMuonDelayedLoss"] == "1.911"
