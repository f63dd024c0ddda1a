"""Bad input: an error that names the user's own setting, before any communication where that is possible."""

import pytest
import torch
from torch import nn

from onelag import ErrorFeedback, SimulatedDelay
from onelag.delay import DelayCompensation
from onelag.pipeline.errors import PipelineError
from onelag.pipeline.schedules import Schedule2BW, SchedulePipeDream
from tests.pipeline.toys import ROWS, Toy, batch, loss_fn, make_optimizer
from tests.pipeline.worlds import run


def build(rank=0, world=1, module=None, optimizer=None, **options):
    module = Toy(rank, world) if module is None else module
    optimizer = make_optimizer("sgd", module.named_parameters()) if optimizer is None else optimizer(module)
    return Schedule2BW(module, loss_fn, optimizer, **{"num_microbatches": 4, "timeout": 20.0, **options})


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"num_microbatches": 0}, ValueError, "num_microbatches=0"),
        ({"depth": "deep"}, ValueError, "depth='deep'"),
        ({"num_stages": 2}, ValueError, "1 processes do not fit num_replicas=1 and num_stages=2: .*--nproc-per-node 2"),
        ({"num_replicas": 2}, ValueError, "1 processes do not fit num_replicas=2"),
        ({"num_replicas": -1}, ValueError, "num_replicas=-1"),
        ({"clip_norm": 0.0}, ValueError, r"clip_norm=0\.0"),
        ({"clip_norm": float("nan")}, ValueError, "clip_norm=nan"),
        ({"update": "later"}, ValueError, "update='later'"),
        ({"optimizer": lambda m: "adam"}, TypeError, "must be a torch.optim.Optimizer"),
        ({"optimizer": lambda m: SimulatedDelay(torch.optim.SGD(m.parameters(), lr=0.1))}, TypeError, "without SimulatedDelay"),
        (
            {"optimizer": lambda m: DelayCompensation(ErrorFeedback(torch.optim.SGD(m.parameters(), lr=0.1)))},
            TypeError,
            "ErrorFeedback must be the outermost wrapper",
        ),
        ({"optimizer": lambda m: torch.optim.SGD(Toy(0, 1).parameters(), lr=0.1)}, ValueError, "not the stage module's own"),
        ({"module": nn.DataParallel(nn.Linear(2, 2))}, TypeError, "wrapped in DataParallel.*num_replicas"),
    ],
)
def test_a_wrong_argument_is_named(options, error, told):
    with pytest.raises(error, match=told):
        build(**options)


def test_a_stage_module_in_the_wrong_place_is_refused():
    module = Toy(0, 1)
    module.stage, module.num_stages = 1, 3
    with pytest.raises(ValueError, match="built for stage=1, but rank 0 is stage 0 of 1"):
        build(module=module)


def test_an_optimizer_that_was_stepped_elsewhere_is_refused():
    module = Toy(0, 1)
    optimizer = ErrorFeedback(torch.optim.SGD(module.parameters(), lr=0.1), form="lookahead")
    loss_fn(module(batch(0, 2)[0]), batch(0, 2)[1]).backward()
    optimizer.step()
    with pytest.raises(ValueError, match="stepped outside the pipeline"):
        build(module=module, optimizer=lambda m: optimizer)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ((batch(0, 6)[0], batch(0, 8)[1]), "inputs: a batch of 6 rows cannot be cut into num_microbatches=4"),
        ((batch(0, 8)[0], batch(0, 3)[1]), "targets: a batch of 3 rows"),
        ((None, batch(0, 8)[1]), "inputs must be a tensor.*got NoneType"),
        (({"a": torch.zeros(4, 1), "b": torch.zeros(8, 1)}, None), r"different numbers of rows, \[4, 8\]"),
        ((torch.zeros(0, 3), None), "a batch of 0 rows"),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused_and_changes_nothing(data, told):
    pipe = build()
    pipe.step(*batch(0, 8))
    with pytest.raises(ValueError, match=told):
        pipe.step(*data)
    pipe.step(*batch(1, 8))
    assert pipe.flush().batch == 1


def test_an_uneven_last_batch_is_refused():
    pipe = build()
    pipe.step(*batch(0, 8))
    with pytest.raises(ValueError, match="this batch has 4 rows, the ones before had 8: drop the uneven last batch"):
        pipe.step(*batch(1, 4))


def test_a_loader_that_ends_early_drains_and_says_so():
    pipe = build()
    with pytest.raises(ValueError, match="ended after 3 of updates=5 batches"):
        pipe.run((batch(t, 8) for t in range(3)), updates=5)
    assert pipe.last_report.batch == 2 and pipe.batches == 3


def test_a_weight_that_is_no_weight_is_refused():
    with pytest.raises(ValueError, match="loss_weight gave -1"):
        build(loss_weight=lambda targets: -1.0).step(*batch(0, 8))
    with pytest.raises(ValueError, match="loss_weight is 0 for every micro-batch"):
        build(loss_weight=lambda targets: 0).step(*batch(0, 8))


