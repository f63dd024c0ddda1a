"""How loose the theory is on a language model, and whether its assumptions hold there: measurements on tiny byte-level models.

`python -m onelag.experiments.theory_tightness` writes results/theory/language_model.json (about 10 minutes on 2 cores), which theory/figures.py draws beside
the model problems. The objective is a fixed pool of sequences, so f, ∇f and the noise of a minibatch are exact; L, σ are estimated along the run, ρ is known.

Terms (theory/inexact.py, Theorem 5, in the product norm of theory/layerwise.py: spectral for hidden matrices, ℓ_∞ for the rest, radii = step multipliers).
Per step, with y_t the plain chain, q_t = ⟨M_t, u_t⟩/‖M_t‖_*, κ_t = ‖u_t‖:   q_t‖∇f(y_t)‖_* ≤ (f_t − f_{t+1})/η + (q_t + κ_t)‖M_t − ∇f(y_t)‖_* + Lκ_t²η/2.
"allowed" is the theorem's bound of each part with κ = max κ_t and the mean q; "used" is what the run used; "measured" is the mean of q_t‖∇f(y_t)‖_*.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from onelag.data.source import load_source
from onelag.delay import ErrorFeedback, SimulatedDelay
from onelag.experiments.provenance import ROOT, machine
from onelag.models.build import build_model
from onelag.models.dense import DenseConfig
from onelag.models.loss import next_token_loss
from onelag.optim import build_optimizer
from onelag.optim.routing import route
from onelag.report.store import write_atomically

TINY = DenseConfig(vocab_size=256, num_layers=2, width=48, num_heads=3, num_kv_heads=1, ffn_width=128)
Values = dict[str, Tensor]


@dataclass(frozen=True)
class Setup:
    """One run at constant step and without decay: momentum β for every part, `rest_lr` for what Muon does not take."""

    optimizer: str = "muon"
    lr: float = 0.005
    rest_lr: float = 0.002
    beta: float = 0.9
    delay: int = 1
    correction: bool = False
    steps: int = 100
    pool: int = 64
    batch: int = 16
    length: int = 64
    seed: int = 0


class Run:
    """A model, its fixed pool of sequences and its optimizer; values are dicts by parameter name."""

    def __init__(self, setup: Setup, config: DenseConfig = TINY):
        self.setup, self.model = setup, build_model(config, setup.seed)
        tokens = torch.from_numpy(load_source("sotu", "bytes").train.astype("int64"))
        self.generator = torch.Generator().manual_seed(1000 + setup.seed)
        starts = torch.randint(0, len(tokens) - setup.length - 1, (setup.pool,), generator=self.generator)
        windows = torch.stack([tokens[s : s + setup.length + 1] for s in starts])
        self.inputs, self.targets = windows[:, :-1], windows[:, 1:]
        self.named = dict(self.model.named_parameters())
        self.routing = route(self.named.items()) if setup.optimizer == "muon" else dict.fromkeys(self.named, "fallback")
        inner = self._inner()
        self.corrected = ErrorFeedback(inner, coefficient=1.0, form="lookahead") if setup.correction else inner
        self.optimizer = SimulatedDelay(self.corrected, setup.delay)

    def _inner(self) -> torch.optim.Optimizer:
        setup = self.setup
        if setup.optimizer == "adamw":
            return build_optimizer("adamw", self.model, lr=setup.lr, weight_decay=0.0, betas=(setup.beta, 0.95))
        if setup.optimizer != "muon":
            raise ValueError(f"optimizer must be 'muon' or 'adamw', but got {setup.optimizer!r}")
        muon = build_optimizer(
            "muon", self.model, lr=setup.lr, weight_decay=0.0, fallback_lr=setup.rest_lr, momentum=setup.beta, nesterov=False
        )
        for group in muon.param_groups:
            if "betas" in group:
                group["betas"] = (setup.beta, 0.95)
        return muon

    @property
    def lr(self) -> float:
        return self.setup.lr

    def radius(self, name: str) -> float:
        """r_l: the layer's step in units of η."""
        if self.routing[name] == "matrix":
            rows, columns = self.named[name].shape
            return math.sqrt(max(1.0, rows / columns))
        return self.setup.rest_lr / self.setup.lr if self.setup.optimizer == "muon" else 1.0

    def dual(self, values: Values) -> float:
        return sum(
            self.radius(n) * float(torch.linalg.svdvals(v).sum() if self.routing[n] == "matrix" else v.abs().sum())
            for n, v in values.items()
        )

    def norm(self, values: Values, of: Callable = max) -> float:
        """max over layers of ‖x_l‖/r_l; `of` may be another summary of the layers' norms."""
        return of(
            [
                float(torch.linalg.matrix_norm(v, 2) if self.routing[n] == "matrix" else v.abs().max()) / self.radius(n)
                for n, v in values.items()
            ]
        )

    @property
    def rho(self) -> float:
        """A4: ρ² = Σ r_l²ρ_l², ρ_l² = the smaller side (spectral) or the number of entries (ℓ_∞)."""
        return math.sqrt(
            sum(self.radius(n) ** 2 * (min(p.shape) if self.routing[n] == "matrix" else p.numel()) for n, p in self.named.items())
        )

    def read(self) -> Values:
        return {n: p.detach().clone() for n, p in self.named.items()}

    def gradient(self, at: Values | None = None, rows: Tensor | None = None) -> tuple[float, Values]:
        """(loss, gradient) on the pool or on some of its rows, at given values or where the model is."""
        rows = torch.arange(len(self.inputs)) if rows is None else rows
        values = self.named if at is None else {n: v.detach().requires_grad_() for n, v in at.items()}
        logits = torch.func.functional_call(self.model, values, (self.inputs[rows],))
        loss = next_token_loss(logits, self.targets[rows])
        found = torch.autograd.grad(loss, list(values.values()))
        return float(loss.detach()), {n: g.detach() for n, g in zip(values, found)}

    def step(self, gradient: Values) -> None:
        for n, p in self.named.items():
            p.grad = gradient[n].clone()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def base(self) -> Values:
        """y: the plain chain's newest value (x itself without correction)."""
        with self.optimizer.base_weights() if self.setup.correction else self.optimizer.latest_weights():
            return self.read()


