"""One stage with its weight versions: forward and backward of a micro-batch on a given version, gradients, and where a new version goes.

The module's own parameters are the fp32 master that the optimizer works on. Forward and backward never see them: they run on slots, one per live
version (two for PipeDream-2BW), put in place with `torch.func.functional_call`. Writing a version bumps autograd's counter, so a graph that
still needs the old values raises instead of computing with the wrong ones. Never `.data`: that would hide exactly this.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from onelag.pipeline.randomness import ModuleRandomness


def call(module: nn.Module, value: Any) -> Any:
    """module(value); a tuple or list gives positional arguments, a dict keyword arguments."""
    if isinstance(value, (tuple, list)):
        return module(*value)
    return module(**value) if isinstance(value, dict) else module(value)


class _Inside(nn.Module):
    """Runs a function while the stage's parameters are replaced: what functional_call does for a forward, for the backward too.

    A module that recomputes activations reads its parameters again during the backward; without this it would read the newest ones (field fault:
    input gradients from one version, weight gradients from another, no error).
    """

    def __init__(self, stage: nn.Module):
        super().__init__()
        self.stage = stage

    def forward(self, function: Callable[[], Any]) -> Any:
        return function()


@dataclass
class Passage:
    """A micro-batch between its forward and its backward."""

    version: int
    received: list[Tensor]
    """the tensors from the stage before, in the order of the message; those that need a gradient are leaves"""
    outputs: list[Tensor]
    """the outputs that a gradient comes back for, or the loss"""


class VersionedStage:
    """A stage module with `num_versions` weight slots; version v lives in slot v mod num_versions.

    Args:
        module: the stage; on the device where it is to run. It is not changed, but from now on its parameters are the master.
        num_versions: live versions, the delay + 1.
        dtype: of the slots and so of the computation; None is the parameters' own. Gradients are summed in the master's dtype.
        randomness: seeds dropout by micro-batch; None leaves the generators alone.
    """

    def __init__(self, module: nn.Module, num_versions: int, dtype: torch.dtype | None = None, randomness: ModuleRandomness | None = None):
        self.module, self.randomness = module, randomness
        self.master: dict[str, nn.Parameter] = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self.dtypes = {n: p.dtype for n, p in self.master.items()}
        self._dtype = dtype
        fixed = {n: p.detach().to(self.dtype_of(p)) for n, p in module.named_parameters() if not p.requires_grad}
        self.slots: list[dict[str, nn.Parameter]] = [
            {n: nn.Parameter(p.detach().to(self.dtype_of(p), copy=True)) for n, p in self.master.items()} for _ in range(num_versions)
        ]
        self.held: list[int | None] = [0] + [None] * (num_versions - 1)
        self._inside = _Inside(module)
        self._bindings = [{f"stage.{n}": p for n, p in {**fixed, **slot}.items()} for slot in self.slots]
        self._sums: dict[str, Tensor] = {}
        for slot in self.slots:
            for name, parameter in slot.items():
                if parameter.dtype != self.dtypes[name]:
                    parameter.register_post_accumulate_grad_hook(self._summing(name))

    def dtype_of(self, parameter: Tensor) -> torch.dtype:
        return self._dtype if self._dtype is not None and parameter.is_floating_point() else parameter.dtype

    def _summing(self, name: str):
        """bf16 gradients of the micro-batches are added up in fp32."""

        def add(parameter: Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            if name in self._sums:
                self._sums[name].add_(gradient)
            else:
                self._sums[name] = gradient.to(self.dtypes[name])

        return add

    # -- versions --------------------------------------------------------------------------------------------------------------------
    def slot(self, version: int) -> dict[str, nn.Parameter]:
        """Where `version` lives or is to be written."""
        return self.slots[version % len(self.slots)]

    def note(self, version: int) -> None:
        """The slot of `version` has been filled with it."""
        self.held[version % len(self.slots)] = version

    def run_on(self, version: int, function: Callable[[], Any]) -> Any:
        """Calls `function` with the module's parameters replaced by those of `version`."""
        if self.held[version % len(self.slots)] != version:
            raise RuntimeError(f"weights W({version}) are not here: the slots hold {self.held}")
        return functional_call(self._inside, self._bindings[version % len(self.slots)], (function,))

    def run_with(self, weights: Mapping[str, Tensor], function: Callable[[], Any]) -> Any:
        """Calls `function` with the module's trainable parameters replaced by `weights`."""
        return functional_call(self._inside, {**self._bindings[0], **{f"stage.{name}": value for name, value in weights.items()}}, (function,))

    # -- a micro-batch -----------------------------------------------------------------------------------------------------------------
    def forward(
        self, version: int, microbatch: int, inputs: Any, finish: Callable[[Any], Tensor] | None = None, recompute: bool = False
    ) -> Any:
        """The stage's output for micro-batch `microbatch` on W(version).

        Args:
            inputs: what the module is called with.
            finish: applied to the output; on the last stage, output → loss.
            recompute: keep no activations, run again in the backward (which must then be `backward`, on the same version).
        """

        def compute() -> Any:
            with self.randomness.of(microbatch) if self.randomness else nullcontext():
                output = call(self.module, inputs)
                return output if finish is None else finish(output)

        return self.run_on(version, (lambda: checkpoint(compute, use_reentrant=False)) if recompute else compute)

    def backward(self, microbatch: int, passage: Passage, gradients: list[Tensor] | None) -> list[Tensor]:
        """Backward on the version of the forward; returns the gradients for the stage before, zeros where the input was not used."""
        if passage.outputs:
            # Seeded as the forward was: a block that recomputes itself draws its masks again.
            with self.randomness.of(microbatch) if self.randomness else nullcontext():
                self.run_on(passage.version, lambda: torch.autograd.backward(passage.outputs, gradients))
        back = []
        for tensor in passage.received:
            if tensor.requires_grad:
                back.append(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)
                tensor.grad = None
        return back

    def take_gradients(self, version: int) -> dict[str, Tensor | None]:
        """The summed gradients of a finished batch that ran on `version`, by name, and forgets them; None where none came."""
        taken: dict[str, Tensor | None] = {}
        for name, parameter in self.slot(version).items():
            if parameter.dtype == self.dtypes[name]:
                taken[name], parameter.grad = parameter.grad, None
            else:
                taken[name] = self._sums.pop(name, None)
        return taken
