"""The order of a pipeline: which forward (F), backward (B) and update (U) each stage runs, and on which weight version.

Pure Python, no torch. Stages are 0 … p−1; micro-batches are numbered through the whole run, micro-batch k belongs to batch t = ⌊k/m⌋;
W(0) are the initial weights and batch t's update makes W(t+1). Every update follows directly on the backward of its batch's last micro-batch.

Schedules
  2bw        PipeDream-2BW (Narayanan et al., ICML 2021, section 3): no flush; batch t runs on W(max(t−1, 0)) on every stage, forward and backward.
  pipedream  PipeDream with weight stashing (Narayanan et al., SOSP 2019): no flush; stage s runs batch t on W(max(t−(p−1−s), 0)), forward and backward.
             The original updates after every micro-batch (m = 1), and there this *is* the newest weight at the forward. With m > 1 the newest weight would
             change within a batch, so that no batch would have one delay; we keep the delay at p−1−s updates for the whole batch (our convention: it is
             what the paper compares with, and what a simulation with one delay per parameter can reproduce).
  1f1b       one forward, one backward, with a flush: batch t runs on W(t).
  gpipe      all forwards, then all backwards, with a flush: batch t runs on W(t).
  paci       stash-free accumulation (arXiv 2606.07881), *our reading of its abstract*: one weight copy, updated in place after every m backwards; no flush.
             A forward reads the newest weights, its backward the then newest ones: they differ by at most ⌈(in flight − 1)/m⌉ updates.

Depth, the micro-batches in flight on stage s: "paper" p−s (as 1F1B), "eager" 2(p−s)−1 (hides a link latency; Zero Bubble's and Megatron's name for it),
or an integer e: e more than p−s on the first stage, fewer in proportion on later ones, none on the last, which has nobody to wait for (0 is "paper", p−1 is
"eager"). Proportion matters: as many more on every stage would hide next to nothing (timeline.steady_step_time). The flush schedules ignore the depth.
"""

from collections import deque
from collections.abc import Iterator
from itertools import count
from typing import Literal, NamedTuple, get_args

Schedule = Literal["2bw", "pipedream", "1f1b", "gpipe", "paci"]
Depth = Literal["paper", "eager"] | int
SCHEDULES: tuple[str, ...] = get_args(Schedule)
FLUSHING = frozenset({"1f1b", "gpipe"})


class Action(NamedTuple):
    """One thing a stage does. `index` counts micro-batches for F and B, batches for U; `version` is read by F and B and produced by U."""

    kind: Literal["F", "B", "U"]
    index: int
    version: int

    def __str__(self) -> str:
        return f"{self.kind}{self.index}{'→' if self.kind == 'U' else ''}w{self.version}"


