"""The house itself: which part may know which, one lock file that fits the ranges, one version number."""

import ast
import re
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "code" / "onelag"
# What each part of onelag may import of onelag, besides itself. "pipeline/order" is ground: it may not even know torch.
MAY_KNOW = {
    "delay": set(),
    "optim": set(),
    "models": set(),
    "data": set(),
    "pipeline": {"models", "optim", "delay", "data"},
    "training": {"pipeline", "models", "optim", "delay", "data"},
    "planner": {"configs", "report", "training", "pipeline", "models", "optim", "delay", "data"},
    "report": set(),
    "experiments": {"report", "training", "pipeline", "models", "optim", "delay", "data"},
}


def imports(path):
    """Every module that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module


def test_arrows_point_down():
    for part, allowed in MAY_KNOW.items():
        for path in (PACKAGE / part).rglob("*.py"):
            known = {name.split(".")[1] for name in imports(path) if name.startswith("onelag.") and name.count(".")}
            assert known - {part} <= allowed, f"{path.relative_to(ROOT)} imports {sorted(known - {part} - allowed)}"


def test_the_ground_and_the_theory_stand_alone():
    for name in ("order", "timeline"):
        assert not any(module.split(".")[0] == "torch" for module in imports(PACKAGE / "pipeline" / f"{name}.py"))
    for path in (ROOT / "theory").rglob("*.py"):
        assert not any(module.split(".")[0] in ("onelag", "torch") for module in imports(path)), path


def test_code_is_no_package():
    """code/__init__.py would shadow the standard library's `code`, which pdb and IPython need."""
    assert not (ROOT / "code" / "__init__.py").exists()
    import code

    assert Path(code.__file__).is_relative_to(Path(sys.base_prefix))


def test_the_lock_fits_every_range_and_the_environment_file_is_a_wrapper():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pinned = {m[1].lower().replace("_", "-"): m[2] for line in lines if (m := re.fullmatch(r"([A-Za-z0-9._-]+)==(\S+)", line))}
    wanted = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    for requirement in map(Requirement, wanted):
        version = pinned.get(requirement.name.lower().replace("_", "-"))
        assert version and requirement.specifier.contains(version), f"{requirement} against the lock's {version}"
    assert "-r requirements.lock" in (ROOT / "environment.yml").read_text()


def test_one_version():
    import onelag

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = (ROOT / "CITATION.cff").read_text()
    assert project["version"] == onelag.__version__ == re.search(r"^version: (\S+)$", citation, re.M)[1]


def test_test_files_have_unique_names():
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names))
