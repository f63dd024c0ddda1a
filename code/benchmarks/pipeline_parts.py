"""What bench_pipeline.py runs in its processes: stages that sleep, stages that compute, and a look at the memory."""

import gc
import resource
import time
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from onelag.delay import ErrorFeedback
from onelag.models.dense import DenseConfig
from onelag.models.loss import next_token_loss
from onelag.models.stages import build_stage, split_by_cost
from onelag.pipeline.baselines import TorchPipeline
from onelag.pipeline.schedules import Schedule2BW
from onelag.pipeline.trace import Recorder, gather

FORWARD, BACKWARD, UPDATE = 0.020, 0.040, 0.120  # seconds that a sleeping stage takes
STEPS, RAMP = 8, 3  # steps per round, and how many of them are not timed
MODEL = DenseConfig(
    vocab_size=256, num_layers=10, width=192, num_heads=6, num_kv_heads=6, ffn_width=576, max_length=256, tie_embeddings=False
)


# -- stages that sleep ------------------------------------------------------------------------------------------------------------------------
class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(context, x, weight):
        time.sleep(FORWARD)
        return x * weight

    @staticmethod
    def backward(context, gradient):
        time.sleep(BACKWARD)
        return gradient.contiguous(), gradient.sum().reshape(1)


class SleepingStage(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return _Sleep.apply(x, self.weight)


class SleepingSGD(torch.optim.SGD):
    """An optimizer step that takes `seconds`."""

    seconds = 0.0

    def step(self, closure=None):
        time.sleep(self.seconds)
        return super().step(closure)


def _pipe(kind, module, loss_fn, optimizer, m, recorder=None):
    if kind == "2bw":
        return Schedule2BW(module, loss_fn, optimizer, m, recorder=recorder)
    return TorchPipeline(module, loss_fn, optimizer, m, kind)


def _mean(output, targets):
    return output.mean()


def seconds_per_step(step, flush, steps=STEPS, ramp=RAMP):
    """Of steps `ramp` … `steps`, which follow each other without a pause."""
    marks = []
    for _ in range(steps):
        step()
        marks.append(time.perf_counter())
    flush()
    return (marks[-1] - marks[ramp - 1]) / (steps - ramp)


def sleeping(rank, world, cases, rounds):
    pipes, times = {}, {case: [] for case in cases}
    for case in cases:
        kind, _, m, update = case
        module = SleepingStage()
        optimizer = SleepingSGD(module.parameters(), lr=0.0)
        optimizer.seconds = update
        pipes[case] = _pipe(kind, module, _mean, optimizer, m)
    for _ in range(rounds):
        for case, pipe in pipes.items():
            x = torch.ones(2 * case[2], 4)
            dist.barrier()
            times[case].append(seconds_per_step(lambda pipe=pipe, x=x: pipe.step(x, x), pipe.flush))
    return times


def traced(rank, world, m, steps):
    """The trace of a run of sleeping stages, on rank 0."""
    module, recorder = SleepingStage(), Recorder()
    pipe = Schedule2BW(module, _mean, SleepingSGD(module.parameters(), lr=0.0), m, recorder=recorder)
    x = torch.ones(2 * m, 4)
    for _ in range(steps):
        pipe.step(x, x)
    pipe.flush()
    return gather(recorder, rank)


# -- stages that compute ----------------------------------------------------------------------------------------------------------------------
def computing(rank, world, ms, rounds, rows=2, length=128):
    """2BW, torch's 1F1B, and each stage's computation alone, without a message: seconds per step."""
    split = split_by_cost(
        [1.0] * MODEL.num_layers, world, last=MODEL.width * MODEL.vocab_size / (4 * MODEL.width**2 + 3 * MODEL.width * MODEL.ffn_width)
    )

    def stage():
        return build_stage(MODEL, rank, world, seed=0, split=split)

    times = {}
    for m in ms:
        pipes = {}
        for kind in ("2bw", "1f1b"):
            module = stage()
            pipes[kind] = _pipe(kind, module, next_token_loss, torch.optim.AdamW(module.parameters(), lr=1e-4, foreach=True), m)
        alone = stage()
        optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-4, foreach=True)
        tokens = torch.randint(0, MODEL.vocab_size, (m * rows, length), generator=torch.Generator().manual_seed(0))
        targets = tokens.roll(-1, 1)
        hidden = torch.randn(rows, length, MODEL.width)

        def one_batch(pipe, tokens=tokens, targets=targets):
            pipe.step(tokens, targets)

        def no_messages(alone=alone, optimizer=optimizer, tokens=tokens, targets=targets, hidden=hidden, m=m):
            for x, y in zip(tokens.chunk(m), targets.chunk(m)):
                output = alone(x if rank == 0 else hidden.detach().requires_grad_())
                if rank == world - 1:
                    next_token_loss(output, y).backward()
                else:
                    output.backward(hidden)
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(rounds):
            for kind, pipe in pipes.items():
                dist.barrier()
                times.setdefault((kind, m), []).append(seconds_per_step(partial(one_batch, pipe), pipe.flush))
            dist.barrier()
            times.setdefault(("no messages", m), []).append(seconds_per_step(no_messages, lambda: None))
    return times, sum(p.numel() for p in stage().parameters())


# -- memory -------------------------------------------------------------------------------------------------------------------------------------
SIDE = 97  # no other tensor has this shape


def _live() -> dict[str, int]:
    """What Python reaches: tensors, the bytes of their storages, and storages in the shape of the weights, of parameters and of anything."""
    gc.collect()
    storages, weights, parameters, count = {}, set(), set(), 0
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            count += 1
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            if thing.shape == (SIDE, SIDE):
                weights.add(storage.data_ptr())
                if isinstance(thing, nn.Parameter):
                    parameters.add(storage.data_ptr())
    return {"tensors": count, "bytes": sum(storages.values()), "weight_shaped": len(weights), "weights": len(parameters)}


def memory(rank, world, m, corrected):
    """What lives between two steps after 3 and after 300 batches, the process's largest size until then, and the most micro-batches in flight."""
    module, recorder = nn.Sequential(nn.Linear(SIDE, SIDE, bias=False), nn.Tanh()), Recorder(limit=100)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    pipe = Schedule2BW(module, _mean, ErrorFeedback(optimizer, form="lookahead") if corrected else optimizer, m, recorder=recorder)
    x, seen = torch.ones(2 * m, SIDE), {}
    for step in range(1, 301):
        pipe.step(x, x)
        if step in (3, 300):
            backward, flying = None, 0
            for span in recorder.spans():
                if span.kind == "F" and backward is not None:
                    flying = max(flying, span.number - backward)
                elif span.kind == "B":
                    backward = span.number
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            seen[step] = _live() | {"microbatches": flying, "peak_rss_kib": peak}
    pipe.flush()
    return seen
