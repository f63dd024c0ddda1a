"""The idea itself: run any torch optimizer on gradients that are `steps` weight versions old, and correct its updates for it.

Wrap inside out: SimulatedDelay(ErrorFeedback(optimizer)). Knows torch.optim and nothing else of onelag.
"""

from onelag.delay.compensation import DelayCompensation
from onelag.delay.error_feedback import ErrorFeedback, lookahead
from onelag.delay.prediction import WeightPrediction
from onelag.delay.simulated import SimulatedDelay, stage_delays
from onelag.delay.wrapper import OptimizerWrapper

__all__ = [
    "DelayCompensation",
    "ErrorFeedback",
    "OptimizerWrapper",
    "SimulatedDelay",
    "WeightPrediction",
    "lookahead",
    "stage_delays",
]
