"""The whole report: files, figures, sidecars, determinism, CLAIMS.md."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure

from onelag.report import claims, figures, style, write
from onelag.report.claims import write_claims
from onelag.report.reported import PAPER_JSON
from onelag.report.store import CannotWrite
from onelag.report.study import Study
from onelag.report.style import COLUMN, FULL, look, save_figure, styled
from onelag.report.summary import summarize
from onelag.report.write import write_report

ROOT = Path(__file__).parents[2]
FIGURES = [
    f"{name}{suffix}"
    for name in ("loss-curves-kept", "loss-curves-retuned", "gaps-kept", "gaps-retuned", "learning-rates")
    for suffix in ("", "-column")
]


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def written(make_study, make_tuning, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports") / "cpu-full" / "table-2"
    return folder, write_report(make_study(), make_tuning(), folder)


def texts(figure: Figure) -> str:
    return "\n".join(artist.get_text() for artist in figure.findobj(mpl.text.Text))


def drawn(function, *arguments):
    with styled():
        figure = function(*arguments)
        figure.canvas.draw()
    return figure


def test_every_file_is_there_and_the_verdicts_come_back(written):
    folder, found = written
    names = set(contents(folder))
    assert names == {
        *("table.md", "table.csv", "table-kept.tex", "table-retuned.tex", "macros.tex", "paper-macros.tex", "verdicts.json"),
        *(f"{name}.{kind}" for name in FIGURES for kind in ("png", "pdf", "json")),
    }
    record = json.loads((folder / "verdicts.json").read_text(encoding="utf-8"))
    assert [v["key"] for v in record["verdicts"]] == [v.key for v in found] and found[0].key == "adamw-degrades"
    assert record["runs"] == 30 + 18 and record["hours"] == pytest.approx(48 * 90 / 3600)  # protocols share runs, each is paid once
    assert record["results"] == ["results/cpu-full/table-2"] and record["command"] == "make table-2 TIER=cpu-full"


def test_sidecars_name_their_inputs_and_their_bytes(written):
    folder, _ = written
    for name in FIGURES:
        sidecar = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        for kind in ("png", "pdf"):
            assert sidecar[f"{kind}_sha256"] == hashlib.sha256((folder / f"{name}.{kind}").read_bytes()).hexdigest()
        assert len(sidecar["runs"]) == (18 if name.startswith("learning") else 30)
    pdf = (folder / "gaps-kept.pdf").read_bytes()
    assert b"CreationDate" not in pdf and b"/Producer" not in pdf
    assert b"Software" not in (folder / "gaps-kept.png").read_bytes()


def test_figures_are_the_same_bytes_in_another_process(written, tmp_path):
    """Another hash seed, another time, another folder."""
    folder, _ = written
    script = f"""
import importlib.util, sys
from pathlib import Path
sys.path.insert(0, {str(ROOT / "code")!r})
spec = importlib.util.spec_from_file_location("synthetic", {str(Path(__file__).with_name("conftest.py"))!r})
synthetic = importlib.util.module_from_spec(spec); spec.loader.exec_module(synthetic)
from onelag.report.write import write_report
write_report(synthetic._make_study(), synthetic._make_tuning(), Path({str(tmp_path)!r}))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], env={"PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1", "PATH": ""}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path) == contents(folder)


def test_nothing_is_drawn_twice_and_a_damaged_figure_is_drawn_again(written, make_study, make_tuning, monkeypatch):
    folder, _ = written
    before = contents(folder)
    calls = []
    monkeypatch.setattr(write, "gap_bars", lambda *arguments: calls.append(arguments) or figures.gap_bars(*arguments))
    for name in ("loss_curves", "learning_rates"):
        monkeypatch.setattr(write, name, lambda *arguments: pytest.fail("drawn although nothing changed"))
    write_report(make_study(), make_tuning(), folder)
    write_report(make_study(), make_tuning(), folder, draft=True)
    assert not calls and contents(folder) == before
    (folder / "gaps-kept.pdf").write_bytes(b"")
    write_report(make_study(), make_tuning(), folder)
    assert len(calls) == 1 and contents(folder) == before


def test_changed_inputs_draw_a_new_figure(make_study, tmp_path):
    study = make_study(seeds=range(2))

    def draw():
        return Figure(figsize=(1, 1))

    rows = [row for row in study.rows if row.protocol == "kept"]
    assert save_figure(tmp_path / "f", draw, rows, "cpu") and not save_figure(tmp_path / "f", draw, rows, "cpu")
    assert save_figure(tmp_path / "f", draw, rows[:-1], "cpu")
    other = make_study(seeds=range(2), noise=0.005)
    assert save_figure(tmp_path / "f", draw, [row for row in other.rows if row.protocol == "kept"], "cpu")


def test_a_draft_is_the_full_width_png_alone(make_study, make_tuning, tmp_path):
    write_report(make_study(seeds=range(2)), make_tuning(), tmp_path, draft=True)
    assert {p.stem for p in tmp_path.glob("*.png")} == {name for name in FIGURES if not name.endswith("-column")} and not list(
        tmp_path.glob("*.pdf")
    )
    write_report(make_study(seeds=range(2)), make_tuning(), tmp_path)
    assert len(list(tmp_path.glob("*.pdf"))) == len(FIGURES)


