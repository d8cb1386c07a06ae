"""α and Q_0 together, by turns (Section 7.1)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from streamgrad._typing import Array, Float
from streamgrad.checks import check_size
from streamgrad.noise.groups import Groups
from streamgrad.theory.episode import Episode
from streamgrad.theory.equilibrate import optimal_alpha
from streamgrad.theory.matrices import b_matrix, c_by_group
from streamgrad.theory.objective import v_by_group
from streamgrad.theory.optimal_q import optimal_q0
from streamgrad.theory.spatial import Spatial, same_group, spatial_of, squeeze_groups


class Joint(NamedTuple):
    """α and Q_0 that suit each other.

    Attributes:
      alpha: `[T]`, or `[T, G]` where there are several groups.
      q0: Q_0, zero between groups.
      value: V(Q), with both.
      history: V(Q) before the first round and after each, `[rounds + 1]`; never increases.
    """

    alpha: Array
    q0: Float[Array, "N N"]
    value: Float[Array, ""]
    history: Float[Array, " R"]


def optimise(ep: Episode, groups: int = 1, rounds: int = 5, damping: float = 0.005) -> Joint:
    """Alternate between the optimal α for the Q_0 at hand and the optimal Q_0 for that α.

    No closed form is known for both at once. Each half of a round is an exact minimisation but for damping, which is
    why a new Q_0 is taken only where it does not increase V(Q); groups decide on their own.

    Args:
      ep: from `collect`, at preactivations.
      groups: as in `uoro`; each group has its own α and block of Q_0. With several weight matrices at least 2.
      rounds: how many.
      damping: of Q_0, as in `optimal_q0`.

    Returns:
      The pair, ready for `uoro(rescale=..., q0=..., groups=...)`.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.vanilla(2, 4), sg.heads.softmax(3))
      >>> chunk = sg.Chunk(jnp.ones((5, 2)), jnp.zeros(5, int))
      >>> ep = sg.theory.collect(model, model.init(jax.random.key(0)), chunk)
      >>> best = sg.theory.optimise(ep)
      >>> bool(best.value < sg.theory.v(ep))
      True
    """
    check_size(rounds=rounds)
    if groups == 1 and len(ep.rows) > 1:
        raise ValueError(
            f"with {len(ep.rows)} weight matrices a full Q_0 and one group would make one group of all of them: "
            "choose at least 2 groups, which keeps the matrices apart."
        )
    partition = spatial_of(ep, None, groups).partition
    index = partition.index

    def value(alpha: Float[Array, "T G"], q0: Float[Array, "N N"]) -> Float[Array, " G"]:
        return v_by_group(ep, alpha, _with(partition, q0))

    def one_round(carry: tuple, _: None) -> tuple[tuple, Float[Array, ""]]:
        alpha, q0, best = carry
        by_group = jnp.moveaxis(c_by_group(ep, _with(partition, q0)), -1, 0)
        new_alpha = jax.vmap(lambda c: optimal_alpha(c).alpha)(by_group).T
        new = value(new_alpha, q0)
        alpha, best = jnp.where((new <= best)[None], new_alpha, alpha), jnp.minimum(new, best)
        new_q0 = optimal_q0(b_matrix(ep, alpha, groups), damping, index)
        new = value(alpha, new_q0)
        q0, best = jnp.where((new <= best)[index][:, None], new_q0, q0), jnp.minimum(new, best)
        return (alpha, q0, best), jnp.sum(best)

    alpha = jnp.ones((ep.length, partition.count), ep.dtype)
    q0 = jnp.eye(ep.size, dtype=ep.dtype)
    start = value(alpha, q0)
    (alpha, q0, best), history = jax.lax.scan(one_round, (alpha, q0, start), None, length=rounds)
    return Joint(squeeze_groups(alpha), q0, jnp.sum(best), jnp.append(jnp.sum(start)[None], history))


def _with(partition: Groups, q0: Float[Array, "N N"]) -> Spatial:
    # The inverse of a block-diagonal matrix is one, but rounding in its factorisation need not know.
    return Spatial(partition, q0, jnp.where(same_group(partition), jnp.linalg.inv(q0), 0))
