"""Reverse passes from every step of an episode at once, over one linearisation of each transition.

Two families of gradients are wanted: b_s^(t) = dL_t/dz_s, and g_{q,r} = Σ_{t>=q} b_r^(t), all that C, B, V(Q) and the
total variance depend on. For r >= q causality makes g_{q,r} = g_{r,r}, which one reverse pass gives for all r. For
r < q no loss is added on the way back from q to r. Both families are therefore the same thing: a gradient with respect
to the state at step q (dL_q/dh_q, or that of all losses from q on), taken back through the steps r <= q. `sweep` does
it for blocks of q, with one linearisation of a step for all q of the block, and lets the caller reduce what it sees;
so that at no time more than one block's gradients at one step r need be in memory.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from streamgrad._typing import Array, Bool, Float, Int, PyTree
from streamgrad.base import Chunk, Model, Params
from streamgrad.checks import check_chunk, check_like, check_model, check_params, check_size, find_cut
from streamgrad.engine.estimator import restart
from streamgrad.step import cuts

# Wide enough for a matrix product to be worth its name, and narrow enough to skip most of what causality makes zero.
DEFAULT_BLOCK = 32


class Tape(NamedTuple):
    """An episode, run once forward and once back.

    Attributes:
      loss: L_t.
      gradient: of the summed loss, like the model's parameters.
      episode: how many resets each step has behind it; steps of different number have nothing to do with each other.
      features: at preactivations a_t of each weight matrix, in the parameters' order; None elsewhere.
      jacobian: elsewhere J_t, with the parameters ravelled; None at preactivations.
      immediate: dL_t/dh_t.
      future: dL/dh_t of the losses from t on.
      diagonal: g_{t,t}, dL/dz_t of the losses from t on.
      pull: `pull(r, cotangents[K, S]) -> ([K, S], [K, N])`, from gradients with respect to h_r to those with respect to
        h_{r-1} and to z_r.
    """

    loss: Float[Array, " T"]
    gradient: Params
    episode: Int[Array, " T"]
    features: tuple[Float[Array, "T _"], ...] | None
    jacobian: Float[Array, "T N P"] | None
    immediate: Float[Array, "T S"]
    future: Float[Array, "T S"]
    diagonal: Float[Array, "T N"]
    pull: Callable[[Any, Float[Array, "K S"]], tuple[Float[Array, "K S"], Float[Array, "K N"]]]


def check_episode(model: Model, params: Any, chunk: Any, cut: Any, block: Any) -> int:
    """The caller's input makes sense; returns the number of steps."""
    check_model(model)
    expected = jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.key(0)))
    check_params(expected, params)
    find_cut(model, cut)
    if cut == "params":
        raise ValueError("the variance theory is for the cuts 'preactivation' and 'state', not 'params'.")
    if block is not None:
        check_size(block=block)
    return check_chunk(model, chunk)


