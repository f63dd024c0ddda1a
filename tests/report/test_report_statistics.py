"""Statistics against scipy, against hand calculations, and by their own promise: coverage in seeded simulations."""

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from onelag.report.statistics import (
    contrast,
    detectable_difference,
    fieller,
    holm,
    mean_interval,
    noise_floor,
    paired_difference,
    power,
    seeds_needed,
    share_recovered,
)

# no deadline: how long an example takes says nothing about it on a busy machine
EASY = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
SAMPLES = st.lists(st.floats(-5, 5), min_size=2, max_size=8)


def pairs(smallest=3):
    return st.integers(smallest, 8).flatmap(lambda n: st.tuples(*[st.lists(st.floats(-3, 3), min_size=n, max_size=n)] * 2))


@given(SAMPLES, st.sampled_from([0.5, 0.9, 0.95, 0.99]))
@EASY
def test_mean_interval_is_scipys(values, level):
    assume(np.std(values) > 1e-6)
    ours, theirs = mean_interval(values, level), stats.ttest_1samp(values, 0)
    interval = theirs.confidence_interval(level)
    np.testing.assert_allclose([ours.low, ours.high, ours.p], [interval.low, interval.high, theirs.pvalue], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(ours.p_against(0.3), stats.ttest_1samp(values, 0.3).pvalue, rtol=1e-9, atol=1e-12)


def test_mean_interval_by_hand():
    e = mean_interval([1, 2, 3])  # sd 1, standard error 1/√3, t(0.975, 2) = 4.302652729911275
    assert (e.n, e.value, e.sd) == (3, 2.0, 1.0)
    assert e.high - e.value == pytest.approx(4.302652729911275 / math.sqrt(3), rel=1e-9)
    assert e.p == pytest.approx(1 - math.sqrt(12) / math.sqrt(12 + 2), rel=1e-12)  # t = 2√3, two degrees: p = 1 − t/√(t² + 2)


def test_too_few_or_equal_values():
    nothing, one, equal, zero = mean_interval([]), mean_interval([1.5]), mean_interval([0.1] * 3), mean_interval([0.0, 0.0])
    assert nothing.n == 0 and math.isnan(nothing.value)
    assert (one.value, one.low, one.high) == (1.5, -math.inf, math.inf) and math.isnan(one.p)
    assert (equal.low, equal.high, equal.p, equal.sd) == (0.1, 0.1, 0.0, 0.0) and equal.p_against(0.1) == 1.0
    assert zero.p == 1.0
    for bad in ([1.0, math.nan], [1.0, math.inf]):
        with pytest.raises(ValueError, match="finite"):
            mean_interval(bad)
    with pytest.raises(ValueError, match="same length"):
        paired_difference([1, 2], [1])


@given(pairs())
@EASY
def test_paired_difference_is_scipys(sample):
    a, b = np.array(sample[0]), np.array(sample[1])
    assume(np.std(a - b) > 1e-6)
    ours, theirs = paired_difference(a, b), stats.ttest_rel(a, b)
    interval = theirs.confidence_interval()
    np.testing.assert_allclose([ours.low, ours.high, ours.p], [interval.low, interval.high, theirs.pvalue], rtol=1e-9, atol=1e-12)


def test_pairing_removes_what_seeds_share():
    """The same differences on very different seeds: a paired interval is narrow where an unpaired one would be useless."""
    seed = np.array([0.0, 10.0, -7.0, 3.0])
    gap = paired_difference(seed + np.array([0.10, 0.11, 0.09, 0.10]), seed)
    assert gap.low > 0.08 and gap.high < 0.12


@given(pairs())
@EASY
def test_fieller_is_the_set_that_t_tests_do_not_reject(sample):
    """Independent reference: θ belongs to the set exactly when a t-test of numerator − θ denominator = 0 has p ≥ 0.05."""
    x, y = np.array(sample[0]), np.array(sample[1])
    assume(np.std(y) > 1e-3 and np.std(x) > 1e-3 and abs(np.mean(y)) > 1e-3)
    ratio = fieller(x, y)
    gap = stats.ttest_1samp(y, 0).pvalue
    assume(abs(gap - 0.05) > 1e-6)
    assert ratio.bounded == (gap < 0.05)
    if not ratio.bounded:
        assert (ratio.low, ratio.high) == (-math.inf, math.inf) and "cannot be told from zero" in ratio.note
        return
    assert ratio.low <= ratio.value + 1e-12 and ratio.value <= ratio.high + 1e-12
    for theta in np.concatenate([np.linspace(-4, 4, 17), [ratio.low, ratio.high, ratio.value]]):
        left = x - theta * y
        if np.std(left) < 1e-9 or min(abs(theta - ratio.low), abs(theta - ratio.high)) < 1e-7 * (1 + abs(theta)):
            continue
        assert (ratio.low < theta < ratio.high) == (stats.ttest_1samp(left, 0).pvalue > 0.05)
    for end in (ratio.low, ratio.high):
        left = x - end * y
        if np.std(left) > 1e-6:
            assert stats.ttest_1samp(left, 0).pvalue == pytest.approx(0.05, abs=1e-4)


def test_fieller_exact_cases():
    y = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    half = fieller(0.5 * y, y)
    assert half.bounded and half.value == 0.5 and half.low == pytest.approx(0.5, abs=1e-12) and half.high == pytest.approx(0.5, abs=1e-12)
    # a denominator without spread leaves the t interval of the numerator, divided by it
    x = np.array([1.0, 2.0, 3.0])
    plain, ratio = mean_interval(x), fieller(x, np.full(3, 4.0))
    assert (ratio.low, ratio.high) == (pytest.approx(plain.low / 4), pytest.approx(plain.high / 4))
    assert fieller([1.0], [2.0]).value == 0.5 and not fieller([1.0], [2.0]).bounded
    assert fieller([], []).n == 0
    assert math.isnan(fieller([1.0, 2.0], [1.0, -1.0]).value)


@given(pairs(), st.floats(0.1, 100))
@EASY
def test_fieller_does_not_depend_on_the_unit(sample, factor):
    x, y = np.array(sample[0]), np.array(sample[1]) + 4
    one, two = fieller(x, y), fieller(factor * x, factor * y)
    assume(one.bounded and two.bounded)
    np.testing.assert_allclose([one.low, one.high], [two.low, two.high], rtol=1e-6, atol=1e-6)


def test_share_recovered_names_its_cases():
    sync, delayed = np.array([1.0, 1.1, 0.9]), np.array([1.4, 1.5, 1.31])
    assert share_recovered(sync, delayed, (sync + delayed) / 2).value == pytest.approx(0.5)
    assert share_recovered(sync, delayed, sync).value == 1.0 and share_recovered(sync, delayed, delayed).value == 0.0
    assert "cannot be told from zero" in share_recovered(sync, sync + np.array([0.1, -0.1, 0.05]), sync).note
    better = share_recovered(delayed, sync, sync)
    assert math.isnan(better.value) and "delayed is better" in better.note
    gone = share_recovered(sync, [1.4, math.inf, math.inf], sync)
    assert math.isnan(gone.value) and not gone.bounded and gone.note == "delayed diverged in 2 of 3"


def coverage(hits, trials, level=0.95):
    """Within four standard errors of the promise."""
    assert abs(hits / trials - level) < 4 * math.sqrt(level * (1 - level) / trials), hits / trials


@pytest.mark.parametrize("n", [2, 5])
def test_intervals_cover_as_often_as_they_say(n):
    rng, trials = np.random.default_rng(n), 3000
    mean = fiellers = floor = 0
    for _ in range(trials):
        seed = rng.normal(0, 1, n)  # shared by the pair, as a seed is
        y = 1.0 + 0.02 * seed + rng.normal(0, 0.01, n)
        x = 0.7 + 0.03 * seed + rng.normal(0, 0.02, n)
        mean += (e := mean_interval(y)).low < 1.0 < e.high
        fiellers += (r := fieller(x, y)).low < 0.7 < r.high
        floor += (s := noise_floor(rng.normal(3, 0.5, n))).low < 0.5 < s.high
    for hits in (mean, fiellers, floor):
        coverage(hits, trials)


def test_fieller_covers_where_the_gap_is_lost_in_noise():
    """A ratio of two means near zero: its set is often unbounded, and still covers. A plain t interval of per-seed ratios would not."""
    rng, trials, hits, unbounded = np.random.default_rng(0), 3000, 0, 0
    for _ in range(trials):
        y = rng.normal(0.02, 0.02, 4)
        x = 0.5 * y + rng.normal(0, 0.01, 4)
        r = fieller(x, y)
        unbounded += not r.bounded
        # the complement of an interval is reported as everything, so the test asks the t-test itself for those
        hits += r.low < 0.5 < r.high if r.bounded else stats.ttest_1samp(x - 0.5 * y, 0).pvalue > 0.05
    assert unbounded > trials / 5
    coverage(hits, trials)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=7))
