"""A stream that reverse passes go back through, from many steps at once, over one linearisation of each transition.

Two families of gradients are wanted: b_s^(t) = dL_t/dz_s, and g_{q,r} = Σ_{t>=q} b_r^(t), all that C, B, V(Q) and the
total variance depend on. For r >= q causality makes g_{q,r} = g_{r,r}, which one reverse pass gives for all r. For
r < q no loss is added on the way back from q to r. Both families are therefore the same thing: a gradient with respect
to the state at step q (dL_q/dh_q, or that of all losses from q on), taken back through the steps r <= q. `sweep` does
it for blocks of q, and the caller reduces the gradients. Memory holds those of one block at one step r at a time.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from streamgrad._typing import Array, Bool, Float, Int, PyTree
from streamgrad.base import Cut
from streamgrad.step.cuts import over_vectors

# Wide enough for a matrix product to be worth its name, and narrow enough to skip most of what causality makes zero.
DEFAULT_BLOCK = 32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tape:
    """A stream, ready for reverse passes; a pytree.

    Attributes:
      params: the cell's parameters.
      fresh: the state that an episode begins with.
      no_dz: a displacement of z by zero, in the structure that the cut gives z.
      before: h_{t-1} ravelled, after a reset where there is one, `[T, S]`.
      inputs: x_t.
      reset: where episodes begin, `[T]`; the first step counts.
      ahead: dL/dh_t of the losses from t on, `[T, S]`.
      cut: where z is.
      block: from how many steps reverse passes go back together.
    """

    # Not annotated with shapes: mapped over, every leaf has a batch axis, and JAX puts other things in their places.
    params: Any
    fresh: Any
    no_dz: Any
    before: Any
    inputs: Any
    reset: Any
    ahead: Any
    cut: Cut = dataclasses.field(metadata={"static": True})
    block: int | None = dataclasses.field(metadata={"static": True})

    def transition(self, params: PyTree, vector: Float[Array, " S"], dz: Float[Array, " N"], x: PyTree) -> Array:
        """h_t as a vector, with z_t displaced by `dz`."""
        return over_vectors(self.cut, self.fresh, self.no_dz)(params, vector, dz, x)

    def pull(self, r: Any, cotangents: Float[Array, "K S"]) -> tuple[Float[Array, "K S"], Float[Array, "K N"]]:
        """From gradients with respect to h_r to those with respect to h_{r-1} and to z_r."""
        x = jax.tree.map(lambda leaf: leaf[r], self.inputs)
        no_dz = ravel_pytree(self.no_dz)[0]
        _, vjp = jax.vjp(lambda v, dz: self.transition(self.params, v, dz, x), self.before[r], no_dz)
        earlier, dz = jax.vmap(vjp)(cotangents)
        return jnp.where(self.reset[r], 0, earlier), dz

    def sweep(
        self,
        seeds: Float[Array, "T S"],
        visit: Callable[[PyTree, Int[Array, " K"], Int[Array, ""], Float[Array, "K N"]], PyTree],
        init: PyTree,
    ) -> PyTree:
        """Take a gradient with respect to the state at every step q back through all steps r <= q.

        Args:
          seeds: for each q, a gradient with respect to h_q.
          visit: `visit(carry, q[K], r, dz[K, N]) -> carry`, called for each block of q, and in it for each r, from the
            block's last step down to the first; `dz[k]` is the gradient with respect to z_r, zero where q[k] < r. The
            last block may reach past the end of the stream, with dz zero there.
          init: the first carry.

        Returns:
          The last carry.
        """
        length = seeds.shape[0]
        width, padded = _width(length, self.block), padded_length(length, self.block)
        seeds = jnp.concatenate([seeds, jnp.zeros((padded - length, seeds.shape[1]), seeds.dtype)])

        def one_block(carry: PyTree, start: Array) -> tuple[PyTree, None]:
            q = start + jnp.arange(width)
            mine = jax.lax.dynamic_slice_in_dim(seeds, start, width)
            top = jnp.minimum(start + width, length)

            def one_step(i: Array, carry: tuple) -> tuple:
                cotangents, carry = carry
                r = jnp.asarray(top - 1 - i, q.dtype)
                earlier, dz = self.pull(r, jnp.where((q == r)[:, None], mine, cotangents))
                return earlier, visit(carry, q, r, dz)

            # The number of steps depends on the block: what causality makes zero is not computed.
            return jax.lax.fori_loop(0, top, one_step, (jnp.zeros_like(mine), carry))[1], None

        return jax.lax.scan(one_block, init, jnp.arange(0, padded, width))[0]


def padded_length(length: int, block: int | None) -> int:
    """The number of q that `sweep` shows to `visit`: the stream's length, up to a multiple of the block."""
    width = _width(length, block)
    return -(-length // width) * width


def same_episode(episode: Int[Array, " T"]) -> Bool[Array, "T T"]:
    """Whether no reset lies between two steps, from the number of resets up to each."""
    return episode[:, None] == episode[None, :]


def _width(length: int, block: int | None) -> int:
    return min(length, DEFAULT_BLOCK if block is None else block)
