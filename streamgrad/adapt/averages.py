"""The averages carried over from window to window, and Q_0 and α solved from them."""

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
    """Exponential averages over windows, not yet divided by their weight; None where they are not needed.

    Attributes:
      weight: the average of 1.
      b: B, `[N, N]` or its diagonal `[N]`.
      c: for episodes C over positions; below the diagonal each row as often as it was sampled.
      visits: the samples of each position's row.
      steps: the steps of a window at each position.
    """

    weight: Float[Array, ""]
    b: Array | None = None
    c: Float[Array, "L L G"] | None = None
    visits: Float[Array, " L"] | None = None
    steps: Float[Array, " L"] | None = None


class Gathered(NamedTuple):
    """A window that is being filled, one for each watched stream; on several devices, for those of each.

    Attributes:
      steps: the `Window` of the steps so far, and their γ and β, `[streams, W, 2, G]`.
      filled: the number of steps so far.
    """

    steps: PerDevice
    filled: Int[Array, ""]


class CarriedShared(NamedTuple):
    """The state that all streams share; a plain pytree, so that it is saved with everything else.

    Attributes:
      shaping: Q_0 and its inverse, or None.
      alpha: for episodes α of each position, `[L, G]`, or None.
      ready: whether the next chunk uses them, or the identity and GIR.
      solved: whether they make sense.
      windows: the number of windows so far.
      passes: the number of reverse passes in the averages.
      averages: of B and C.
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
    """Solve for Q_0 and α; where the solution makes no sense they stay, and `solved` is False."""
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
    old = (shared.shaping, shared.alpha)
    shaping, alpha = jax.tree.map(lambda new, old: jnp.where(good, new, old), (shaping, alpha), old)
    return shared._replace(shaping=shaping, alpha=alpha, solved=good)


def solve_q0(groups: Groups, damping: float, b: Array) -> tuple[Shaping, Bool[Array, ""]]:
    """Q_0 and its inverse, from B `[N, N]` or its diagonal `[N]`; and whether B is non-zero in every group."""
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
    # Q_0's scale is α's. With equal traces of Q_0 Q_0^T and its inverse, as the identity has them, a new Q_0 does not
    # shift the balance between past and present.
    scale = (mine @ inverse_squares / (mine @ squares)) ** 0.25
    if b.ndim == 2:
        scale = scale[:, None]
    return Shaping(q0 * scale, inverse / scale), jnp.all(trace > 0)


def solve_alpha(averages: Averages, weight: Array) -> tuple[Array, Bool[Array, ""]]:
    """α for every position and group, `[L, G]`; and whether rows and columns of C have been balanced."""
    assert averages.c is not None and averages.visits is not None and averages.steps is not None
    visited = averages.visits > 0
    # Above the diagonal each window adds all; below, a row as often as it was sampled, which `due` makes up for.
    due = jnp.where(visited, averages.steps / weight / jnp.where(visited, averages.visits, 1), 0)
    upper = np.triu(np.ones(averages.c.shape[:2], bool))[:, :, None]
    c = averages.c * jnp.where(upper, 1 / weight, due[:, None, None])
    solution = jax.vmap(lambda c: optimal_alpha(c, max_iterations=20, tolerance=_TOLERANCE))(jnp.moveaxis(c, -1, 0))
    sound = jnp.all(solution.residual <= 100 * _TOLERANCE) & jnp.all(jnp.sum(c, axis=(0, 1)) > 0)
    return solution.alpha.T, sound
