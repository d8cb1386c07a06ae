"""Truncated backpropagation through time with the same reach for every loss, across chunks."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from streamgrad._typing import Array, Bool, Float, PyTree
from streamgrad.base import Chunk, EstimatorState, GradientEstimator, Info, Model, Params, real_dtype
from streamgrad.checks import check_model, check_size, leading_length
from streamgrad.engine.estimator import Algorithm, Outcome, estimator, restart, transition


class Past(NamedTuple):
    """The last window - 1 steps, oldest first.

    Attributes:
      states: the state that each step began with.
      inputs: what each step read.
      begins: whether no credit may pass to before the step: an episode begins with it, or nothing was there yet.
      started: whether there was any step at all.
    """

    states: PyTree
    inputs: PyTree
    begins: Bool[Array, " W"]
    started: Bool[Array, ""]


def tbptt(model: Model, window: int) -> GradientEstimator:
    """Each loss reaches back `window` steps, its own among them: Σ_t Σ_{t-window < s <= t} dL_t/dθ_s.

    The reach does not depend on how the stream is cut into chunks: the last `window - 1` states and inputs are kept
    from one chunk to the next. If the parameters have changed since, the old steps are differentiated at the states
    that the stream really visited and at the new parameters.

    Args:
      model: the model whose gradients are estimated.
      window: at least 1. With 1, only the immediate effect of the parameters counts.

    Returns:
      The estimator. Time is `window` reverse steps per step, all steps of a chunk in parallel.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.vanilla(2, 4), sg.heads.squared_error(1))
      >>> params = model.init(jax.random.key(0))
      >>> est = sg.tbptt(model, window=3)
      >>> chunk = sg.Chunk(jnp.ones((1, 2)), jnp.zeros((1, 1)))  # one step at a time
      >>> grads, state, info = est.update(params, est.init(params), chunk, key=None)
      >>> state.memory.inputs.shape
      (2, 2)

    References:
      Williams and Peng, An efficient gradient-based algorithm for on-line training of recurrent network
      trajectories, 1990.
    """
    check_model(model)
    check_size(window=window)
    example = model.cell.example_input
    if example is None and window > 1:
        raise ValueError(
            "tbptt stores inputs across chunks: give cells.from_function an example_input, one x or its shape."
        )
    kept = window - 1

    def stored(x: Any, dtype: Any) -> Array:
        """One leaf of the inputs in the dtype in which it is kept: that of the parameters, if it is real."""
        return jnp.asarray(x, dtype if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype)

    def init(params: Params) -> EstimatorState:
        state = model.init_state(params)
        dtype = real_dtype(params.cell)
        past = Past(
            jax.tree.map(lambda leaf: jnp.repeat(leaf[None], kept, axis=0), state),
            jax.tree.map(lambda leaf: stored(jnp.zeros((kept, *leaf.shape), leaf.dtype), dtype), example),
            jnp.ones(kept, bool),
            jnp.zeros((), bool),
        )
        return EstimatorState(state, past, ())

    def run(params: Params, state: EstimatorState, chunk: Chunk, key: Any) -> Outcome:
        del key
        fresh = model.init_state(params)
        length = leading_length(chunk, "time")

        def forward(state: PyTree, now: tuple) -> tuple[PyTree, tuple]:
            x, reset = now
            before = restart(reset, fresh, state)
            after = transition(model, params, before, x)
            return after, (before, after)

        end, (before, after) = jax.lax.scan(forward, state.cell, (chunk.inputs, chunk.reset))
        loss, head_grads, dl_dstate = model.read_out_chunk(params.head, after, chunk.targets)

        begins = jnp.zeros(length, bool) if chunk.reset is None else chunk.reset
        past = _append(state.memory, before, chunk.inputs, begins)
        credit = _credit(model, params, past, dl_dstate, window)
        cell_grads = _backprop(model, params, past, credit)
        memory = jax.tree.map(lambda leaf: leaf[length:], past._replace(started=()))
        memory = memory._replace(started=jnp.ones((), bool))
        grads, outputs = Params(cell_grads, head_grads), jax.vmap(model.cell.output)(after)
        return Outcome(grads, EstimatorState(end, memory, ()), Info(loss, {}), outputs=outputs)

    return estimator(model, Algorithm(init, run))


def _append(past: Past, states: PyTree, inputs: PyTree, begins: Bool[Array, " T"]) -> Past:
    """The past followed by the steps of a chunk; the very first step of a stream begins an episode."""

    def join(old: Array, new: Array) -> Array:
        return jnp.concatenate([old, jnp.asarray(new, old.dtype)])

    begins = begins.at[0].set(begins[0] | ~past.started)
    inputs = inputs if past.inputs is None else jax.tree.map(join, past.inputs, inputs)
    return Past(jax.tree.map(join, past.states, states), inputs, join(past.begins, begins), past.started)


def _step(model: Model, params: PyTree, vector: Array, like: PyTree, x: PyTree) -> Float[Array, " S"]:
    """F over a ravelled state."""
    state = ravel_pytree(like)[1](vector)
    return ravel_pytree(model.cell.step(params, state, x))[0].astype(vector.dtype)


def _credit(
    model: Model, params: Params, past: Past, dl_dstate: Float[Array, "T S"], window: int
) -> Float[Array, "L S"]:
    """Σ_t dL_t/dh_s over the losses of the chunk that reach step s, for every step s of past and chunk.

    All losses go back together: after k rounds, `reach[t]` is dL_t/dh_{t-k}.
    """
    length = dl_dstate.shape[0]
    kept = window - 1

    def back(reach: Array, state: PyTree, x: PyTree, begins: Array) -> Array:
        vector, _ = ravel_pytree(state)
        _, vjp = jax.vjp(lambda vector: _step(model, params.cell, vector, state, x), vector)
        return jnp.where(begins, 0, vjp(reach)[0])

    def round_(carry: tuple[Array, Array], k: Array) -> tuple[tuple[Array, Array], None]:
        reach, credit = carry
        here = jax.lax.dynamic_slice_in_dim(credit, kept - k, length)
        credit = jax.lax.dynamic_update_slice_in_dim(credit, here + reach, kept - k, axis=0)
        slices = jax.tree.map(
            lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, kept - k, length),
            (past.states, past.inputs, past.begins),
        )
        return (jax.vmap(back)(reach, *slices), credit), None

    nothing = jnp.zeros((kept + length, dl_dstate.shape[1]), dl_dstate.dtype)
    (_, credit), _ = jax.lax.scan(round_, (dl_dstate, nothing), jnp.arange(window))
    return credit


def _backprop(model: Model, params: Params, past: Past, credit: Float[Array, "L S"]) -> PyTree:
    """Σ_s credit_s dh_s/dθ_s, in one reverse pass over all steps at once."""

    def all_steps(cell_params: PyTree) -> Float[Array, "L S"]:
        def one(state: PyTree, x: PyTree) -> Array:
            return _step(model, cell_params, ravel_pytree(state)[0], state, x)

        return jax.vmap(one)(past.states, past.inputs)

    _, vjp = jax.vjp(all_steps, params.cell)
    return vjp(credit)[0]
