"""Confidence intervals for few, paired seeds. Pure functions of float64 arrays; losses in nats, one entry per seed.

Seeds are paired: the same seed means the same initialization and the same data order in every cell, so differences are taken seed by seed and their
spread, not that of the losses, decides. Intervals are Student's t (normal differences assumed); the share recovered is a ratio of two paired means and
gets Fieller's interval (Fieller, J. R. Stat. Soc. B 16:175, 1954), which says so when the denominator cannot be told from zero.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import integrate, optimize, special, stats


@dataclass(frozen=True)
class Estimate:
    """A mean with its two-sided confidence interval.

    Attributes:
        n: seeds.
        value: the mean; nan for n = 0; infinite where runs diverged.
        low, high: the interval; infinite where nothing can be said (n < 2, diverged runs).
        p: two-sided p-value of the mean being 0; nan for n < 2.
        sd: standard deviation over seeds (n − 1); nan for n < 2.
    """

    n: int
    value: float
    low: float
    high: float
    p: float
    sd: float

    def p_against(self, threshold: float) -> float:
        """Two-sided p-value of the mean being `threshold`; nan where there is no t-test of it (n < 2, diverged runs and a threshold other than 0)."""
        if threshold == 0 or math.isnan(self.p):
            return self.p
        if self.sd == 0:
            return float(self.value == threshold)
        return float(2 * stats.t.sf(abs(self.value - threshold) / self.sd * math.sqrt(self.n), self.n - 1))


@dataclass(frozen=True)
class Ratio:
    """A ratio of paired means with Fieller's confidence set.

    Attributes:
        value: numerator mean / denominator mean; nan where that has no meaning.
        low, high: the interval; infinite on both sides where it is unbounded.
        bounded: the denominator can be told from zero.
        note: why there is no bounded interval, in words for a table; empty otherwise.
    """

    n: int
    value: float
    low: float
    high: float
    bounded: bool
    note: str = ""


@dataclass(frozen=True)
class Spread:
    """The noise floor: how much one cell scatters over seeds alone.

    Attributes:
        sd, low, high: standard deviation (n − 1) in nats with its chi-square interval.
    """

    n: int
    sd: float
    low: float
    high: float


def mean_interval(values: Sequence[float], level: float = 0.95) -> Estimate:
    """Mean of n finite values with Student's t interval. No spread at all gives an interval of no width."""
    x = _finite(values)
    n = len(x)
    if n == 0:
        return Estimate(0, math.nan, -math.inf, math.inf, math.nan, math.nan)
    mean = float(x.mean())
    if n == 1:
        return Estimate(1, mean, -math.inf, math.inf, math.nan, math.nan)
    if np.ptp(x) == 0:
        return Estimate(n, float(x[0]), float(x[0]), float(x[0]), float(x[0] == 0), 0.0)
    sd = float(x.std(ddof=1))
    error = sd / math.sqrt(n)
    half = float(stats.t.ppf((1 + level) / 2, n - 1)) * error
    return Estimate(n, mean, mean - half, mean + half, float(2 * stats.t.sf(abs(mean) / error, n - 1)), sd)


def paired_difference(a: Sequence[float], b: Sequence[float], level: float = 0.95) -> Estimate:
    """Mean of a − b over pairs, all finite."""
    a, b = _finite(a), _finite(b)
    if a.shape != b.shape:
        raise ValueError(f"paired samples must have the same length, but got {len(a)} and {len(b)}")
    return mean_interval(a - b, level)


def contrast(terms: Sequence[tuple[float, Sequence[float]]], worst: float, level: float = 0.95) -> Estimate:
    """Mean over seeds of Σ weight · loss, where a loss may be +inf: a run that diverged.

    With diverged runs on the positive side the mean is +inf and the upper end open. The lower end is that of the same contrast with each diverged loss
    replaced by the worst finished loss of its own term (`worst` where none finished), which understates it: a cautious bound that one divergence cannot
    blur by its sheer size. The negative side is the mirror image, and with both the contrast has no value. p is that of the cautious contrast; nan with both.

    Args:
        terms: (weight, losses (n,)) with the same seeds in the same order.
        worst: a loss that a model that diverged is at least as bad as, in nats: a uniform guess's, ln(vocabulary).
    """
    weights = [float(weight) for weight, _ in terms]
    losses = np.array([np.asarray(values, dtype=np.float64) for _, values in terms]).reshape(len(terms), -1)
    if np.isnan(losses).any() or np.isneginf(losses).any():
        raise ValueError("losses must be finite, or +inf for a diverged run")
    gone = np.isposinf(losses)
    up = any(gone[i].any() for i, weight in enumerate(weights) if weight > 0)
    down = any(gone[i].any() for i, weight in enumerate(weights) if weight < 0)
    for values, lost in zip(losses, gone):
        if lost.any():
            values[lost] = worst if lost.all() else values[~lost].max()
    plain = mean_interval(sum(weight * values for weight, values in zip(weights, losses)), level)
    if up and down:
        return Estimate(plain.n, math.nan, -math.inf, math.inf, math.nan, math.nan)
    if up:
        return Estimate(plain.n, math.inf, plain.low, math.inf, plain.p, math.nan)
    if down:
        return Estimate(plain.n, -math.inf, -math.inf, plain.high, plain.p, math.nan)
    return plain


