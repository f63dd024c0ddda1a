"""The pieces under the theorems: norms and their duals, test functions with their constants, momentum kernels, the bounds' single door.

Which bug fails here: a dual norm or lmo that does not fit its norm, a smoothness constant that is too small, a gradient that is not the function's,
kernel weights that the momentum recursion does not have.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from theory import gradient_correction, lmo_delay, update_correction
from theory.bounds import Correction, delayed_lmo_bound
from theory.geometry import GEOMETRIES, Layers, Spectral
from theory.kernels import best_shift, mean_age, square_sum, weights, weights_by_recursion
from theory.problems import LOGARITHM, QUADRATIC, STAR, line_quadratic, phi, phi_slope, random_problems
from theory.recursion import Rule, run

ALL = (*GEOMETRIES, Layers(Spectral(2, 3), 1.0, 0.3))
names = [geometry.name for geometry in ALL]


@pytest.mark.parametrize("geometry", ALL, ids=names)
def test_lmo_norm_and_dual_fit_together(geometry):
    rng = np.random.default_rng(0)
    M, D = rng.standard_normal((2, 500, *geometry.shape))
    u = geometry.lmo(M)
    assert np.all(geometry.norm(u) <= 1 + 1e-12)
    np.testing.assert_allclose((M * u).sum((-2, -1)), geometry.dual(M), rtol=1e-12)
    assert np.all((M * D).sum((-2, -1)) <= geometry.dual(M) * geometry.norm(D) * (1 + 1e-12))  # duality on random pairs
    assert np.all(geometry.dual(M) <= geometry.rho * np.sqrt((M * M).sum((-2, -1))) * (1 + 1e-12))  # A4


def test_rho_is_attained():
    for geometry in GEOMETRIES[:2]:
        D = np.eye(*geometry.shape)[None] if geometry.name == "spectral" else np.ones((1, *geometry.shape))
        np.testing.assert_allclose(geometry.dual(D), geometry.rho * np.sqrt((D * D).sum((-2, -1))))


@pytest.mark.parametrize("geometry", ALL, ids=names)
def test_functions_are_what_they_say(geometry):
    rng = np.random.default_rng(1)
    problem = random_problems(geometry, 300, rng, (QUADRATIC, LOGARITHM, STAR))
    direction = rng.standard_normal(problem.x0.shape)
    step = 1e-6
    slope = (problem.f(problem.x0 + step * direction) - problem.f(problem.x0 - step * direction)) / (2 * step)
    exact = (problem.grad(problem.x0) * direction).sum((-2, -1))
    np.testing.assert_allclose(slope, exact, rtol=1e-5, atol=1e-5 * np.abs(exact).max())
    Y = problem.x0 + rng.standard_normal(problem.x0.shape) * 10.0 ** rng.uniform(-2, 1, (300, 1, 1))
    change = geometry.dual(problem.grad(problem.x0) - problem.grad(Y))
    assert np.all(change <= problem.L * geometry.norm(problem.x0 - Y) * (1 + 1e-10))  # A2
    assert np.all(problem.f(problem.x0) >= 0) and np.all(problem.f(0 * problem.x0) == 0)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=names[:3])
def test_the_smoothness_constant_of_a_quadratic_is_attained(geometry):
    rng = np.random.default_rng(2)
    problem = random_problems(geometry, 50, rng, (QUADRATIC,))
    best = np.zeros(50)
    for _ in range(40):  # local maxima exist in ℓ_∞: restarts
        D = rng.standard_normal((50, *geometry.shape))
        for _ in range(60):  # ascent on the convex function ⟨D, PD⟩ over the unit ball: D ← lmo(PD)
            D = geometry.lmo(problem.grad(D))
        best = np.maximum(best, (D * problem.grad(D)).sum((-2, -1)) / problem.L)
    assert np.all(best <= 1 + 1e-9)
    assert np.all(best > 0.98)  # power iteration is slow where two eigenvalues are close


def test_the_star_function_is_star_convex_not_convex_and_smooth():
    u = np.linspace(-60, 60, 240001)
    kind = np.array(STAR)
    assert np.all(u * phi_slope(kind, u) - phi(kind, u) >= 0)
    curvature = np.gradient(phi_slope(kind, u), u)
    assert curvature.min() < -0.1 and np.abs(curvature).max() <= 1 + 1e-6


@settings(max_examples=60, deadline=None)
@given(st.floats(0.02, 1.0), st.integers(0, 25), st.floats(0, 1))
def test_kernel_weights_are_the_recursion(alpha, t, share):
    theta = share * (1 - alpha) / alpha
    for start, correction in (("first-gradient", 0.0), ("first-gradient", theta), ("zero", 0.0)):
        w = weights(alpha, t, correction, start)
        np.testing.assert_allclose(w, weights_by_recursion(alpha, t, correction, start), atol=1e-12 * max(1, theta))
        assert abs(w.sum() - 1) < 1e-9
        assert w.min() > -1e-12
        age = np.arange(t + 1)
        assert w @ age <= mean_age(alpha, correction) + 1e-9
        if start == "first-gradient":
            assert w @ w <= square_sum(alpha, correction) + (1 - alpha) ** (2 * t) + 1e-9


def test_best_shift_by_brute_force():
    for alpha in (1.0, 0.5, 0.1, 0.03):
        j = np.arange(3000)
        spread = [float((alpha * (1 - alpha) ** j) @ np.abs(j - k)) for k in range(60)]
        k, value = best_shift(alpha)
        assert k == int(np.argmin(spread))
        assert abs(value - min(spread)) < 1e-9


def test_one_door_leads_to_each_theorem():
    inputs = (2.0, 1.0, 0.1, 0.3, 0.5, 2.0, 50, 1)
    assert delayed_lmo_bound(*inputs).total == lmo_delay.bound(*inputs, metric="average").total
    assert delayed_lmo_bound(*inputs, metric="minimum").total == lmo_delay.bound(*inputs, metric="average-stale").total
    fed = delayed_lmo_bound(*inputs, correction=Correction("error-feedback", 1.0, staleness=0.4))
    assert fed.total == update_correction.bound(*inputs, theta=1.0, staleness=0.4, start="first").total
    inner = delayed_lmo_bound(*inputs, correction=Correction("gradient", 0.7))
    assert inner.total == gradient_correction.bound(*inputs, theta=0.7).total
    with pytest.raises(ValueError, match="'nesterov'"):
        delayed_lmo_bound(*inputs, correction=Correction("nesterov"))
    with pytest.raises(ValueError, match="theta"):
        delayed_lmo_bound(*inputs, correction=Correction("gradient", 5.0))
    with pytest.raises(ValueError, match="median"):
        delayed_lmo_bound(*inputs, metric="median")


def test_the_exact_start_is_sharper_and_still_a_bound():
    geometry, T = Spectral(3, 4), 12
    for delay in (0, 1, 3):
        problem = line_quadratic(geometry, start=float(T))
        path = run(problem, geometry, Rule(eta=1.0, alpha=0.4, delay=delay), T)
        measured = np.mean([geometry.dual(problem.grad(x))[0] for x in path.stale()])
        inputs = (problem.f(problem.x0)[0], 1.0, 1.0, 0.4, 0.0, geometry.rho, T, delay)
        assert measured <= lmo_delay.exact_start(*inputs).total < lmo_delay.bound(*inputs).total


def test_error_feedback_pays_off_in_the_bound_exactly_below_one():
    inputs = (2.0, 1.0, 0.1, 0.3, 0.5, 2.0, 50, 1)
    without = lmo_delay.bound(*inputs, metric="average").total
    for staleness in (0.2, 0.99, 1.01, 2.0):
        fed = update_correction.bound(*inputs, theta=1.0, staleness=staleness).total
        assert (fed < without) == bool(update_correction.helps(staleness))
