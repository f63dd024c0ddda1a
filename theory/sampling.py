"""Random instances of the LMO theorems, shared by their numeric checks: problem, geometry, step, momentum, delay, noise, horizon."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy import ndarray

from theory.evidence import Bound, Rows
from theory.geometry import GEOMETRIES, Layers, Spectral
from theory.problems import Problems, random_problems
from theory.recursion import Path, Rule, run

SEEDS = 4  # noise seeds per instance; bounds in expectation are compared with their mean
DELAYS = (0, 1, 3)


@dataclass(frozen=True)
class Sample:
    """A batch of instances of one geometry and one delay. Arrays (B,); `problem` holds B functions, each repeated for its noise seeds."""

    geometry: object
    problem: Problems
    rule: Rule
    sigma: ndarray
    steps: int
    seed: int
    repeats: int

    @property
    def alpha(self) -> ndarray:
        return self.rule.alpha

    def run(self, rule: Rule, lmo=None) -> Path:
        """The same noise for every rule of one sample: rules are compared on equal samples."""
        return run(self.problem, self.geometry, rule, self.steps, self.sigma, np.random.default_rng(self.seed), lmo)

    def measured(self, points: ndarray) -> ndarray:
        """(1/T)Σ_t ‖∇f(point_t)‖_*, (B,)."""
        return np.mean([self.geometry.dual(self.problem.grad(point)) for point in points], axis=0)

    def noise(self, path: Path) -> ndarray:
        """(1/T)Σ_t ‖noise part of M_t‖_*, (B,)."""
        return np.mean([self.geometry.dual(noise) for noise in path.noise], axis=0)

    def over_seeds(self, values: ndarray) -> ndarray:
        return values.reshape(-1, self.repeats).mean(axis=1)

    def compare(self, label: str, path: Path, points: ndarray, bound: Callable[..., Bound], errors: float = 2.0, **options) -> list[Rows]:
        """Two comparisons. "path": each run against the bound with its own noise norms in place of the noise terms: no expectation, must
        hold on every path. "mean": the average over noise seeds against the bound as printed. `errors`: how often the noise enters
        (2)."""
        rule = path.rule
        inputs = (self.problem.delta0, self.problem.L, rule.eta, rule.alpha)
        measured = self.measured(points)
        silent = bound(*inputs, 0.0, self.geometry.rho, path.steps, rule.delay, **options).total
        printed = bound(*inputs, self.sigma, self.geometry.rho, path.steps, rule.delay, **options).total
        return [
            Rows(f"{label} (path)", measured, silent + errors * self.noise(path)),
            Rows(f"{label} (mean)", self.over_seeds(measured), self.over_seeds(np.broadcast_to(printed, measured.shape))),
        ]

    @staticmethod
    def merge(rows: list[Rows]) -> list[Rows]:
        """Rows of the same label from all batches as one."""
        labels = dict.fromkeys(row.label for row in rows)
        return [
            Rows(
                label,
                np.concatenate([row.measured for row in rows if row.label == label]),
                np.concatenate([row.bound for row in rows if row.label == label]),
            )
            for label in labels
        ]


def instances(count: int, seed: int, delays=DELAYS, steps: int = 30, noiseless: float = 0.25, layers: bool = True) -> list[Sample]:
    """At least `count` instances in all, spread over geometries and delays; a quarter without noise, a fifth without momentum.

    Steps η are 10^U(−1,1) times the one that balances the bound, noise σ is 10^U(−1,1) times ‖∇f(x₀)‖_*/ρ.
    """
    geometries = (*GEOMETRIES, Layers(Spectral(2, 3), 1.0, 0.3)) if layers else GEOMETRIES
    batches = [(geometry, delay) for geometry in geometries for delay in delays]
    each = -(-count // len(batches))
    return [_sample(geometry, delay, each, seed + 101 * i, steps, noiseless) for i, (geometry, delay) in enumerate(batches)]


def _sample(geometry, delay: int, count: int, seed: int, steps: int, noiseless: float) -> Sample:
    rng = np.random.default_rng(seed)
    problem = random_problems(geometry, count, rng)
    alpha = np.where(rng.random(count) < 0.2, 1.0, rng.uniform(0.03, 1.0, count))
    best = np.sqrt(problem.delta0 / (problem.L * steps * (2 / alpha + delay - 1.5)))
    eta = best * 10.0 ** rng.uniform(-1, 1, count)
    gradient = geometry.dual(problem.grad(problem.x0))
    sigma = np.where(rng.random(count) < noiseless, 0.0, gradient / geometry.rho * 10.0 ** rng.uniform(-1, 1, count))
    repeat = lambda v: np.repeat(v, SEEDS, axis=0)  # noqa: E731
    return Sample(geometry, problem.repeated(SEEDS), Rule(repeat(eta), repeat(alpha), delay), repeat(sigma), steps, seed + 1, SEEDS)