def record(model: Model, params: Params, chunk: Chunk, cut: str) -> Tape:
    """Run an episode forward and once back.

    Args:
      model: the model.
      params: its parameters.
      chunk: one stream, from the beginning of an episode on.
      cut: "preactivation" or "state".

    Returns:
      What all further reverse passes start from.
    """
    vertex = model.cell.cuts[cut]
    fresh = model.init_state(params)
    start, unravel_state = ravel_pytree(fresh)
    first = jax.tree.map(lambda leaf: leaf[0], chunk.inputs)
    z, unravel_z = ravel_pytree(vertex.into(params.cell, fresh, first))
    still = jnp.zeros_like(z)
    length = chunk_length(chunk)
    # An episode that begins inside a chunk owes nothing to the steps before it, nor does the chunk's first.
    reset = jnp.zeros(length, bool) if chunk.reset is None else chunk.reset
    reset = reset.at[0].set(True)

    def transition(cell_params: PyTree, vector: Array, dz: Array, x: PyTree) -> Array:
        new = vertex.inject(cell_params, unravel_state(vector), x, unravel_z(dz))
        check_like("the state that the cell's step returns", fresh, new, "the state it was given")
        return ravel_pytree(new)[0].astype(vector.dtype)

    def forward(vector: Array, now: tuple) -> tuple[Array, tuple]:
        x, target, reset = now
        before = restart(reset, start, vector)
        after = transition(params.cell, before, still, x)
        loss, head_grads, immediate = model.read_out(params.head, unravel_state(after), target)
        if vertex.features is None:

            def into(cell_params: PyTree) -> Array:
                return ravel_pytree(vertex.into(cell_params, unravel_state(before), x))[0].astype(z.dtype)

            by_row = jax.vmap(lambda v: ravel_pytree(jax.vjp(into, params.cell)[1](v)[0])[0])
            what = by_row(jnp.eye(z.size, dtype=z.dtype))
        else:
            what = tuple(jax.tree.leaves(vertex.features(params.cell, unravel_state(before), x)))
        return after, (before, loss, head_grads, immediate, what)

    _, (before, loss, head_grads, immediate, what) = jax.lax.scan(forward, start, (chunk.inputs, chunk.targets, reset))

    def backward(carry: tuple, now: tuple) -> tuple[tuple, tuple]:
        later, grads = carry
        vector, x, reset, immediate = now
        future = immediate + later
        _, vjp = jax.vjp(lambda p, v, dz: transition(p, v, dz, x), params.cell, vector, still)
        cell_grads, earlier, diagonal = vjp(future)
        return (jnp.where(reset, 0, earlier), jax.tree.map(jnp.add, grads, cell_grads)), (future, diagonal)

    zero = (jnp.zeros_like(start), jax.tree.map(jnp.zeros_like, params.cell))
    (_, cell_grads), (future, diagonal) = jax.lax.scan(
        backward, zero, (before, chunk.inputs, reset, immediate), reverse=True
    )

    def pull(r: Any, cotangents: Float[Array, "K S"]) -> tuple[Float[Array, "K S"], Float[Array, "K N"]]:
        x = jax.tree.map(lambda leaf: leaf[r], chunk.inputs)
        _, vjp = jax.vjp(lambda v, dz: transition(params.cell, v, dz, x), before[r], still)
        earlier, dz = jax.vmap(vjp)(cotangents)
        return jnp.where(reset[r], 0, earlier), dz

    head_grads = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), head_grads)
    features, jacobian = (None, what) if vertex.features is None else (what, None)
    return Tape(
        loss,
        Params(cell_grads, head_grads),
        jnp.cumsum(reset),
        features,
        jacobian,
        immediate,
        future,
        diagonal,
        pull,
    )


def sweep(
    tape: Tape,
    seeds: Float[Array, "T S"],
    visit: Callable[[PyTree, Int[Array, " K"], Any, Float[Array, "K N"]], PyTree],
    init: PyTree,
    block: int | None = None,
) -> PyTree:
    """Take a gradient with respect to the state at every step q back through all steps r <= q.

    Args:
      tape: from `record`.
      seeds: for each q, a gradient with respect to h_q.
      visit: `visit(carry, q[K], r, dz[K, N]) -> carry`, called for each block of q, and in it for each r, from the
        block's last step down to the first; `dz[k]` is the gradient with respect to z_r, zero where q[k] < r. The last
        block may reach past the end of the episode, with dz zero there.
      init: the first carry.
      block: K, how many q go back together.

    Returns:
      The last carry.
    """
    length = seeds.shape[0]
    width = min(length, DEFAULT_BLOCK if block is None else block)
    padded = padded_length(length, block)
    seeds = jnp.concatenate([seeds, jnp.zeros((padded - length, seeds.shape[1]), seeds.dtype)])

    def one_block(carry: PyTree, start: Array) -> tuple[PyTree, None]:
        q = start + jnp.arange(width)
        mine = jax.lax.dynamic_slice_in_dim(seeds, start, width)
        top = jnp.minimum(start + width, length)

        def one_step(i: Array, carry: tuple) -> tuple:
            cotangents, carry = carry
            r = top - 1 - i
            earlier, dz = tape.pull(r, jnp.where((q == r)[:, None], mine, cotangents))
            return earlier, visit(carry, q, r, dz)

        # The number of steps depends on the block: what causality makes zero is not computed.
        return jax.lax.fori_loop(0, top, one_step, (jnp.zeros_like(mine), carry))[1], None

    return jax.lax.scan(one_block, init, jnp.arange(0, padded, width))[0]


def padded_length(length: int, block: int | None) -> int:
    """The number of q that `sweep` shows to `visit`: the episode's length, up to a multiple of the block."""
    width = min(length, DEFAULT_BLOCK if block is None else block)
    return -(-length // width) * width


def chunk_length(chunk: Chunk) -> int:
    """The number of steps of a chunk that has been checked."""
    return jax.tree.leaves(chunk.inputs)[0].shape[0]


def rows_of(model: Model, cut: str) -> tuple[int, ...]:
    """How many entries of z each weight matrix has; at the state cut the single entry (N,)."""
    return cuts.layout(model.cell, model.cell.cuts[cut]).rows


def same_episode(episode: Bool[Array, " T"] | Int[Array, " T"]) -> Bool[Array, "T T"]:
    """Whether no reset lies between two steps."""
    return episode[:, None] == episode[None, :]
