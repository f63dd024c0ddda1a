"""What a pipeline does between its runs: show its weights, evaluate, give and take its state."""


import torch
from torch import Tensor


class Drained:
    """The part of a schedule that works on a drained pipeline. While parked, the module's own parameters show the newest weights x."""

    def __init__(self) -> None:
        self._parked = False
        self._aside: dict[str, Tensor] = {}  # what parking moved out of the module's parameters
        self._resume()

    def _drain(self) -> None:
        """Parks: the module's own parameters get the newest weights."""
        if self._parked:
            return
        stage, newest = self.stage, self.stage.slot(self.newest)
        with torch.no_grad():
            for name, parameter in stage.master.items():
                if name not in self.parts.replicas.owned:
                    parameter.data = newest[name].detach().to(stage.dtypes[name], copy=True)
                elif name in self.master.extrapolated:  # the master is y here
                    self._aside[name] = parameter.detach().clone()
                    parameter.copy_(newest[name])
        self._parked = True

    def _resume(self) -> None:
        """The module's own parameters are the master again; of those that other replicas step, nothing is kept."""
        with torch.no_grad():
            for name, parameter in self.stage.master.items():
                if name not in self.parts.replicas.owned:
                    parameter.data = parameter.data.new_empty(0)
                elif name in self._aside:
                    parameter.copy_(self._aside.pop(name))
        self._parked = False
