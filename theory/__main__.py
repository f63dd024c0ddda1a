"""`python -m theory`: runs every check of the theory, writes results/theory/*.json, draws the figures; exit status 1 if a check fails.

python -m theory                   about 3 minutes on 2 cores
python -m theory --slow            adds the long programs (N = 8 from below, N ≤ 14 from above): about 3 minutes more
python -m theory --only "Theorem 1" --count 5000
python -m theory --figures         draws the figures again from the result files
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from theory import certificates, curves, separable, tightness, worst_case_gd, worst_case_lmo
from theory.catalogue import STATEMENTS, Statement
from theory.evidence import Rows
from theory.store import RESULTS, write


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m theory", description="Runs the machine checks of the theory.")
    parser.add_argument("--slow", action="store_true", help="also the long linear, conic and semidefinite programs")
    parser.add_argument("--count", type=int, default=1000, help="random instances per theorem (default 1000)")
    parser.add_argument("--only", metavar="NAME", help="one statement of the catalogue, e.g. 'Theorem 3'; writes no result files")
    parser.add_argument("--figures", action="store_true", help="draw the figures from the result files, check nothing")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where result files go (default results/theory)")
    options = parser.parse_args(arguments)
    if options.count < 1:
        parser.error(f"--count must be at least 1, got {options.count}")
    if options.figures:
        return _draw(options.results)
    chosen = [s for s in STATEMENTS if options.only in (None, s.name)]
    if not chosen:
        parser.error(f"--only {options.only!r}: no such statement; there are {', '.join(s.name for s in STATEMENTS)}")
    run = Run()
    run.statements(chosen, options.count)
    if options.only is None:
        run.worst_cases(options.slow, options.results)
        run.curves(options.results)
        run.write_checks(options.results)
        _draw(options.results)
    print(f"{run.checks} checks, {len(run.failures)} failed, {time.time() - run.started:.0f} s")
    for failure in run.failures:
        print(f"FAILED  {failure}")
    return 1 if run.failures else 0


def _draw(results: Path) -> int:
    from theory.figures import draw_all

    for path in draw_all(results):
        if path.suffix == ".png":
            print(f"figure  {path.name}")
    return 0


class Run:
    """Collects outcomes, prints one line per group, remembers failures."""

    def __init__(self):
        self.started, self.checks, self.failures = time.time(), 0, []
        self.symbolic, self.numeric, self.sharp = [], [], []

    def _timed(self, name: str, work: Callable):
        begun = time.time()
        print(f"{name:<58}", end="", flush=True)
        value = work()
        print(f"{time.time() - begun:6.1f} s", flush=True)
        return value, time.time() - begun

    def _judge(self, good: bool, what: str) -> None:
        self.checks += 1
        if not good:
            self.failures.append(what)

    def statements(self, chosen: list[Statement], count: int) -> None:
        for statement in chosen:
            self._timed(f"{statement.name}: {statement.title}", lambda statement=statement: self._statement(statement, count))

    def _statement(self, statement: Statement, count: int) -> None:
        done = statement.module.check_symbolic()
        self.symbolic.append({"statement": statement.name, "decided": done.decided, "assumed": done.assumed})
        for name, good in done.decided.items():
            self._judge(good, f"{statement.name}: {name}")
        if statement.numeric:
            self._rows(statement.name, statement.module.check_numeric(count))
        if statement.sharp:
            for sharp in statement.module.check_sharp():
                self.sharp.append(
                    {
                        "statement": statement.name,
                        "label": sharp.label,
                        "term": sharp.term,
                        "measured": sharp.measured,
                        "bound": sharp.bound,
                        "weakened": sharp.weakened,
                    }
                )
                self._judge(sharp.holds, f"{sharp.label}: the bound does not hold")
                self._judge(sharp.caught, f"{sharp.label}: {sharp.term} weakened by 20 % went unnoticed")

    def _rows(self, statement: str, rows: list[Rows]) -> None:
        for row in rows:
            self.numeric.append({"statement": statement, **row.summary()})
            self._judge(row.violations == 0, f"{row.label}: {row.violations} of {row.measured.size} instances violate the bound")

    def worst_cases(self, slow: bool, results: Path) -> None:
        begun = time.time()
        upper, _ = self._timed(
            "Worst case of LMO steps, from above (linear programs)",
            lambda: worst_case_lmo.table((4, 6, 8, 10, 12, 14) if slow else (4, 6, 8)),
        )
        lower, _ = self._timed(
            "Worst case of LMO steps, from below (separable functions)", lambda: separable.table((4, 6, 8) if slow else (4, 6))
        )
        key = lambda row: (row["delay"], row["theta"], row["steps"], row["metric"])  # noqa: E731
        below = {key(row): row for row in lower}
        rows = [{**row, "lower": below[key(row)]["lower"] if key(row) in below else None} for row in upper]
        for row in rows:
            if row["theta"] == 0 and row["metric"] == "minimum":
                self._judge(
                    abs(row["upper"] - worst_case_lmo.closed_form(row["steps"], row["delay"])) < 1e-7,
                    f"closed form of the minimum at {key(row)}",
                )
            if row["lower"] is not None:
                self._judge(row["lower"] <= row["upper"] + 1e-6, f"the instance beats the upper side at {key(row)}")
                self._judge(
                    abs(row["lower"] - below[key(row)]["program"]) < 1e-3,
                    f"the replayed instance misses the program's optimum at {key(row)}",
                )
        methods = [(worst_case_lmo.Method(4, 1, 0.0), "minimum"), (worst_case_lmo.Method(4, 1, 1.0), "average")] + (
            [(worst_case_lmo.Method(8, 1, 1.0), "minimum")] if slow else []
        )
        twice, _ = self._timed(
            "The same as a semidefinite program (PEPit, Clarabel)",
            lambda: [(worst_case_lmo.semidefinite(m, k), worst_case_lmo.upper(m, k)) for m, k in methods],
        )
        for a, b in twice:
            self._judge(abs(a - b) < 1e-5, f"semidefinite {a} and linear program {b} disagree")
        write(
            "constants",
            {"rows": rows, "semidefinite": twice, "solvers": "HiGHS (linear), Clarabel (conic, semidefinite)"},
            time.time() - begun,
            results,
        )
        descent, seconds = self._timed(
            "Worst case of delayed gradient descent (PEPit, Clarabel)", lambda: worst_case_gd.table(steps=5 if slow else 3)
        )
        self._rows("Gradient descent", worst_case_gd.check_numeric(descent))
        write("gradient_descent", {"rows": descent, "solver": "Clarabel"}, seconds, results)
        proofs, seconds = self._timed("Dual certificates in rational numbers", certificates.all_certificates)
        for proof in proofs:
            self._judge(proof["multipliers"] > 0, f"empty certificate: {proof['problem']}")
        write("certificates", {"rows": proofs}, seconds, results)

    def curves(self, results: Path) -> None:
        parts = {
            "stability": curves.stability,
            "variance": curves.variance,
            "adam": curves.adam_floor,
            "momentum": curves.momentum_regimes,
            "cycles": curves.cycles,
        }
        begun = time.time()
        write("curves", {name: self._timed(f"Curves: {name}", work)[0] for name, work in parts.items()}, time.time() - begun, results)
        rows, seconds = self._timed("Tightness, term by term", tightness.table)
        for row in rows:
            for term, used in row["used"].items():
                self._judge(
                    used <= row["allowed"][term] * (1 + 1e-9), f"tightness: {row['case']} uses more of {term} than the bound allows"
                )
        write("tightness", {"rows": rows}, seconds, results)

    def write_checks(self, results: Path) -> None:
        counts = {"checks": self.checks, "failures": self.failures, "instances": sum(row["instances"] for row in self.numeric)}
        write(
            "checks",
            {**counts, "symbolic": self.symbolic, "numeric": self.numeric, "sharp": self.sharp},
            time.time() - self.started,
            results,
        )


if __name__ == "__main__":
    sys.exit(main())
