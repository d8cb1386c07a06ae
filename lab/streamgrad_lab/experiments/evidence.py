"""How sure a recorded number is, and what it decides: a claim holds, fails, or is undecided.

A claim is a list of estimates that must all be above 0. It holds where all their 95% intervals are above 0, fails where
one of them is below, and is undecided otherwise.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from streamgrad_lab.experiments.base import Claim

# Student's t at 97.5%, by degrees of freedom from 1 on; beyond them the normal distribution's is close enough.
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


class Estimate(NamedTuple):
    """A number and half of its 95% interval, which is infinite where a single trial says nothing of the spread."""

    value: float
    half: float

    def above(self, least: float) -> "Estimate":
        """How far it is above `least`."""
        return Estimate(self.value - least, self.half)

    def below(self, most: float) -> "Estimate":
        """How far it is below `most`."""
        return Estimate(most - self.value, self.half)

    def __str__(self) -> str:
        return f"{self.value:.3g} ± {self.half:.2g}" if math.isfinite(self.half) else f"{self.value:.3g} (one trial)"


def quantile(freedom: int | float) -> float:
    """Student's t at 97.5% for that many degrees of freedom, rounded down; infinite for less than 1.

    Example:
      >>> quantile(1), quantile(9.7), quantile(1000)
      (12.706, 2.262, 1.96)
    """
    if not freedom >= 1:
        return math.inf
    return _T[int(freedom) - 1] if freedom < len(_T) + 1 else 1.96


def mean_of(trials: np.ndarray) -> Estimate:
    """The mean of independent trials.

    Example:
      >>> print(mean_of(np.array([1.0, 3.0])))  # 12.7 standard errors, of which each is 1
      2 ± 13
    """
    return difference(trials, np.zeros(1))


def difference(a: np.ndarray, b: np.ndarray) -> Estimate:
    """mean(a) - mean(b) of independent trials, after Welch; a single zero stands for a known 0.

    Example:
      >>> print(difference(np.array([3.0, 3.1, 2.9]), np.array([1.0, 1.3, 0.7])))
      2 ± 0.79
    """
    known = len(b) == 1 and b[0] == 0
    spreads = [float(np.var(x, ddof=1)) / len(x) if len(x) > 1 else math.inf for x in ((a,) if known else (a, b))]
    total = sum(spreads)
    value = float(np.mean(a) - np.mean(b))
    if total == 0 or not math.isfinite(total):
        return Estimate(value, float(total))
    freedom = total**2 / sum(s**2 / (len(x) - 1) for s, x in zip(spreads, (a, b), strict=False))
    # Rounding of equal spreads must not cost a degree of freedom.
    return Estimate(value, quantile(freedom + 1e-9) * math.sqrt(total))


def log_ratio(a: np.ndarray, b: np.ndarray) -> Estimate:
    """log of the geometric mean of a over that of b: for positive numbers that spread over orders of magnitude."""
    return difference(np.log(a), np.log(b))


def log_ratio_of_means(a: Estimate, b: Estimate) -> Estimate:
    """log(a / b) of two positive estimates, to first order in their errors.

    Example:
      >>> print(log_ratio_of_means(Estimate(2.0, 0.06), Estimate(1.0, 0.04)))
      0.693 ± 0.05
    """
    return Estimate(math.log(a.value / b.value), math.hypot(a.half / a.value, b.half / b.value))


def power(x: np.ndarray, y: np.ndarray) -> Estimate:
    """The power of x that y follows: the slope of a straight line through their logarithms.

    Example:
      >>> print(power(np.array([1.0, 2.0, 4.0]), np.array([3.0, 12.0, 48.0])))
      2 ± 0
    """
    along, up = np.log(x) - np.mean(np.log(x)), np.log(y) - np.mean(np.log(y))
    slope = along @ up / (along @ along)
    rest, freedom = np.round(up - slope * along, 12), len(x) - 2
    if freedom < 1:
        return Estimate(float(slope), math.inf)
    return Estimate(float(slope), quantile(freedom) * math.sqrt(rest @ rest / freedom / (along @ along)))


def show_ratio(log: Estimate) -> str:
    """A ratio with its 95% interval, from its logarithm.

    Example:
      >>> show_ratio(Estimate(0.0, 0.1)), show_ratio(Estimate(math.log(2), math.inf))
      ('1 (0.905 to 1.11)', '2 (one trial)')
    """
    if not math.isfinite(log.half):
        return f"{math.exp(log.value):.3g} (one trial)"
    low, high = (_exp(log.value + sign * log.half) for sign in (-1, 1))
    return f"{_exp(log.value):.3g} ({low:.3g} to {high:.3g})"


def within(log: Estimate, share: float) -> list[Estimate]:
    """Margins for a ratio, given by its logarithm, to lie between 1 - share and 1 + share."""
    return [log.above(math.log1p(-share)), log.below(math.log1p(share))]


def decide(margins: Iterable[Estimate]) -> bool | None:
    """Whether all are above 0: True, False, or None where the intervals cannot tell.

    Example:
      >>> sure, unsure, wrong = Estimate(2.0, 1.0), Estimate(0.5, 1.0), Estimate(-2.0, 1.0)
      >>> decide([sure]), decide([sure, unsure]), decide([unsure, wrong])
      (True, None, False)
    """
    margins = list(margins)
    if any(m.value + m.half < 0 for m in margins):
        return False
    return True if margins and all(m.value - m.half > 0 for m in margins) else None


def judge(text: str, margins: Iterable[Estimate] | None, detail: str, if_fails: str = "") -> Claim:
    """A claim that holds where all margins are above 0.

    Args:
      text: the statement.
      margins: what must be above 0; None where a setting that it is about was not run to the end.
      detail: the numbers with their uncertainty.
      if_fails: the likely cause, for the reader, where it fails.

    Returns:
      The claim, whose detail says why where it does not hold.
    """
    if margins is None:
        return Claim(text, None, f"{detail} Not all of the settings were run to the end.".lstrip())
    holds = decide(margins)
    if holds is None:
        detail += " Undecided: the 95% intervals leave room for both."
    elif not holds:
        detail += f" It fails here. {if_fails}".rstrip()
    return Claim(text, holds, detail)


def _exp(x: float) -> float:
    return math.exp(min(x, 700.0))
