"""What decides a claim: intervals that cover what they should, and verdicts that follow them."""

import math

import numpy as np
import pytest

from streamgrad_lab.experiments.evidence import Estimate, decide, difference, judge, log_ratio, mean_of, power, within


@pytest.mark.parametrize("sizes, spreads", [((2, 2), (1.0, 1.0)), ((3, 10), (1.0, 3.0)), ((10, 10), (1.0, 0.1))])
def test_intervals_cover_the_truth_95_times_in_100(sizes, spreads):
    """A fixed seed; 2,000 intervals of which each misses with probability 5% at most: 4 standard errors are 2%."""
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(2000):
        a, b = (rng.normal(mean, spread, n) for mean, n, spread in zip((3.0, 1.0), sizes, spreads, strict=True))
        found = difference(a, b)
        covered += abs(found.value - 2.0) <= found.half
    assert 0.93 <= covered / 2000 <= 0.995


def test_one_trial_decides_nothing():
    assert math.isinf(mean_of(np.array([5.0])).half)
    assert decide([difference(np.array([5.0]), np.array([1.0]))]) is None
    assert decide([]) is None


def test_trials_without_spread_decide():
    assert difference(np.array([2.0, 2.0]), np.array([1.0, 1.0])) == Estimate(1.0, 0.0)


def test_a_small_run_is_undecided_and_a_large_one_is_not():
    """The losses of two settings that differ by 1%, with a spread of 3%, in 2 and in 1,000 trials."""
    rng = np.random.default_rng(1)
    verdicts = []
    for count in (2, 1000):
        low, high = (loss * np.exp(0.03 * rng.normal(size=count)) for loss in (2.31, 2.33))
        verdicts.append(judge("Lower.", [log_ratio(high, low)], "Numbers.", "A reason."))
        wrong = judge("Higher.", [log_ratio(low, high)], "Numbers.", "A reason.")
    assert [claim.holds for claim in verdicts] == [None, True]
    assert verdicts[0].detail.startswith("Numbers. Undecided")
    assert wrong.holds is False and wrong.detail == "Numbers. It fails here. A reason."
    assert judge("Lower.", None, "Numbers.").holds is None


def test_within():
    assert decide(within(Estimate(0.0, 0.1), 0.15)) is True
    assert decide(within(Estimate(0.1, 0.1), 0.15)) is None
    assert decide(within(Estimate(-0.4, 0.1), 0.15)) is False


def test_the_error_of_a_power_is_that_of_the_least_squares_fit():
    rng = np.random.default_rng(2)
    x = np.exp(rng.normal(size=7))
    y = x**1.5 * np.exp(0.1 * rng.normal(size=7))
    (slope, _), covariance = np.polyfit(np.log(x), np.log(y), 1, cov=True)
    found = power(x, y)
    assert found.value == pytest.approx(slope)
    assert found.half == pytest.approx(2.571 * math.sqrt(covariance[0, 0]))
