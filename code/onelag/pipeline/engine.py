"""The engine: one process per stage runs the order of `order.py` on real modules. One thread does everything (pytorch #175145)."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from onelag.pipeline.assembly import Parts, assemble
from onelag.pipeline.channel import take_apart
from onelag.pipeline.clipping import BatchReport
from onelag.pipeline.errors import PipelineError
from onelag.pipeline.evaluation import base_weights, corrects, mean_loss
from onelag.pipeline.microbatches import loss_shares
from onelag.pipeline.neighbours import Neighbours
from onelag.pipeline.order import Action, Depth, drain_actions, in_flight, stage_actions
from onelag.pipeline.parking import Parking
from onelag.pipeline.stage import Passage
from onelag.pipeline.state import give, take
from onelag.pipeline.updates import Updates


class PipelineSchedule:
    """What all schedules share; see `schedules.Schedule2BW` for its arguments."""

    schedule: ClassVar[str]

    def __init__(
        self,
        stage_module: nn.Module,
        loss_fn: Callable[[Any, Any], Tensor],
        optimizer: torch.optim.Optimizer | None,
        num_microbatches: int = 8,
        depth: Depth = "paper",
        group: torch.distributed.ProcessGroup | None = None,
        *,
        num_stages: int | None = None,
        num_replicas: int = 1,
        clip_norm: float | None = None,
        compute_dtype: torch.dtype | None = None,
        loss_weight: Callable[[Any], Any] | None = None,
        recompute: bool = False,
        dropout_seed: int | None = None,
        update: Literal["slack", "inline"] = "slack",
        tied: Iterable[str] | None = None,
        timeout: float = 600.0,
        config: Mapping[str, Any] | None = None,
        recorder: Any = None,
    ):
        parts: Parts = assemble(
            stage_module, optimizer, self.schedule, num_microbatches, depth, group, num_stages, num_replicas, clip_norm, compute_dtype,
            recompute, dropout_seed, update, tied, timeout, config,
        )  # fmt: skip
        self.parts, self.here, self.num_microbatches, self.depth = parts, parts.here, num_microbatches, depth
        self._loss_fn, self._loss_weight, self._recorder = loss_fn, loss_weight, recorder
        flight = [num_microbatches if self.schedule == "gpipe" else in_flight(s, self.here.num_stages, depth) for s in range(self.here.num_stages)]
        # With one micro-batch in flight the backward follows at once: keeping its activations costs nothing more.
        self._recompute = recompute and flight[self.here.stage] > 1
        self._neighbours = Neighbours(parts, flight[max(self.here.stage - 1, 0)], self._span)
        self._inline = update == "inline"
        # Under PipeDream the last stage needs its own newest weights at once: waiting there for every other stage's norm would be a flush.
        self._updates = Updates(parts, clip_norm, self.schedule != "pipedream" or clip_norm is not None, self._span)
        self._parking = Parking(parts.stage, parts.master, parts.replicas)
        self._lag = 1 + max(parts.delays)  # after step(n), every rank knows the batches up to n − lag
        self._forwards = self._backwards = self._steps = 0
        self._actions: Iterator[Action] | None = None
        self._between: dict[int, Passage] = {}
        self._settings: dict[int, list[dict[str, Any]]] = {}
        self._loss: Tensor | None = None
        self._inputs: list[Any] = []
        self._targets: list[Any] = []
        self._shares: list[float] = []
        self._broken: str | None = None

    # -- a step ----------------------------------------------------------------------------------------------------------------------
    def step(self, inputs: Any = None, targets: Any = None) -> float:
        """Trains on one batch: runs until all its forwards are done. No flush, no waiting for its loss.

        Args:
            inputs: the batch for the first stage, (num_microbatches · rows, …): a tensor, a tuple (positional) or a dict (keyword arguments). Other stages
                ignore it. With replicas, this replica's part.
            targets: the same for `loss_fn` on the last stage.

        Returns:
            The loss of the newest batch that is known on every rank, two batches behind this one; nan in the first steps. `reports()` tells all.

        Raises:
            ValueError: a batch that cannot be cut, or has another size than those before.
            PipelineError: a stage failed, or did not answer in time.
        """
        self._begin()
        batch = self._steps
        self._feed(inputs, targets)
        self._steps += 1
        self._settings[batch] = self.parts.master.settings()
        if self._actions is None:
            place = (self.here.stage, self.here.num_stages, self.num_microbatches)
            self._actions = stage_actions(*place, None, self.schedule, self.depth, first_batch=batch)
        self._neighbours.expect_inputs(self._forwards)
        while self._forwards < self._steps * self.num_microbatches:
            self._run(next(self._actions))
        self._inputs, self._targets, self._shares = [], [], []
        self._guard("the sum over all ranks", lambda: self._updates.show(batch - self._lag))
        return self.last_report.loss if self.last_report else float("nan")

    def run(
        self, loader: Iterable[tuple[Any, Any]], updates: int, stop: Callable[[], bool] = lambda: False, on_report: Callable[[BatchReport], Any] | None = None
    ) -> list[BatchReport]:
        """`updates` steps and a flush.

        Args:
            loader: yields (inputs, targets) on every rank.
            updates: how many batches to train on.
            stop: asked before every step, e.g. for SIGTERM; once it says True on any rank, all ranks stop together a few batches later and drain.
            on_report: called with every batch's report, in order.

        Returns:
            The reports of all batches that were trained on; fewer than `updates` only after a stop.

        Raises:
            ValueError: the loader ends before `updates` batches (the pipeline is drained first).
        """
        collected: list[BatchReport] = []

        def collect() -> None:
            for report in self.reports():
                collected.append(report)
                if on_report:
                    on_report(report)

        batches, missing, first = iter(loader), 0, self._steps
        for number in range(updates):
            self._updates.stopping |= bool(stop())
            try:
                inputs, targets = next(batches)
            except StopIteration:
                missing = updates - number
                break
            self.step(inputs, targets)
            collect()
            if self.last_report and self.last_report.stopping and self.last_report.batch >= first:
                break
        self.flush()
        collect()
        self._updates.stopping = False
        if missing:
            raise ValueError(f"the loader ended after {updates - missing} of updates={updates} batches")
        return collected

    def reports(self) -> Iterator[BatchReport]:
        """The reports of the batches that became known since the last call, in order; each is given once. The same on all ranks after the same step."""
        while self._updates.visible:
            yield self._updates.visible.popleft()

    def flush(self) -> BatchReport | None:
        """Drains: every batch given so far is finished and updated. Costs one ramp and changes no value.

        Afterwards the stage module's own parameters hold the newest weights (until the next step).

        Returns:
            The last batch's report; None before the first step.
        """
        self._begin()
        rest = drain_actions(self._forwards, self._backwards, self.here.stage, self.here.num_stages, self.num_microbatches, self.schedule)
        for action in rest:
            self._run(action)
        self._guard("the last updates", lambda: self._updates.reach(self._steps))
        self._actions = None
        self._guard("the last messages", self._neighbours.settle)
        self._guard("the last sum over all ranks", lambda: self._updates.show(self._steps - 1))
        self._parking.park(self._updates.newest)
        return self.last_report

    @property
    def last_report(self) -> BatchReport | None:
        """The newest report that every rank knows."""
        return self._updates.last_report

    @property
    def batches(self) -> int:
        """Batches trained on, including those that are still on their way."""
        return self._steps

    # -- between two steps -------------------------------------------------------------------------------------------------------------
    def evaluate(self, batches: Iterable[tuple[Any, Any]], loss_fn: Callable[[Any, Any], Tensor] | None = None, base: bool = False) -> float:
        """Drains, then runs forward only: the mean loss over `batches` and replicas, the same on every rank. Training goes on as if it had not been.

        Args:
            batches: (inputs, targets) of one shape, not cut into micro-batches; equally many on every rank.
            loss_fn: None is the one of training.
            base: at y (where the theory says to evaluate) instead of the newest weights x; without a correction they are the same.
        """
        with self.at_rest() as parts:
            weights = base_weights(parts) if base else parts.stage.slot(self._updates.newest)
            return self._guard("evaluation", lambda: mean_loss(parts, weights, batches, loss_fn or self._loss_fn))

    @contextmanager
    def at_rest(self) -> Iterator[Parts]:
        """Drains; inside, the module's own parameters are the master and the slots hold what their versions say. Afterwards it is as after `flush`."""
        self.flush()
        self._parking.resume()
        try:
            yield self.parts
        finally:
            self._parking.park(self._updates.newest)

    @property
    def corrects(self) -> bool:
        """Whether there is a correction, so that y and x differ."""
        return corrects(self.parts)

    def state_dict(self) -> dict[str, Any]:
        """Drains; what this rank must keep to go on bitwise: all live weight versions, master, optimizer, correction, counters (state.py).

        Parameters are under their global names, each on the rank that steps it; `checkpoint.py` writes it for any number of stages.
        """
        with self.at_rest() as parts:
            return copy.deepcopy(take(parts, self._steps))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state_dict()` was taken. Every rank calls it; `state` holds at least the parameters that this rank steps.

        Raises:
            StateError: of another model, schedule or correction.
        """
        if self._forwards != self._backwards:
            raise RuntimeError("load_state_dict on a pipeline that runs: call flush() first")
        self._begin()
        self._steps = give(self.parts, state)
        self._forwards = self._backwards = self._steps * self.num_microbatches
        self._actions = None
        self._settings.clear()
        self._updates.restart(self._steps)
        self._parking.park(self._updates.newest)

    # -- the actions -----------------------------------------------------------------------------------------------------------------
    def _run(self, action: Action) -> None:
        kind, index, version = action
        batch = index if kind == "U" else index // self.num_microbatches
        what = {"F": "forward of micro-batch", "B": "backward of micro-batch", "U": "update of batch"}[kind]
        where = f"{what} {index}" + ("" if kind == "U" else f" (batch {batch}, weights W({version}))")
        work = {"F": self._forward, "B": self._backward, "U": self._end_batch}[kind]
        self._guard(where, lambda: work(index, version))

    def _guard(self, where: str, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except PipelineError:
            raise
        except Exception as error:
            self._broken = f"{self.here}, {where}: {type(error).__name__}: {error}"
            raise PipelineError(self._broken) from error

    def _forward(self, k: int, version: int) -> None:
        self._updates.reach(version)
        if self.here.is_first:
            inputs, received = self._inputs[k % self.num_microbatches], []
        else:
            inputs, received = self._neighbours.inputs(k, version, more=k + 1 < self._steps * self.num_microbatches)
        with self._span("F", k, version), self.parts.clock.computing():
            finish = self._finish(k) if self.here.is_last else None
            output = self.parts.stage.forward(version, k, inputs, finish, self._recompute)
            spec, tensors = take_apart(output)
        self._between[k] = Passage(version, received, [tensor for tensor in tensors if tensor.requires_grad])
        self._forwards += 1
        if self.here.is_last:
            loss = tensors[0].detach()
            self._loss = loss if self._loss is None else self._loss + loss
        else:
            self._neighbours.send_outputs(k, version, spec, tensors, next_backward=self._backwards)

    def _finish(self, k: int) -> Callable[[Any], Tensor]:
        target = self._targets[k % self.num_microbatches]
        share = self._shares[k % self.num_microbatches] if self._shares else None

        def scaled_loss(output: Any) -> Tensor:
            loss = self._loss_fn(output, target)
            if not isinstance(loss, Tensor) or loss.ndim:
                raise ValueError(f"loss_fn must return a scalar tensor, but returned {getattr(loss, 'shape', type(loss).__name__)}")
            return loss / (self.num_microbatches * self.here.num_replicas) if share is None else loss * share

        return scaled_loss

    def _backward(self, k: int, version: int) -> None:
        self._updates.count()
        gradients = None if self.here.is_last else self._neighbours.gradients(k, version, more=k + 1 < self._forwards)
        with self._span("B", k, version), self.parts.clock.computing():
            back = self.parts.stage.backward(k, self._between.pop(k), gradients)
        self._backwards += 1
        if not self.here.is_first:
            self._neighbours.send_gradients(k, version, back)

    def _end_batch(self, batch: int, version: int) -> None:
        loss, self._loss = self._loss, None
        self._updates.start(batch, loss, self._settings.pop(batch))
        if self._inline:
            self._updates.reach(version)

    # -- help --------------------------------------------------------------------------------------------------------------------------
    def _begin(self) -> None:
        if self._broken:
            raise PipelineError(f"this pipeline has failed and cannot go on: {self._broken}")
        self._parking.resume()

    def _feed(self, inputs: Any, targets: Any) -> None:
        self._inputs = self.parts.cut_inputs(inputs) if self.here.is_first else []
        self._targets = self.parts.cut_targets(targets) if self.here.is_last else []
        if self.here.is_last and self._loss_weight is not None:
            self._shares = loss_shares(self._targets, self._loss_weight, self.parts.groups.replicas, self.parts.wire)

    def _span(self, kind: str, number: int, version: int):
        return nullcontext() if self._recorder is None else self._recorder.span(kind, number, version)
