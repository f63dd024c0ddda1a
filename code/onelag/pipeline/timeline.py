"""When every F, B and U of an order happens, given how long each takes: step time, bubble, memory and slack of a schedule, before any process starts.

The model: a stage runs its actions of `order.py` one after another. A forward starts when the stage is free and its input is there, that is `latency`
after the forward on the stage before has ended; a backward likewise from the stage behind. Links carry any number of messages at once and sending
costs the sender nothing. That holds where messages are asynchronous and small against the link's bandwidth; measured times tell (trace.py).

Where the update of batch t runs:
  slack    just before the stage's first action that reads W(t+1) or a newer one: what the engine does
  inline   directly after the batch's last backward
  stream   beside the stage's computation, on a second stream or core, started after the last backward; whoever reads W(t+1) waits for it
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, NamedTuple

from onelag.pipeline.order import FLUSHING, Action, Depth, Schedule, in_flight, stage_order

UpdatePlace = Literal["slack", "inline", "stream"]


class Span(NamedTuple):
    """One action with its time on a stage, in the unit of the costs (seconds, when measured)."""

    stage: int
    kind: str
    index: int
    version: int
    start: float
    end: float


@dataclass(frozen=True)
class Costs:
    """How long things take, in any one unit; a tuple holds one value per stage."""

    forward: float | tuple[float, ...] = 1.0
    backward: float | tuple[float, ...] = 2.0
    latency: float = 0.0
    """from the end of an action on a stage until its tensor is on the next one"""
    update: float | tuple[float, ...] = 0.0
    agreement: float | None = None
    """every update waits for all stages' last backward of its batch and then this long (global gradient norm); None: it waits for its own stage alone"""

    def of(self, kind: str, stage: int, num_stages: int) -> float:
        """The time of an F, B or U on `stage`."""
        name = {"F": "forward", "B": "backward", "U": "update"}[kind]
        value = getattr(self, name)
        if isinstance(value, (int, float)):
            return float(value)
        if len(value) != num_stages:
            raise ValueError(f"{name} has {len(value)} values, but num_stages={num_stages}: give one number, or one per stage")
        return float(value[stage])


@dataclass(frozen=True)
class StageMemory:
    """The most that a stage keeps at once: micro-batches between forward and backward, and weight versions (those still to be read, and the newest)."""

    microbatches: int
    versions: int


