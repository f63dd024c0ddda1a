"""The delayed and the corrected recursion against their formulas, on a quadratic with SGD, in float64.

Which bug fails here: an off-by-one in the delay, momentum or decay acting on the stale weights, the correction one step early or late, the
learning rate left out of the stored update, a wrong sign.
"""

import itertools

import pytest
import torch

from onelag.delay import DelayCompensation, ErrorFeedback, SimulatedDelay, WeightPrediction, stage_delays

LR, STEPS = 0.05, 14


def problem(seed=0):
    generator = torch.Generator().manual_seed(seed)
    hessian = torch.randn(5, 5, generator=generator, dtype=torch.float64)
    hessian = hessian @ hessian.T / 5 + 0.1 * torch.eye(5, dtype=torch.float64)
    noise = torch.randn(STEPS, 5, generator=generator, dtype=torch.float64)
    return torch.randn(5, generator=generator, dtype=torch.float64), lambda t, w: hessian @ w + 0.3 * noise[t]


def sgd_update(gradient, weights, buffer, lr, momentum, decay):
    """torch's SGD on vectors, decay decoupled by hand: returns (u, buffer)."""
    buffer = gradient if buffer is None else momentum * buffer + gradient
    return lr * (buffer if momentum else gradient) + lr * decay * weights, buffer


class DecoupledSGD(torch.optim.SGD):
    """SGD with decoupled decay, so that u contains a term in the weights."""

    def __init__(self, params, decay=0.0, **settings):
        super().__init__(params, **settings)
        self.decay = decay

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(1 - group["lr"] * self.decay)
        return super().step()


def recursion(start, gradient, delay, coefficient, momentum, decay, form="update", rates=None):
    """x_{t+1} = x_t − u_t − c (u_t − u_{t−1}) as it is written; the lookahead form works on y. Returns x_0 … x_STEPS and y."""
    x, y, buffer, last = [start], start, None, None
    for t in range(STEPS):
        lr = LR if rates is None else rates[t]
        g = gradient(t, x[max(t - delay, 0)])
        if form == "update":
            u, buffer = sgd_update(g, x[t], buffer, lr, momentum, decay)
            x.append(x[t] - u - (coefficient * (u - last) if last is not None else 0))
            y = x[-1] + coefficient * u
        else:
            u, buffer = sgd_update(g, y, buffer, lr, momentum, decay)
            if last is None:
                x.append(y - u)
                y = y - u + coefficient * u
            else:
                y = y - u
                x.append(y - coefficient * u)
        last = u
    return x, y


def run(wrap, start, gradient, momentum, decay, rates=None):
    """The parameter's value before each step and after the last one, newest weights at the end, and y."""
    p = torch.nn.Parameter(start.clone())
    optimizer = wrap(DecoupledSGD([p], lr=LR, momentum=momentum, decay=decay))
    seen = []
    for t in range(STEPS):
        if rates is not None:
            optimizer.param_groups[0]["lr"] = rates[t]
        seen.append(p.detach().clone())
        p.grad = gradient(t, p.detach())
        optimizer.step()
        optimizer.zero_grad()
    newest, base = p.detach().clone(), p.detach().clone()
    if hasattr(optimizer, "latest_weights"):
        with optimizer.latest_weights():
            newest = p.detach().clone()
        with optimizer.base_weights():
            base = p.detach().clone()
    return seen, newest, base


@pytest.mark.parametrize("delay, momentum, decay", list(itertools.product([0, 1, 2, 5], [0.0, 0.9], [0.0, 0.1])))
def test_delay_is_the_formula(delay, momentum, decay):
    start, gradient = problem()
    expected, _ = recursion(start, gradient, delay, 0.0, momentum, decay)
    seen, newest, _ = run(lambda o: SimulatedDelay(o, steps=delay), start, gradient, momentum, decay)
    for t in range(STEPS):
        torch.testing.assert_close(seen[t], expected[max(t - delay, 0)], rtol=0, atol=1e-14)
    torch.testing.assert_close(newest, expected[-1], rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    "delay, momentum, decay, coefficient, form",
    list(itertools.product([0, 1, 2], [0.0, 0.9], [0.0, 0.1], [0.5, 1.0, 1.5], ["update", "lookahead"])),
)
def test_correction_is_the_formula(delay, momentum, decay, coefficient, form):
    start, gradient = problem(1)
    rates = [LR * (1 + 0.1 * t) / (1 + 0.2 * t) for t in range(STEPS)]  # a changing rate shows an update stored without it
    expected, base = recursion(start, gradient, delay, coefficient, momentum, decay, form, rates)
    seen, newest, y = run(
        lambda o: SimulatedDelay(ErrorFeedback(o, coefficient, form), steps=delay), start, gradient, momentum, decay, rates
    )
    for t in range(STEPS):
        torch.testing.assert_close(seen[t], expected[max(t - delay, 0)], rtol=0, atol=1e-13)
    torch.testing.assert_close(newest, expected[-1], rtol=0, atol=1e-13)
    torch.testing.assert_close(y, base, rtol=0, atol=1e-13)


