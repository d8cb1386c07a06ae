"""What is carried over from window to window, and how Q_0 and α are solved from it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from streamgrad._typing import Array, Bool, Float, Int
from streamgrad.engine.collectives import PerDevice
from streamgrad.noise.groups import Groups
from streamgrad.noise.shaping import Shaping
from streamgrad.theory.equilibrate import optimal_alpha
from streamgrad.theory.optimal_q import optimal_q0
from streamgrad.theory.spatial import same_group
from streamgrad.trees import all_finite

# α is solved for until rows and columns of C balance to this, which V does not notice.
_TOLERANCE = 1e-3


class Averages(NamedTuple):
    """Exponential averages over windows, not yet divided by their weights; None where they are not needed.

    Attributes:
      weight: what a window that is 1 has added up to.
      b: B, `[N, N]` or its diagonal `[N]`.
      c: for episodes C over positions, its rows below the diagonal as often as they were seen.
      visits: how often, for each position.
      steps: how many steps a window has at each position.
    """

    weight: Float[Array, ""]
    b: Array | None = None
    c: Float[Array, "L L G"] | None = None
    visits: Float[Array, " L"] | None = None
    steps: Float[Array, " L"] | None = None


class Gathered(NamedTuple):
    """The window that is being filled, one for each stream that is watched; on several devices, for those of each.

    Attributes:
      steps: the `Window` of the steps so far, and their γ and β, `[streams, W, 2, G]`.
      filled: how many.
    """

    steps: PerDevice
    filled: Int[Array, ""]


class CarriedShared(NamedTuple):
    """What all streams have in common; a plain pytree, so that it is saved with everything else.

    Attributes:
      shaping: Q_0 and its inverse, or None.
      alpha: for episodes α of each position, `[L, G]`, or None.
      ready: whether the next chunk uses them, or the identity and GIR.
      solved: whether they make sense.
      windows: how many windows there have been.
      passes: how many reverse passes the averages are made of.
      averages: what Q_0 and α are solved from.
      gathered: for streams, the window that is being filled.
    """

    shaping: Shaping | None
    alpha: Array | None
    ready: Bool[Array, ""]
    solved: Bool[Array, ""]
    windows: Int[Array, ""]
    passes: Int[Array, ""]
    averages: Averages
    gathered: Gathered | None


def solve(groups: Groups, damping: float, shared: CarriedShared) -> CarriedShared:
    """Solve for Q_0 and α; where that makes no sense they stay, and `solved` says so.

    Args:
      groups: the partition of the preactivations.
      damping: of Q_0.
      shared: with the averages.

    Returns:
      The same with what was found.
    """
    averages = shared.averages
    weight = jnp.where(averages.weight > 0, averages.weight, 1)
    good = averages.weight > 0
    shaping, alpha = shared.shaping, shared.alpha
    if averages.b is not None:
        shaping, sound = solve_q0(groups, damping, averages.b / weight)
        good &= sound
    if averages.c is not None:
        alpha, sound = solve_alpha(averages, weight)
        good &= sound
    good &= all_finite((shaping, alpha))
    kept = (shared.shaping, shared.alpha)
    shaping, alpha = jax.tree.map(lambda new, old: jnp.where(good, new, old), (shaping, alpha), kept)
    return shared._replace(shaping=shaping, alpha=alpha, solved=good)


def solve_q0(groups: Groups, damping: float, b: Array) -> tuple[Shaping, Bool[Array, ""]]:
    """Q_0 for B, or for its diagonal, with its inverse; and whether every group has a B.

    Args:
      groups: the partition of the preactivations.
      damping: how much of a group's mean eigenvalue is added to all of them.
      b: `[N, N]` or `[N]`.

    Returns:
      The pair, with the same trace of Q_0 Q_0^T and of its inverse in every group.
    """
    mine = jnp.asarray(same_group(groups), b.dtype)
    trace = mine @ (b if b.ndim == 1 else jnp.diagonal(b))
    if b.ndim == 1:
        relative = b / jnp.where(trace > 0, trace / jnp.sum(mine, axis=1), 1) + damping
        q0 = jnp.maximum(relative, jnp.finfo(b.dtype).eps) ** -0.25
        inverse = 1 / q0
        squares, inverse_squares = q0**2, inverse**2
    else:
        q0 = optimal_q0(b, damping, groups.index)
        inverse = jnp.where(same_group(groups), jnp.linalg.inv(q0), 0)
        squares, inverse_squares = jnp.sum(q0**2, axis=1), jnp.sum(inverse**2, axis=1)
    # Q_0's scale is α's. With equal traces of Q_0 Q_0^T and its inverse, a new Q_0 does not shift the balance
    # between what the stream has gathered and what it adds; the identity has them, too.
    scale = (mine @ inverse_squares / (mine @ squares)) ** 0.25
    if b.ndim == 2:
        scale = scale[:, None]
    return Shaping(q0 * scale, inverse / scale), jnp.all(trace > 0)


def solve_alpha(averages: Averages, weight: Array) -> tuple[Array, Bool[Array, ""]]:
    """α for every position and group, `[L, G]`; and whether rows and columns of C have been balanced."""
    assert averages.c is not None and averages.visits is not None and averages.steps is not None
    visited = averages.visits > 0
    # Above the diagonal each window adds all; below, a row as often as it was visited, to be scaled to its due.
    due = jnp.where(visited, averages.steps / weight / jnp.where(visited, averages.visits, 1), 0)
    upper = np.triu(np.ones(averages.c.shape[:2], bool))[:, :, None]
    c = averages.c * jnp.where(upper, 1 / weight, due[:, None, None])
    solution = jax.vmap(lambda c: optimal_alpha(c, max_iterations=20, tolerance=_TOLERANCE))(jnp.moveaxis(c, -1, 0))
    sound = jnp.all(solution.residual <= 100 * _TOLERANCE) & jnp.all(jnp.sum(c, axis=(0, 1)) > 0)
    return solution.alpha.T, sound
