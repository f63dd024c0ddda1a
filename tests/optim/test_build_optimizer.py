"""`build_optimizer`: routing by global name, groups, settings, refusals, and the combined optimizer's state."""

import copy
import logging

import pytest
import torch

from onelag.optim import OPTIMIZERS, build_optimizer, route
from onelag.optim.combined import CombinedOptimizer


def language_model():
    torch.manual_seed(0)
    model = torch.nn.Module()
    model.embed_tokens = torch.nn.Embedding(7, 4)
    model.layers = torch.nn.ModuleList([torch.nn.ModuleDict({"q_proj": torch.nn.Linear(4, 4, bias=False), "norm": torch.nn.LayerNorm(4)})])
    model.experts = torch.nn.Parameter(torch.randn(3, 4, 4))
    model.lm_head = torch.nn.Linear(4, 7, bias=False)
    return model


def give_gradients(model, seed=0):
    for i, p in enumerate(model.parameters()):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * seed + i))


def test_hidden_matrices_and_nothing_else_go_to_the_matrix_optimizer():
    routing = route(language_model().named_parameters())
    assert {name for name, kind in routing.items() if kind == "matrix"} == {"layers.0.q_proj.weight", "experts"}
    assert len(routing) == 6


def test_a_stage_routes_as_the_whole_model():
    """Megatron 4641: the tied copy on the last stage must not be routed otherwise than the first stage's."""
    model = language_model()
    whole = route(model.named_parameters())
    parts = list(model.named_parameters())
    assert {**route(parts[:2]), **route(parts[2:])} == whole
    stage = build_optimizer("muon", parts[:1])  # a stage that holds the embedding only has no matrix, and works
    assert not isinstance(stage, CombinedOptimizer)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_parameter_is_in_one_group_and_vectors_are_not_decayed(name):
    model = language_model()
    optimizer = build_optimizer(name, model, lr=0.01, weight_decay=0.3)
    grouped = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(grouped) == len({id(p) for p in grouped}) == len(list(model.parameters()))
    for group in optimizer.param_groups:
        assert group["initial_lr"] == group["lr"] == 0.01
        for p in group["params"]:
            assert group["weight_decay"] == (0.3 if p.ndim >= 2 else 0.0)


def test_routing_is_logged_once_and_fallback_has_its_own_rate(caplog):
    with caplog.at_level(logging.INFO, logger="onelag"):
        optimizer = build_optimizer("muon", language_model(), lr=0.02, fallback_lr=0.003)
    assert len(caplog.records) == 1 and "2 matrices" in caplog.text
    assert sorted({group["lr"] for group in optimizer.param_groups}) == [0.003, 0.02]


@pytest.mark.parametrize("name", ["muon", "soap", "normuon"])
def test_combined_state_round_trip_and_part_equality(name):
    """The combination steps each part as the part alone would, and its state loads into a fresh one."""
    model, resumed = language_model(), language_model()
    optimizer = build_optimizer(name, model)
    for t in range(3):
        give_gradients(model, t)
        optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    assert sorted(index for group in state["param_groups"] for index in group["params"]) == list(range(6))
    again = build_optimizer(name, resumed)
    resumed.load_state_dict(model.state_dict())
    again.load_state_dict(state)
    for m, o in ((model, optimizer), (resumed, again)):
        give_gradients(m, 3)
        o.step()
    for a, b in zip(model.parameters(), resumed.parameters()):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match="parameter groups"):
        again.load_state_dict(build_optimizer("adamw", resumed).state_dict())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_builds_step_bitwise_alike(name):
    results = []
    for _ in range(2):
        model = language_model()
        optimizer = build_optimizer(name, model)
        for t in range(3):
            give_gradients(model, t)
            optimizer.step()
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_refusals():
    model = language_model()
    for words, action in {
        "unknown optimizer 'adm': choose one of adamw": lambda: build_optimizer("adm", model),
        "no setting momentum": lambda: build_optimizer("adamw", model, momentum=0.9),
        "matrices only": lambda: build_optimizer("adamw", model, fallback_lr=1e-3),
        "matches none": lambda: build_optimizer("muon", model, fallback=("*embed*", "*wte*")),
        "no trainable parameter": lambda: build_optimizer("adamw", torch.nn.Module()),
    }.items():
        with pytest.raises(ValueError, match=words):
            action()
