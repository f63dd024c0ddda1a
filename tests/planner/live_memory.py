"""Bytes of all tensors that are alive, by watching every operation; what the planner's memory model is held against."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveMemory(TorchDispatchMode):
    """Inside, `live` is the sum over storages that were made inside and still exist, `peak` its largest value since it was last set."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        for value in tree_iter(result):
            if isinstance(value, torch.Tensor) and value.device.type == "cpu":
                self._see(value.untyped_storage())
        return result

    def _see(self, storage) -> None:
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.live -= self._sizes.pop(key)
