"""Three versions of one rule step side by side: theory's recursion, the simulation of onelag.delay, and the real pipeline.

Which bug fails here: any of the three with another delay, another first step, the correction one step off, or y (z) read at another point.
"""

import numpy as np
import pytest
import torch

from onelag.delay import ErrorFeedback, SimulatedDelay, WeightPrediction
from onelag.optim import Muon
from onelag.pipeline.schedules import Schedule2BW
from tests.pipeline.toys import ROWS, Toy, batch, loss_fn, merged
from tests.pipeline.worlds import run as run_world
from theory.geometry import Spectral
from theory.problems import random_problems
from theory.recursion import Rule, run
from theory.weight_prediction import PredictedPath

STEPS = 25
GEOMETRY = Spectral(3, 4)


def matrix_problem(seed=0):
    return random_problems(GEOMETRY, 1, np.random.default_rng(seed))


class WithoutWrapper:
    """The bare optimizer with the two contexts of the wrappers."""

    def __init__(self, optimizer):
        self.step = optimizer.step


def simulate(problem, wrap, eta, beta, nesterov=False):
    """x before each step (where the gradient is taken), newest x and y after each, with Muon by SVD in float64."""
    p = torch.nn.Parameter(torch.tensor(problem.x0[0]))
    muon = Muon([p], lr=eta, momentum=beta, nesterov=nesterov, weight_decay=0.0, orthogonalization="svd")
    optimizer = wrap(muon)
    seen, newest, base = [], [], []
    for _ in range(STEPS):
        seen.append(p.detach().numpy().copy())
        p.grad = torch.tensor(problem.grad(seen[-1][None])[0])
        optimizer.step()
        with optimizer.latest_weights():
            newest.append(p.detach().numpy().copy())
        with optimizer.base_weights():
            base.append(p.detach().numpy().copy())
    return np.array(seen), np.array(newest), np.array(base)


@pytest.mark.parametrize("form", ["update", "lookahead"])
@pytest.mark.parametrize(("delay", "theta"), [(0, 1.0), (1, 0.5), (1, 1.0), (2, 1.0), (3, 1.7)])
def test_error_feedback_under_delay(form, delay, theta):
    problem = matrix_problem(delay)
    eta, beta = 0.1, 0.9
    seen, newest, base = simulate(problem, lambda inner: SimulatedDelay(ErrorFeedback(inner, theta, form), delay), eta, beta)
    path = run(problem, GEOMETRY, Rule(eta, 1 - beta, delay, theta, lag=1, start="first", momentum="zero"), STEPS)
    np.testing.assert_allclose(seen, path.stale()[:, 0], atol=1e-9)
    np.testing.assert_allclose(newest, path.x[1:, 0], atol=1e-9)
    np.testing.assert_allclose(base, path.z[1:, 0], atol=1e-9)


@pytest.mark.parametrize(("delay", "nesterov"), [(0, False), (1, False), (1, True), (4, True)])
def test_plain_delay_and_nesterov(delay, nesterov):
    problem = matrix_problem(10 + delay)
    eta, beta = 0.1, 0.8
    seen, newest, _ = simulate(problem, lambda inner: SimulatedDelay(inner, delay), eta, beta, nesterov)
    rule = Rule(eta, 1 - beta, delay, inner=beta if nesterov else 0.0, momentum="zero")
    path = run(problem, GEOMETRY, rule, STEPS)
    np.testing.assert_allclose(seen, path.stale()[:, 0], atol=1e-9)
    np.testing.assert_allclose(newest, path.x[1:, 0], atol=1e-9)


