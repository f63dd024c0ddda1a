"""onelag: does a one-step gradient delay hurt LLM pretraining?

`SimulatedDelay` and `ErrorFeedback` wrap any torch optimizer; `Muon` and `build_optimizer` make one; `Schedule2BW` trains without a bubble.
"""

from importlib import import_module

__version__ = "0.1.0"

# Imported on first use: `from onelag import ErrorFeedback` must not pay for the pipeline or the plotting libraries.
_HOME = {
    "ErrorFeedback": "onelag.delay",
    "SimulatedDelay": "onelag.delay",
    "WeightPrediction": "onelag.delay",
    "DelayCompensation": "onelag.delay",
    "Muon": "onelag.optim",
    "NorMuon": "onelag.optim",
    "build_optimizer": "onelag.optim",
    "Schedule2BW": "onelag.pipeline",
}
__all__ = list(_HOME)


def __getattr__(name: str):
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'onelag' has no attribute '{name}'")
