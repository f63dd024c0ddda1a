"""Worst cases from above and below, and the certificates.

Which bug fails here: a relaxation that cuts off a real instance, an "instance" that is not the function it claims, a certificate that verifies with a
multiplier changed.
"""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from theory import certificates, separable, worst_case_gd
from theory.worst_case_gd import Descent
from theory.worst_case_lmo import Method, closed_form, program, semidefinite, upper


@pytest.mark.parametrize(("steps", "delay"), [(4, 0), (5, 1), (7, 1), (6, 2), (8, 3)])
def test_the_closed_form_of_the_minimum(steps, delay):
    assert upper(Method(steps, delay)) == pytest.approx(closed_form(steps, delay), abs=1e-8)


def test_error_feedback_looks_worse_in_the_worst_case():
    plain, half, full = (upper(Method(6, 1, theta)) for theta in (0.0, 0.5, 1.0))
    assert plain < half < full
    assert full == pytest.approx(35 / 12, abs=1e-8)


def test_linear_and_semidefinite_program_agree():
    for method, metric in ((Method(3, 1, 1.0), "minimum"), (Method(4, 1), "average")):
        assert semidefinite(method, metric) == pytest.approx(upper(method, metric), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("theta", [0.0, 0.5, 1.0])
def test_linear_and_semidefinite_program_agree_at_eight_steps(theta):
    assert semidefinite(Method(8, 1, theta), "minimum") == pytest.approx(upper(Method(8, 1, theta), "minimum"), abs=1e-5)


@pytest.mark.parametrize(("delay", "theta"), [(0, 0.0), (1, 0.0), (1, 1.0), (2, 0.0)])
@pytest.mark.parametrize("metric", ["minimum", "average"])
def test_the_instance_is_real_and_below_the_upper_side(delay, theta, metric):
    method = Method(4, delay, theta)
    found = separable.optimum(method, metric)
    measured = separable.replay(method, found)
    attained = (measured[metric] - measured["Delta"] / method.steps) / measured["L"]
    assert attained == pytest.approx(found.constant, abs=2e-4)
    assert attained <= upper(method, metric) + 1e-6


def test_known_lower_constants():
    assert separable.optimum(Method(4, 0), "average").constant == pytest.approx(0.5, abs=1e-5)  # attained: equal to the upper side
    assert separable.optimum(Method(4, 1), "minimum").constant == pytest.approx(1 - 1 / 4, abs=1e-5)
    assert separable.optimum(Method(5, 1), "minimum").constant == pytest.approx(1 - 1 / 5, abs=1e-5)


@pytest.mark.slow
def test_known_lower_constants_at_eight_steps():
    assert separable.optimum(Method(8, 1), "minimum").constant == pytest.approx(1 - 1 / 8, abs=1e-4)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_a_piecewise_function_goes_through_its_data_and_is_smooth(seed):
    """Data taken from a random L-smooth function are always reproduced, with slopes that change at most by L per unit and the stated infimum."""
    rng = np.random.default_rng(seed)
    L = rng.uniform(0.5, 3)
    a, b = rng.uniform(0, 1), rng.uniform(0.5, 2)
    f = lambda x: L * (a * x**2 / 2 + (1 - a) * (1 - np.cos(b * x)) / b**2)  # noqa: E731  |f''| ≤ L, f ≥ 0
    g = lambda x: L * (a * x + (1 - a) * np.sin(b * x) / b)  # noqa: E731
    x = np.unique(np.round(rng.uniform(-4, 4, 5), 3))
    made = separable.Piecewise(x, f(x), g(x), L)
    for xi in x:
        value, slope = made(xi)
        assert value == pytest.approx(f(xi), abs=1e-8) and slope == pytest.approx(g(xi), abs=1e-8)
    grid = np.linspace(x[0] - 5, x[-1] + 5, 4001)
    values, slopes = np.array([made(v) for v in grid]).T
    assert np.abs(np.diff(slopes)).max() <= L * (grid[1] - grid[0]) * (1 + 1e-6)
    np.testing.assert_allclose(np.diff(values), (slopes[1:] + slopes[:-1]) / 2 * np.diff(grid), atol=2 * L * (grid[1] - grid[0]) ** 2)
    assert made.infimum() == pytest.approx(min(values.min(), (f(x) - g(x) ** 2 / (2 * L)).min()), abs=2e-4)
    assert made.infimum() <= values.min() + 1e-9


def test_linear_certificates_prove_the_printed_fractions():
    found = certificates.linear(Method(6, 1), "minimum")
    assert found.bound - Fraction(100, 6) == Fraction(3, 2) - Fraction(1, 6)
    assert certificates.linear(Method(6, 1, 1.0), "average").bound - Fraction(100, 6) == Fraction(41, 12)
    p = program(Method(4, 1))
    y = [certificates.linear(Method(4, 1), "minimum").multipliers.get(label, Fraction(0)) for label in p.labels]
    assert certificates.verify_linear(p, y) == Fraction(100, 4) + Fraction(5, 4)
    changed = list(y)
    changed[next(i for i, v in enumerate(y) if v)] += Fraction(1, 1000)
    with pytest.raises(ArithmeticError, match="do not add up"):
        certificates.verify_linear(p, changed)
    changed = list(y)
    changed[next(i for i, v in enumerate(y) if v)] *= -1
    with pytest.raises(ArithmeticError, match="negative"):
        certificates.verify_linear(p, changed)


def test_semidefinite_certificates_prove_their_bound():
    method, family = Descent(0.5, 2, 1), "convex"
    found = certificates.gram(method, family)
    optimum = worst_case_gd.worst(method, family)
    assert optimum <= float(found.bound) <= optimum * (1 + 2e-5)
    assert all(pivot > 0 for pivot in found.pivots)
    data = certificates.gram_problem(method, family)
    y = [found.multipliers.get(name, Fraction(0)) for name in data.names]
    y[0] = found.bound * Fraction(99, 100)  # a bound one percent below the optimum cannot be proved
    with pytest.raises(ArithmeticError, match="not positive definite"):
        certificates.verify_gram(data, y)


def test_gradient_descent_known_values():
    assert worst_case_gd.worst(Descent(0.5, 3, 0), "convex") == pytest.approx(1 / 8, abs=1e-6)
    assert worst_case_gd.worst(Descent(0.5, 3, 1), "convex") == pytest.approx(1 / 8, abs=1e-6)  # a delay that costs nothing
    assert worst_case_gd.worst(Descent(1.0, 2, 1), "convex") > 3 * worst_case_gd.worst(Descent(1.0, 2, 0), "convex")
    with pytest.raises(ValueError, match="'concave'"):
        worst_case_gd.worst(Descent(0.5), "concave")


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 9), st.integers(0, 3), st.floats(0, 2))
def test_displacements_are_the_recursion(steps, delay, theta):
    """x_t from `displacements` against the update rule with named directions."""
    rng = np.random.default_rng(0)
    u = rng.standard_normal(steps + 1)
    x, before = [0.0], None
    for t in range(steps):
        now = u[max(t - delay, 0)]
        x.append(x[-1] + now + theta * (now - (now if before is None else before)))
        before = now
    for i in range(steps + 1):
        got = sum(v * u[k] for k, v in Method(steps, delay, theta).between(0, i).items())
        assert got == pytest.approx(x[i], abs=1e-9)