@EASY
def test_holm_rejects_what_the_step_down_procedure_rejects(p):
    adjusted = holm(p)
    for level in (0.01, 0.05, 0.2):
        rejected, m = set(), len(p)
        for rank, i in enumerate(sorted(range(m), key=lambda i: p[i])):  # the procedure as in Holm's paper
            if p[i] > level / (m - rank):
                break
            rejected.add(i)
        near = any(abs(a - level) < 1e-12 for a in adjusted)
        assert near or {i for i, a in enumerate(adjusted) if a <= level} == rejected
    assert all(p[i] <= adjusted[i] <= 1 for i in range(len(p)))


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    mixed = holm([0.02, math.nan, 0.04])
    assert mixed[0] == pytest.approx(0.04) and math.isnan(mixed[1]) and mixed[2] == pytest.approx(0.04)
    assert holm([]) == []


def test_contrast_without_divergence_is_the_paired_difference():
    a, b = np.array([1.4, 1.5, 1.45]), np.array([1.0, 1.2, 1.1])
    assert contrast([(1, a), (-1, b)], 5.5) == paired_difference(a, b)
    quarter = contrast([(0.25, a), (-0.25, b), (-1, b), (1, b)], 5.5)
    assert quarter.value == pytest.approx(0.25 * paired_difference(a, b).value)
    assert contrast([(1, []), (-1, [])], 5.5).n == 0


