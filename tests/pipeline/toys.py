"""A small model cut into stages, its data, its optimizers, and the one-process oracle that the engine is held against."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from onelag import ErrorFeedback, Muon, SimulatedDelay
from onelag.delay import stage_delays

WIDTH, VOCABULARY, LENGTH, ROWS = 16, 32, 8, 2


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class Toy(nn.Module):
    """Blocks `first` to `last` of `layers`; the embedding on the first stage, the head on the last. Names are global."""

    def __init__(self, stage: int, num_stages: int, layers: int = 4, dropout: float = 0.0, tied: bool = False):
        super().__init__()
        bounds = [layers * s // num_stages for s in range(num_stages + 1)]
        self.is_first, self.is_last, self.tied = stage == 0, stage == num_stages - 1, tied
        self.tied_names = ("embed.weight",) if tied else ()
        if self.is_first or (tied and self.is_last):
            self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(i): Block(dropout) for i in range(bounds[stage], bounds[stage + 1])})
        if self.is_last and not tied:
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():  # by name, so that every split starts from the same values
            generator = torch.Generator().manual_seed(sum(ord(c) * (i + 1) for i, c in enumerate(name)))
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3 + (1.0 if "norm.weight" in name else 0.0))

    def forward(self, x):
        if self.is_first:
            x = self.embed(x)
        for block in self.layers.values():
            x = block(x)
        if not self.is_last:
            return x
        return x @ self.embed.weight.t() if self.tied else self.head(x)


def batch(number: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(1000 + number))
    return tokens, torch.roll(tokens, 1, 1)


def loss_fn(output, targets):
    return nn.functional.cross_entropy(output.reshape(-1, VOCABULARY), targets.reshape(-1))


def make_optimizer(kind: str, named) -> torch.optim.Optimizer:
    """sgd, adamw or muon; "+update" and "+lookahead" wrap it in ErrorFeedback."""
    name, _, form = kind.partition("+")
    named = list(named)
    if name == "sgd":
        optimizer = torch.optim.SGD([p for _, p in named], lr=0.3, momentum=0.9)
    elif name == "adamw":
        optimizer = torch.optim.AdamW([p for _, p in named], lr=1e-2, weight_decay=0.1)
    else:
        from onelag import build_optimizer

        optimizer = build_optimizer("muon", named, lr=0.02, weight_decay=0.1, fallback_lr=1e-2)
    return ErrorFeedback(optimizer, coefficient=0.8, form=form) if form else optimizer


@contextmanager
def one_thread() -> Iterator[None]:
    """Bitwise comparisons pin one thread: with more, sums are ordered otherwise."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@one_thread()
def oracle(kind: str, m: int, batches: int, delay: int | None = 1, on_batch: Callable | None = None, rows: int = ROWS, pipedream: int = 0, **toy):
    """The simulation in one process: losses per batch, and the newest weights x and y after the last one."""
    model = Toy(0, 1, **toy)
    optimizer = make_optimizer(kind, model.named_parameters())
    if pipedream:
        stages = {f"layers.{i}.": next(s for s in range(pipedream) if i < 4 * (s + 1) // pipedream) for i in range(4)}
        where = lambda name: next((s for prefix, s in stages.items() if name.startswith(prefix)), 0 if "embed" in name else pipedream - 1)  # noqa: E731
        optimizer = SimulatedDelay(optimizer, stage_delays(model.named_parameters(), where, pipedream))
    else:
        optimizer = SimulatedDelay(optimizer, steps=delay)
    losses = []
    for t in range(batches):
        inputs, targets = batch(t, m * rows)
        total = 0.0
        for x, y in zip(inputs.chunk(m), targets.chunk(m)):
            loss = loss_fn(model(x), y) / m
            loss.backward()
            total = total + loss.detach()
        losses.append(float(total))
        if on_batch:
            on_batch(t, model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    with optimizer.latest_weights():
        x = {name: p.detach().clone() for name, p in model.named_parameters()}
    with optimizer.base_weights():
        y = {name: p.detach().clone() for name, p in model.named_parameters()}
    return losses, x, y


def merged(parts: list[dict]) -> dict:
    """The weights of all stages in one dict."""
    return {name: value for part in parts for name, value in part.items()}


def differing(got: dict, wanted: dict) -> list[str]:
    """Names whose values are not equal bit by bit."""
    assert set(got) == set(wanted), set(got) ^ set(wanted)
    return [f"{n}: {(got[n] - wanted[n]).abs().max():.2e}" for n in wanted if not torch.equal(got[n], wanted[n])]


__all__ = ["LENGTH", "ROWS", "VOCABULARY", "WIDTH", "Block", "Muon", "Toy", "batch", "differing", "loss_fn", "make_optimizer", "merged", "one_thread", "oracle"]
