"""Backpropagation through time over the whole chunk: the exact reference."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from streamgrad._typing import Array, Float, PyTree
from streamgrad.base import Chunk, EstimatorState, GradientEstimator, Info, Model, Params, transition, worked
from streamgrad.checks import check_size, leading_length
from streamgrad.engine.chunk import in_stretches
from streamgrad.engine.estimator import estimator
from streamgrad.engine.method import Method, Outcome, per_stream, sum_over_streams
from streamgrad.step.matvec import by_parts
from streamgrad.step.platform import unroll
from streamgrad.step.weights import Outer, rows_of, sum_outer, zero_rows
from streamgrad.trees import restart, same_dtype

Run = Callable[[Params, EstimatorState, Chunk, None], Outcome]


def bptt(model: Model, recompute: int | None = None) -> GradientEstimator:
    """The exact gradient of the chunk, by reverse mode (Equation 3).

    The state at the chunk's beginning is a constant: the past before it gets no credit. On chunks of k steps this is
    what most papers call truncated BPTT, or TBPTT; `windowed_bptt` reaches a fixed number of steps back, across chunks.

    Args:
      model: the model whose gradients are computed.
      recompute: None stores what the reverse pass needs of every step. A number k stores the state at every k-th step
        alone, and computes the k steps between again on the way back: memory of T/k + k steps instead of T, for one
        more forward pass.

    Returns:
      The estimator.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.lstm(2, 4), sg.heads.squared_error(1))
      >>> params = model.init(jax.random.key(0))
      >>> est = sg.bptt(model, recompute=3)
      >>> chunk = sg.Chunk(jnp.ones((8, 2)), jnp.zeros((8, 1)))
      >>> grads, state, info = est.update(params, est.init(params), chunk)
      >>> info.loss.shape
      (8,)

    References:
      Werbos, Backpropagation through time: what it does and how to do it, 1990.
      Chen et al., Training deep nets with sublinear memory cost, 2016 (for `recompute`).
    """
    model = worked(model)
    if recompute is not None:
        check_size(recompute=recompute)

    def init(params: Params) -> EstimatorState:
        return EstimatorState(model.init_state(params), (), ())

    # Outer products keep a number for each preactivation and step: not where there are nearly as many as weights.
    if recompute is None and "preactivation" in model.cell.cuts and _is_wide(model):
        run = per_stream(_with_outer_products(model), sum_factors)
    else:
        run = per_stream(_plain(model, recompute))
    return estimator(Method(name="bptt", options={"recompute": recompute}, model=model, init=init, run=run))


def _is_wide(model: Model) -> bool:
    """Whether a preactivation stands for several weights, as in a product of matrices it does."""
    params = jax.eval_shape(model.cell.init_params, jax.eval_shape(lambda: jax.random.key(0)))
    return 2 * sum(rows_of(params)) <= sum(leaf.size for leaf in jax.tree.leaves(params))


def _plain(model: Model, recompute: int | None) -> Run:
    """Differentiate with respect to the parameters, whatever they are."""

    def stretch(params: Params, state: PyTree, chunk: Chunk) -> tuple[PyTree, tuple[Array, Array]]:
        """The state at the end of a stretch, and the loss and the output at each of its steps."""
        fresh = model.init_state(params)

        def step(state: PyTree, now: tuple) -> tuple[PyTree, Array]:
            x, reset = now
            state = transition(model, params, restart(reset, fresh, state), x)
            return state, model.cell.output(state)

        state, outputs = jax.lax.scan(step, state, (chunk.inputs, chunk.reset), unroll=unroll())
        return state, (_losses(model, params.head, outputs, chunk), outputs)

    def one(params: Params, state: EstimatorState, chunk: Chunk, noise: None) -> Outcome:
        del noise
        again = jax.checkpoint(stretch, prevent_cse=False)

        def total(params: Params) -> tuple[Array, tuple[PyTree, Array, Array]]:
            if recompute is None:
                end, (losses, outputs) = stretch(params, state.cell, chunk)
            else:  # in stretches that the reverse pass computes again
                parts = functools.partial(again, params)
                end, (losses, outputs) = in_stretches(parts, state.cell, chunk, recompute)
            return jnp.sum(losses), (end, losses, outputs)

        grads, (end, losses, outputs) = jax.grad(total, has_aux=True)(params)
        return Outcome(grads, EstimatorState(end, (), ()), Info(losses, {}, outputs))

    return one


def _with_outer_products(model: Model) -> Run:
    """Differentiate with respect to the preactivations, and leave the weights to one matrix product at the end.

    Differentiating a scan with respect to weights adds an outer product to a buffer of their size at every step.
    """
    cut = model.cell.cuts["preactivation"]
    assert cut.features is not None
    features = cut.features

    def one(params: Params, state: EstimatorState, chunk: Chunk, noise: None) -> Outcome:
        del noise
        fresh = model.init_state(params)
        no_displacement = zero_rows(params.cell, leading_length(chunk, "time"))

        def total(dz: PyTree, head: PyTree) -> tuple[Array, tuple]:
            def step(state: PyTree, now: tuple) -> tuple[PyTree, tuple]:
                x, reset, dz = now
                state = restart(reset, fresh, state)
                a = jax.lax.stop_gradient(features(params.cell, state, x))
                state = same_dtype(cut.inject(params.cell, state, x, dz), state)
                return state, (model.cell.output(state), a)

            end, (outputs, a) = jax.lax.scan(step, state.cell, (chunk.inputs, chunk.reset, dz), unroll=unroll())
            losses = _losses(model, head, outputs, chunk)
            return jnp.sum(losses), (end, losses, outputs, a)

        with by_parts():
            grads, aux = jax.grad(total, argnums=(0, 1), has_aux=True)(no_displacement, params.head)
        end, losses, outputs, a = aux
        factors = Params([Outer(grads[0], a)], grads[1])
        return Outcome(factors, EstimatorState(end, (), ()), Info(losses, {}, outputs))

    return one


def sum_factors(summands: Params) -> Params:
    """The gradient from the factors of outer products, of streams and steps, and the head's gradient of each stream."""
    parts = [sum_outer(part) for part in summands.cell]
    return Params(functools.reduce(add_trees, parts), sum_over_streams(summands.head))


def add_trees(first: PyTree, second: PyTree) -> PyTree:
    """The sum of two trees of the same structure."""
    return jax.tree.map(jnp.add, first, second)


def _losses(model: Model, head: PyTree, outputs: Float[Array, "T width"], chunk: Chunk) -> Float[Array, " T"]:
    losses = jax.vmap(model.loss, in_axes=(None, 0, 0))(head, outputs, chunk.targets)
    return losses.astype(outputs.dtype)
