"""Which rows of a comparison are worth a look: their places by error, and those that no other beats."""

import math
from collections.abc import Sequence

from streamgrad.checks import check_choice
from streamgrad_lab.comparison import Comparison

COSTS = ("us_per_step", "memory_bytes")  # of a row, what an error may be weighed against


def ranks(rows: Sequence[Comparison]) -> list[int | None]:
    """The place of each row by squared error; the same for those that differ by no more than the noise.

    Args:
      rows: from `compare`.

    Returns:
      Numbers from 1, None for those of hindsight. A row shares the place of the best row with that place if their
      difference is within its 95% interval.
    """
    order = sorted((i for i, row in enumerate(rows) if not row.hindsight), key=lambda i: rows[i].squared_error)
    found: list[int | None] = [None] * len(rows)
    best = None
    for place, index in enumerate(order, 1):
        row = rows[index]
        if best is None or not same_error(rows[best], row):
            best = index
            found[index] = place
        else:
            found[index] = found[best]
    return found


def frontier(rows: Sequence[Comparison], cost: str = "us_per_step") -> list[Comparison]:
    """The rows that no other beats: none has as small an error, within noise, for less.

    Args:
      rows: from `compare`.
      cost: "us_per_step" or "memory_bytes".

    Returns:
      Those rows, the cheapest first; of each the error is smaller than of all before. Rows of hindsight are no choice,
      and left out.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> from streamgrad_lab import candidates_for, compare, frontier
      >>> model = sg.Model(sg.cells.vanilla(2, 3), sg.heads.softmax(2))
      >>> params = model.init(jax.random.key(0))
      >>> stream = sg.Chunk(jnp.ones((6, 2)), jnp.zeros(6, int))
      >>> some = candidates_for(model, params, stream, only=["bptt", "rtrl"])
      >>> rows = compare(model, params, stream, jax.random.key(1), candidates=some, chunk_length=2)
      >>> [row.name for row in frontier(rows, "memory_bytes")]
      ['bptt', 'rtrl']
    """
    check_choice("cost", cost, COSTS)
    choices = [row for row in rows if not row.hindsight]

    def beats(other: Comparison, row: Comparison) -> bool:
        price, own = getattr(other, cost), getattr(row, cost)
        return as_small(other, row) if price < own else price == own and other.squared_error < row.squared_error

    found = [row for row in choices if not any(beats(other, row) for other in choices)]
    return sorted(found, key=lambda row: (getattr(row, cost), row.squared_error))


def same_error(a: Comparison, b: Comparison) -> bool:
    """Whether the squared errors of two rows differ by no more than the noise of the measurement, or by rounding."""
    return abs(a.squared_error - b.squared_error) <= interval(a, b) or a.verdict == b.verdict == "exact"


def as_small(a: Comparison, b: Comparison) -> bool:
    """Whether the error of `a` is no larger than that of `b`, as far as noise lets one see.

    Noise larger than the error itself lets one see nothing: a row that was hardly measured is as small as no other.
    """
    if a.squared_error <= b.squared_error:
        return True
    return same_error(a, b) and (a.verdict == "exact" or interval(a, b) <= b.squared_error)


def interval(a: Comparison, b: Comparison) -> float:
    """Half of the 95% interval of the difference of two squared errors."""
    return 1.96 * math.hypot(a.squared_error_noise, b.squared_error_noise)
