"""What a running pipeline did and when: a bounded recorder per rank, and one Chrome/Perfetto trace of all ranks (ui.perfetto.dev opens it).

    recorder = Recorder()
    pipe = Schedule2BW(..., recorder=recorder)
    pipe.run(loader, updates=6)
    lanes = gather(recorder, stage=pipe.here.stage)       # on rank 0; None elsewhere
    if lanes: write_trace(Path("trace.json"), lanes); draw_gantt([("measured", measured_spans(lanes))], "s")

On a CPU a span is host time. On a GPU the host only launches: there F, B, U and every other span are measured between two CUDA events on the stream that
was current, and nothing waits for them until the trace is read.
"""

import json
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from onelag.pipeline.timeline import Span

_COMPUTE = frozenset("FBU")
_BATCHWISE = frozenset({"U", "reduce"})


class Recorded(NamedTuple):
    """One span. `number` counts micro-batches, for U and reduce batches; times are nanoseconds since the epoch."""

    kind: str
    number: int
    version: int
    start: int
    end: int


class Lane(NamedTuple):
    """All spans of a rank, by start, and how many older ones its recorder let go."""

    rank: int
    stage: int
    spans: list[Recorded]
    dropped: int


class Recorder:
    """Keeps the newest `limit` spans of this rank.

    Args:
        limit: spans kept; a batch of m micro-batches makes about 6m + 2. Older ones are let go, so that a long run needs no more memory.
        device: a CUDA device measures between CUDA events; anything else takes the host's clock.

    Raises:
        ValueError: limit < 1.
    """

    def __init__(self, limit: int = 50_000, device: torch.device | str = "cpu"):
        if limit < 1:
            raise ValueError(f"limit={limit}: a recorder keeps at least 1 span")
        self.dropped = 0
        self._cuda = torch.device(device).type == "cuda"
        self._closed: deque[tuple[str, int, int, Any, Any]] = deque(maxlen=limit)
        self._open: list[tuple[str, int, int, Any]] = []
        self._anchor_event = self._mark() if self._cuda else None
        if self._cuda:
            self._anchor_event.synchronize()
        # perf_counter never jumps; one pair of readings places it on the wall clock, which ranks on other machines share as well as theirs are set.
        self._anchor = time.time_ns() - time.perf_counter_ns() if not self._cuda else time.time_ns()

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin(self, kind: str, number: int, version: int) -> None:
        """Opens a span; spans may nest."""
        self._open.append((kind, number, version, self._mark()))

    def end(self) -> None:
        """Closes the span that was opened last."""
        if not self._open:
            raise RuntimeError("end() without begin(): no span is open")
        self.dropped += len(self._closed) == self._closed.maxlen
        self._closed.append((*self._open.pop(), self._mark()))

    @contextmanager
    def span(self, kind: str, number: int, version: int) -> Iterator[None]:
        """`with recorder.span("F", microbatch, version): …`; an exception closes it too."""
        self.begin(kind, number, version)
        try:
            yield
        finally:
            self.end()

    def clear(self) -> None:
        """Forgets the spans so far, e.g. a warm-up."""
        self._closed.clear()
        self.dropped = 0

    def spans(self) -> list[Recorded]:
        """The closed spans by start; on a GPU this waits for the device."""
        if self._cuda:
            torch.cuda.synchronize()
        return sorted(
            (Recorded(k, n, v, self._when(a), self._when(b)) for k, n, v, a, b in self._closed), key=lambda span: (span.start, -span.end)
        )

    def _when(self, mark: Any) -> int:
        return self._anchor + (round(self._anchor_event.elapsed_time(mark) * 1e6) if self._cuda else mark)


def gather(recorder: Recorder, stage: int, group: Any = None) -> list[Lane] | None:
    """All ranks' lanes on the group's first rank, None on the others; every rank calls it. One process needs no group."""
    import torch.distributed as dist

    rank = dist.get_rank(group) if dist.is_initialized() else 0
    lane = Lane(rank, stage, recorder.spans(), recorder.dropped)
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [lane]
    lanes: list[Lane | None] | None = [None] * dist.get_world_size(group) if rank == 0 else None
    dist.gather_object(lane, lanes, group=group, group_dst=0)
    return lanes


def chrome_trace(lanes: Iterable[Lane]) -> dict[str, Any]:
    """The trace as Chrome's JSON object: a process per rank, a thread for computation and one for messages; times in µs from the first span."""
    lanes = list(lanes)
    zero = min((span.start for lane in lanes for span in lane.spans), default=0)
    events: list[dict[str, Any]] = []
    for lane in lanes:
        names = {"process_name": f"stage {lane.stage} (rank {lane.rank})", "process_sort_index": lane.rank}
        for name, value in names.items():
            key = "name" if name == "process_name" else "sort_index"
            events.append({"ph": "M", "name": name, "pid": lane.rank, "tid": 0, "args": {key: value}})
        for thread, title in enumerate(("compute", "messages")):
            events.append({"ph": "M", "name": "thread_name", "pid": lane.rank, "tid": thread, "args": {"name": title}})
        for kind, number, version, start, end in lane.spans:
            counted = "batch" if kind in _BATCHWISE else "microbatch"
            events.append(
                {
                    "ph": "X",
                    "name": f"{kind}{'' if kind in _COMPUTE else ' '}{number}",
                    "cat": kind,
                    "pid": lane.rank,
                    "tid": 0 if kind in _COMPUTE else 1,
                    "ts": (start - zero) / 1000,
                    "dur": (end - start) / 1000,
                    "args": {counted: number, "version": version, "stage": lane.stage},
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"dropped": {str(lane.rank): lane.dropped for lane in lanes}}}


def write_trace(path: Path, lanes: Iterable[Lane]) -> None:
    """Writes `chrome_trace` whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(json.dumps(chrome_trace(lanes)), encoding="utf-8")
    os.replace(temporary, path)


def measured_spans(lanes: Iterable[Lane]) -> list[Span]:
    """F, B and U for `gantt.draw_gantt`, in seconds from the first of them. With replicas, each stage's lowest rank."""
    of_stage: dict[int, Lane] = {}
    for lane in sorted(lanes, key=lambda lane: lane.rank):
        of_stage.setdefault(lane.stage, lane)
    kept = [(stage, s) for stage, lane in sorted(of_stage.items()) for s in lane.spans if s.kind in _COMPUTE]
    zero = min((s.start for _, s in kept), default=0)
    return [Span(stage, s.kind, s.number, s.version, (s.start - zero) / 1e9, (s.end - zero) / 1e9) for stage, s in kept]
