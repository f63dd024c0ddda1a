"""Muon and its orthogonalization against the formula, the exact polar factor, and torch's own Muon within bf16 tolerance."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onelag.optim import Muon, NorMuon, newton_schulz, svd_orthogonalize
from onelag.optim.muon import update_scale
from onelag.optim.newton_schulz import CUBIC, QUINTIC


def matrix(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 9), columns=st.integers(1, 9), batch=st.integers(1, 4), seed=st.integers(0, 999))
def test_converged_newton_schulz_is_the_polar_factor(rows, columns, batch, seed):
    m = matrix(batch, rows, columns, seed=seed)
    m = m + 0.3 * torch.eye(rows, columns, dtype=torch.float64)
    if torch.linalg.svdvals(m).amin() < 1e-2:
        return  # the iteration count below is for singular values that are not tiny
    torch.testing.assert_close(newton_schulz(m, 40, CUBIC), svd_orthogonalize(m), rtol=0, atol=1e-10)


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 12), columns=st.integers(1, 12), seed=st.integers(0, 999))
def test_quintic_is_its_scalar_polynomial_on_the_singular_values(rows, columns, seed):
    """The independent reference: U p⁵(S/‖M‖_F) Vᵀ with p(s) = a s + b s³ + c s⁵. Catches a wrong coefficient, power or transposition."""
    m = matrix(rows, columns, seed=seed)
    u, s, vh = torch.linalg.svd(m, full_matrices=False)
    s = s / m.norm()
    for _ in range(5):
        s = QUINTIC[0] * s + QUINTIC[1] * s**3 + QUINTIC[2] * s**5
    torch.testing.assert_close(newton_schulz(m), (u * s) @ vh, rtol=0, atol=1e-9)


def test_five_steps_end_near_semi_orthogonal():
    for shape in ((64, 64), (32, 96), (96, 32)):
        values = torch.linalg.svdvals(newton_schulz(matrix(*shape, dtype=torch.float32)))
        assert values.max() < 1.21 and values[: int(0.9 * len(values))].min() > 0.6


def test_inputs_are_not_modified_and_zero_gives_zero():
    for function in (newton_schulz, svd_orthogonalize):
        m = matrix(3, 5, 4)
        copy = m.clone()
        function(m)
        assert torch.equal(m, copy)
        assert torch.equal(function(torch.zeros(4, 6)), torch.zeros(4, 6))
    half = matrix(4, 4, dtype=torch.bfloat16)
    copy = half.clone()
    assert newton_schulz(half, dtype=torch.bfloat16).dtype == torch.bfloat16 and torch.equal(half, copy)


def reference_run(gradients, start, *, lr, beta, nesterov, form, decay, scaling):
    w, buffer = start.clone(), torch.zeros_like(start)
    for g in gradients:
        if form == "ema":
            buffer = beta * buffer + (1 - beta) * g
            direction = beta * buffer + (1 - beta) * g if nesterov else buffer
        else:
            buffer = beta * buffer + g
            direction = g + beta * buffer if nesterov else buffer
        u, _, vh = torch.linalg.svd(direction, full_matrices=False)
        rows, columns = w.shape
        scale = max(1, rows / columns) ** 0.5 if scaling == "original" else 0.2 * max(rows, columns) ** 0.5
        w = (1 - lr * decay) * w - lr * scale * u @ vh
    return w, buffer


@pytest.mark.parametrize(
    "nesterov, form, scaling, implementation",
    list(itertools.product([True, False], ["ema", "sum"], ["original", "match_rms_adamw"], ["fast", "reference"])),
)
def test_step_is_the_formula(nesterov, form, scaling, implementation):
    shapes = [(4, 6), (6, 4), (4, 6), (5, 5)]
    starts = [matrix(*shape, seed=i) for i, shape in enumerate(shapes)]
    parameters = [torch.nn.Parameter(w.clone()) for w in starts]
    options = dict(lr=0.03, weight_decay=0.2, nesterov=nesterov, momentum_form=form, scaling=scaling, implementation=implementation)
    optimizer = Muon(parameters, momentum=0.9, orthogonalization="svd", **options)
    gradients = [[matrix(*shape, seed=100 + 10 * t + i) for t in range(4)] for i, shape in enumerate(shapes)]
    for t in range(4):
        for p, g in zip(parameters, gradients):
            p.grad = g[t].clone()
        optimizer.step()
    for p, g, start in zip(parameters, gradients, starts):
        expected, buffer = reference_run(
            g, start, lr=0.03, beta=0.9, nesterov=nesterov, form=form, decay=0.2, scaling=scaling
        )
        torch.testing.assert_close(p.detach(), expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(optimizer.state[p]["momentum_buffer"], buffer, rtol=0, atol=1e-13)


@pytest.mark.parametrize("orthogonalization, cls", list(itertools.product(["newton_schulz", "svd"], [Muon, NorMuon])))
def test_fast_agrees_with_reference(orthogonalization, cls):
    """Same-shape batches, 3-D experts, a parameter without gradient: the two versions agree."""
    shapes = [(6, 4), (6, 4), (4, 6), (3, 6, 4), (3, 6, 4), (1, 7), (5, 5)]
    models = [[torch.nn.Parameter(matrix(*s, seed=i)) for i, s in enumerate(shapes)] for _ in range(2)]
    optimizers = [
        cls(ps, orthogonalization=orthogonalization, implementation=kind) for ps, kind in zip(models, ("fast", "reference"))
    ]
    for t in range(5):
        for ps, optimizer in zip(models, optimizers):
            for i, p in enumerate(ps):
                p.grad = None if (i, t) in ((1, 2), (4, 0)) else matrix(*p.shape, seed=50 * t + i)
            optimizer.step()
    for a, b in zip(*models):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_each_expert_is_a_matrix_of_its_own():
    stack = torch.nn.Parameter(matrix(3, 4, 6))
    single = [torch.nn.Parameter(stack[i].detach().clone()) for i in range(3)]
    gradient = matrix(3, 4, 6, seed=1)
    stack.grad = gradient
    for p, g in zip(single, gradient):
        p.grad = g.clone()
    Muon([stack]).step()
    Muon(single).step()
    torch.testing.assert_close(stack.detach(), torch.stack([p.detach() for p in single]), rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype, nesterov", list(itertools.product([torch.float32, torch.bfloat16], [True, False])))
def test_momentum_buffer_is_the_average_and_the_gradient_is_untouched(dtype, nesterov):
    """pytorch PR 194664: torch's Muon normalises its own buffer in place for bf16 without Nesterov; Jordan's overwrites p.grad."""
    p = torch.nn.Parameter(matrix(16, 24, dtype=dtype))
    optimizer = Muon([p], momentum=0.95, nesterov=nesterov, dtype=torch.bfloat16)
    average = torch.zeros_like(p)
    for t in range(6):
        gradient = matrix(16, 24, seed=t + 1, dtype=dtype)
        p.grad = gradient.clone()
        optimizer.step()
        average = average * 0.95 + gradient * (1 - 0.95)
        assert torch.equal(p.grad, gradient)
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(optimizer.state[p]["momentum_buffer"], average, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("orthogonalization", ["newton_schulz", "svd"])
def test_update_does_not_depend_on_the_gradients_scale(orthogonalization):
    """Down to gradients of 1e-10, where an eps of 1e-7 would have taken over."""
    updates = []
    for scale in (1.0, 1e-10, 1e6):
        p = torch.nn.Parameter(torch.zeros(12, 20))
        optimizer = Muon([p], lr=1.0, weight_decay=0.0, orthogonalization=orthogonalization)
        for t in range(3):
            p.grad = scale * matrix(12, 20, seed=t, dtype=torch.float32)
            optimizer.step()
        updates.append(p.detach().clone())
    for other in updates[1:]:
        torch.testing.assert_close(other, updates[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize("nesterov", [True, False])
def test_torch_muon_within_bf16_tolerance(nesterov):
    """A cross-check only: torch's Muon computes in bf16 whatever the parameters are (so the singular directions of small value differ)."""
    ours, theirs = (torch.nn.Parameter(matrix(32, 48, dtype=torch.float32)) for _ in range(2))
    a = Muon([ours], lr=0.1, weight_decay=0.1, nesterov=nesterov, dtype=torch.bfloat16)
    b = torch.optim.Muon([theirs], lr=0.1, weight_decay=0.1, nesterov=nesterov, momentum=0.95, ns_steps=5)
    for t in range(3):
        ours.grad = matrix(32, 48, seed=t, dtype=torch.float32)
        theirs.grad = ours.grad.clone()
        a.step()
        b.step()
    update_a, update_b = (p.detach() - matrix(32, 48, dtype=torch.float32) for p in (ours, theirs))
    assert torch.nn.functional.cosine_similarity(update_a.flatten(), update_b.flatten(), 0) > 0.999
    torch.testing.assert_close(update_a.norm(), update_b.norm(), rtol=1e-2, atol=0)


