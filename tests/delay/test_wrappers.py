"""The wrappers as optimizers: bitwise transparency, resume, missing gradients, memory, contexts, refusals; around every optimizer of the study."""

import copy
import io
import itertools
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onelag.delay import DelayCompensation, ErrorFeedback, SimulatedDelay, WeightPrediction
from onelag.optim import OPTIMIZERS, build_optimizer

WRAPS = {
    "delay 0": lambda o: SimulatedDelay(o, steps=0),
    "coefficient 0": lambda o: ErrorFeedback(o, coefficient=0),
    "coefficient 0, lookahead": lambda o: ErrorFeedback(o, coefficient=0, form="lookahead"),
    "prediction 0": lambda o: WeightPrediction(o, steps=0),
    "compensation 0": lambda o: DelayCompensation(o, steps=0),
}
ACTIVE = {
    "delay 1": lambda o: SimulatedDelay(o),
    "delay 3": lambda o: SimulatedDelay(o, steps=3),
    "update": lambda o: SimulatedDelay(ErrorFeedback(o)),
    "lookahead": lambda o: SimulatedDelay(ErrorFeedback(o, 0.5, "lookahead"), steps=2),
    "update alone": lambda o: ErrorFeedback(o),
    "prediction": lambda o: SimulatedDelay(WeightPrediction(o, 2), steps=2),
    "compensation": lambda o: SimulatedDelay(DelayCompensation(o, 1, 2.0, 0.95)),
}


def small_model(dtype=torch.float64, seed=0):
    """Names as the language models have them, so that routing sends two matrices to the matrix optimizer and the rest to AdamW."""
    torch.manual_seed(seed)
    model = torch.nn.ModuleDict(
        {
            "embed": torch.nn.Embedding(11, 8),
            "up": torch.nn.Linear(8, 12, bias=False),
            "down": torch.nn.Linear(12, 8, bias=False),
            "norm": torch.nn.LayerNorm(8),
            "lm_head": torch.nn.Linear(8, 11, bias=False),
        }
    )
    return model.to(dtype)


def backward(model, t):
    tokens = torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(t))
    hidden = model["embed"](tokens)
    hidden = model["norm"](hidden + model["down"](torch.relu(model["up"](hidden))))
    logits = model["lm_head"](hidden)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten()).backward()


def advance(model, optimizer, steps):
    for t in steps:
        backward(model, t)
        optimizer.step()
        optimizer.zero_grad()


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name, wrap", list(itertools.product(OPTIMIZERS, WRAPS)))
def test_zero_is_bitwise_the_bare_optimizer(name, wrap):
    bare, wrapped = small_model(torch.float32), small_model(torch.float32)
    advance(bare, build_optimizer(name, bare), range(5))
    advance(wrapped, WRAPS[wrap](build_optimizer(name, wrapped)), range(5))
    assert same(weights(bare), weights(wrapped))


@pytest.mark.parametrize("name, wrap", list(itertools.product(OPTIMIZERS, ACTIVE)))
def test_resume_is_bitwise_around_every_optimizer(name, wrap):
    """Through a real torch.save: after 4 steps, 3 more in one go equal 3 more after loading into fresh objects."""
    model = small_model(torch.float32)
    optimizer = ACTIVE[wrap](build_optimizer(name, model))
    advance(model, optimizer, range(4))
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    advance(model, optimizer, range(4, 7))
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    other = small_model(torch.float32, seed=9)
    again = ACTIVE[wrap](build_optimizer(name, other))
    other.load_state_dict(saved["model"])
    again.load_state_dict(saved["optimizer"])
    advance(other, again, range(4, 7))
    assert same(weights(model), weights(other))
    with optimizer.latest_weights(), again.latest_weights():
        assert same(weights(model), weights(other))