@dataclass(frozen=True)
class Timeline:
    """A run of `num_batches` batches; `spans[s]` are the actions of stage s in the order in which they start."""

    num_stages: int
    num_microbatches: int
    num_batches: int
    schedule: str
    depth: Depth
    update: UpdatePlace
    costs: Costs
    spans: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> float:
        """From the first forward to the end of the last action, ramps included."""
        return max(span.end for row in self.spans for span in row)

    @property
    def step_time(self) -> float:
        """Time per batch in the steady state: between the last backwards of batches on stage 0, over the second half of the run without its last batch.

        Raises:
            ValueError: fewer than 4 batches, which have no steady state.
        """
        if self.num_batches < 4:
            raise ValueError(f"num_batches={self.num_batches} has no steady state: use 4 or more")
        ends = self.batch_ends(0)
        first, last = self.num_batches // 2 - 1, self.num_batches - 2
        return (ends[last] - ends[first]) / (last - first)

    @property
    def work(self) -> tuple[float, ...]:
        """Time per batch that each stage computes; an update on a stream of its own is not counted."""
        of, p = self.costs.of, self.num_stages
        own = self.update != "stream"
        return tuple(self.num_microbatches * (of("F", s, p) + of("B", s, p)) + own * of("U", s, p) for s in range(p))

    @property
    def bubble(self) -> float:
        """The part of the steady state in which a stage waits, on average over stages. Unequal stages wait for the slowest: that counts."""
        return 1.0 - fmean(self.work) / self.step_time

    @property
    def run_bubble(self) -> float:
        """The same over the whole run with its ramps."""
        return 1.0 - self.num_batches * fmean(self.work) / self.makespan

    def batch_ends(self, stage: int) -> list[float]:
        """When each batch's last backward ends on `stage`."""
        m = self.num_microbatches
        return [span.end for span in self.spans[stage] if span.kind == "B" and (span.index + 1) % m == 0]

    def slack(self, stage: int) -> float:
        """The least time, in the steady state, from a batch's last backward to the first action that reads its weights: what an update may take there."""
        first_read: dict[int, float] = {}
        for span in self.spans[stage]:
            if span.kind in "FB":
                first_read.setdefault(span.version, span.start)
        ends = self.batch_ends(stage)
        middle = range(self.num_batches // 2 - 1, self.num_batches - 1)
        waits = [first_read[batch + 1] - ends[batch] for batch in middle if batch + 1 in first_read]
        if not waits:
            raise ValueError(f"num_batches={self.num_batches} is too short to see the slack on stage {stage}")
        return min(waits)

    def memory(self, stage: int) -> StageMemory:
        """See `StageMemory`."""
        return peak_memory(stage_order(stage, self.num_stages, self.num_microbatches, self.num_batches, self.schedule, self.depth))


def simulate(
    num_stages: int,
    num_microbatches: int,
    costs: Costs = Costs(),
    num_batches: int = 8,
    schedule: Schedule = "2bw",
    depth: Depth = "paper",
    update: UpdatePlace = "slack",
) -> Timeline:
    """Runs the model.

    Raises:
        ValueError: settings that `order.check_feasible` refuses, or costs for another number of stages.
    """
    if update not in ("slack", "inline", "stream"):
        raise ValueError(f"update={update!r}: use 'slack', 'inline' or 'stream'")
    p, m = num_stages, num_microbatches
    duration = [{kind: costs.of(kind, s, p) for kind in "FBU"} for s in range(p)]
    todo = [stage_order(s, p, m, num_batches, schedule, depth) for s in range(p)]
    if update == "slack":
        todo = [postpone_updates(actions) for actions in todo]
    spans: list[list[Span]] = [[] for _ in range(p)]
    at, free, side_free = [0] * p, [0.0] * p, [0.0] * p
    ended: dict[tuple[str, int, int], float] = {}  # (kind, stage, index) → end
    unmade: dict[tuple[int, int], float] = {}  # (stage, version) → when it is made, if on a stream of its own

    def earliest(stage: int, action: Action) -> float | None:
        """When what the action waits for is there; None if it is not known yet."""
        kind, index, version = action
        if kind == "U":
            if costs.agreement is None:
                return ended["B", stage, index * m + m - 1]
            slowest = "B", 0, index * m + m - 1  # gradients flow to stage 0: it is the last one to end a batch
            return ended[slowest] + costs.agreement if slowest in ended else None
        made = unmade.get((stage, version), 0.0)
        if kind == "F":
            source = ("F", stage - 1, index) if stage else None
        else:
            source = ("B", stage + 1, index) if stage < p - 1 else None
        if source is None:
            return made
        return max(made, ended[source] + costs.latency) if source in ended else None

    progress = True
    while progress:
        progress = False
        for s in range(p):
            while at[s] < len(todo[s]):
                action = todo[s][at[s]]
                ready = earliest(s, action)
                if ready is None:
                    break
                beside = action.kind == "U" and update == "stream"
                start = max(ready, side_free[s] if beside else free[s])
                end = start + duration[s][action.kind]
                if beside:
                    side_free[s] = unmade[s, action.version] = end
                else:
                    free[s] = end
                ended[action.kind, s, action.index] = end
                spans[s].append(Span(s, *action, start, end))
                at[s] += 1
                progress = True
    if any(at[s] < len(todo[s]) for s in range(p)):
        stuck = ", ".join(f"stage {s} at {todo[s][at[s]]}" for s in range(p) if at[s] < len(todo[s]))
        raise ValueError(f"the settings wait for themselves: schedule={schedule!r}, depth={depth!r}, update={update!r} stop with {stuck}")
    rows = tuple(tuple(sorted(row, key=lambda span: span.start)) for row in spans)
    return Timeline(p, m, num_batches, schedule, depth, update, costs, rows)


def postpone_updates(actions: Sequence[Action]) -> list[Action]:
    """The same actions with every update moved to just before the first one that reads its weights or newer ones, else to the end."""
    order: list[Action] = []
    waiting: list[Action] = []
    for action in actions:
        if action.kind == "U":
            waiting.append(action)
            continue
        while waiting and waiting[0].version <= action.version:
            order.append(waiting.pop(0))
        order.append(action)
    return order + waiting


def peak_memory(actions: Sequence[Action]) -> StageMemory:
    """What a stage with this order must keep at least."""
    last_read = {action.version: place for place, action in enumerate(actions) if action.kind != "U"}
    newest, microbatches, most, versions = 0, 0, 0, 1
    alive = {0}
    for place, action in enumerate(actions):
        microbatches += {"F": 1, "B": -1, "U": 0}[action.kind]
        if action.kind == "U":
            newest = action.version
            alive.add(newest)
        alive = {version for version in alive if version == newest or last_read.get(version, -1) > place}
        most, versions = max(most, microbatches), max(versions, len(alive))
    return StageMemory(most, versions)


# -- closed forms, for equal stages ---------------------------------------------------------------------------------------------------------
def flush_bubble(num_stages: int, num_microbatches: int) -> float:
    """1F1B and GPipe with a flush, no latency, no update: (p−1)/(m+p−1) (Huang et al., NeurIPS 2019; Narayanan et al., SC 2021)."""
    return (num_stages - 1) / (num_microbatches + num_stages - 1)


def steady_step_time(num_stages: int, num_microbatches: int, costs: Costs, schedule: Schedule = "2bw", depth: Depth = "paper") -> float:
    """Time per batch in the steady state for equal stages, update excluded.

    Without flush, with w_s micro-batches in flight and T = t_F + t_B: F_s(k) → F_q(k) on a later stage q → B_q(k − w_q + 1), which follows it there →
    B_s(k − w_q + 1) → F_s(k − w_q + 1 + w_s). So w_s − w_q + 1 micro-batches pass in (d+1)T + 2dc, d = q − s, and the slowest such round decides. At depth
    "paper" that is T + 2(p−1)c/p, utilisation pT/(pT + 2(p−1)c); "eager" gives T for every latency c ≤ T/2.
    GPipe: (m+p−1)T + 2(p−1)c. 1F1B has no closed form with a latency; without one it takes as long as GPipe.

    Raises:
        ValueError: per-stage costs, or a latency with 1F1B.
    """
    if not isinstance(costs.forward, (int, float)) or not isinstance(costs.backward, (int, float)):
        raise ValueError("the closed form is for equal stages: give one number for forward and one for backward")
    p, m, latency, work = num_stages, num_microbatches, costs.latency, costs.forward + costs.backward
    if schedule in FLUSHING:
        if schedule == "1f1b" and latency:
            raise ValueError("1f1b has no closed form with a latency: use simulate")
        return (m + p - 1) * work + 2 * (p - 1) * latency
    width = [in_flight(s, p, depth) for s in range(p)]
    rounds = (((q - s + 1) * work + 2 * (q - s) * latency) / (width[s] - width[q] + 1) for q in range(p) for s in range(q + 1))
    return m * max(rounds)


def slack_slots(stage: int, num_stages: int, num_microbatches: int, depth: Depth = "paper") -> int:
    """2BW: micro-batch slots from the end of batch t's last backward to the first forward that reads W(t+1): m − w_s + 1, so m − p + s + 1 at depth "paper"."""
    return num_microbatches - in_flight(stage, num_stages, depth) + 1
