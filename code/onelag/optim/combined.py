"""Several optimizers behind the face of one: Muon for the matrices and AdamW for the rest, for example."""

from collections.abc import Callable, Sequence
from typing import Any

import torch


class CombinedOptimizer(torch.optim.Optimizer):
    """Steps its parts in order. `param_groups` are all groups of all parts (the same dicts), so schedulers and wrappers see one optimizer.

    Each parameter belongs to one part. `state_dict` numbers the parameters in the order of the groups, as torch does.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]):
        self.parts = list(parts)
        self._building = True
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self._building = False

    # Read from the parts each time: they replace their lists when a state is loaded. torch's constructor assigns; nothing is to be kept.
    param_groups = property(lambda self: [group for part in self.parts for group in part.param_groups], lambda self, value: None)

    @property
    def state(self) -> dict:
        return {parameter: entry for part in self.parts for parameter, entry in part.state.items()}

    @state.setter
    def state(self, value) -> None:
        pass

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if not self._building:
            raise ValueError("parameters cannot be added to a combined optimizer: build it again with build_optimizer")

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable | None = None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        state, groups, offset = {}, [], 0
        for part in self.parts:
            saved = part.state_dict()
            state.update({index + offset: entry for index, entry in saved["state"].items()})
            groups += [{**group, "params": [index + offset for index in group["params"]]} for group in saved["param_groups"]]
            offset += sum(len(group["params"]) for group in saved["param_groups"])
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if len(state_dict["param_groups"]) != len(self.param_groups):
            raise ValueError(
                f"the saved state has {len(state_dict['param_groups'])} parameter groups, this optimizer has {len(self.param_groups)}: "
                "it was saved with another optimizer or model"
            )
        first_group, offset = 0, 0
        for part in self.parts:
            groups = state_dict["param_groups"][first_group : first_group + len(part.param_groups)]
            count = sum(len(group["params"]) for group in groups)
            part.load_state_dict(
                {
                    "state": {index - offset: s for index, s in state_dict["state"].items() if offset <= index < offset + count},
                    "param_groups": [{**group, "params": [index - offset for index in group["params"]]} for group in groups],
                }
            )
            first_group, offset = first_group + len(part.param_groups), offset + count

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._patch_step_function()