def test_normuon_rows_have_equal_size_and_the_norm_is_kept():
    p = torch.nn.Parameter(torch.zeros(10, 30, dtype=torch.float64))
    optimizer = NorMuon([p], lr=1.0, weight_decay=0.0, beta2=0.0, scaling="original", orthogonalization="svd")
    p.grad = matrix(10, 30) * torch.logspace(-3, 3, 10, dtype=torch.float64).unsqueeze(1)
    optimizer.step()
    rows = p.detach().norm(dim=1)
    torch.testing.assert_close(rows, torch.full_like(rows, rows[0].item()), rtol=1e-6, atol=0)
    torch.testing.assert_close(p.detach().norm(), torch.tensor(10**0.5, dtype=torch.float64), rtol=1e-6, atol=0)


def test_scales():
    assert update_scale(torch.Size([8, 2]), "original") == 2.0
    assert update_scale(torch.Size([2, 8]), "original") == 1.0
    assert update_scale(torch.Size([4, 25, 9]), "match_rms_adamw") == pytest.approx(1.0)


def test_refusals_name_the_parameter():
    vector = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match=r"layers\.0\.bias has shape \(3,\)"):
        Muon([("layers.0.bias", vector)])
    with pytest.raises(ValueError, match="number 1"):
        Muon([torch.nn.Parameter(torch.zeros(2, 2)), vector])
    for bad in ({"lr": -1.0}, {"momentum": 1.0}, {"scaling": "none"}, {"orthogonalization": "qr"}, {"momentum_form": "x"}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            Muon([torch.nn.Parameter(torch.zeros(2, 2))], **bad)