def test_the_smallest_study_and_a_smoke_watermark(make_study, make_tuning, tmp_path):
    study = make_study(optimizers=("muon",), modes=("sync",), seeds=(4,), protocols=("kept",), tier="smoke", experiment="table-1")
    found = write_report(study, [], tmp_path, draft=True)
    assert [v.verdict for v in found if v.headline] == ["undecided"] * 4
    assert {p.name for p in tmp_path.glob("*.png")} == {"loss-curves-kept.png"}
    for tier, marked in (("smoke", True), ("cpu", False)):
        figure = drawn(figures.loss_curves, study, "kept", FULL)
        style.watermark(figure, tier)
        assert ("smoke" in [t.get_text() for t in figure.texts]) == marked


@pytest.mark.parametrize("width", [COLUMN, FULL])
def test_every_figure_states_its_size_and_units(make_study, make_tuning, width):
    study, tuning = make_study(), make_tuning()
    for figure, axis in (
        (drawn(figures.loss_curves, study, "kept", width), "validation loss (nats)"),
        (drawn(figures.gap_bars, study, "kept", summarize(study), width), "loss − sync loss (nats)"),
        (drawn(figures.learning_rates, study, tuning, width), "final validation loss (nats)"),
    ):
        shown = texts(figure)
        assert figure.get_size_inches()[0] == width
        for needed in ("320K parameters", "2.46M tokens", "State of the Union", "n = ", axis, "tier cpu-full"):
            assert needed in shown, needed
        renderer = figure.canvas.get_renderer()
        for artist in figure.findobj(mpl.text.Text):  # nothing runs off the page
            if artist.get_visible() and artist.get_text() and artist.get_figure() is figure:
                box = artist.get_window_extent(renderer)
                if artist in figure.texts or artist is figure._supxlabel:
                    assert box.x0 >= -1 and box.x1 <= figure.bbox.x1 + 1, artist.get_text()


def test_bars_are_the_gaps_and_dots_the_seeds(make_study):
    study = make_study(optimizers=("adamw", "muon", "lion"), diverged={("lion", "delayed", 2)})
    cells = summarize(study)
    figure = drawn(figures.gap_bars, study, "kept", cells, FULL)
    axes = figure.axes[0]
    expected = [c.gap.value for c in cells if c.protocol == "kept" and c.gap]
    heights = [patch.get_height() for patch in axes.patches]
    for height, value in zip(heights, expected, strict=True):
        assert height == value if np.isfinite(value) else height > max(e for e in expected if np.isfinite(e))
    dots = [line for line in axes.lines if line.get_linestyle() == "None" and line.get_markerfacecolor() == "white"]
    assert sorted(len(line.get_ydata()) for line in dots) == [4, 5, 5, 5, 5, 5]
    losses, base = study.paired("kept", ("adamw", "delayed"), ("adamw", "sync"))
    assert np.array_equal(dots[0].get_ydata(), losses - base)
    assert "1/5\ndiverged" in texts(figure)
    sync_gone = make_study(diverged={("adamw", "sync", 0)})
    figure = drawn(figures.gap_bars, sync_gone, "kept", summarize(sync_gone), FULL)
    assert "sync\ndiverged" in texts(figure) and figure.axes[0].patches[0].get_height() == 0


def test_curves_are_means_and_end_at_a_divergence(make_study):
    study = make_study(diverged={("adamw", "delayed", 1)})
    axes = drawn(figures.loss_curves, study, "kept", FULL).axes[0]
    sync, delayed, _ = [line for line in axes.lines if line.get_marker() == "None"]
    rows = study.cell("kept", "adamw", "sync")
    mean = np.mean([row.result.metrics["curve"]["validation_loss"] for row in rows], axis=0)
    assert np.allclose(sync.get_ydata(), mean) and sync.get_xdata()[-1] == 1200 * 2048
    assert delayed.get_xdata()[-1] == 300 * 2048
    assert [line.get_xdata()[0] for line in axes.lines if line.get_marker() == "x"] == [300 * 2048]


def test_a_run_that_diverged_at_once_is_no_obstacle(make_study, make_result, tmp_path):
    study = make_study(optimizers=("adamw",), seeds=range(2), protocols=("kept",))
    rows = []
    for row in study.rows:
        gone = make_result(row.optimizer, row.mode, row.seed, diverged_at=3)
        rows.append(type(row)(gone, *(getattr(row, n) for n in ("protocol", "optimizer", "mode", "seed", "learning_rate"))))
    assert rows[0].result.metrics["curve"]["step"] == []
    found = write_report(Study("cpu", "table-2", rows), [], tmp_path, draft=True)
    assert found[0].verdict == "undecided" and found[0].diverged == {"AdamW delayed": 2, "AdamW sync": 2}


