"""The stage before and the stage after, as one stage sees them: who gets what, and when a receive is posted or a send forgotten."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from onelag.pipeline.assembly import Parts
from onelag.pipeline.channel import MessageSpec, put_together


class Neighbours:
    """Both edges of a stage, in both directions.

    Args:
        parts: of the pipeline.
        ahead: micro-batches in flight on the stage before: gradients older than that have arrived there.
        span: (kind, number, version) → context, for the trace.
    """

    def __init__(self, parts: Parts, ahead: int, span: Callable[[str, int, int], AbstractContextManager]):
        self._down_in, self._up_in = parts.inboxes.get("down_in"), parts.inboxes.get("up_in")
        self._down_out, self._up_out = parts.outboxes.get("down_out"), parts.outboxes.get("up_out")
        self._ahead, self._span = ahead, span

    def expect_inputs(self, k: int) -> None:
        """Micro-batch k will come: its receive may be posted."""
        if self._down_in is not None and self._down_in.spec is not None:
            self._down_in.expect(k)

    def inputs(self, k: int, version: int, more: bool) -> tuple[Any, list[Tensor]]:
        """What the module is called with for micro-batch k, and the tensors in it; `more`: another will come."""
        if self._down_in.spec is None:
            self._up_out.spec = self._down_in.hear().gradients
        with self._span("recv", k, version):
            arrived = self._down_in.take(k)
        if more:
            self._down_in.expect(k + 1)
        received = [tensor.requires_grad_(spec.needs_grad) for tensor, spec in zip(arrived, self._down_in.spec.tensors)]
        return put_together(self._down_in.spec, received), received

    def send_outputs(self, k: int, version: int, spec: MessageSpec, tensors: list[Tensor], next_backward: int) -> None:
        """Micro-batch k goes on; the gradient of `next_backward` will be needed."""
        with self._span("send", k, version):
            if self._down_out.spec is None:
                self._down_out.announce(spec)
                self._up_in.spec = spec.gradients
            self._down_out.post(k, spec, tensors)
        self._up_in.expect(next_backward)

    def gradients(self, k: int, version: int, more: bool) -> list[Tensor]:
        """The gradients of micro-batch k's outputs; `more`: another one is on its way."""
        with self._span("recv", k, version):
            gradients = self._up_in.take(k)
        self._down_out.settle(k)  # its gradient is here, so it has arrived
        if more:
            self._up_in.expect(k + 1)
        return gradients

    def send_gradients(self, k: int, version: int, gradients: list[Tensor]) -> None:
        """The gradients of micro-batch k's inputs go back."""
        with self._span("send", k, version):
            self._up_out.post(k, MessageSpec.of_gradients(gradients), gradients)
        self._up_out.settle(k - self._ahead)

    def settle(self) -> None:
        """Waits until everything has left."""
        for box in (self._down_out, self._up_out):
            if box is not None:
                box.settle_all()
