"""The updates under way: reductions started at the last backward of a batch, waited for where their weights are needed.

    end of batch t on a stage        sums over replicas (and over stages, for tied parameters) start
    an action or more later          they are here; the sum over all ranks starts: squared norm, loss, wish to stop, seconds
    first forward that needs W(t+1)  that is here too; clip, step, share with the replicas, write the slot
"""

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from onelag.pipeline.assembly import Parts
from onelag.pipeline.clipping import BatchReport, Tally, clip_factor, scale_, squared_norm
from onelag.pipeline.replicas import PendingGradients


class _Ending:
    """A batch whose backwards are done on this stage and whose update is not."""

    def __init__(self, batch: int, gradients: PendingGradients, loss: Tensor | None, settings: list[dict[str, Any]]):
        self.batch, self.gradients, self.loss, self.settings = batch, gradients, loss, settings
        self.sums: dict[str, Tensor | None] | None = None


class Updates:
    """One stage's updates, in order.

    Args:
        parts: of the pipeline.
        clip_norm: see `schedules.Schedule2BW`.
        agrees: wait for the sum over all ranks before an update, to clip it, or to skip it everywhere if it is not finite anywhere.
        span: (kind, number, version) → context, for the trace.

    Attributes:
        newest: W(newest) is the newest version that is made.
        stopping: this rank wishes to stop.
        last_report: the newest report that is visible.
    """

    def __init__(self, parts: Parts, clip_norm: float | None, agrees: bool, span: Callable[[str, int, int], AbstractContextManager]):
        self.parts, self._clip_norm, self._agrees, self._span = parts, clip_norm, agrees, span
        self.newest = 0
        self.stopping = False
        self.last_report: BatchReport | None = None
        self._endings: deque[_Ending] = deque()
        self._tallies: deque[tuple[int, Tally]] = deque()
        self._heard: BatchReport | None = None  # the newest report that this rank knows
        self._hidden: deque[BatchReport] = deque()  # known here, perhaps not everywhere
        self.visible: deque[BatchReport] = deque()

    def start(self, batch: int, loss: Tensor | None, settings: list[dict[str, Any]]) -> None:
        """The batch's gradients are complete on this stage. `loss`: on the last stage, this replica's part of the mean."""
        read = max(batch - self.parts.delays[self.parts.here.stage], 0)
        gradients = self.parts.replicas.reduce(self.parts.stage.take_gradients(read))
        self._endings.append(_Ending(batch, gradients, loss, settings))
        if not gradients.early:
            self.count()

    def count(self) -> None:
        """Waits for the sums over replicas and starts the sum over all ranks."""
        for ending in self._endings:
            if ending.sums is not None:
                continue
            with self._span("reduce", ending.batch, ending.batch + 1):
                ending.sums = self.parts.replicas.collect(ending.gradients)
            squares = squared_norm([g for g in ending.sums.values() if g is not None], self.parts.wire)
            tally = Tally(squares, ending.loss, self.stopping, *self.parts.clock.lap(), self.parts.groups.everyone)
            self._tallies.append((ending.batch, tally))

    def reach(self, version: int) -> None:
        """Makes the weights up to W(version)."""
        while self.newest < version:
            self.count()
            ending = self._endings.popleft()
            report = self._learn(ending.batch) if self._agrees else None
            sums = {**ending.sums, **self.parts.replicas.collect(ending.gradients, late=True)}
            with self._span("U", ending.batch, ending.batch + 1):
                with self.parts.clock.computing():
                    if report is not None and report.skipped:
                        sums = dict.fromkeys(sums)
                    elif report is not None and self._clip_norm is not None:
                        scale_(sums.values(), clip_factor(report.gradient_norm, self._clip_norm))
                    self.parts.master.apply(ending.batch + 1, sums, ending.settings)
                self.parts.replicas.share(self.parts.stage.slot(ending.batch + 1))
            self.newest = ending.batch + 1
            self.parts.stage.note(self.newest)

    def _learn(self, batch: int) -> BatchReport:
        """The report of `batch`; waits for its sum over all ranks."""
        while self._heard is None or self._heard.batch < batch:
            number, tally = self._tallies.popleft()
            self._heard = tally.report(number, measured=self.parts.device.type == "cpu")
            self._hidden.append(self._heard)
        return self._heard

    def show(self, batch: int) -> None:
        """Makes the reports up to `batch` visible: a stage may know more already, but what is seen is the same everywhere."""
        if batch >= 0 and (self._heard is None or self._heard.batch < batch):
            self._learn(batch)
        while self._hidden and self._hidden[0].batch <= batch:
            self.last_report = self._hidden.popleft()
            self.visible.append(self.last_report)

    def restart(self, newest: int) -> None:
        """After a state was loaded: W(newest) is here, and nothing of a batch before it will be reported."""
        self.newest = newest
        self.last_report = None
        self._heard = BatchReport(newest - 1, float("nan"), float("nan"), False, None, False) if newest else None
        self._hidden.clear()
        self.visible.clear()
        self.parts.clock.lap()
