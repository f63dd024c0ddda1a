"""Memory: two weight versions and a master, whatever the correction; p − s activations in flight; nothing that grows with the run."""

import gc

import torch
from torch import nn

from onelag import ErrorFeedback
from onelag.pipeline.schedules import Schedule2BW, SchedulePipeDream
from tests.pipeline.toys import ROWS, Toy, batch, loss_fn
from tests.pipeline.worlds import run

M = 4


def storages(shape=None):
    """Distinct live storages, of tensors of one shape or of all: {address: bytes}."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and (shape is None or tuple(thing.shape) == shape):
            storage = thing.untyped_storage()
            if storage.nbytes():
                found[storage.data_ptr()] = storage.nbytes()
    return found


def alive():
    gc.collect()
    return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()), sum(storages().values())


class Stage(nn.Module):
    """A toy with a matrix of a shape of its own."""

    def __init__(self, rank, world):
        super().__init__()
        self.body, self.mark = Toy(rank, world), nn.Parameter(torch.zeros(13, 17))

    def forward(self, x):
        x = self.body(x)
        return x + self.mark.sum() if x.is_floating_point() else x


def measured(rank, world):
    gc.freeze()  # what the imports made is not looked through again and again
    result = {"weights": {}, "growth": []}
    for name, coefficient, cls, recompute in (
        ("plain", 0.0, Schedule2BW, False),
        ("corrected", 1.0, Schedule2BW, False),
        ("recompute", 1.0, Schedule2BW, True),
        ("pipedream", 0.0, SchedulePipeDream, False),
    ):
        module = Stage(rank, world)
        optimizer = ErrorFeedback(torch.optim.SGD(module.parameters(), lr=0.01), coefficient, form="lookahead")
        pipe = cls(module, loss_fn, optimizer, num_microbatches=M, timeout=30, recompute=recompute)
        flying = 0
        for t in range(3):
            pipe.step(*batch(t, M * ROWS))
            flying = max(flying, len(pipe._between))
        pipe.flush()
        pipe._updates.visible.clear()
        result["weights"][name] = len(storages((13, 17))), flying, sum(box.outstanding for box in pipe.parts.outboxes.values())
        if name == "corrected":
            for t in range(3, 33):
                pipe.step(*batch(t, M * ROWS))
                list(pipe.reports())
                if t in (6, 32):
                    result["growth"].append(alive())
            pipe.flush()
        del module, optimizer, pipe
        gc.collect()
    return result


def test_two_versions_and_a_master_and_no_growth():
    results = run(measured, 3)
    for stage, result in enumerate(results):
        for name, (matrices, flying, outstanding) in result["weights"].items():
            versions = 3 - stage if name == "pipedream" else 2
            assert matrices == versions + 1, (stage, name, matrices)
            assert flying == 3 - stage and outstanding == 0, (stage, name, flying)
        early, late = result["growth"]
        assert early == late, (stage, early, late)


def saved_weights(rank, world):
    """Storages of weights that the graphs of the micro-batches in flight hold on to."""
    module = Stage(rank, world)
    pipe = Schedule2BW(module, loss_fn, torch.optim.SGD(module.parameters(), lr=0.01), num_microbatches=M, timeout=30, compute_dtype=torch.bfloat16)
    held = set()

    def pack(tensor):
        if tensor.shape in ((32, 16), (16, 32)):  # up and down, or their transposes
            held.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for t in range(4):
            pipe.step(*batch(t, M * 3))  # 3 rows of 8 tokens: no activation has the shape of a weight
    slots = {p.untyped_storage().data_ptr() for slot in pipe.parts.stage.slots for n, p in slot.items() if p.shape in ((32, 16), (16, 32))}
    pipe.flush()
    return held == slots, len(held)


def test_micro_batches_in_flight_share_the_two_versions():
    """Autocast would keep one bf16 copy of the weights per micro-batch in flight."""
    same, count = run(saved_weights, 3)[1]  # the stage without embedding and head
    assert same and count == 2 * 2  # two matrices, two versions


class Nothing(nn.Module):
    """A stage between two others that has no layer of its own."""

    def forward(self, x):
        return x


def relayed(rank, world):
    module = Nothing() if rank == 1 else Toy(rank // 2, 2)
    optimizer = None if rank == 1 else ErrorFeedback(torch.optim.AdamW(module.parameters(), lr=0.01), form="lookahead")
    pipe = Schedule2BW(module, loss_fn, optimizer, num_microbatches=M, timeout=30, clip_norm=1.0)
    reports = pipe.run((batch(t, M * ROWS) for t in range(4)), updates=4)
    return [r.loss for r in reports]


def two(rank, world):
    module = Toy(rank, world)
    optimizer = ErrorFeedback(torch.optim.AdamW(module.parameters(), lr=0.01), form="lookahead")
    pipe = Schedule2BW(module, loss_fn, optimizer, num_microbatches=M, timeout=30, clip_norm=1.0)
    return [r.loss for r in pipe.run((batch(t, M * ROWS) for t in range(4)), updates=4)]


def test_a_stage_without_parameters_passes_things_on():
    assert run(relayed, 3)[0] == run(two, 2)[0]