def test_the_search_for_learning_rates_marks_choice_edge_and_divergence(make_study, make_tuning):
    figure = drawn(figures.learning_rates, make_study(), make_tuning(), FULL)
    axes = figure.axes[0]
    rings = sorted(line.get_xdata()[0] for line in axes.lines if line.get_markersize() == 9)
    assert rings == [0.002, 0.004, 0.004]
    assert sum(text.get_text() == "edge" for text in axes.texts) == 1
    assert [line.get_xdata()[0] for line in axes.lines if line.get_marker() == "x"] == [0.008]


def test_modes_differ_without_colour():
    modes = ["sync", "delayed", "delayed+EF", "prediction", "smaller rate", "compensation"]
    looks = [look(mode, modes) for mode in modes]
    for name in ("line", "marker", "hatch"):
        assert len({str(entry[name]) for entry in looks}) == len(modes), name


def test_drawing_leaves_the_users_settings_alone(make_study):
    before = dict(mpl.rcParams)
    drawn(figures.gap_bars, make_study(seeds=range(2)), "kept", summarize(make_study(seeds=range(2))), COLUMN)
    assert dict(mpl.rcParams) == before


def test_without_the_papers_numbers_the_table_says_so(make_study, tmp_path, caplog):
    write_report(make_study(seeds=range(2), protocols=("kept",)), [], tmp_path, reported_json=tmp_path / "none.json", draft=True)
    assert "not at hand" in (tmp_path / "table.md").read_text(encoding="utf-8") and "none.json is not there" in caplog.text


def test_a_full_disk_leaves_the_earlier_report(written, make_study, make_tuning, monkeypatch):
    folder, _ = written
    before = contents(folder)
    monkeypatch.setattr("onelag.report.store.os.fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(CannotWrite, match="No space left"):
        write_report(make_study(seeds=range(3)), make_tuning(), folder)
    assert contents(folder) == before


STATIC = {
    "title": "Theory",
    "claims": [
        {
            "claim": "EF is plain delay at 2y_t − y_{t−1} | exactly",
            "verdict": "holds",
            "number": "largest difference 0",
            "n": 1000,
            "scale": "random instances",
            "test": "tests/report/test_verdicts.py",
            "results": "results/theory",
            "command": "make theory",
            "cost": "5 min",
        }
    ],
}


def test_claims_list_everything_and_are_stable(written, make_study, tmp_path):
    folder, _ = written
    reports = folder.parents[1]
    write_report(make_study(tier="smoke", seeds=range(2)), [], reports / "smoke" / "table-2", draft=True)
    write_report(
        make_study(tier="cpu", seeds=range(2), modes=("sync", "delayed"), experiment="table-1"), [], reports / "cpu" / "table-1", draft=True
    )
    (tmp_path / "results" / "claims").mkdir(parents=True)
    (tmp_path / "results" / "claims" / "theory.json").write_text(json.dumps(STATIC), encoding="utf-8")
    target = tmp_path / "CLAIMS.md"
    write_claims(tmp_path / "results", reports, target)
    text = target.read_text(encoding="utf-8")
    write_claims(tmp_path / "results", reports, target)
    assert target.read_text(encoding="utf-8") == text
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert headings == ["## table-2, tier cpu-full", "## table-1, tier cpu", "## Theory"]  # the strongest first, smoke left out
    rows = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    adamw = next(row for row in rows if "AdamW degrades" in row and "| kept |" in row)
    assert "| holds |" in adamw and "+0.278 (A)" in adamw and "| 5 |" in adamw and "[+0.37" in adamw
    assert any("AdamW's gap" in row and "90 % (C)" in row for row in rows)
    assert "largest difference 0" in text and r"y_{t−1} \| exactly" in text
    for needed in ("`make table-2 TIER=cpu-full`", "`results/cpu-full/table-2`", "core-hours, 48 runs", claims.TEST):
        assert needed in text
    assert (ROOT / claims.TEST).exists()


def test_claims_without_results_say_so(tmp_path):
    write_claims(tmp_path / "results", tmp_path / "reports", tmp_path / "CLAIMS.md")
    assert "No results yet" in (tmp_path / "CLAIMS.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        ("{", "not a list of claims"),
        ('{"title": "x", "claims": [{"claim": "y"}]}', "each needs"),
        (json.dumps(STATIC).replace('"holds"', '"proved"'), "must be holds"),
    ],
)
def test_a_static_claim_that_is_incomplete_is_refused(tmp_path, content, cause):
    (tmp_path / "claims").mkdir()
    (tmp_path / "claims" / "theory.json").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=cause):
        write_claims(tmp_path, tmp_path, tmp_path / "CLAIMS.md")
    assert not (tmp_path / "CLAIMS.md").exists()


def test_a_damaged_verdict_file_is_named(tmp_path):
    bad = tmp_path / "cpu" / "table-1" / "verdicts.json"
    bad.parent.mkdir(parents=True)
    bad.write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match=r"verdicts\.json is not a verdict file"):
        write_claims(tmp_path, tmp_path, tmp_path / "CLAIMS.md", PAPER_JSON)
