"""Where a result comes from: everything that a reader needs to trust or repeat it, and nothing about who ran it."""

import hashlib
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch

from onelag.training.config import TrainConfig
from onelag.training.fingerprint import code_fingerprint

ROOT = Path(__file__).parents[3]


def provenance(config: TrainConfig, source) -> dict[str, Any]:
    """The provenance record of a result file, but for wall_seconds and tokens, which the run knows at its end."""
    return {
        **_repository(),
        "corpus_sha256": source.corpus_sha256,
        "tokenizer_sha256": source.tokenizer_sha256,
        "code_sha256": code_fingerprint(config),
        **machine(),
        "argv": [Path(sys.argv[0]).name, *sys.argv[1:]] if sys.argv else [],
        "threads": torch.get_num_threads(),
        "start": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def machine() -> dict[str, Any]:
    """The class of machine and the versions that decide its arithmetic."""
    return {
        "host_class": f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


@cache
def _repository() -> dict[str, Any]:
    """Commit, whether the tree differs from it, and the lock file's hash; None where the code runs outside a checkout."""

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    lock = ROOT / "requirements.lock"
    changes = git("status", "--porcelain", "--untracked-files=no")
    return {
        "commit": git("rev-parse", "HEAD"),
        "dirty": None if changes is None else bool(changes),
        "lock_sha256": hashlib.sha256(lock.read_bytes()).hexdigest() if lock.exists() else None,
    }


@cache
def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