def combine(a: Values, b: Values, s: float = 1.0, t: float = -1.0) -> Values:
    return {n: s * a[n] + t * b[n] for n in a}


def inner(a: Values, b: Values) -> float:
    return float(sum((a[n] * b[n]).sum() for n in a))


def measure_terms(setup: Setup, say: Callable = print) -> dict:
    """One run: terms allowed and used, in units of the measured mean of q_t‖∇f(y_t)‖_*; and the estimates that went in."""
    run, alpha, eta, T = Run(setup), 1 - setup.beta, setup.lr, setup.steps
    begun = time.time()
    y = run.base()
    f, full = run.gradient(y)
    losses, gradients, points = [f], [full], [y]  # at the plain chain
    M = N = None
    noise_sq, rows = [], []
    for t in range(T):
        stale = run.read()
        picked = torch.randperm(setup.pool, generator=run.generator)[: setup.batch]
        known = not setup.correction and t >= setup.delay  # without correction the stale point is an earlier y, whose gradient is known
        exact = gradients[-1 - setup.delay] if known else run.gradient(stale)[1]
        g = run.gradient(stale, picked)[1]
        n = combine(g, exact)
        noise_sq.append(inner(n, n))
        zero = {k: torch.zeros_like(v) for k, v in g.items()}
        M, N = (combine(M or zero, g, setup.beta, alpha), combine(N or zero, n, setup.beta, alpha))
        mass = 1 - setup.beta ** (t + 1)
        momentum, noise = combine(M, zero, 1 / mass), combine(N, zero, 1 / mass)
        run.step(g)
        after = run.base()
        u = combine(
            points[-1], after, 1 / eta, -1 / eta
        )  # y_{t+1} = y_t − ηu_t; under correction y_1 = x_0 (c = 1), where the chain begins
        if setup.correction and t == 0:
            points[-1] = after
            continue
        f_next, full_next = run.gradient(after)
        error = combine(combine(momentum, noise), gradients[-1])
        quality = inner(momentum, u) / run.dual(momentum)
        rows.append(
            {
                "q": quality,
                "kappa": run.norm(u),
                "noise": run.dual(noise),
                "drift": run.dual(error),
                "gradient": run.dual(gradients[-1]),
                "curvature": (f_next - losses[-1] + eta * inner(gradients[-1], u)) / eta,
                "staleness": run.norm(combine(points[-1], stale)) / eta,
            }
        )
        losses.append(f_next)
        gradients.append(full_next)
        points.append(after)
    say(
        f"  {setup.optimizer}{' + error feedback' if setup.correction else ''}: loss {losses[0]:.3f} → {losses[-1]:.3f}, {time.time() - begun:.0f} s"
    )
    return _row(setup, run, rows, losses, gradients, points, noise_sq)


