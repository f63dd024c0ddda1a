"""The engine: one process per stage runs the order of `order.py` on real modules, without a flush.

    pipe = Schedule2BW(stage_module, loss_fn, optimizer, num_microbatches=8)     # in every process, stage = rank
    for inputs, targets in loader:
        loss = pipe.step(inputs, targets)
    pipe.flush()

Every update is made where it costs nothing: its reductions start at the last backward of its batch and are waited for where W(t+1) is first needed,
m − p + s + 1 micro-batch slots later. One thread does everything (pytorch #175145).
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from onelag.pipeline.assembly import Parts, assemble
from onelag.pipeline.channel import MessageSpec, put_together, take_apart
from onelag.pipeline.clipping import BatchReport, Tally, clip_factor, squared_norm
from onelag.pipeline.drained import Drained
from onelag.pipeline.errors import PipelineError
from onelag.pipeline.microbatches import loss_shares
from onelag.pipeline.order import Action, Depth, drain_actions, in_flight, stage_actions
from onelag.pipeline.replicas import PendingGradients
from onelag.pipeline.stage import Passage


class _Ending:
    """The update that ends a batch, under way."""

    def __init__(self, batch: int, gradients: PendingGradients, loss: Tensor | None, settings: list[dict[str, Any]]):
        self.batch, self.gradients, self.loss, self.settings = batch, gradients, loss, settings
        self.sums: dict[str, Tensor | None] | None = None


class PipelineSchedule(Drained):
    """What all schedules share; see `Schedule2BW`."""

    schedule: ClassVar[str]

    def __init__(
        self,
        stage_module: nn.Module,
        loss_fn: Callable[[Any, Any], Tensor],
        optimizer: torch.optim.Optimizer,
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
        self.stage, self.master = parts.stage, parts.master
        self._loss_fn, self._loss_weight, self._clip_norm, self._recompute = loss_fn, loss_weight, clip_norm, recompute
        self._inline, self._recorder = update == "inline", recorder
        # Under PipeDream the last stage needs its own newest weights at once: waiting there for every other stage's norm would be a flush.
        self._agrees = self.schedule != "pipedream" or clip_norm is not None
        self._lag = 1 + max(parts.delays)  # after step(n), every rank knows the batches up to n − lag
        self._forwards = self._backwards = self._steps = self.newest = 0
        self._actions: Iterator[Action] | None = None
        self._between: dict[int, Passage] = {}
        self._settings: dict[int, list[dict[str, Any]]] = {}
        self._loss: Tensor | None = None
        self._endings: deque[_Ending] = deque()
        self._tallies: deque[tuple[int, Tally]] = deque()
        self._heard: BatchReport | None = None  # the newest report that this rank knows
        self._hidden: deque[BatchReport] = deque()  # known here, perhaps not everywhere
        self._reports: deque[BatchReport] = deque()
        self.last_report: BatchReport | None = None
        self._inputs: list[Any] = []
        self._targets: list[Any] = []
        self._shares: list[float] = []
        self._stopping = False
        self._broken: str | None = None
        super().__init__()

    # -- a step ----------------------------------------------------------------------------------------------------------------------
    def step(self, inputs: Any = None, targets: Any = None) -> float:
        """Trains on one batch: runs until all its forwards are done. No flush, no waiting for its loss.

        Args:
            inputs: the batch for the first stage, (num_microbatches · rows, …): a tensor, a tuple (positional) or a dict (keyword arguments). Other stages
                ignore it. With replicas, this replica's part.
            targets: the same for `loss_fn` on the last stage.

        Returns:
            The loss of the newest batch that is known on every rank, the one before the last one; nan in the first steps. `reports()` tells all.

        Raises:
            ValueError: a batch that cannot be cut, or has another size than those before.
            PipelineError: a stage failed, or did not answer in time.
        """
        self._resume()
        batch = self._steps
        self._feed(inputs, targets)
        self._steps += 1
        self._settings[batch] = self.master.settings()
        if self._actions is None:
            place = (self.here.stage, self.here.num_stages, self.num_microbatches)
            self._actions = stage_actions(*place, None, self.schedule, self.depth, first_batch=batch)
        inbox = self.parts.inboxes.get("down_in")
        if inbox is not None and inbox.spec is not None:
            inbox.expect(self._forwards)
        while self._forwards < self._steps * self.num_microbatches:
            self._run(next(self._actions))
        self._inputs, self._targets, self._shares = [], [], []
        self._show(batch - self._lag)
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

        batches, missing = iter(loader), 0
        for number in range(updates):
            self._stopping |= bool(stop())
            try:
                inputs, targets = next(batches)
            except StopIteration:
                missing = updates - number
                break
            self.step(inputs, targets)
            collect()
            if self.last_report and self.last_report.stopping:
                break
        self.flush()
        collect()
        self._stopping = False
        if missing:
            raise ValueError(f"the loader ended after {updates - missing} of updates={updates} batches")
        return collected

    def reports(self) -> Iterator[BatchReport]:
        """The reports of the batches that became known since the last call, in order; each is given once. The same on all ranks after the same step."""
        while self._reports:
            yield self._reports.popleft()

    def flush(self) -> BatchReport | None:
        """Drains: every batch given so far is finished and updated. Costs one ramp and changes no value.

        Afterwards the stage module's own parameters hold the newest weights (until the next step).

        Returns:
            The last batch's report; None before the first step.
        """
        self._resume()
        rest = drain_actions(self._forwards, self._backwards, self.here.stage, self.here.num_stages, self.num_microbatches, self.schedule)
        for action in rest:
            self._run(action)
        self._guard("the last updates", lambda: self._reach(self._steps))
        self._actions = None
        for box in self.parts.outboxes.values():
            self._guard("the last messages", box.settle_all)
        self._show(self._steps - 1)
        self._drain()
        return self.last_report

    # -- the actions -----------------------------------------------------------------------------------------------------------------
    def _run(self, action: Action) -> None:
        kind, index, version = action
        batch = index if kind == "U" else index // self.num_microbatches
        what = {"F": "forward of micro-batch", "B": "backward of micro-batch", "U": "update of batch"}[kind]
        where = f"{what} {index}" + ("" if kind == "U" else f" (batch {batch}, weights W({version}))")
        work = {"F": self._forward, "B": self._backward, "U": self._end_batch}[kind]
        self._guard(where, lambda: work(index, version))

    def _guard(self, where: str, work: Callable[[], Any]) -> Any:
        if self._broken:
            raise PipelineError(f"this pipeline has failed and cannot go on: {self._broken}")
        try:
            return work()
        except PipelineError:
            raise
        except Exception as error:
            self._broken = f"{self.here}, {where}: {type(error).__name__}: {error}"
            raise PipelineError(self._broken) from error

    def _forward(self, k: int, version: int) -> None:
        self._reach(version)
        received: list[Tensor] = []
        if self.here.is_first:
            inputs = self._inputs[k % self.num_microbatches]
        else:
            inbox = self.parts.inboxes["down_in"]
            if inbox.spec is None:
                inbox.hear()
                self.parts.outboxes["up_out"].spec = inbox.spec.gradients
            with self._span("recv", k, version):
                arrived = inbox.take(k)
            if k + 1 < self._steps * self.num_microbatches:
                inbox.expect(k + 1)
            received = [tensor.requires_grad_(spec.needs_grad) for tensor, spec in zip(arrived, inbox.spec.tensors)]
            inputs = put_together(inbox.spec, received)
        with self._span("F", k, version), self.parts.clock.computing():
            finish = self._finish(k) if self.here.is_last else None
            # With one micro-batch in flight the backward follows at once, and keeping the activations costs nothing more.
            again = self._recompute and in_flight(self.here.stage, self.here.num_stages, self.depth) > 1
            output = self.stage.forward(version, k, inputs, finish, again)
            spec, tensors = take_apart(output)
        self._between[k] = Passage(version, received, [tensor for tensor in tensors if tensor.requires_grad])
        self._forwards += 1
        if self.here.is_last:
            loss = tensors[0].detach()
            self._loss = loss if self._loss is None else self._loss + loss
        else:
            outbox, gradients = self.parts.outboxes["down_out"], self.parts.inboxes["up_in"]
            with self._span("send", k, version):
                if outbox.spec is None:
                    outbox.announce(spec)
                    gradients.spec = spec.gradients
                outbox.post(k, spec, tensors)
            gradients.expect(self._backwards)

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
        if self._endings:
            self._count()
        gradients = None
        if not self.here.is_last:
            with self._span("recv", k, version):
                gradients = self.parts.inboxes["up_in"].take(k)
            self.parts.outboxes["down_out"].settle(k)  # its gradient is here, so it has arrived
            if k + 1 < self._forwards:
                self.parts.inboxes["up_in"].expect(k + 1)
        with self._span("B", k, version), self.parts.clock.computing():
            back = self.stage.backward(self._between.pop(k), gradients)
        self._backwards += 1
        if not self.here.is_first:
            outbox = self.parts.outboxes["up_out"]
            with self._span("send", k, version):
                outbox.post(k, MessageSpec.of_gradients(back), back)
            outbox.settle(k - in_flight(self.here.stage - 1, self.here.num_stages, self.depth))

    # -- the update ------------------------------------------------------------------------------------------------------------------
    def _end_batch(self, batch: int, version: int) -> None:
        """Starts the sums of the batch's gradients; W(version) follows when it is needed."""
        read = max(batch - self.parts.delays[self.here.stage], 0)
        gradients = self.parts.replicas.reduce(self.stage.take_gradients(read))
        loss, self._loss = self._loss, None
        self._endings.append(_Ending(batch, gradients, loss, self._settings.pop(batch)))
        if self._inline or not gradients.early:
            self._count()
        if self._inline:
            self._reach(version)

    def _count(self) -> None:
        """Waits for the sums over replicas and starts the sum over all ranks; between the two lie an action or more."""
        for ending in self._endings:
            if ending.sums is not None:
                continue
            with self._span("reduce", ending.batch, ending.batch + 1):
                ending.sums = self.parts.replicas.collect(ending.gradients)
            squares = squared_norm([g for g in ending.sums.values() if g is not None], self.parts.wire)
            tally = Tally(squares, ending.loss, self._stopping, *self.parts.clock.lap(), self.parts.groups.everyone)
            self._tallies.append((ending.batch, tally))

    def _reach(self, version: int) -> None:
        """Makes the weights up to W(version)."""
        while self.newest < version:
            self._count()
            ending = self._endings.popleft()
            report = self._learn(ending.batch) if self._agrees else None
            sums = {**ending.sums, **self.parts.replicas.collect(ending.gradients, late=True)}
            with self._span("U", ending.batch, ending.batch + 1):
                with self.parts.clock.computing():
                    if report is not None and report.skipped:
                        sums = dict.fromkeys(sums)
                    elif self._clip_norm is not None:
                        torch._foreach_mul_([g for g in sums.values() if g is not None], clip_factor(report.gradient_norm, self._clip_norm))
                    self.master.apply(ending.batch + 1, sums, ending.settings)
                self.parts.replicas.share(self.stage.slot(ending.batch + 1))
            self.newest = ending.batch + 1
            self.stage.note(self.newest)

    def _learn(self, batch: int) -> BatchReport:
        """The report of `batch`; waits for its sum over all ranks."""
        while self._heard is None or self._heard.batch < batch:
            number, tally = self._tallies.popleft()
            self._heard = tally.report(number, measured=self.parts.device.type == "cpu")
            self._hidden.append(self._heard)
        return self._heard

    def _show(self, batch: int) -> None:
        """Makes the reports up to `batch` visible: a stage may know more already, but what is seen is the same everywhere."""
        if batch >= 0:
            self._guard("the sum over all ranks", lambda: self._learn(batch))
        while self._hidden and self._hidden[0].batch <= batch:
            self.last_report = self._hidden.popleft()
            self._reports.append(self.last_report)

    # -- help --------------------------------------------------------------------------------------------------------------------------
    def _feed(self, inputs: Any, targets: Any) -> None:
        self._inputs = self.parts.cut_inputs(inputs) if self.here.is_first else []
        self._targets = self.parts.cut_targets(targets) if self.here.is_last else []
        if self.here.is_last and self._loss_weight is not None:
            self._shares = loss_shares(self._targets, self._loss_weight, self.parts.groups.replicas, self.parts.wire)

    def _span(self, kind: str, number: int, version: int):
        return nullcontext() if self._recorder is None else self._recorder.span(kind, number, version)


