"""Dropout that does not know about the pipeline: the same masks for any number of stages, with and without recompute.

Before a module runs, the generator is seeded from (seed, micro-batch, the module's global name, how often it ran in this micro-batch). Whoever runs
the module, in one process or on some stage, first or again, draws the same numbers.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


class ModuleRandomness:
    """Seeds every submodule of `module` on entry.

        randomness = ModuleRandomness(model, seed=0)
        with randomness.of(microbatch):                  # numbered through the whole run
            loss = loss_fn(model(inputs), targets)

    Outside the context nothing is seeded, and the global generators are left as they were. A module that is shared by several blocks, each of which
    recomputes itself, is counted wrongly in the recomputation: let the pipeline recompute (`recompute=True`) there.

    Args:
        module: a whole model or a stage.
        seed: of the run.
        name_of: local module name → global name, for stages whose submodules are named by their place in the stage.
    """

    def __init__(self, module: nn.Module, seed: int, name_of: Callable[[str], str] = lambda name: name):
        self.seed = seed
        self.microbatch: int | None = None
        self._calls: dict[str, int] = {}
        self._handles = []
        for name, submodule in module.named_modules():
            self._handles.append(submodule.register_forward_pre_hook(self._hook(name_of(name))))

    def _hook(self, name: str):
        def seed_generators(module, inputs) -> None:
            if self.microbatch is not None and module.training:
                call = self._calls[name] = self._calls.get(name, -1) + 1
                digest = hashlib.sha256(f"{self.seed}/{self.microbatch}/{name}/{call}".encode()).digest()
                seed = int.from_bytes(digest[:8], "little") >> 1
                torch.default_generator.manual_seed(seed)  # torch.manual_seed would format the call stack each time, for a device that is not there
                if torch.cuda.is_initialized():
                    torch.cuda.manual_seed(seed)

        return seed_generators

    @contextmanager
    def of(self, microbatch: int) -> Iterator[None]:
        """Inside, the masks are those of this micro-batch."""
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices=devices):
            outer = self.microbatch, self._calls
            self.microbatch, self._calls = microbatch, {}
            try:
                yield
            finally:
                self.microbatch, self._calls = outer

    def remove(self) -> None:
        """Takes the hooks off the module."""
        for handle in self._handles:
            handle.remove()
