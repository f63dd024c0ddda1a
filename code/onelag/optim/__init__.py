"""Optimizers: our Muon and NorMuon, and `build_optimizer`, which makes every optimizer of the study by name.

Hidden matrices go to the matrix optimizer, everything else to AdamW; the decision is by global parameter name (routing.py).
"""

from onelag.optim.muon import Muon
from onelag.optim.newton_schulz import newton_schulz, svd_orthogonalize
from onelag.optim.normuon import NorMuon
from onelag.optim.registry import OPTIMIZERS, build_optimizer
from onelag.optim.routing import route

__all__ = ["OPTIMIZERS", "Muon", "NorMuon", "build_optimizer", "newton_schulz", "route", "svd_orthogonalize"]