def in_flight(stage: int, num_stages: int, depth: Depth = "paper") -> int:
    """Micro-batches that have gone forward but not yet backward on `stage`, at most, in a schedule without flush."""
    _check_place(stage, num_stages)
    below = num_stages - 1 - stage  # stages between this one and the loss
    if depth == "paper":
        return below + 1
    if depth == "eager":
        return 2 * below + 1
    if isinstance(depth, int) and not isinstance(depth, bool) and depth >= 0:
        return below + 1 + (-(-depth * below // (num_stages - 1)) if below else 0)
    raise ValueError(f"depth={depth!r}: use 'paper', 'eager' or an integer >= 0 (extra micro-batches in flight on the first stage)")


def smallest_num_microbatches(num_stages: int, depth: Depth = "paper", schedule: Schedule = "2bw") -> int:
    """The smallest m with which `schedule` never needs a weight before its update has run.

    The forward of batch t's first micro-batch, number tm, comes after the backwards 0 … tm − w (w in flight). 2BW needs update t−2, that is backward
    (t−1)m − 1: m ≥ w − 1. PipeDream on a stage with delay d needs backward (t−d)m − 1: dm ≥ w − 1.
    """
    _check_schedule(schedule)
    if schedule == "2bw":
        return max(1, in_flight(0, num_stages, depth) - 1)
    if schedule == "pipedream":
        delays = range(1, num_stages)
        return max([1, *(-(-(in_flight(num_stages - 1 - d, num_stages, depth) - 1) // d) for d in delays)])
    in_flight(0, num_stages, depth)  # refuses a bad depth or number of stages
    return 1


def check_feasible(num_stages: int, num_microbatches: int, depth: Depth = "paper", schedule: Schedule = "2bw") -> None:
    """Raises ValueError, naming the settings and the smallest `num_microbatches`, if a stage would need weights that do not exist yet."""
    smallest = smallest_num_microbatches(num_stages, depth, schedule)
    if not isinstance(num_microbatches, int) or isinstance(num_microbatches, bool) or num_microbatches < 1:
        raise ValueError(f"num_microbatches={num_microbatches!r}: use an integer >= 1")
    if num_microbatches < smallest:
        raise ValueError(
            f"num_microbatches={num_microbatches} is too small for num_stages={num_stages} with depth={depth!r} (schedule {schedule!r}): "
            f"the smallest is num_microbatches={smallest}"
        )


def version_of(microbatch: int, num_microbatches: int, schedule: Schedule = "2bw", stage: int = 0, num_stages: int = 1) -> int:
    """The weight version that `microbatch` (numbered through the run) reads on `stage`, forward and backward alike."""
    return max(microbatch // num_microbatches - delay_of(schedule, stage, num_stages), 0)


def delay_of(schedule: Schedule = "2bw", stage: int = 0, num_stages: int = 1) -> int:
    """How many updates late the gradients of `stage` are: 1 for 2bw, p−1−s for pipedream, 0 with a flush."""
    _check_schedule(schedule)
    _check_place(stage, num_stages)
    if schedule == "paci":
        raise ValueError("schedule='paci' has no one version per micro-batch: forward and backward read different ones, see stage_actions")
    return {"2bw": 1, "pipedream": num_stages - 1 - stage}.get(schedule, 0)


def stage_actions(
    stage: int,
    num_stages: int,
    num_microbatches: int,
    num_batches: int | None = None,
    schedule: Schedule = "2bw",
    depth: Depth = "paper",
    first_batch: int = 0,
) -> Iterator[Action]:
    """What `stage` does, in order; with `num_batches=None` the stream never ends, otherwise it drains after `num_batches` batches.

    `first_batch`: the first batch after a drain; its micro-batches and versions are numbered on from there, so that draining changes no version.
    """
    _check_place(stage, num_stages)
    check_feasible(num_stages, num_microbatches, depth, schedule)
    if num_batches is not None and num_batches < 0:
        raise ValueError(f"num_batches={num_batches}: use an integer >= 0, or None for a stream without end")
    return _actions(stage, num_stages, num_microbatches, num_batches, schedule, depth, first_batch)


def _actions(stage, num_stages, num_microbatches, num_batches, schedule, depth, first_batch) -> Iterator[Action]:
    m, newest = num_microbatches, first_batch
    delay = None if schedule == "paci" else delay_of(schedule, stage, num_stages)

    def compute(kind: str, k: int) -> Action:
        return Action(kind, k, newest if delay is None else max(k // m - delay, 0))

    batches = count(first_batch) if num_batches is None else range(first_batch, first_batch + num_batches)
    if schedule in FLUSHING:
        width = m if schedule == "gpipe" else min(in_flight(stage, num_stages), m)
        rounds = ([t * m + j for j in range(m)] for t in batches)
    else:
        width = in_flight(stage, num_stages, depth)
        rounds = iter([(t * m + j for t in batches for j in range(m))])
    for microbatches in rounds:  # one round per flush
        waiting: deque[int] = deque()  # forward done, backward not
        forwards = iter(microbatches)
        more = True
        while more or waiting:
            k = next(forwards, None) if more else None
            more = k is not None
            if waiting and (not more or len(waiting) == width):
                oldest = waiting.popleft()
                yield compute("B", oldest)
                if (oldest + 1) % m == 0:
                    newest = oldest // m + 1
                    yield Action("U", oldest // m, newest)
            if more:
                yield compute("F", k)
                waiting.append(k)


def stage_order(
    stage: int, num_stages: int, num_microbatches: int, num_batches: int, schedule: Schedule = "2bw", depth: Depth = "paper"
) -> list[Action]:
    """The whole run of `num_batches` batches on `stage`, with its drain, as a list."""
    return list(stage_actions(stage, num_stages, num_microbatches, num_batches, schedule, depth))


def drain_actions(
    forwards: int,
    backwards: int,
    stage: int,
    num_stages: int,
    num_microbatches: int,
    schedule: Schedule = "2bw",
) -> list[Action]:
    """What is left when a stream stops after forward `forwards` − 1 and backward `backwards` − 1: the backwards in flight and their updates."""
    if forwards % num_microbatches:
        raise ValueError(f"cannot drain inside a batch: {forwards} forwards are no multiple of num_microbatches={num_microbatches}")
    rest = []
    for k in range(backwards, forwards):
        # Under PACI a backward reads the newest weights, which are those of its own batch: every earlier batch has been updated by then.
        version = k // num_microbatches if schedule == "paci" else version_of(k, num_microbatches, schedule, stage, num_stages)
        rest.append(Action("B", k, version))
        if (k + 1) % num_microbatches == 0:
            rest.append(Action("U", k // num_microbatches, k // num_microbatches + 1))
    return rest


def _check_place(stage: int, num_stages: int) -> None:
    if not isinstance(num_stages, int) or isinstance(num_stages, bool) or num_stages < 1:
        raise ValueError(f"num_stages={num_stages!r}: use an integer >= 1")
    if not 0 <= stage < num_stages:
        raise ValueError(f"stage={stage}: with num_stages={num_stages} use 0 to {num_stages - 1}")


def _check_schedule(schedule: str) -> None:
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r}: use one of {', '.join(SCHEDULES)}")