def fieller(numerator: Sequence[float], denominator: Sequence[float], level: float = 0.95) -> Ratio:
    """Ratio of paired means with Fieller's confidence set: all θ for which mean(numerator − θ denominator) cannot be told from zero.

    The set is an interval exactly when the denominator's mean can be told from zero at the same level; otherwise it has no finite ends, and `note` says so.
    """
    x, y = _finite(numerator), _finite(denominator)
    if x.shape != y.shape:
        raise ValueError(f"paired samples must have the same length, but got {len(x)} and {len(y)}")
    n = len(x)
    if n == 0:
        return Ratio(0, math.nan, -math.inf, math.inf, False, "no pair of seeds")
    mx, my = float(x.mean()), float(y.mean())
    value = mx / my if my else math.nan
    if n == 1:
        return Ratio(1, value, -math.inf, math.inf, False, "one seed has no interval")
    (sxx, sxy), (_, syy) = np.cov(x, y, ddof=1).tolist()
    k = float(stats.t.ppf((1 + level) / 2, n - 1)) ** 2 / n
    a, b = my * my - k * syy, mx * my - k * sxy
    if a <= 0:
        return Ratio(n, value, -math.inf, math.inf, False, "the gap cannot be told from zero")
    # b² − a (mx² − k sxx), written without the cancelling mx² my² terms; it is never negative when a > 0 but for rounding
    root = math.sqrt(max(0.0, k * (mx * mx * syy - 2 * mx * my * sxy + my * my * sxx) - k * k * (sxx * syy - sxy * sxy)))
    return Ratio(n, value, (b - root) / a, (b + root) / a, True)


def share_recovered(sync: Sequence[float], delayed: Sequence[float], corrected: Sequence[float], level: float = 0.95) -> Ratio:
    """(delayed − corrected) / (delayed − sync) from paired seeds. Without a positive gap there is nothing to recover, and `note` says which case it is."""
    s, d, c = (np.asarray(values, dtype=np.float64) for values in (sync, delayed, corrected))
    gone = [
        f"{name} diverged in {int(np.isinf(v).sum())} of {len(v)}"
        for name, v in (("sync", s), ("delayed", d), ("corrected", c))
        if np.isinf(v).any()
    ]
    if gone:
        return Ratio(len(s), math.nan, -math.inf, math.inf, False, "; ".join(gone))
    ratio = fieller(d - c, d - s, level)
    if ratio.bounded and (d - s).mean() < 0:
        return Ratio(ratio.n, math.nan, -math.inf, math.inf, False, "no gap: delayed is better than sync")
    return ratio


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p-values (Holm, Scand. J. Stat. 6:65, 1979), in the given order. nan (too few seeds) stays nan and is no comparison."""
    order = sorted((p, i) for i, p in enumerate(p_values) if not math.isnan(p))
    adjusted, floor = [math.nan] * len(p_values), 0.0
    for rank, (p, i) in enumerate(order):
        floor = max(floor, min(1.0, (len(order) - rank) * p))
        adjusted[i] = floor
    return adjusted


def noise_floor(losses: Sequence[float], level: float = 0.95) -> Spread:
    """Spread over seeds of one cell (finite losses); for n < 2 nothing is known."""
    x = _finite(losses)
    n = len(x)
    if n < 2:
        return Spread(n, math.nan, 0.0, math.inf)
    sd = float(x.std(ddof=1))
    low, high = (sd * math.sqrt((n - 1) / float(stats.chi2.ppf(q, n - 1))) for q in ((1 + level) / 2, (1 - level) / 2))
    return Spread(n, sd, low, high)


def power(difference: float, sd: float, n: int, level: float = 0.95) -> float:
    """Probability that n ≥ 2 pairs, whose differences have mean `difference` and standard deviation `sd` > 0, show it in a two-sided t-test.

    The noncentral t distribution, integrated over the chi distribution of the estimated spread (scipy's own `nct` returns nan in its far tail).
    """
    degrees = n - 1
    t, shift = float(stats.t.ppf((1 + level) / 2, degrees)), abs(difference) / sd * math.sqrt(n)
    spread = stats.chi(degrees, scale=1 / math.sqrt(degrees))

    def density(w: float) -> float:
        return float(spread.pdf(w) * (special.ndtr(shift - t * w) + special.ndtr(-shift - t * w)))

    low, high = float(spread.ppf(1e-13)), float(spread.isf(1e-13))
    turn = min(max(shift / t, low), high)  # where the integrand falls off
    return min(1.0, sum(integrate.quad(density, a, b, epsabs=1e-11, limit=200)[0] for a, b in ((low, turn), (turn, high)) if a < b))


def seeds_needed(difference: float, sd: float, wanted: float = 0.8, level: float = 0.95, most: int = 1000) -> int | None:
    """The smallest n ≥ 2 with that power; None where even `most` pairs are too few."""
    return next((n for n in range(2, most + 1) if power(difference, sd, n, level) >= wanted), None)


def detectable_difference(sd: float, n: int, wanted: float = 0.8, level: float = 0.95) -> float:
    """The mean difference in nats that n pairs with spread `sd` show with that power; inf for n < 2."""
    if n < 2:
        return math.inf
    return sd * optimize.brentq(lambda d: power(d, 1.0, n, level) - wanted, 1e-6, 100 / math.sqrt(n))


def _finite(values: Sequence[float]) -> np.ndarray:
    x = np.asarray(values, dtype=np.float64).reshape(-1)
    if not np.isfinite(x).all():
        raise ValueError("these statistics are of finite values; diverged runs go through `contrast`")
    return x
