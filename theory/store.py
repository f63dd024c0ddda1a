"""Result files of the theory: written whole (temporary file, then rename), with the versions and seconds that a reader needs to repeat
them.
"""

import json
import os
import platform
from importlib.metadata import version
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "theory"
PACKAGES = ("numpy", "scipy", "sympy", "mpmath", "cvxpy", "clarabel", "PEPit")


def provenance(seconds: float) -> dict:
    return {
        "python": platform.python_version(),
        "host_class": f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}",
        **{package: version(package) for package in PACKAGES},
        "seconds": round(seconds, 1),
    }


def plain(value):
    """Numbers of numpy as numbers of Python, arrays as lists; JSON has no infinity, so it becomes null."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value


def write(name: str, content: dict, seconds: float, folder: Path = RESULTS) -> Path:
    """results/theory/<name>.json."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    temporary = path.with_suffix(".json.part")
    record = {"schema": 1, "name": name, **plain(content), "provenance": provenance(seconds)}
    temporary.write_text(json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    temporary.replace(path)
    return path


def read(name: str, folder: Path = RESULTS) -> dict:
    """Raises FileNotFoundError with the command that makes the file."""
    path = folder / f"{name}.json"
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: run `python -m theory` first")
    return json.loads(path.read_text(encoding="utf-8"))