class Schedule2BW(PipelineSchedule):
    """PipeDream-2BW: every gradient one version late, two weight versions per stage, no bubble.

        pipe = Schedule2BW(stage_module, loss_fn, optimizer, num_microbatches=8)
        loss = pipe.step(inputs, targets)
        pipe.flush(); pipe.state_dict()

    Batch t runs on W(max(t − 1, 0)) on every stage, and its mean gradient makes W(t + 1) from W(t) (arXiv 2006.09503; order.py). With
    `ErrorFeedback(optimizer, form="lookahead")` the slots hold x and the master holds y.

    Args:
        stage_module: this process's stage, on the device where it is to run, not wrapped in DDP or FSDP. It is called with the tensor, tuple or dict that
            the stage before returned. Its own parameters become the master and belong to the pipeline between `step` and `flush`.
        loss_fn: (output, targets) → scalar, the mean over a micro-batch; used on the last stage.
        optimizer: any torch optimizer on `stage_module`'s own parameters, or a correction of `onelag.delay` around one.
        num_microbatches: m ≥ micro-batches in flight on the first stage − 1; with depth "paper", m ≥ num_stages − 1.
        depth: micro-batches in flight, see order.py; "eager" hides a slow link for more activations.
        group: a process group of all processes, whose order says who is which stage; None is the default one. One process needs none.
        num_stages: p, to be checked against the number of processes; None takes it from there.
        num_replicas: data-parallel copies of every stage; rank = stage · num_replicas + replica. Optimizer state and master are split over them by
            whole parameters (ZeRO-1).
        clip_norm: clips the global gradient norm over all stages, exactly, without a stall; None does not clip.
        compute_dtype: of the weight slots, e.g. torch.bfloat16 with an fp32 master; None is the parameters' own.
        loss_weight: targets → how much a micro-batch counts, e.g. its number of labels that are not ignored; None counts all alike.
        recompute: keep only the inputs of a stage between forward and backward.
        dropout_seed: the same dropout masks for any number of stages (see randomness.py); None leaves the generators alone.
        update: "slack" makes W(t+1) where it is first needed, "inline" at once, with every stage waiting for the slowest.
        tied: names of parameters that also live on other stages and stay equal; None asks `stage_module.tied_names`, if there is one.
        timeout: seconds to wait for another rank before this one fails.
        config: the user's own settings, nested; compared over the ranks at the start.
        recorder: a `trace.Recorder`.

    Raises:
        ValueError: num_microbatches too small for num_stages and depth, or processes ≠ num_stages · num_replicas, before any communication; or ranks with
            different settings, naming the first one that differs.
        TypeError: a module or an optimizer that cannot work here.
        PipelineError: a connection that does not come up within `timeout`.
    """

    schedule = "2bw"


class SchedulePipeDream(PipelineSchedule):
    """PipeDream with weight stashing: stage s is p − 1 − s updates late and keeps p − s versions. Arguments as `Schedule2BW`.

    With `clip_norm` every update waits for all stages, which is a flush: its last stage needs W(t+1) at once.
    """

    schedule = "pipedream"


class Schedule1F1B(PipelineSchedule):
    """One forward, one backward, a flush after every batch: no delay. The synchronous control on the same engine. Arguments as `Schedule2BW`."""

    schedule = "1f1b"


class ScheduleGPipe(PipelineSchedule):
    """All forwards, all backwards, a flush: no delay, m micro-batches in flight. Arguments as `Schedule2BW`."""

    schedule = "gpipe"