@pytest.mark.parametrize("wrap", ACTIVE)
def test_resume_at_every_step(wrap):
    states, model = [], small_model()
    optimizer = ACTIVE[wrap](build_optimizer("adamw", model))
    for t in range(6):
        states.append(copy.deepcopy((model.state_dict(), optimizer.state_dict())))
        advance(model, optimizer, [t])
    for t, (model_state, optimizer_state) in enumerate(states):
        other = small_model(seed=5)
        again = ACTIVE[wrap](build_optimizer("adamw", other))
        other.load_state_dict(model_state)
        again.load_state_dict(optimizer_state)
        advance(other, again, range(t, 6))
        assert same(weights(model), weights(other)), f"resumed at step {t}"


def test_a_model_saved_at_the_latest_weights_still_resumes():
    """The stale version comes from the optimizer's state: a model checkpoint taken inside latest_weights() loses nothing."""
    model = small_model()
    optimizer = SimulatedDelay(build_optimizer("adamw", model))
    advance(model, optimizer, range(4))
    with optimizer.latest_weights():
        newest = copy.deepcopy(model.state_dict())
    state = copy.deepcopy(optimizer.state_dict())
    advance(model, optimizer, range(4, 6))
    other = small_model(seed=3)
    other.load_state_dict(newest)
    again = SimulatedDelay(build_optimizer("adamw", other))
    again.load_state_dict(state)
    advance(other, again, range(4, 6))
    assert same(weights(model), weights(other))


def test_state_moves_to_another_dtype():
    model = small_model(torch.float32)
    optimizer = SimulatedDelay(ErrorFeedback(build_optimizer("adamw", model)))
    advance(model, optimizer, range(3))
    half = small_model(torch.bfloat16)
    half.load_state_dict(model.state_dict())
    moved = SimulatedDelay(ErrorFeedback(build_optimizer("adamw", half)))
    moved.load_state_dict(optimizer.state_dict())
    advance(half, moved, range(3, 5))
    entry = moved.state_dict()["state"][0]
    assert entry["error_feedback.kept"].dtype == entry["simulated_delay.version_0"].dtype == torch.bfloat16


@pytest.mark.parametrize("form", ["update", "lookahead"])
def test_a_parameter_without_gradient_stays_and_forgets(form):
    p, q = (torch.nn.Parameter(torch.full((3,), 1.0, dtype=torch.float64)) for _ in range(2))
    optimizer = ErrorFeedback(torch.optim.SGD([p, q], lr=0.1), form=form)
    for t in range(3):
        p.grad, q.grad = torch.full_like(p, t + 1.0), torch.full_like(q, 1.0)
        optimizer.step()
    before = p.detach().clone()
    p.grad = None
    optimizer.step()
    assert torch.equal(p.detach(), before)
    p.grad, q.grad = torch.full_like(p, 5.0), torch.full_like(q, 1.0)
    optimizer.step()
    torch.testing.assert_close(p.detach(), before - 0.1 * 5.0, rtol=0, atol=1e-15)  # a first update again: not corrected


def test_a_parameter_without_gradient_keeps_its_place_in_the_delay():
    p, q = (torch.nn.Parameter(torch.zeros(2, dtype=torch.float64)) for _ in range(2))
    for wrap in (lambda o: SimulatedDelay(o, 2), lambda o: SimulatedDelay(ErrorFeedback(o, form="lookahead"), 2)):
        with torch.no_grad():
            p.zero_(), q.zero_()
        optimizer = wrap(torch.optim.SGD([p, q], lr=1.0))
        for t in range(5):
            p.grad, q.grad = (torch.ones_like(p) if t == 0 else None), torch.ones_like(q)
            optimizer.step()
            expected = 0.0 if t < 2 else -1.0  # W(1) = −1 for good; seen two steps later
            assert torch.equal(p.detach(), torch.full_like(p, expected)), (t, p)


