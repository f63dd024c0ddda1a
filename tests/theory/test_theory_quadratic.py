"""The quadratic model: characteristic polynomials against the recursion's own matrix, limits against exact arithmetic, Adam's fixed point, momentum.

Which bug fails here: a polynomial of another method, a limit off by more than 1e-12, a variance read at the wrong iterate, an Adam prediction that the
simulation does not show.
"""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from theory import adam, momentum
from theory.limit_cycle import cycle, mean_residual
from theory.stability import (
    EMA,
    NESTEROV,
    best_theta,
    exact_limit,
    limit_corrected,
    limit_nesterov_corrected,
    limit_plain,
    polynomial,
    schur_stable,
)
from theory.variance import lyapunov, state_space, variance


def recursion_matrix(direction, beta, h, theta, delay):
    """The linear map of the recursion, column by column, from the recursion written out as code (λ = 1, η = h/(1−β))."""
    eta, size = h / (1 - beta), delay + 3

    def step(state):
        x, m, last = state[: delay + 1], state[delay + 1], state[delay + 2]
        g = x[delay]
        m = beta * m + (1 - beta) * g
        u = m if direction == EMA else beta * m + (1 - beta) * g
        return np.array([x[0] - eta * (u + theta * (u - last)), *x[:-1], m, u])

    return np.stack([step(np.eye(size)[i]) for i in range(size)], axis=1)


cases = st.tuples(
    st.sampled_from([EMA, NESTEROV]), st.floats(0.05, 0.97), st.floats(0.05, 3), st.sampled_from([0.0, 0.5, 1.0, 1.7]), st.integers(0, 4)
)


@settings(max_examples=80, deadline=None)
@given(cases)
def test_the_polynomial_is_the_recursion(case):
    direction, beta, h, theta, delay = case
    matrix = recursion_matrix(direction, beta, h, theta, delay)
    np.testing.assert_allclose(state_space(direction, beta, h, theta, delay)[0], matrix, atol=1e-12)
    own = np.poly(matrix)
    stated = np.array(polynomial(direction, beta, h, theta, delay), float)
    padded = np.concatenate([stated, np.zeros(len(own) - len(stated))]) if len(stated) < len(own) else stated
    np.testing.assert_allclose(own, padded[: len(own)], atol=1e-9)
    assert not np.any(padded[len(own) :])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.fractions(-2, 2, max_denominator=20), min_size=1, max_size=5))
def test_schur_cohn_agrees_with_roots(tail):
    coefficients = [Fraction(1), *tail]
    largest = np.abs(np.roots([float(c) for c in coefficients])).max(initial=0.0)
    if abs(largest - 1) > 1e-3:
        assert schur_stable(coefficients) == (largest < 1)


def test_the_paper_table_of_limits():
    """ηλ at β = 0.9: 38, 1, 2.702, 3.025, 3.450, against exact bisection."""
    beta = Fraction(9, 10)
    scale = 10
    for direction, theta, delay, value in (
        (EMA, Fraction(0), 0, 38.0),
        (EMA, Fraction(0), 1, 1.0),
        (EMA, Fraction(1), 1, 2.70156),
        (NESTEROV, Fraction(1), 1, 3.45),
        (NESTEROV, Fraction(0), 1, 2.531),
    ):
        assert scale * float(exact_limit(direction, beta, theta, delay)) == pytest.approx(value, rel=2e-4)
    theta = Fraction(best_theta(0.9)).limit_denominator(10**9)
    assert scale * float(exact_limit(EMA, beta, theta, 1)) == pytest.approx(3.025, rel=1e-6)


def test_the_correction_helps_stability_exactly_above_one_half():
    for beta in (0.0, 0.3, 0.49, 0.51, 0.7, 0.95):
        assert (limit_corrected(beta, 1.0) > limit_plain(beta, 1)) == (beta > 0.5)
    assert limit_corrected(0.5, 1.0) == pytest.approx(0.5, abs=1e-15)


def test_best_theta_is_best():
    for beta in (0.2, 0.6, 0.9, 0.97):
        grid = max(limit_corrected(beta, theta) for theta in np.linspace(0.01, 4, 4001))
        best = limit_corrected(beta, best_theta(beta))
        assert grid <= best * (1 + 1e-12) and best == pytest.approx((2 - beta) ** 2 / 4, rel=1e-12)


def test_nesterov_with_error_feedback_tends_to_a_third():
    assert float(limit_nesterov_corrected(0.9999)) == pytest.approx(1 / 3, rel=1e-3)


def test_variance_crossing_at_three_fifths():
    small = 1e-4
    for beta in (0.3, 0.55, 0.65, 0.9):
        h = (1 - beta) * small
        assert (variance(EMA, beta, h, 1.0, 1, "x") < variance(EMA, beta, h, 0.0, 1)) == (beta > 0.6)
    with pytest.raises(ValueError, match="lyapunov"):
        variance(EMA, 0.9, 0.01, 0.0, 2)


