"""The identity of a run: what it was configured to do, on which data, by which code.

The code part covers the modules that decide the numbers of that run, as parsed (comments and docstrings do not count), so a result is never
reused after a change that could have altered it, and survives one that could not.
"""

import ast
import hashlib
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from onelag.training.config import TrainConfig, digest

_ALWAYS = (
    "onelag.data.sampler",
    "onelag.models.dense",
    "onelag.models.loss",
    "onelag.optim.registry",
    "onelag.optim.routing",
    "onelag.training.build",
    "onelag.training.evaluate",
    "onelag.training.schedule",
    "onelag.training.step",
)
_MUON = ("onelag.optim.combined", "onelag.optim.muon", "onelag.optim.newton_schulz")
_OPTIMIZER = {"muon": _MUON, "normuon": (*_MUON, "onelag.optim.normuon"), "soap": ("onelag.optim.combined",)}
_CORRECTION = {
    "none": (),
    "error-feedback": ("onelag.delay.error_feedback",),
    "weight-prediction": ("onelag.delay.error_feedback", "onelag.delay.prediction"),
    "delay-compensation": ("onelag.delay.compensation",),
}


def deciding_modules(config: TrainConfig) -> list[str]:
    """The modules of onelag that decide the numbers of this run."""
    modules = [*_ALWAYS, *_OPTIMIZER.get(config.optimizer.name, ()), *_CORRECTION[config.delay.correction]]
    if config.delay.steps or config.delay.pipedream_stages or config.delay.correction != "none":
        modules += ["onelag.delay.wrapper", "onelag.delay.simulated"]
    if config.data.tokenizer != "bytes":
        modules.append("onelag.data.tokenizer")
    return sorted(set(modules))


def code_fingerprint(config: TrainConfig) -> str:
    """sha256 over the parsed sources of `deciding_modules`."""
    return digest({module: _parsed(module) for module in deciding_modules(config)})


def run_identity(config: TrainConfig, corpus_sha256: str, tokenizer_sha256: str) -> str:
    """The run id: 16 hexadecimal digits over configuration (with the optimizer's full settings), data and deciding code."""
    return digest(
        {
            "config": resolved(config),
            "corpus": corpus_sha256,
            "tokenizer": tokenizer_sha256,
            "code": code_fingerprint(config),
        }
    )[:16]


def resolved(config: TrainConfig) -> dict:
    """The configuration with the optimizer's recipe written out: what the result file stores."""
    from onelag.optim import OPTIMIZERS

    whole = config.to_dict()
    whole["optimizer"]["settings"] = {
        key: value if isinstance(value, (int, float, str, bool, type(None))) else str(value)
        for key, value in {**OPTIMIZERS[config.optimizer.name].settings, **config.optimizer.settings}.items()
    }
    return whole


@cache
def _parsed(module: str) -> str:
    tree = ast.parse(Path(find_spec(module).origin).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()