def test_first_corrected_update_is_the_second():
    start, gradient = problem(2)
    seen, _, _ = run(lambda o: SimulatedDelay(ErrorFeedback(o)), start, gradient, 0.0, 0.0)
    x0 = start
    u0, u1, u2 = LR * gradient(0, x0), LR * gradient(1, x0), LR * gradient(2, x0 - LR * gradient(0, x0))
    torch.testing.assert_close(seen[1], x0, rtol=0, atol=0)  # batches 0 and 1 both at W(0)
    torch.testing.assert_close(seen[2], x0 - u0, rtol=0, atol=1e-15)
    torch.testing.assert_close(seen[3], x0 - u0 - 2 * u1 + u0, rtol=0, atol=1e-15)
    torch.testing.assert_close(seen[4], x0 - u0 - 2 * u1 + u0 - 2 * u2 + u1, rtol=0, atol=1e-15)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_correction_is_plain_delay_at_the_extrapolated_point(momentum):
    """E2: with y_t = x_t + last applied u, y follows the plain method with gradients taken at 2 y_{t−1} − y_{t−2}, one step late."""
    start, gradient = problem(3)
    seen, newest, _ = run(lambda o: SimulatedDelay(ErrorFeedback(o)), start, gradient, momentum, 0.0)
    # From y_1 = x_0 on: y_{t+1} = y_t − u_t, gradient of step t at x_{t−1} = 2 y_{t−1} − y_{t−2} where those exist.
    buffer, x, y = None, [start], [None]
    for t in range(STEPS):
        u, buffer = sgd_update(gradient(t, x[max(t - 1, 0)]), start, buffer, LR, momentum, 0.0)
        if t == 0:
            y.append(start)
            x.append(start - u)
        else:
            y.append(y[t] - u)
            x.append(2 * y[t + 1] - y[t])
    for t in range(1, STEPS):
        torch.testing.assert_close(seen[t], x[t - 1], rtol=0, atol=1e-13)
    torch.testing.assert_close(newest, x[-1], rtol=0, atol=1e-13)


def test_weight_prediction_is_the_lookahead_from_the_first_step():
    start, gradient = problem(4)
    for tau in (1, 3):
        seen, newest, base = run(lambda o, tau=tau: SimulatedDelay(WeightPrediction(o, steps=tau), steps=tau), start, gradient, 0.9, 0.0)
        x, y, buffer = [start], start, None
        for t in range(STEPS):
            g = gradient(t, x[max(t - tau, 0)])
            buffer = g if buffer is None else 0.9 * buffer + g
            y = y - LR * buffer
            x.append(y - tau * LR * buffer)
        for t in range(STEPS):
            torch.testing.assert_close(seen[t], x[max(t - tau, 0)], rtol=0, atol=1e-13)
        torch.testing.assert_close(newest, x[-1], rtol=0, atol=1e-13)
        torch.testing.assert_close(base, y, rtol=0, atol=1e-13)


@pytest.mark.parametrize("decay", [None, 0.95])
def test_delay_compensation_is_its_formula(decay):
    start, gradient = problem(5)
    tau, strength = 2, 0.7
    seen, newest, _ = run(
        lambda o: SimulatedDelay(DelayCompensation(o, tau, strength, decay), steps=tau), start, gradient, 0.9, 0.0
    )
    x, buffer, square = [start], None, torch.zeros_like(start)
    for t in range(STEPS):
        old = x[max(t - tau, 0)]
        g = gradient(t, old)
        scale = strength
        if decay is not None:
            square = decay * square + (1 - decay) * g**2
            scale = strength / (square + 1e-7).sqrt()
        g = g + scale * g * g * (x[t] - old)
        buffer = g if buffer is None else 0.9 * buffer + g
        x.append(x[t] - LR * buffer)
    for t in range(STEPS):
        torch.testing.assert_close(seen[t], x[max(t - tau, 0)], rtol=0, atol=1e-13)
    torch.testing.assert_close(newest, x[-1], rtol=0, atol=1e-13)


def test_per_parameter_delays_and_pipedream_stages():
    """Coupled parameters with delays 2, 1, 0: the gradient of step t sees W_p(max(t − τ_p, 0)) for each p."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(3, 3, dtype=torch.float64) for _ in range(3)))
    delays = stage_delays(model.named_parameters(), lambda name: int(name.split(".")[0]), 3)
    assert sorted(set(delays.values())) == [0, 1, 2]
    optimizer = SimulatedDelay(torch.optim.SGD(model.parameters(), lr=0.1), steps=delays)
    names = dict(model.named_parameters())
    history = [{n: p.detach().clone() for n, p in names.items()}]
    for t in range(8):
        inputs = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(t))
        stale = {n: history[max(t - delays[p], 0)][n].requires_grad_() for n, p in names.items()}
        loss = torch.func.functional_call(model, stale, (inputs,)).square().sum()
        gradients = dict(zip(stale, torch.autograd.grad(loss, list(stale.values()))))
        history.append({n: (history[t][n] - 0.1 * gradients[n]).detach() for n in names})
        model(inputs).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with optimizer.latest_weights():
        for n, p in names.items():
            torch.testing.assert_close(p.detach(), history[-1][n], rtol=0, atol=1e-14)
