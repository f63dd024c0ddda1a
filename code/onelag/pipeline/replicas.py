"""Data parallelism of one stage, and ZeRO-1 by whole matrices: each replica owns some parameters whole, steps those, and gives them to the others.

Never by slices: Newton–Schulz on four row shards of a matrix differs from the whole by 61 %, and a flat shard of it is no matrix at all.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onelag.pipeline.topology import Groups, Place


def assign_owners(costs: Mapping[str, float], num_replicas: int) -> dict[str, int]:
    """Name → replica, largest first to the least loaded (Graham's LPT): no replica carries more than 4/3 of the best possible maximum.

    A pure function of the costs and of their order.
    """
    loads = [0.0] * num_replicas
    owners = {}
    for name in sorted(costs, key=lambda n: -costs[n]):  # stable: equal costs keep their order
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += costs[name]
    return {name: owners[name] for name in costs}


def step_costs(shapes: Mapping[str, Sequence[int]], matrices: set[str]) -> tuple[dict[str, float], dict[str, float]]:
    """(Newton–Schulz work of the matrices that are orthogonalized, element counts of the rest): balanced one by one, they have no common unit."""

    def count(shape: Sequence[int]) -> int:
        return int(torch.Size(shape).numel())

    products = {name: float(count(shape)) * min(shape[-2:]) for name, shape in shapes.items() if name in matrices}
    return products, {name: float(count(shape)) for name, shape in shapes.items() if name not in matrices}


class Reduction:
    """Gradients on their way to be summed, as one flat tensor."""

    def __init__(self, gradients: Mapping[str, Tensor | None], shapes: Mapping[str, torch.Size], like: Tensor):
        self.shapes = {name: shapes[name] for name in gradients}
        # The gradients, and behind them for each one whether it exists, so that "no gradient" stays apart from "zero".
        parts = [like.new_zeros(self.shapes[n].numel()) if g is None else g.reshape(-1) for n, g in gradients.items()]
        parts.append(torch.tensor([g is not None for g in gradients.values()], dtype=like.dtype, device=like.device))
        self.flat = torch.cat(parts)
        self.work: Any = None

    def wait(self) -> dict[str, Tensor | None]:
        """The sums; None for a parameter that got no gradient anywhere."""
        self.work.wait()
        present = self.flat[self.flat.numel() - len(self.shapes) :].tolist()
        sums, start = {}, 0
        for (name, shape), some in zip(self.shapes.items(), present):
            sums[name] = self.flat[start : start + shape.numel()].view(shape) if some else None
            start += shape.numel()
        return sums


class PendingGradients:
    """What `Replicas.reduce` started. `early` sums belong to the norm of this stage; `late` ones are counted by another stage."""

    def __init__(self) -> None:
        self.ready: dict[str, Tensor | None] = {}
        self.early: list[tuple[Reduction, int]] = []
        self.late: list[tuple[Reduction, int]] = []


class Replicas:
    """The replicas of one stage.

    Args:
        owners: name → the replica that steps it, for every trainable parameter of the stage.
        parameters: by the same names; what they are now gives shapes, dtype and device.
        tied: names whose gradient is also summed over the stages that hold them.
        counts_tied: this stage's norm includes them; every tied parameter counts once.
    """

    def __init__(
        self, here: Place, groups: Groups, owners: Mapping[str, int], parameters: Mapping[str, Tensor], tied: Sequence[str] = (), counts_tied: bool = True
    ):
        self.here, self.groups, self.owners, self.tied, self.counts_tied = here, groups, dict(owners), [n for n in tied if n in owners], counts_tied
        self.owned = [name for name, owner in owners.items() if owner == here.replica]
        self._shapes = {name: parameter.shape for name, parameter in parameters.items()}
        dtypes = {parameter.dtype for parameter in parameters.values()}
        if len(dtypes) > 1 and (here.num_replicas > 1 or self.tied):
            raise ValueError(f"num_replicas > 1 and tied parameters need one dtype for all parameters of a stage, but this one has {sorted(map(str, dtypes))}")
        self._like = next((p.detach().new_empty(0) for p in parameters.values()), torch.empty(0))

    def reduce(self, gradients: Mapping[str, Tensor | None]) -> PendingGradients:
        """Starts the sums over replicas, and over stages for tied parameters, of this rank's gradients of all parameters; waits for nothing."""
        pending = PendingGradients()
        if self.tied:
            reduction = Reduction({name: gradients[name] for name in self.tied}, self._shapes, self._like)
            reduction.work = dist.all_reduce(reduction.flat, group=self.groups.tied, async_op=True)
            (pending.early if self.counts_tied else pending.late).append((reduction, self.here.replica))
        single = {name: gradient for name, gradient in gradients.items() if name not in self.tied}
        if self.here.num_replicas == 1:
            pending.ready = single
            return pending
        for owner in range(self.here.num_replicas):
            part = {name: gradient for name, gradient in single.items() if self.owners[name] == owner}
            if part:
                reduction = Reduction(part, self._shapes, self._like)
                reduction.work = dist.reduce(reduction.flat, dst=self.groups.replica_rank(owner), group=self.groups.replicas, async_op=True)
                pending.early.append((reduction, owner))
        return pending

    def collect(self, pending: PendingGradients, late: bool = False) -> dict[str, Tensor | None]:
        """Waits for the early or the late sums and returns those of the parameters that this replica owns."""
        sums = {} if late else dict(pending.ready)
        for reduction, owner in pending.late if late else pending.early:
            if owner == self.here.replica:
                sums.update(reduction.wait())
            else:
                reduction.work.wait()  # what was sent must stay until it has gone
        return {name: gradient for name, gradient in sums.items() if self.owners[name] == self.here.replica}

    @torch.no_grad()
    def share(self, values: Mapping[str, Tensor]) -> None:
        """Every owner's values reach all replicas, in place; `values` holds all parameters of the stage, in the same order everywhere."""
        if self.here.num_replicas == 1:
            return
        moving = []
        for owner in range(self.here.num_replicas):
            names = [name for name in values if self.owners[name] == owner]
            if names:
                flat = torch.cat([values[name].detach().reshape(-1) for name in names])
                work = dist.broadcast(flat, src=self.groups.replica_rank(owner), group=self.groups.replicas, async_op=True)
                moving.append((names, flat, owner, work))
        for names, flat, owner, work in moving:
            work.wait()
            if owner != self.here.replica:
                for name, part in zip(names, flat.split([values[name].numel() for name in names])):
                    values[name].copy_(part.view_as(values[name]))

