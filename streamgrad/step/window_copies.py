"""One transition for several copies of the state: one value, with derivatives over windows of different lengths.

Each loss needs the derivative of the state with respect to its own window alone. These derivatives differ, but the
state is one, and so is the linear map from its derivative before a step to the one after it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from streamgrad._typing import Array, PyTree


def in_copies(transition: Callable[[PyTree, PyTree, PyTree, PyTree], PyTree]) -> Callable[..., tuple]:
    """A transition that takes several copies of the state along.

        dh^c_t = (dh_t/dh_{t-1}) dh^c_{t-1} + (dh_t/dz_t) dz_t,    without the first term where copy c starts again

    z_t is displaced. The step is computed and linearised once for all copies, and a reverse pass takes the cotangents
    of all of them at a time.

    Args:
      transition: `transition(params, displaced, state, x) -> state`.

    Returns:
      `copied(params, displaced, state, copies, x, starts, own, begins) -> (state, copies, seen)`. `copies` has a
      leading axis; its values mean nothing, its derivatives are those of the copies. A copy forgets the past where its
      bool of `starts` is true, and all copies where `begins` is, which may be None. `seen` is the new state with the
      derivative of the copy `own`. With `starts=None` there is one copy, without an axis. There are derivatives with
      respect to `displaced` and `copies` alone, and none of the new state itself.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> step = in_copies(lambda params, displaced, state, x: params * state + displaced)
      >>> def seen(displaced, own):
      ...     starts = jnp.asarray([False, True])  # the second copy sees this step alone
      ...     state, copies, _ = step(2.0, displaced, 1.0, jnp.zeros(2), None, jnp.zeros(2, bool), 0, None)
      ...     return step(2.0, displaced, state, copies, None, starts, own, None)[2]
      >>> [jax.grad(seen)(0.0, own).item() for own in (0, 1)]
      [3.0, 1.0]
    """

    @jax.custom_jvp
    def copied(
        params: PyTree, displaced: PyTree, state: PyTree, copies: PyTree, x: PyTree, starts: Any, own: Any, begins: Any
    ) -> tuple[PyTree, PyTree, PyTree]:
        del starts, own, begins
        new = transition(params, displaced, state, x)
        return new, copies, new

    @copied.defjvp
    def _(primals: tuple, tangents: tuple) -> tuple[tuple, tuple]:
        params, displaced, state, copies, x, starts, own, begins = primals
        _, displaced_dot, _, copies_dot, *_ = tangents

        def step(displaced: PyTree, before: PyTree) -> PyTree:
            # Here and not copy by copy, so that the reverse pass stores it once for all of them.
            before = before if begins is None else _cut(begins, state, before)
            return transition(params, displaced, before, x)

        def follow(starts: Array, copy: PyTree) -> PyTree:
            return push(displaced_dot, _cut(starts, jax.tree.map(jnp.zeros_like, copy), copy))

        new, push = jax.linearize(step, displaced, state)
        if starts is None:
            moved = seen = push(displaced_dot, copies_dot)
        else:
            moved = jax.vmap(follow)(starts, copies_dot)
            seen = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, own, keepdims=False), moved)
        return (new, copies, new), (jax.tree.map(jnp.zeros_like, new), moved, seen)

    return copied


def _cut(where: Array, constant: PyTree, tree: PyTree) -> PyTree:
    return jax.tree.map(lambda constant, leaf: jnp.where(where, constant, leaf), constant, tree)