def test_lyapunov_reads_z_where_z_is():
    """z_t = x_t + θηu_{t−1} is the plain chain: z_{t+1} = z_t − ηu_t, so the variance of its increment is η² Var u."""
    F, G, z = state_space(EMA, 0.8, 0.05, 1.0, 1)
    from scipy.linalg import solve_discrete_lyapunov

    V = solve_discrete_lyapunov(F, G @ G.T)
    step, noise = z @ F - z, z @ G
    increment = float(step @ V @ step + noise @ noise)
    eta, last = 0.05 / 0.2, len(z) - 1
    assert increment == pytest.approx(eta**2 * V[last, last], rel=1e-9)
    assert lyapunov(EMA, 0.8, 0.05, 1.0, 1, "z") < lyapunov(EMA, 0.8, 0.05, 1.0, 1, "x")


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 5), st.integers(1, 96), st.integers(0, 6))
def test_limit_cycle_exactly(delay, numerator, whole):
    if numerator % 97:
        period, mean = cycle(Fraction(numerator, 97) + whole, delay)
        assert (period, mean) == (4 * delay + 2, mean_residual(Fraction(delay)))


def test_adam_floor_ratios():
    assert adam.floor_ratio(0.0) == pytest.approx(2) and adam.floor_ratio(0.9) == pytest.approx(38)
    assert adam.floor_ratio(0.9, "error feedback") == pytest.approx(38 / 2.70156, rel=1e-5)
    for eta, beta1, scheme in ((0.3, 0.9, "delayed"), (2.0, 0.0, "sync"), (5.0, 0.95, "error feedback")):
        assert np.sqrt(adam.predicted_variance(eta, beta1, 0.0, scheme)) == pytest.approx(eta / adam.edge(beta1, scheme))
        small, large = (adam.predicted_variance(eta, beta1, sigma, scheme) for sigma in (1e-6, 10.0))
        assert small == pytest.approx((eta / adam.edge(beta1, scheme)) ** 2, rel=1e-3) and large > 0


def test_adam_simulation_is_adam():
    """Against torch's AdamW with its bias correction taken out, under the package's own delay: 60 steps in float64."""
    import torch

    from onelag.delay import SimulatedDelay

    steps, sigma, eta, beta1, beta2, d = 60, 0.3, 0.05, 0.9, 0.99, 3
    H = np.diag([1.0, 0.3, 0.1])
    rng = np.random.default_rng(5)
    x0 = 0.1 * eta * rng.standard_normal((1, d))
    noise = [sigma * rng.standard_normal((1, d)) for _ in range(steps)]
    p = torch.nn.Parameter(torch.tensor(x0))
    inner = torch.optim.Adam([p], lr=eta, betas=(beta1, beta2), eps=1e-300)
    v0 = sigma**2 + 0.01 * eta**2
    inner.state[p] = {"step": torch.tensor(10.0**6), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.full_like(p, v0)}  # β^{10⁶} = 0
    optimizer = SimulatedDelay(inner, steps=1)
    seen = []
    for t in range(steps):
        p.grad = p.detach() @ torch.tensor(H) + torch.tensor(noise[t])
        optimizer.step()
        with optimizer.latest_weights():
            seen.append(p.detach().numpy().copy())
    rule = adam.Adam(np.array([eta]), np.array([beta1]), np.array([sigma]), beta2)
    moments, _ = adam.simulate(H, rule, steps, 5)
    kept = np.stack(seen[steps // 2 :])[:, 0]
    np.testing.assert_allclose(moments[0], np.mean(kept[:, :, None] * kept[:, None, :], axis=0), rtol=1e-9, atol=1e-15)


def test_the_first_moment_is_to_blame_not_the_second():
    by_case = {row["case"]: row for row in adam.ablation(beta1=0.9, steps=3000)}
    assert by_case["delayed"]["flat_slowdown"] > 3
    assert by_case["delayed m, fresh v"]["flat_slowdown"] == pytest.approx(by_case["delayed"]["flat_slowdown"], rel=0.03)
    assert by_case["fresh m, delayed v"]["flat_slowdown"] == pytest.approx(1, abs=0.03)
    assert by_case["delayed, aligned axes"]["flat_slowdown"] == pytest.approx(1, abs=0.03)
    assert by_case["delayed + error feedback"]["flat_slowdown"] < 2


def test_momentum_exposes_when_curvature_limits_and_not_when_noise_does():
    grid = np.geomspace(1e-3, 20, 24)
    quiet = [momentum.tuned_gaps(momentum.Spectrum(1e-3, steps=512), beta, grid) for beta in (0.0, 0.9)]
    loud = [momentum.tuned_gaps(momentum.Spectrum(0.3, steps=512), beta, grid) for beta in (0.0, 0.9)]
    assert quiet[1]["edge"] > 1 and quiet[1]["delayed"] > 1.5 * quiet[0]["delayed"]
    assert loud[1]["edge"] < 0.3 and all(row["delayed"] < 1.05 for row in loud)
    with pytest.raises(ValueError, match="power of two"):
        momentum.second_moment(0.9, 0.1, 0.0, 1, 100, 1.0, 0.0)
