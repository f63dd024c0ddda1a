"""Whose are the module's own parameters? While the pipeline runs: the master's. While it is drained: the user's, and they show the newest weights x."""

import torch
from torch import Tensor, nn

from onelag.pipeline.replicas import Replicas
from onelag.pipeline.stage import VersionedStage
from onelag.pipeline.update import MasterUpdate


class Parking:
    """Moves between the two. Of parameters that another replica steps there is no master here: in between they have no memory."""

    def __init__(self, stage: VersionedStage, master: MasterUpdate, replicas: Replicas):
        self._stage, self._master, self._replicas = stage, master, replicas
        self._swapped: list[tuple[nn.Parameter, nn.Parameter]] = []  # x is in the parameter and y in its slot: no memory of its own
        self._aside: dict[str, Tensor] = {}  # y, where the slots have another dtype
        self.parked = True
        self.resume()

    @torch.no_grad()
    def park(self, newest: int) -> None:
        """Shows W(newest). In fp32 bit by bit; with a smaller compute dtype the owner's fp32 values, rounded ones where x ≠ y or another replica is owner."""
        if self.parked:
            return
        slot = self._stage.slot(newest)
        for name, parameter in self._stage.master.items():
            if name not in self._replicas.owned:
                parameter.data = slot[name].detach().to(self._stage.dtypes[name], copy=True)
            elif name in self._master.extrapolated and slot[name].dtype == parameter.dtype:
                _swap(parameter, slot[name])
                self._swapped.append((parameter, slot[name]))
            elif name in self._master.extrapolated:
                self._aside[name] = parameter.detach().clone()
                parameter.copy_(slot[name])
        self.parked = True

    @torch.no_grad()
    def resume(self) -> None:
        """The parameters are the master again."""
        if not self.parked:
            return
        for name, parameter in self._stage.master.items():
            if name not in self._replicas.owned:
                parameter.data = parameter.data.new_empty(0)
            elif name in self._aside:
                parameter.copy_(self._aside.pop(name))
        for pair in self._swapped:
            _swap(*pair)
        self._swapped.clear()
        self.parked = False


def _swap(left: nn.Parameter, right: nn.Parameter) -> None:
    """Exchanges memory. The pipeline is drained: no graph needs either."""
    left.data, right.data = right.data, left.data