@pytest.mark.parametrize("delay", [1, 2])
def test_weight_prediction(delay):
    """theory's predictor "last" in the z-form, zero momentum start: the direction of an LMO does not see the start's scale."""
    problem = matrix_problem(20 + delay)
    eta, beta = 0.1, 0.9
    _, newest, base = simulate(problem, lambda inner: SimulatedDelay(WeightPrediction(inner, delay), delay), eta, beta)
    # PredictedPath starts momentum at the first gradient; Muon starts at zero. With β = 0 the two agree from the first step on.
    seen0, newest0, base0 = simulate(problem, lambda inner: SimulatedDelay(WeightPrediction(inner, delay), delay), eta, 0.0)
    path = PredictedPath(problem, GEOMETRY, Rule(eta, 1.0, delay), STEPS, "last")
    np.testing.assert_allclose(base0, path.z[1:, 0], atol=1e-9)
    np.testing.assert_allclose(newest0, path.x[1:, 0], atol=1e-9)
    np.testing.assert_allclose(seen0[0], problem.x0[0])
    if delay == 1:  # and at τ = 1 it is error feedback but for the first step (Proposition E2)
        rule = Rule(eta, 1 - beta, 1, 1.0, start="zero", momentum="zero")
        path = run(problem, GEOMETRY, rule, STEPS)
        np.testing.assert_allclose(newest, path.x[1:, 0], atol=1e-9)
        np.testing.assert_allclose(base, path.z[1:, 0], atol=1e-9)


# -- the pipeline ------------------------------------------------------------------------------------------------------------------
LR, BETA, COEFFICIENT, BATCHES, MICROBATCHES = 0.3, 0.9, 0.8, 6, 2


def train_pipeline(rank, world, forms):
    """The weights of this stage after BATCHES batches of 2BW, per form, in float64."""
    results = {}
    for form in forms:
        module = Toy(rank, world).double()
        optimizer = torch.optim.SGD(module.parameters(), lr=LR, momentum=BETA)
        if form:
            optimizer = ErrorFeedback(optimizer, COEFFICIENT, form)
        pipe = Schedule2BW(module, loss_fn, optimizer, num_microbatches=MICROBATCHES, timeout=30)
        pipe.run((batch(t, MICROBATCHES * ROWS) for t in range(BATCHES)), updates=BATCHES)
        results[form] = {name: p.detach().clone() for name, p in module.named_parameters()}
    return results


class ModelProblem:
    """The whole model as theory's problem: x is the flat parameter vector, (1, d, 1); the k-th gradient asked for is that of batch k."""

    def __init__(self):
        self.model = Toy(0, 1).double()
        self.shapes = {name: p.shape for name, p in self.model.named_parameters()}
        self.x0 = self.flatten({name: p.detach() for name, p in self.model.named_parameters()})
        self.asked = 0

    def flatten(self, values):
        return torch.cat([values[name].reshape(-1) for name in self.shapes]).numpy()[None, :, None].copy()

    def grad(self, X):
        offset = 0
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(torch.tensor(X[0, offset : offset + p.numel(), 0]).view(self.shapes[name]))
                offset += p.numel()
        inputs, targets = batch(self.asked, MICROBATCHES * ROWS)
        self.asked += 1
        self.model.zero_grad()
        loss_fn(self.model(inputs), targets).backward()
        return self.flatten({name: p.grad for name, p in self.model.named_parameters()})


@pytest.mark.parametrize("world", [2, 3])
def test_the_pipeline_runs_theorys_recursion(world):
    forms = ["", "update", "lookahead"]
    parts = run_world(train_pipeline, world, forms)
    for form in forms:
        problem, step = ModelProblem(), iter(range(BATCHES))

        def heavy_ball(M, step=step):  # torch's buffer is the sum, theory's zero-start EMA divides by its mass
            return M * (1 - BETA ** (next(step) + 1)) / (1 - BETA)

        rule = Rule(LR, 1 - BETA, 1, COEFFICIENT if form else 0.0, start="first", momentum="zero")
        path = run(problem, None, rule, BATCHES, lmo=heavy_ball)
        got = problem.flatten(merged([part[form] for part in parts]))
        np.testing.assert_allclose(got, path.x[-1], atol=1e-10)
        assert np.abs(path.x[-1] - path.x[0]).max() > 0.1  # it did move