@settings(max_examples=25, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(1, 4), min_size=0, max_size=3), min_size=1, max_size=4),
    cut=st.integers(0, 3),
    tau=st.integers(0, 3),
    form=st.sampled_from(["update", "lookahead"]),
    missing=st.lists(st.booleans(), min_size=24, max_size=24),
    seed=st.integers(0, 99),
)
def test_any_shapes_groups_and_missing_gradients(shapes, cut, tau, form, missing, seed):
    """Both forms against the formula per parameter, whatever the shapes, the grouping, and the gradients that are not there."""
    generator = torch.Generator().manual_seed(seed)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in shapes]
    groups = [{"params": g, "lr": 0.1 * (i + 1)} for i, g in enumerate((parameters[: cut + 1], parameters[cut + 1 :])) if g]
    rates = [g["lr"] for g in groups for _ in g["params"]]
    optimizer = SimulatedDelay(ErrorFeedback(torch.optim.SGD(groups, lr=0.1), form=form), steps=tau)
    x, last = [[p.detach().clone()] for p in parameters], [None] * len(parameters)
    for t in range(6):
        for i, p in enumerate(parameters):
            assert torch.allclose(p.detach(), x[i][max(t - tau, 0)], rtol=0, atol=1e-12)
            if missing[(t * len(parameters) + i) % 24]:
                p.grad, last[i] = None, None
                x[i].append(x[i][t])
            else:
                p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64)
                u = rates[i] * p.grad
                x[i].append(x[i][t] - u - (u - last[i] if last[i] is not None else 0))
                last[i] = u
        optimizer.step()


def test_memory_is_one_buffer_per_wrapper():
    """Exactly: ErrorFeedback one parameter-sized tensor, SimulatedDelay `steps`, counted by storage."""

    def live_bytes(optimizer, model):
        own = [p for p in model.parameters()]
        kept = [t for entry in optimizer.state_dict()["state"].values() for key, t in entry.items() if "." in key]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in [*own, *kept]}.values())

    for form, tau in itertools.product(("update", "lookahead"), (0, 1, 3)):
        model = small_model()
        size = sum(p.numel() * 8 for p in model.parameters())
        optimizer = SimulatedDelay(ErrorFeedback(build_optimizer("adamw", model), form=form), steps=tau)
        advance(model, optimizer, range(4))
        assert live_bytes(optimizer, model) == size * (1 + 1 + tau)


def test_contexts_show_the_newest_weights_and_put_everything_back():
    model = small_model()
    optimizer = SimulatedDelay(ErrorFeedback(build_optimizer("adamw", model)), steps=2)
    advance(model, optimizer, range(5))
    stale = weights(model)
    with pytest.raises(KeyError), optimizer.latest_weights():
        newest = weights(model)
        raise KeyError
    assert same(weights(model), stale) and not same(newest, stale)
    with optimizer.base_weights():
        assert not same(weights(model), newest)
        for action in (optimizer.step, optimizer.state_dict, lambda: optimizer.load_state_dict({})):
            with pytest.raises(RuntimeError, match="base_weights"):
                action()
    assert same(weights(model), stale)
    advance(model, optimizer, [5, 6])  # two more steps, and what was newest is what the gradient is taken at
    assert same(weights(model), newest)


def test_parameters_that_are_views_of_one_bucket_keep_their_memory():
    flat = torch.randn(20, dtype=torch.float64)
    parts = [torch.nn.Parameter(flat[:12].view(3, 4)), torch.nn.Parameter(flat[12:])]
    whole = [torch.nn.Parameter(p.detach().clone()) for p in parts]
    optimizers = [SimulatedDelay(ErrorFeedback(torch.optim.SGD(ps, lr=0.1), form="lookahead"), 2) for ps in (parts, whole)]
    for _ in range(6):
        for ps, optimizer in zip((parts, whole), optimizers):
            for p in ps:
                p.grad = torch.sin(p.detach())
            optimizer.step()
        assert same(parts, whole)
        assert torch.equal(torch.cat([p.detach().flatten() for p in parts]), flat)  # the bucket still is the parameters


