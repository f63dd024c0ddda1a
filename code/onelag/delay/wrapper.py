"""What every wrapper of this package shares: it *is* a torch.optim.Optimizer to the outside and owns a few tensors per parameter."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class OptimizerWrapper(torch.optim.Optimizer):
    """An optimizer around another optimizer.

    `param_groups`, `state` and `defaults` are the inner optimizer's own objects, so learning-rate schedulers, gradient scalers, hooks and
    `zero_grad` work on the wrapper as on the bare optimizer. `state_dict()` is the inner one's, plus this wrapper's tensors beside the inner
    ones of the same parameter (keys `<label>.<name>`) and its settings (key `<label>`): tools that expect `state` and `param_groups` see both.

    Subclasses set `label` and implement `_tensors`, `_restore`, `_settings` and `step`.

    Raises:
        TypeError: what is wrapped is no torch.optim.Optimizer.
        ValueError: a parameter group is added after construction, or the loaded state belongs to another set of wrappers.
        RuntimeError: a closure is passed to `step`, or `step` and `state_dict` are called inside `latest_weights()` or `base_weights()`.
    """

    label: str

    def __init__(self, optimizer: torch.optim.Optimizer):
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"{type(self).__name__} wraps a torch.optim.Optimizer, but got {type(optimizer).__name__}")
        self.optimizer = optimizer
        self._borrowed = None  # the name of the context that has other weights in the parameters right now
        super().__init__(optimizer.param_groups, optimizer.defaults)

    # The three attributes below belong to the inner optimizer, which replaces them in load_state_dict: hence properties, not copies.
    # torch's constructor assigns them; those assignments would detach the wrapper, so they are accepted and ignored.
    param_groups = property(lambda self: self.optimizer.param_groups, lambda self, value: None)
    state = property(lambda self: self.optimizer.state, lambda self, value: None)
    defaults = property(lambda self: self.optimizer.defaults, lambda self, value: None)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if not any(param_group is group for group in self.param_groups):
            raise ValueError(
                f"{type(self).__name__} keeps weights per parameter from the start, so parameters cannot be added later: "
                "build the inner optimizer with all its parameter groups, then wrap it"
            )

    def parameters(self) -> Iterator[Tensor]:
        """All parameters, in the order of the groups (the order of `state_dict`'s indices)."""
        for group in self.param_groups:
            yield from group["params"]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def step_beside(self, newest: Mapping[Tensor, Tensor]) -> None:
        """`step()` for a caller that keeps the newest weights: `newest[p]` holds them and is left alone, p's own values are dead."""
        for parameter, weights in newest.items():
            parameter.copy_(weights)
        self.step()

    # -- what a subclass owns --------------------------------------------------------------------------------------------------------
    def _tensors(self, parameter: Tensor) -> Mapping[str, Tensor]:
        """This wrapper's tensors for one parameter, by name; empty when it has none yet."""
        raise NotImplementedError

    def _restore(self, parameter: Tensor, tensors: Mapping[str, Tensor]) -> None:
        """Takes back what `_tensors` gave: fresh copies in the parameter's dtype and on its device."""
        raise NotImplementedError

    def _settings(self) -> dict[str, Any]:
        """What must agree between the run that saved and the run that loads."""
        raise NotImplementedError

    @property
    def corrects(self) -> bool:
        """Whether y differs from x: a correction that extrapolates is somewhere inside."""
        return isinstance(self.optimizer, OptimizerWrapper) and self.optimizer.corrects

    # -- contexts --------------------------------------------------------------------------------------------------------------------
    @contextmanager
    def latest_weights(self) -> Iterator[None]:
        """The parameters hold the newest weight version inside this context, and what they held before after it."""
        with self.optimizer.latest_weights() if isinstance(self.optimizer, OptimizerWrapper) else _nothing():
            yield

    @contextmanager
    def base_weights(self) -> Iterator[None]:
        """The parameters hold y, the newest version without extrapolation (where the theory evaluates); without a correction y is x."""
        with self.optimizer.base_weights() if isinstance(self.optimizer, OptimizerWrapper) else _nothing():
            yield

    @contextmanager
    def _holding(self, context: str, weights: Mapping[Tensor, Tensor]) -> Iterator[None]:
        """Puts `weights` into the parameters by exchange and takes them out again, also after an exception."""
        self._refuse_inside(context)
        self._borrowed = context
        stored = {parameter: exchange(parameter, values) for parameter, values in weights.items()}
        try:
            yield
        finally:
            for parameter, values in stored.items():
                exchange(parameter, values)
            self._borrowed = None

    def _refuse_inside(self, action: str) -> None:
        if self._borrowed:
            raise RuntimeError(f"{type(self).__name__}: {action} inside {self._borrowed}(): leave the context first")

    def _begin_step(self, closure) -> None:
        if closure is not None:
            raise RuntimeError(
                f"{type(self).__name__}.step() takes no closure: a closure evaluates the loss at weights that the delay decides. "
                "Call loss.backward() first, then step()"
            )
        self._refuse_inside("step")

    # -- saving and loading ----------------------------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state and this wrapper's, by reference, as torch does."""
        self._refuse_inside("state_dict")
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        inner = self.optimizer.state_dict()
        state = {index: dict(entry) for index, entry in inner["state"].items()}
        for index, parameter in enumerate(self.parameters()):
            for name, tensor in self._tensors(parameter).items():
                state.setdefault(index, {})[f"{self.label}.{name}"] = tensor
        result = {**inner, "state": state, self.label: self._settings()}
        for hook in self._optimizer_state_dict_post_hooks.values():
            changed = hook(self, result)
            result = result if changed is None else changed
        return result

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` gave; dtype and device follow the parameters of this optimizer.

        Raises:
            ValueError: the state was saved without this wrapper, or with other settings (the message names the setting).
        """
        self._refuse_inside("load_state_dict")
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        if self.label not in state_dict:
            raise ValueError(f"this optimizer state was saved without {type(self).__name__}: load it into the optimizer that saved it")
        saved, wanted = state_dict[self.label], self._settings()
        for key, value in wanted.items():
            if saved.get(key) != value:
                raise ValueError(f"{type(self).__name__}: the saved state has {key}={saved.get(key)!r}, this optimizer has {key}={value!r}")
        mark = self.label + "."
        inner_state, own = {}, {}
        for index, entry in state_dict["state"].items():
            rest = {key: value for key, value in entry.items() if not str(key).startswith(mark)}
            own[index] = {key[len(mark) :]: value for key, value in entry.items() if str(key).startswith(mark)}
            if rest:  # an empty entry would make a lazily initialised optimizer believe that it has state
                inner_state[index] = rest
        outer = {key: value for key, value in state_dict.items() if key != self.label}
        self.optimizer.load_state_dict({**outer, "state": inner_state})
        for index, parameter in enumerate(self.parameters()):
            self._restore(parameter, {name: tensor.detach().clone().to(parameter) for name, tensor in own.get(index, {}).items()})
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._patch_step_function()


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@torch.no_grad()
def exchange(parameter: Tensor, buffer: Tensor) -> Tensor:
    """Exchanges the values of a parameter and of a buffer of the same shape; returns the tensor that now holds the parameter's old values.

    Costs nothing where the parameter owns its memory (the two trade storages). A parameter that is a view of something larger, a flattened
    bucket for example, keeps its memory, and the values are copied. A live autograd graph that still needs the old values raises either way.
    """
    if parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size():
        old = parameter.data
        parameter.data = buffer
        torch.autograd.graph.increment_version(parameter)
        return old
    old = parameter.clone()
    parameter.copy_(buffer)
    buffer.copy_(old)
    return buffer