def _row(setup: Setup, run: Run, rows: list[dict], losses, gradients, points, noise_sq) -> dict:
    eta, alpha, T = setup.lr, 1 - setup.beta, len(rows)
    L = max(
        run.dual(combine(gradients[t], gradients[t - j])) / run.norm(combine(points[t], points[t - j]))
        for j in (1, 2, 4, 8)
        for t in range(j, T + 1, j)
    )
    sigma = math.sqrt(sum(noise_sq) / len(noise_sq))
    mean = lambda key: sum(key(r) for r in rows) / T  # noqa: E731
    kappa, q = max(r["kappa"] for r in rows), mean(lambda r: r["q"])
    staleness = mean(lambda r: r["staleness"])
    both = q + kappa
    allowed = {
        "start": losses[0] / (eta * T),  # f_* ≥ 0
        "noise": both * run.rho * sigma * (math.sqrt(alpha / (2 - alpha)) + 1 / (alpha * T)),
        "drift": both * L * eta * (kappa * (1 - alpha) / alpha + staleness),
        "curvature": L * kappa**2 * eta / 2,
    }
    used = {
        "start": (losses[0] - losses[-1]) / (eta * T),
        "noise": mean(lambda r: (r["q"] + r["kappa"]) * r["noise"]),
        "drift": mean(lambda r: (r["q"] + r["kappa"]) * r["drift"]),
        "curvature": mean(lambda r: r["curvature"]),
    }
    measured = mean(lambda r: r["q"] * r["gradient"])
    scaled = lambda terms: {k: v / measured for k, v in terms.items()}  # noqa: E731
    label = {"muon": "Muon", "adamw": "AdamW"}[setup.optimizer] + (" + EF" if setup.correction else "")
    return {
        "case": f"language model, {label}",
        "n": 1,
        "allowed": scaled(allowed),
        "used": scaled(used),
        "bound_over_measured": sum(allowed.values()) / measured,
        "used_over_measured": sum(used.values()) / measured,
        "estimates": {
            "L": L,
            "sigma": sigma,
            "rho": run.rho,
            "kappa": kappa,
            "q": q,
            "staleness": staleness,
            "mean_gradient": mean(lambda r: r["gradient"]),
        },
        "loss": [losses[0], losses[-1]],
        "setup": asdict(setup),
    }


def measure_all(quick: bool = False, say: Callable = print, keep: Callable = lambda found: None) -> dict:
    """Everything of this file and of `theory_assumption`; quick: a few steps, to see that it runs. `keep` gets what is there after each part."""
    from onelag.experiments.theory_assumption import measure_directions, measure_sharpness

    steps = 12 if quick else 100
    cases = (
        Setup("muon", steps=steps),
        Setup("muon", correction=True, steps=steps),
        Setup("adamw", lr=0.002, steps=steps),
        Setup("adamw", lr=0.002, correction=True, steps=steps),
    )
    found = {}
    parts = {
        "rows": ("terms of the bound", lambda: [measure_terms(setup, say) for setup in cases]),
        "sharpness": ("sharpness in Adam's own metric", lambda: measure_sharpness(quick, say)),
        "directions": ("directions of consecutive updates", lambda: measure_directions(quick, say)),
    }
    for key, (title, work) in parts.items():
        say(title)
        found[key] = work()
        keep(found)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few steps each, and no result file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    begun, source = time.time(), load_source("sotu", "bytes")
    path = ROOT / "results" / "theory" / "language_model.json"

    def keep(found: dict) -> None:
        provenance = {**machine(), "corpus_sha256": source.corpus_sha256, "threads": 1, "seconds": round(time.time() - begun, 1)}
        record = {"schema": 1, "name": "language_model", **found, "provenance": provenance}
        write_atomically(path, json.dumps(record, indent=1, allow_nan=False) + "\n")
        print(f"wrote {path.relative_to(ROOT)} after {provenance['seconds']} s", flush=True)

    measure_all(options.quick, lambda line: print(line, flush=True), (lambda found: None) if options.quick else keep)


if __name__ == "__main__":
    main()