def test_schedulers_hooks_and_groups_work_on_the_wrapper():
    model = small_model()
    inner = build_optimizer("muon", model)
    optimizer = SimulatedDelay(ErrorFeedback(inner))
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "mark": 1})
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.5**t)
    peak = [group["lr"] for group in inner.param_groups]
    advance(model, optimizer, [0])
    scheduler.step()
    assert [group["lr"] for group in inner.param_groups] == [lr / 2 for lr in peak]
    assert calls == ["pre", "post"] and optimizer.state_dict()["mark"] == 1
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)  # torch replaces the inner groups here; the wrapper must follow
    optimizer.param_groups[0]["lr"] = 123.0
    assert inner.param_groups[0]["lr"] == 123.0
    advance(model, pickle.loads(pickle.dumps(SimulatedDelay(torch.optim.SGD(model.parameters(), lr=0.1)))), [])


@pytest.mark.parametrize("kernel", [{"foreach": True}, {"foreach": False}, {"fused": True}])
def test_every_kernel_of_torch_gives_the_same_run(kernel):
    """foreach and fused kernels write through lists of tensors: an exchange of storages that they did not see would show here."""
    plain, other = small_model(), small_model()
    optimizers = [
        SimulatedDelay(ErrorFeedback(torch.optim.AdamW([{"params": list(m.parameters())[:2], "lr": 1e-2}, {"params": list(m.parameters())[2:]}], **k)))
        for m, k in ((plain, {"foreach": False}), (other, kernel))
    ]
    for model, optimizer in zip((plain, other), optimizers):
        advance(model, optimizer, range(6))
    for a, b in zip(plain.parameters(), other.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_gradients_are_left_alone():
    for wrap in ACTIVE.values():
        model = small_model()
        optimizer = wrap(build_optimizer("sgd", model))
        for t in range(3):
            backward(model, t)
            before = [p.grad.clone() for p in model.parameters()]
            optimizer.step()
            assert same(before, [p.grad for p in model.parameters()])
            optimizer.zero_grad()


def test_refusals_are_one_clear_line():
    p = torch.nn.Parameter(torch.zeros(2))
    sgd = torch.optim.SGD([p], lr=0.1)
    cases = [
        (ValueError, "0 or more", lambda: SimulatedDelay(sgd, steps=-1)),
        (TypeError, "integer", lambda: SimulatedDelay(sgd, steps=1.5)),
        (ValueError, "must name each", lambda: SimulatedDelay(sgd, steps={})),
        (ValueError, "0 or more", lambda: ErrorFeedback(sgd, coefficient=-0.1)),
        (ValueError, "finite", lambda: ErrorFeedback(sgd, coefficient=float("nan"))),
        (ValueError, "form", lambda: ErrorFeedback(sgd, form="other")),
        (TypeError, "inside the delay", lambda: ErrorFeedback(SimulatedDelay(sgd))),
        (TypeError, "Optimizer", lambda: SimulatedDelay(p)),
        (RuntimeError, "closure", lambda: SimulatedDelay(sgd).step(lambda: 0.0)),
        (RuntimeError, "closure", lambda: ErrorFeedback(sgd).step(lambda: 0.0)),
        (ValueError, "added later", lambda: SimulatedDelay(sgd).add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})),
        (ValueError, "saved without SimulatedDelay", lambda: SimulatedDelay(sgd).load_state_dict(sgd.state_dict())),
        (ValueError, "steps", lambda: SimulatedDelay(sgd, 1).load_state_dict(SimulatedDelay(sgd, 2).state_dict())),
        (ValueError, "form", lambda: ErrorFeedback(sgd).load_state_dict(ErrorFeedback(sgd, form="lookahead").state_dict())),
        (ValueError, "steps", lambda: WeightPrediction(sgd, -1)),
        (ValueError, "strength", lambda: DelayCompensation(sgd, 1, -1.0)),
    ]
    for error, words, action in cases:
        with pytest.raises(error, match=words) as caught:
            action()
        assert "\n" not in str(caught.value)
