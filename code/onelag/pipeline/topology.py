"""Who is where: stages × replicas on the ranks of a process group, and the process groups between them.

Rank = stage · num_replicas + replica: the replicas of a stage are neighbours, so the heavy gradient reduction stays inside a node, and without replicas
stage = rank. All ranks create all groups, in one fixed order, and one group per edge *and direction*: on a shared communicator a send can queue
behind an unmatched receive of the other direction (pytorch #172668), and groups created in different orders hang (Megatron PR #5240).
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist


@dataclass(frozen=True)
class Place:
    """Where one process stands. `stage` is 0 … num_stages − 1, `replica` 0 … num_replicas − 1."""

    stage: int
    num_stages: int
    replica: int = 0
    num_replicas: int = 1

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    def rank_of(self, stage: int, replica: int | None = None) -> int:
        """The rank, within the pipeline's group, of another place."""
        return stage * self.num_replicas + (self.replica if replica is None else replica)

    def __str__(self) -> str:
        replica = f", replica {self.replica} of {self.num_replicas}" if self.num_replicas > 1 else ""
        return f"stage {self.stage} of {self.num_stages}{replica} (rank {self.rank_of(self.stage)})"


def place(rank: int, world_size: int, num_stages: int | None = None, num_replicas: int = 1) -> Place:
    """The place of `rank`; `num_stages=None` takes what the world size leaves.

    Raises:
        ValueError: world_size ≠ num_stages · num_replicas.
    """
    for name, value in (("num_replicas", num_replicas), ("num_stages", num_stages)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"{name}={value!r}: use an integer >= 1")
    wanted = world_size // num_replicas if num_stages is None else num_stages
    if wanted * num_replicas != world_size or wanted < 1:
        asked = f"num_replicas={num_replicas}" + ("" if num_stages is None else f" and num_stages={num_stages}")
        raise ValueError(
            f"{world_size} processes do not fit {asked}: start num_stages x num_replicas processes, "
            f"e.g. torchrun --nproc-per-node {max(wanted, 1) * num_replicas}"
        )
    stage, replica = divmod(rank, num_replicas)
    return Place(stage, wanted, replica, num_replicas)


class Edge(NamedTuple):
    """One direction of a connection between neighbours, as one end sees it."""

    group: dist.ProcessGroup
    peer: int
    """global rank of the other end"""
    name: str


class Groups:
    """The process groups of one rank. `edges` maps "down_in", "down_out" (activations), "up_in", "up_out" (gradients) to this rank's ends."""

    def __init__(self, here: Place, ranks: list[int], timeout: float, tied_stages: tuple[int, ...] = ()):
        """`ranks`: global rank of each place, in the order of `Place.rank_of`; every rank calls this with the same arguments but `here`."""
        self.here, self.ranks = here, ranks
        self.edges: dict[str, Edge] = {}
        self.everyone = self.replicas = self.tied = None
        if here.num_stages * here.num_replicas == 1:
            return
        limit = timedelta(seconds=timeout)
        self.everyone = dist.new_group(ranks, timeout=limit)
        for replica in range(here.num_replicas):
            for upper in range(here.num_stages - 1):
                pair = [ranks[here.rank_of(upper, replica)], ranks[here.rank_of(upper + 1, replica)]]
                for direction in ("down", "up"):
                    group = dist.new_group(pair, timeout=limit)
                    if replica == here.replica:
                        self._join(group, pair, upper, direction)
        for stage in range(here.num_stages):
            if here.num_replicas > 1:
                group = dist.new_group([ranks[here.rank_of(stage, r)] for r in range(here.num_replicas)], timeout=limit)
                self.replicas = group if stage == here.stage else self.replicas
        if tied_stages:
            group = dist.new_group([ranks[here.rank_of(s, r)] for s in tied_stages for r in range(here.num_replicas)], timeout=limit)
            self.tied = group if here.stage in tied_stages else None

    def _join(self, group: dist.ProcessGroup, pair: list[int], upper: int, direction: str) -> None:
        sender, receiver = (upper, upper + 1) if direction == "down" else (upper + 1, upper)
        name = f"edge stage {sender} -> stage {receiver} ({'activations' if direction == 'down' else 'gradients'})"
        if self.here.stage == sender:
            self.edges[f"{direction}_out"] = Edge(group, pair[receiver - upper], name)
        elif self.here.stage == receiver:
            self.edges[f"{direction}_in"] = Edge(group, pair[sender - upper], name)

    def replica_rank(self, replica: int) -> int:
        """Global rank of another replica of this stage."""
        return self.ranks[self.here.rank_of(self.here.stage, replica)]
