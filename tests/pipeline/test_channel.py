"""Messages between neighbours, the groups they travel on, and what is refused before the first one."""

import pathlib
import re

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import onelag.pipeline.engine as engine
from onelag.pipeline.channel import Inbox, MessageSpec, Outbox, put_together, take_apart
from onelag.pipeline.handshake import ANY, agree_on_names, compare_settings
from onelag.pipeline.replicas import assign_owners
from onelag.pipeline.topology import Groups, Place, place
from tests.pipeline.worlds import run

_tensors = st.builds(
    lambda shape, dtype, grad: torch.zeros(shape, dtype=dtype, requires_grad=grad and dtype.is_floating_point),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
    st.booleans(),
)


@given(st.one_of(_tensors, st.lists(_tensors, max_size=3).map(tuple), st.dictionaries(st.text(max_size=4), _tensors, max_size=3)))
def test_a_message_is_told_and_put_together_again(value):
    spec, tensors = take_apart(value)
    assert MessageSpec.unpack(spec.pack()) == spec
    again = put_together(spec, tensors)
    assert type(again) is type(value)
    if isinstance(value, dict):
        assert list(again) == list(value) and all(again[k] is value[k] for k in value)
    assert spec.gradients == MessageSpec.of_gradients([t for t in tensors if t.requires_grad])
    assert [t.needs_grad for t in spec.tensors] == [t.requires_grad for t in tensors]


@pytest.mark.parametrize("value", [None, (torch.zeros(1), None), {"a": 1.0}, {1: torch.zeros(1)}, [[torch.zeros(1)]]])
def test_anything_else_than_tensors_is_refused(value):
    with pytest.raises(TypeError, match="must be a tensor, a tuple of tensors or a dict"):
        take_apart(value)


def exchange(rank, world):
    cpu = torch.device("cpu")
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.ones(2), 1 - rank), dist.P2POp(dist.irecv, torch.empty(2), 1 - rank)])
    for work in works:  # the fact behind pytorch #132644: one Work per operation, and all must be waited for
        work.wait()
    here = place(rank, world, 2)
    groups = Groups(here, [0, 1], 20.0)
    assert set(groups.edges) == ({"down_out", "up_in"} if rank == 0 else {"down_in", "up_out"})
    members = [dist.get_process_group_ranks(edge.group) for edge in groups.edges.values()]
    assert members == [[0, 1]] * 2 and len({id(edge.group) for edge in groups.edges.values()}) == 2
    if rank == 0:
        outbox = Outbox(groups.edges["down_out"], cpu)
        message = {"hidden": torch.full((1 << 16,), 3.0).reshape(2, -1).t(), "flat": torch.zeros(1 << 18), "mask": torch.tensor([True, False])}
        spec, tensors = take_apart(message)
        outbox.announce(spec)
        for number in range(3):
            message["hidden"].fill_(number)
            message["flat"].fill_(number)
            outbox.post(number, spec, tensors)
            message["flat"].fill_(-1.0)
            message["hidden"].fill_(-1.0)  # overwritten at once: the receiver gets what was posted
        wrong, other = take_apart({**message, "hidden": torch.zeros(3)})
        with pytest.raises(ValueError, match=r"output changed between micro-batches: it was \(hidden: float32\[32768, 2\].*now it is \(hidden: float32\[3\]"):
            outbox.post(3, wrong, other)
        assert outbox.outstanding == 3
        outbox.settle(1)
        assert outbox.outstanding == 1
        outbox.settle_all()
        return outbox.outstanding
    inbox = Inbox(groups.edges["down_in"], cpu, cpu)
    inbox.hear()
    inbox.expect(0)
    inbox.expect(0)
    inbox.expect(1)
    seen = []
    for number in range(3):
        arrived = put_together(inbox.spec, inbox.take(number))
        assert arrived["hidden"].shape == (32768, 2) and arrived["mask"].tolist() == [True, False]
        seen.append(torch.cat([arrived["hidden"].reshape(-1), arrived["flat"]]).unique().tolist())
    return seen, len(works)


def test_what_was_posted_arrives_in_order_whatever_happens_to_the_original():
    sender, (seen, works) = run(exchange, 2)
    assert sender == 0 and seen == [[0.0], [1.0], [2.0]] and works == 2


def fixed_order(rank, world):
    made = []
    original = dist.new_group
    dist.new_group = lambda ranks, **options: (made.append(tuple(ranks)), original(ranks, **options))[1]
    Groups(place(rank, world, 2, 2), list(range(world)), 20.0, tied_stages=(0, 1))
    return made


def test_all_ranks_make_all_groups_in_one_order():
    made = run(fixed_order, 4)
    assert made[0] == made[1] == made[2] == made[3]
    assert made[0] == [(0, 1, 2, 3), (0, 2), (0, 2), (1, 3), (1, 3), (0, 1), (2, 3), (0, 1, 2, 3)]


