"""Two measurements that decide which part of the theory speaks about real training: do consecutive directions agree, and how sharp is the loss.

Directions (theory/update_correction.py, theory/correlation.py). Error feedback helps the bound iff δ̄ < 1, δ̄ the mean of ‖u_{t−1} − u_{t−2}‖ in the method's
norm; in an inner-product geometry iff the cosine of consecutive directions exceeds 1/2.
Sharpness (theory/adam.py, theory/stability.py). ηλ_max(P⁻¹H) with P = √v̂ + ε of AdamW: a synchronous run may sit anywhere below 2(1+β₁)/(1−β₁) (38 at 0.9), a
delayed one is driven back to 1, one with error feedback to 2.70.
"""

from collections.abc import Callable
from statistics import mean, median

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from onelag.experiments.theory_tightness import Run, Setup, Values, combine, inner
from onelag.models.loss import next_token_loss

BETAS = (0.0, 0.5, 0.9, 0.95)


def measure_directions(quick: bool = False, say: Callable = print) -> list[dict]:
    """Per optimizer and β, delayed with error feedback: means over the second half of the run and over seeds."""
    rows = []
    steps, seeds = (12, 1) if quick else (100, 2)
    for optimizer in ("muon", "adamw"):
        for beta in (0.9,) if quick else BETAS:
            found = [
                _directions(Setup(optimizer, 0.01 if optimizer == "muon" else 0.003, 0.003, beta, correction=True, steps=steps, seed=s))
                for s in range(seeds)
            ]
            row = {"optimizer": optimizer, "beta": beta, "n": seeds, **{key: mean(one[key] for one in found) for key in found[0]}}
            say(
                f"  {optimizer} β = {beta}: cosine {row['cosine']:.3f}, δ̄ {row['staleness_norm']:.2f} (median layer {row['staleness_median_layer']:.2f})"
            )
            rows.append(row)
    return rows


def _directions(setup: Setup) -> dict[str, float]:
    run, before, last = Run(setup), None, None
    cosine, layers, whole, rms, loss = [], [], [], [], []
    y = run.base()
    for t in range(setup.steps):
        picked = torch.randperm(setup.pool, generator=run.generator)[: setup.batch]
        value, g = run.gradient(run.read(), picked)
        run.step(g)
        after = run.base()
        u = combine(y, after, 1 / setup.lr, -1 / setup.lr)
        y = after
        if before is not None and t >= setup.steps // 2:
            change = combine(u, before)
            cosine.append(inner(u, before) / (inner(u, u) * inner(before, before)) ** 0.5)
            rms.append((inner(change, change) / inner(u, u)) ** 0.5)
            whole.append(run.norm(change))
            layers.append(run.norm(change, of=median))
            loss.append(value)
        before = u if t else None  # the first difference of the corrected chain is not a step
        last = loss[-1] if loss else last
    return {
        "cosine": mean(cosine),
        "staleness_rms": mean(rms),
        "staleness_norm": mean(whole),
        "staleness_median_layer": mean(layers),
        "loss": mean(loss[-10:]),
    }


def measure_sharpness(quick: bool = False, say: Callable = print) -> list[dict]:
    """ηλ_max(P⁻¹H) at the plain chain y along AdamW runs: sync, delayed, delayed with error feedback."""
    rows = []
    for lr, beta in ((0.003, 0.9),) if quick else ((0.003, 0.9), (0.003, 0.0)):
        for name, delay, correction in (("sync", 0, False), ("delayed", 1, False), ("error feedback", 1, True)):
            setup = Setup("adamw", lr, lr, beta, delay, correction, steps=12 if quick else 240, seed=0)  # full pool: no minibatch noise
            curve = _sharpness(setup, every=6 if quick else 40)
            rows.append({"mode": name, "beta1": beta, "lr": lr, "n": 1, "curve": curve})
            say(
                f"  lr {lr} β₁ = {beta} {name}: "
                + ", ".join(f"{point['eta_lambda']:.2f}" for point in curve)
                + f"; loss {curve[-1]['loss']:.3f}"
            )
    return rows


def _sharpness(setup: Setup, every: int) -> list[dict]:
    run, curve = Run(setup), []
    for t in range(1, setup.steps + 1):
        loss, g = run.gradient(run.read())
        run.step(g)
        if t % every == 0:
            curve.append({"step": t, "loss": loss, "eta_lambda": setup.lr * _largest(run, _preconditioner(run, t))})
    return curve


def _preconditioner(run: Run, t: int) -> Values:
    """√v̂ + ε of the AdamW inside, by parameter name."""
    state = run.optimizer.state
    found = {}
    for name, p in run.named.items():
        beta2, epsilon = 0.95, 1e-8
        found[name] = (state[p]["exp_avg_sq"] / (1 - beta2**t)).sqrt() + epsilon
    return found


def _largest(run: Run, P: Values, iterations: int = 20) -> float:
    """Largest eigenvalue of P^{−1/2} H P^{−1/2} at y on the pool: Lanczos with exact Hessian products and full reorthogonalization (float64 basis)."""
    at = {n: v.detach().requires_grad_() for n, v in run.base().items()}
    root = torch.cat([v.sqrt().reshape(-1) for v in P.values()]).double()
    with sdpa_kernel(SDPBackend.MATH):  # the fused attention has no second derivative
        loss = next_token_loss(torch.func.functional_call(run.model, at, (run.inputs,)), run.targets)
        first = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(at.values()), create_graph=True)])
        basis = [torch.randn(len(root), generator=torch.Generator().manual_seed(0), dtype=torch.float64)]
        basis[0] /= basis[0].norm()
        alpha, beta = [], []
        for _ in range(iterations):
            product = torch.autograd.grad(first, list(at.values()), (basis[-1] / root).to(first.dtype), retain_graph=True)
            w = torch.cat([h.reshape(-1) for h in product]).double() / root
            alpha.append(float(w @ basis[-1]))
            for v in basis:
                w -= (w @ v) * v
            beta.append(float(w.norm()))
            basis.append(w / beta[-1])
    T = torch.diag(torch.tensor(alpha)) + torch.diag(torch.tensor(beta[:-1]), 1) + torch.diag(torch.tensor(beta[:-1]), -1)
    return float(torch.linalg.eigvalsh(T)[-1])