def test_a_diverged_run_is_infinitely_bad_and_its_bound_cautious():
    sync = np.array([1.0, 1.1, 1.05, 1.02])
    delayed = np.array([1.40, math.inf, 1.44, 1.41])
    gap = contrast([(1, delayed), (-1, sync)], 5.5)
    cautious = paired_difference([1.40, 1.44, 1.44, 1.41], sync)  # the worst finished run of its own cell in its place
    assert (gap.value, gap.high) == (math.inf, math.inf) and (gap.low, gap.p) == (cautious.low, cautious.p) and gap.low > 0
    mirrored = contrast([(1, sync), (-1, delayed)], 5.5)
    assert (mirrored.value, mirrored.low, mirrored.high) == (-math.inf, -math.inf, -gap.low)
    every = contrast([(1, np.full(4, math.inf)), (-1, sync)], 5.5)
    assert every.low == paired_difference(np.full(4, 5.5), sync).low
    both = contrast([(1, delayed), (-1, [1.0, 1.1, math.inf, 1.0])], 5.5)
    assert math.isnan(both.value) and (both.low, both.high) == (-math.inf, math.inf)
    for bad in (math.nan, -math.inf):
        with pytest.raises(ValueError, match="finite"):
            contrast([(1, [bad, 1.0])], 5.5)


@pytest.mark.parametrize(("difference", "n"), [(0.5, 5), (1.0, 3), (1.5, 8), (0.0, 4), (2.0, 2)])
def test_power_is_the_noncentral_t_and_what_happens(difference, n):
    t, shift = stats.t.ppf(0.975, n - 1), difference * math.sqrt(n)
    reference = stats.nct.sf(t, n - 1, shift) + stats.nct.cdf(-t, n - 1, shift) if difference else 0.05
    assert power(difference, 1.0, n) == pytest.approx(reference, abs=1e-8)
    draws = np.random.default_rng(1).normal(difference, 1.0, (20000, n))
    seen = (stats.ttest_1samp(draws, 0, axis=1).pvalue < 0.05).mean()
    assert power(difference, 1.0, n) == pytest.approx(seen, abs=0.015)


@pytest.mark.parametrize("n", [2, 3, 5, 12])
def test_detectable_difference_has_the_power_it_claims(n):
    assert power(detectable_difference(0.02, n), 0.02, n) == pytest.approx(0.8, abs=1e-9)
    assert power(detectable_difference(1.0, n, wanted=0.95), 1.0, n) == pytest.approx(0.95, abs=1e-9)


def test_seeds_needed_is_the_smallest():
    n = seeds_needed(0.8, 1.0)
    assert power(0.8, 1.0, n) >= 0.8 > power(0.8, 1.0, n - 1)
    assert seeds_needed(100.0, 1.0) == 2 and seeds_needed(0.01, 1.0, most=6) is None
    assert detectable_difference(1.0, 1) == math.inf


def test_noise_floor_by_hand():
    s = noise_floor([1.0, 2.0, 3.0])
    assert (s.n, s.sd) == (3, 1.0)
    # chi-square with two degrees is exponential: quantile q is −2 ln(1 − q)
    assert s.low == pytest.approx(math.sqrt(2 / (-2 * math.log(0.025)))) and s.high == pytest.approx(math.sqrt(2 / (-2 * math.log(0.975))))
    assert noise_floor([1.0]).high == math.inf
