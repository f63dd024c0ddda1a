"""`python -m theory`, its result files, figures and README.

Which bug fails here: a failed check that does not reach the exit status, a result file with NaN, a figure that needs more than its result file, a
README that names a file or statement that does not exist.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from theory import equivalence, store
from theory.__main__ import main
from theory.catalogue import CONJECTURE, KNOWN, PROVED, STATEMENTS
from theory.evidence import Rows
from theory.figures import FIGURES, draw_all

ROOT = Path(__file__).parents[2]


def test_one_statement_passes(capsys):
    assert main(["--only", "Proposition E", "--count", "12"]) == 0
    assert "0 failed" in capsys.readouterr().out


def test_a_failed_check_is_the_exit_status(monkeypatch, capsys):
    monkeypatch.setattr(equivalence, "check_numeric", lambda count: [Rows("broken", np.array([2.0]), np.array([1.0]))])
    assert main(["--only", "Proposition E"]) == 1
    assert "FAILED  broken: 1 of 1" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "word"), [(["--only", "Theorem 99"], "Theorem 99"), (["--count", "0"], "--count")])
def test_wrong_arguments_end_with_two(arguments, word, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert word in capsys.readouterr().err


def test_result_files_are_plain_json(tmp_path):
    content = {"a": np.float64(1.5), "b": np.array([1, 2]), "c": float("inf"), "d": {1: (np.int64(3), None)}, "e": np.bool_(True)}
    path = store.write("example", content, 1.234, tmp_path)
    record = json.loads(path.read_text())
    assert (record["a"], record["b"], record["c"], record["d"], record["e"]) == (1.5, [1, 2], None, {"1": [3, None]}, True)
    assert record["provenance"]["seconds"] == 1.2 and set(store.PACKAGES) <= set(record["provenance"])
    assert [p.name for p in tmp_path.iterdir()] == ["example.json"]
    assert store.read("example", tmp_path) == record
    with pytest.raises(FileNotFoundError, match="python -m theory"):
        store.read("missing", tmp_path)


def test_committed_results_are_whole_and_without_failures():
    checks = store.read("checks")
    assert checks["failures"] == []
    assert {row["statement"] for row in checks["symbolic"]} == {s.name for s in STATEMENTS}
    assert all(row["violations"] == 0 for row in checks["numeric"])
    per_statement = {}
    for row in checks["numeric"]:
        per_statement[row["statement"]] = per_statement.get(row["statement"], 0) + row["instances"]
    assert all(per_statement[s.name] >= 1000 for s in STATEMENTS if s.numeric)


def test_figures_are_functions_of_the_result_files(tmp_path):
    for path in (ROOT / "results" / "theory").glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    drawn = draw_all(tmp_path)
    assert {path.stem for path in drawn} == set(FIGURES)
    assert all(path.stat().st_size > 2000 for path in drawn)


def test_readme_maps_every_statement():
    text = (ROOT / "theory" / "README.md").read_text(encoding="utf-8")
    for statement in STATEMENTS:
        rows = [line for line in text.splitlines() if line.startswith("|") and f"| {statement.name} |" in line]
        assert len(rows) == 1, statement.name
        assert statement.file.removeprefix("theory/") in rows[0], statement.name
        assert statement.mark in rows[0] and statement.mark in (KNOWN, PROVED, CONJECTURE)
        if statement.figure:
            assert statement.figure in rows[0] and statement.figure in FIGURES
    for word in text.replace("`", " ").replace("(", " ").replace(")", " ").split():
        if word.startswith(("tests/", "theory/", "code/", "results/")) and word.rstrip(".,:;").endswith((".py", ".md", ".json")):
            assert list(ROOT.glob(word.rstrip(".,:;"))), word