def test_an_error_in_the_model_names_stage_and_micro_batch_and_the_pipeline_stays_broken():
    module = Toy(0, 1)
    pipe = build(module=module)
    pipe.step(*batch(0, 8))
    module.layers["2"].register_forward_hook(lambda m, i, o: 1 / 0)
    with pytest.raises(PipelineError, match=r"stage 0 of 1 \(rank 0\), forward of micro-batch 4 \(batch 1, weights W\(0\)\): ZeroDivisionError"):
        pipe.step(*batch(1, 8))
    with pytest.raises(PipelineError, match=r"has failed and cannot go on.*micro-batch 4"):
        pipe.step(*batch(1, 8))
    with pytest.raises(PipelineError, match="loss_fn must return a scalar"):
        other = Toy(0, 1)
        Schedule2BW(other, lambda o, t: o, torch.optim.SGD(other.parameters()), num_microbatches=2).step(*batch(0, 4))


def across(rank, world):
    """What every rank says, for each way in which the ranks do not fit together."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    told = {}

    def attempt(name, error, **options):
        try:
            build(rank, world, **options)
        except error as caught:
            told[name] = str(caught)

    communicated = []
    import torch.distributed as dist

    originals = {name: getattr(dist, name) for name in ("new_group", "all_gather_object", "isend", "irecv")}
    for name in originals:
        setattr(dist, name, lambda *a, name=name, **o: communicated.append(name))
    attempt("few", ValueError, num_microbatches=2)
    attempt("eager", ValueError, num_microbatches=5, depth="eager")
    attempt("world", ValueError, num_stages=3)
    attempt("ddp", TypeError, module=nn.Sequential(_unwrapped(DistributedDataParallel)), optimizer=lambda m: torch.optim.SGD([torch.zeros(1)]))
    for name, original in originals.items():
        setattr(dist, name, original)
    sharded = Toy(rank, world)
    fully_shard(sharded)
    attempt("fsdp", TypeError, module=sharded)
    attempt("config", ValueError, config={"optimizer": {"learning_rate": 0.1 if rank < 2 else 0.2}})
    attempt("microbatches", ValueError, num_microbatches=4 + rank % 2)
    attempt("dtype", ValueError, compute_dtype=torch.bfloat16 if rank == 3 else None)
    lopsided = lambda m: ErrorFeedback(torch.optim.SGD(m.parameters(), lr=0.1), form="update" if rank else "lookahead")  # noqa: E731
    attempt("correction", ValueError, optimizer=lopsided)
    module = Toy(rank, world)
    try:
        SchedulePipeDream(module, loss_fn, torch.optim.SGD(module.parameters()), num_microbatches=1, depth="eager")
    except ValueError as error:
        told["pipedream"] = str(error)
    pair = dist.new_group([0, 1])
    if rank < 2:
        attempt("group", ValueError, group=pair)
    return told, communicated


def _unwrapped(cls):
    """A module of that class that was never set up: enough to be recognised."""
    module = cls.__new__(cls)
    nn.Module.__init__(module)
    return module


def test_ranks_that_do_not_fit_together_say_why():
    results = run(across, 4)
    assert all(communicated == [] for _, communicated in results)
    wanted = {
        "few": r"num_microbatches=2 is too small for num_stages=4 with depth='paper'.*smallest is num_microbatches=3",
        "eager": r"num_microbatches=5 is too small.*depth='eager'.*num_microbatches=6",
        "world": r"4 processes do not fit num_replicas=1 and num_stages=3",
        "ddp": r"submodule '0' is wrapped in DistributedDataParallel",
        "fsdp": r"the stage module is wrapped in FSDPModule",
        "config": r"optimizer\.learning_rate=0\.1 on rank 0, optimizer\.learning_rate=0\.2 on rank 2",
        "microbatches": r"num_microbatches=4 on rank 0, num_microbatches=5 on rank 1",
        "dtype": r"compute_dtype='None' on rank 0, compute_dtype='torch\.bfloat16' on rank 3",
        "correction": r"correction\.form='lookahead' on rank 0, correction\.form='update' on rank 1",
        "pipedream": r"num_microbatches=1 is too small for num_stages=4 with depth='eager' .*num_microbatches=2",
    }
    for name, pattern in wanted.items():
        texts = {told[name] for told, _ in results}
        assert len(texts) == 1, texts
        with pytest.raises(ValueError, match=pattern):
            raise ValueError(texts.pop())
    assert "group= holds 2 of 4 processes" in results[0][0]["group"]


class Shrinking(nn.Module):
    """A stage whose output depends on which micro-batch it is."""

    def __init__(self, rank, world):
        super().__init__()
        self.body, self.count = Toy(rank, world), 0

    def forward(self, x):
        self.count += 1
        x = self.body(x)
        return x[:, : 4 if self.count == 3 else 8]


def changing(rank, world):
    pipe = build(rank, world, module=Shrinking(rank, world) if rank == 0 else Toy(rank, world), timeout=2.0)
    try:
        pipe.run((batch(t, 4 * ROWS) for t in range(2)), updates=2)
    except PipelineError as error:
        return str(error)
    return None


def test_an_output_that_changes_its_shape_is_refused_by_the_sender():
    from tests.pipeline.worlds import run_to_the_end

    first, second = run_to_the_end(changing, 2)
    assert "forward of micro-batch 2" in first.result and "it was (0: float32[2, 8, 16] with gradient), now it is (0: float32[2, 4, 16]" in first.result
    assert second.result is None or "stage 1 of 2" in second.result