@given(st.integers(1, 6), st.integers(1, 6))
def test_every_place_has_one_rank(stages, replicas):
    places = [place(rank, stages * replicas, stages, replicas) for rank in range(stages * replicas)]
    assert len({(p.stage, p.replica) for p in places}) == stages * replicas
    assert all(p.rank_of(p.stage) == rank for rank, p in enumerate(places))
    assert place(0, stages * replicas, None, replicas).num_stages == stages


def test_processes_that_do_not_fit_are_refused_by_the_names_of_the_settings():
    with pytest.raises(ValueError, match=r"4 processes do not fit num_replicas=3: .*torchrun --nproc-per-node 3"):
        place(0, 4, None, 3)
    with pytest.raises(ValueError, match=r"4 processes do not fit num_replicas=2 and num_stages=3"):
        place(0, 4, 3, 2)
    with pytest.raises(ValueError, match="num_stages=0"):
        place(0, 4, 0)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30), st.integers(1, 5))
@settings(deadline=None)
def test_owners_share_the_work(costs, replicas):
    owners = assign_owners({str(i): cost for i, cost in enumerate(costs)}, replicas)
    loads = [sum(cost for i, cost in enumerate(costs) if owners[str(i)] == r) for r in range(replicas)]
    assert sum(loads) == sum(costs) and list(owners) == [str(i) for i in range(len(costs))]
    best = max(sum(costs) / replicas, *costs)
    assert max(loads) <= 4 / 3 * best + max(costs) * (len(costs) > replicas) and max(loads) - min(loads) <= max(costs)


def test_the_first_differing_setting_is_named():
    compare_settings([{"a": 1, "b": ANY}, {"a": 1, "b": 2}, {"a": 1, "b": 2}])
    with pytest.raises(ValueError, match=r"optimizer\.lr=0\.1 on rank 0, optimizer\.lr=0\.2 on rank 2"):
        compare_settings([{"optimizer.lr": 0.1, "z": 1}, {"optimizer.lr": 0.1, "z": 2}, {"optimizer.lr": 0.2, "z": 1}])
    with pytest.raises(ValueError, match=r"extra='\(absent\)' on rank 0, extra=5 on rank 1"):
        compare_settings([{}, {"extra": 5}])


def _holding(*stages, tied=()):
    return [{"parameters": parameters, "tied": [n for n in tied if n in parameters]} for parameters in stages]


def test_names_are_global_where_they_can_be():
    names = agree_on_names(Place(1, 2), _holding({"a": "(1,) f"}, {"b": "(1,) f"}))
    assert names.global_name == {"b": "b"} and names.tied == () and names.prefix == ""
    names = agree_on_names(Place(1, 2), _holding({"0.weight": "(1,) f"}, {"0.weight": "(1,) f"}))
    assert names.global_name == {"0.weight": "stages.1.0.weight"}
    names = agree_on_names(Place(2, 3), _holding({"e": "(1,) f", "x": "f"}, {"y": "f"}, {"e": "(1,) f"}, tied=["e"]))
    assert names.global_name == {"e": "e"} and names.tied == ("e",) and names.tied_stages == (0, 2)


@pytest.mark.parametrize(
    ("stages", "tied", "told"),
    [
        (_holding({"e": "f"}, {"b": "f"}, tied=["e"]), 1, "tied parameter 'e' is on 1 of the 2 stages"),
        (_holding({"e": "(1,) f"}, {"e": "(2,) f"}, tied=["e"]), 1, r"tied parameter 'e' differs between stages: \['\(1,\) f', '\(2,\) f'\]"),
    ],
)
def test_tied_parameters_that_cannot_be_tied_are_refused(stages, tied, told):
    with pytest.raises(ValueError, match=told):
        agree_on_names(Place(0, 2), stages)
    with pytest.raises(ValueError, match="live on different stages"):
        agree_on_names(Place(0, 3), _holding({"e": "f", "d": "f"}, {"d": "f"}, {"e": "f"}, tied=["e", "d"]))
    with pytest.raises(ValueError, match=r"stage 0: replica 1 does not hold the same parameters as replica 0: a is \(3,\) f against \(2,\) f"):
        agree_on_names(Place(0, 1, 0, 2), _holding({"a": "(2,) f"}, {"a": "(3,) f"}))


def test_one_thread_and_single_operations():
    """pytorch #175145 (threads) and #174288 (batches of operations): the engine uses neither."""
    for path in pathlib.Path(engine.__file__).parent.glob("*.py"):
        if path.name != "baselines.py":
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"^\s*(import|from) (threading|concurrent|asyncio|multiprocessing)", text, re.M), path
            assert "batch_isend_irecv" not in text and ".is_completed(" not in text, path


