"""Backpropagation through time over the whole chunk: the exact reference."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from streamgrad._typing import Array, Float, PyTree
from streamgrad.base import Chunk, EstimatorState, GradientEstimator, Info, Model, Params
from streamgrad.checks import check_model, check_size, leading_length
from streamgrad.contract import label_of
from streamgrad.engine.estimator import Algorithm, Outcome, estimator, restart, same_dtype, sum_over_streams, transition
from streamgrad.step.matvec import by_parts
from streamgrad.step.platform import unroll
from streamgrad.step.weights import Outer, rows_of, sum_outer, zero_rows

Run = Callable[[Params, EstimatorState, Chunk, Any], Outcome]


def bptt(model: Model, recompute: int | None = None) -> GradientEstimator:
    """The exact gradient of the chunk, by reverse mode (Equation 3).

    The state at the chunk's beginning is a constant: what came before it gets no credit. On chunks of k steps this is
    what is mostly called truncated BPTT; `tbptt` reaches across chunks.

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
      >>> grads, state, info = est.update(params, est.init(params), chunk, key=None)
      >>> info.loss.shape
      (8,)

    References:
      Werbos, Backpropagation through time: what it does and how to do it, 1990.
      Chen et al., Training deep nets with sublinear memory cost, 2016 (for `recompute`).
    """
    check_model(model)
    if recompute is not None:
        check_size(recompute=recompute)

    def init(params: Params) -> EstimatorState:
        return EstimatorState(model.init_state(params), (), ())

    label = label_of("bptt", recompute=recompute)
    # Outer products keep a number for each preactivation and step: not where there are nearly as many as weights.
    if recompute is None and "preactivation" in model.cell.cuts and _is_wide(model):
        return estimator(model, Algorithm(init, _with_outer_products(model), _sum_outer_products), label=label)
    return estimator(model, Algorithm(init, _plain(model, recompute)), label=label)


def _is_wide(model: Model) -> bool:
    """Whether a preactivation stands for several weights, as in a product of matrices it does."""
    params = jax.eval_shape(model.cell.init_params, jax.eval_shape(lambda: jax.random.key(0)))
    return 2 * sum(rows_of(params)) <= sum(leaf.size for leaf in jax.tree.leaves(params))


def _plain(model: Model, recompute: int | None) -> Run:
    """Differentiate with respect to the parameters, whatever they are."""

    def run(params: Params, state: PyTree, chunk: Chunk) -> tuple[PyTree, tuple[Array, Array]]:
        """The state at the end of a stretch, and the loss and the output at each of its steps."""
        fresh = model.init_state(params)

        def step(state: PyTree, now: tuple) -> tuple[PyTree, Array]:
            x, reset = now
            state = transition(model, params, restart(reset, fresh, state), x)
            return state, model.cell.output(state)

        state, outputs = jax.lax.scan(step, state, (chunk.inputs, chunk.reset), unroll=unroll())
        return state, (_losses(model, params.head, outputs, chunk), outputs)

    def run_again(params: Params, state: PyTree, chunk: Chunk, k: int) -> tuple[PyTree, tuple[Array, Array]]:
        """`run`, in stretches of k steps that the reverse pass computes again."""
        length = leading_length(chunk, "time")
        whole = length - length % k
        remembering = jax.checkpoint(run, prevent_cse=False)

        def stretch(state: PyTree, chunk: Chunk) -> tuple[PyTree, tuple[Array, Array]]:
            return remembering(params, state, chunk)

        stretches = jax.tree.map(lambda leaf: leaf[:whole].reshape(-1, k, *leaf.shape[1:]), chunk)
        state, found = jax.lax.scan(stretch, state, stretches)
        found = jax.tree.map(lambda leaf: leaf.reshape(whole, *leaf.shape[2:]), found)
        if whole < length:
            state, rest = remembering(params, state, jax.tree.map(lambda leaf: leaf[whole:], chunk))
            found = jax.tree.map(lambda *parts: jnp.concatenate(parts), found, rest)
        return state, found

    def chunkwise(params: Params, state: EstimatorState, chunk: Chunk, key: Any) -> Outcome:
        del key

        def total(params: Params) -> tuple[Array, tuple[PyTree, Array, Array]]:
            if recompute is None:
                end, (losses, outputs) = run(params, state.cell, chunk)
            else:
                end, (losses, outputs) = run_again(params, state.cell, chunk, recompute)
            return jnp.sum(losses), (end, losses, outputs)

        grads, (end, losses, outputs) = jax.grad(total, has_aux=True)(params)
        return Outcome(grads, EstimatorState(end, (), ()), Info(losses, {}), outputs=outputs)

    return chunkwise


def _with_outer_products(model: Model) -> Run:
    """Differentiate with respect to the preactivations, and leave the weights to one matrix product at the end.

    Differentiating a scan with respect to weights adds an outer product to a buffer of their size at every step.
    """
    cut = model.cell.cuts["preactivation"]
    assert cut.features is not None
    features = cut.features

    def chunkwise(params: Params, state: EstimatorState, chunk: Chunk, key: Any) -> Outcome:
        del key
        fresh = model.init_state(params)
        length = leading_length(chunk, "time")
        still = zero_rows(params.cell, length)

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
            grads, (end, losses, outputs, a) = jax.grad(total, argnums=(0, 1), has_aux=True)(still, params.head)
        summands = (Outer(grads[0], a), grads[1])
        return Outcome(summands, EstimatorState(end, (), ()), Info(losses, {}), outputs=outputs)

    return chunkwise


def _sum_outer_products(summands: tuple[Outer, PyTree]) -> Params:
    return Params(sum_outer(summands[0]), sum_over_streams(summands[1]))


def _losses(model: Model, head: PyTree, outputs: Float[Array, "T width"], chunk: Chunk) -> Float[Array, " T"]:
    losses = jax.vmap(model.loss, in_axes=(None, 0, 0))(head, outputs, chunk.targets)
    return losses.astype(outputs.dtype)
