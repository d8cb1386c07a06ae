"""RTRL inside each layer, backpropagation across layers at the same step."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from streamgrad._typing import Array, Float, PyTree
from streamgrad.base import Cell, Chunk, EstimatorState, GradientEstimator, Info, Model, Params
from streamgrad.checks import check_model
from streamgrad.contract import label_of
from streamgrad.engine.chunk import chunkwise, last_axis
from streamgrad.engine.collectives import ALONE, Columns, Devices, Spread
from streamgrad.engine.estimator import Algorithm, Outcome, as_stream, estimator, restart, same_dtype
from streamgrad.estimators.rtrl import find_across, rtrl
from streamgrad.heads import squared_error
from streamgrad.step.platform import unroll
from streamgrad.step_loss import Credit


def local_rtrl(model: Model) -> GradientEstimator:
    """Exact RTRL inside the layers of a stack, and backpropagation across them at the same step.

        dL/dθ_l ≈ Σ_t δ_t^l M_t^l,    M_t^l = (dh_t^l/dh_{t-1}^l) M_{t-1}^l + dh_t^l/dθ_l

    δ_t^l = dL_t/dh_t^l goes from the loss down through the layers of step t. What a lower layer does to later losses
    through the memory of an upper one is left out, so that it is biased for more than one layer; for one it is `rtrl`.
    In return M of each layer is over its own parameters alone, and where the layers are diagonal it costs no more than
    BPTT.

    Args:
      model: the model whose gradients are estimated; its cell is from `cells.stack`, or a single layer.

    Returns:
      The estimator. Time and memory are those of `rtrl` on each layer.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> layers = sg.cells.lru(2, 3, 4), sg.cells.lru(4, 3, 4)
      >>> model = sg.Model(sg.cells.stack(*layers), sg.heads.softmax(3))
      >>> params = model.init(jax.random.key(0))
      >>> est = sg.local_rtrl(model)
      >>> chunk = sg.Chunk(jnp.ones((5, 2)), jnp.zeros(5, int))
      >>> grads, state, info = est.update(params, est.init(params), chunk, None)
      >>> len(state.memory)
      2

    References:
      Zucchet, Meier, Schug, Mujika and Sacramento, Online learning of long-range dependencies, 2023.
    """
    check_model(model)
    layers = model.cell.layers
    if len(layers) < 2:
        return dataclasses.replace(rtrl(model), label=label_of("local_rtrl"))
    # Each layer by itself: what it is given is known, and so is the gradient at all of its state.
    models = [Model(layer._replace(output=_whole, worked=None), squared_error(1)) for layer in layers]
    parts = [chunkwise(one, find_across(one)) for one in models]

    def own(params: Params) -> list[Params]:
        return [Params(cell, ()) for cell in params.cell]

    def init(params: Params) -> EstimatorState:
        memory = tuple(part.init(theta).memory for part, theta in zip(parts, own(params), strict=True))
        return EstimatorState(model.init_state(params), memory, ())

    def batch(params: Params, state: EstimatorState, chunk: Chunk, keys: Any, devices: Devices) -> Outcome:
        before, after, inputs = _forward(model, params, state.cell, chunk)
        losses, head, signals = _spatial(model, params, before, after, chunk)
        grads, ends, memories = [], [], []
        for i, (part, theta) in enumerate(zip(parts, own(params), strict=True)):
            assert part.batch is not None
            one = Chunk(inputs[i], Credit(signals[i]), chunk.reset)
            found = part.batch(theta, EstimatorState(state.cell[i], state.memory[i], ()), one, keys, devices)
            grads.append(jax.tree.map(lambda leaf: leaf[0], found.summands.cell))
            ends.append(found.state.cell)
            memories.append(found.state.memory)
        outputs = jax.vmap(jax.vmap(model.cell.output))(after)
        return Outcome(
            as_stream(Params(tuple(grads), head)),
            EstimatorState(tuple(ends), tuple(memories), ()),
            Info(losses, {}),
            outputs=outputs,
        )

    def run(params: Params, state: EstimatorState, chunk: Chunk, key: Any) -> Outcome:
        many = batch(params, as_stream(state), as_stream(chunk), as_stream(key), ALONE)
        return jax.tree.map(lambda leaf: leaf[0], many)

    def spread(columns: Columns) -> Spread:
        inits = [part.columns(columns).init for part in parts if part.columns is not None]

        def whole(params: Params) -> EstimatorState:
            memory = tuple(one(theta).memory for one, theta in zip(inits, own(params), strict=True))
            return init(params)._replace(memory=memory)

        return Spread(whole, last_axis)

    can = all(part.columns is not None for part in parts)
    algorithm = Algorithm(init, run, batch=batch, columns=spread if can else None)
    return estimator(model, algorithm, label=label_of("local_rtrl"))


def _whole(state: PyTree) -> Float[Array, " S"]:
    return ravel_pytree(state)[0]


def _climb(layers: tuple[Cell, ...], params: PyTree, state: PyTree, x: PyTree, moved: PyTree) -> tuple[tuple, tuple]:
    """The new states of all layers, each displaced; and what each of them was given."""
    new, given = [], []
    for layer, theta, old, by in zip(layers, params, state, moved, strict=True):
        given.append(x)
        here = same_dtype(layer.step(theta, old, x), old)
        new.append(jax.tree.map(jnp.add, here, by))
        x = layer.output(new[-1])
    return tuple(new), tuple(given)


def _forward(model: Model, params: Params, start: PyTree, chunk: Chunk) -> tuple[PyTree, PyTree, tuple]:
    """Of every stream and step the state before it, where an episode begins the fresh one; after it; and all inputs."""
    fresh = model.init_state(params)
    still = jax.tree.map(jnp.zeros_like, fresh)

    def one(start: PyTree, inputs: PyTree, reset: Array | None) -> tuple:
        def step(state: PyTree, now: tuple) -> tuple[PyTree, tuple]:
            x, reset = now
            state = restart(reset, fresh, state)
            new, given = _climb(model.cell.layers, params.cell, state, x, still)
            return new, (state, new, given)

        return jax.lax.scan(step, start, (inputs, reset), unroll=unroll())[1]

    return jax.vmap(one)(start, chunk.inputs, chunk.reset)


def _spatial(model: Model, params: Params, before: PyTree, after: PyTree, chunk: Chunk) -> tuple[Array, PyTree, list]:
    """L_t, the head's gradient, and δ_t of every layer: how L_t depends on its state through this step alone."""

    def loss(head: PyTree, moved: PyTree, state: PyTree, x: PyTree, target: PyTree) -> Array:
        new, _ = _climb(model.cell.layers, params.cell, state, x, moved)
        return jnp.asarray(model.loss(head, model.cell.output(new), target), jax.tree.leaves(new)[0].dtype)

    def one(state: PyTree, new: PyTree, x: PyTree, target: PyTree) -> tuple:
        still = jax.tree.map(jnp.zeros_like, new)
        value, (head, moved) = jax.value_and_grad(loss, argnums=(0, 1))(params.head, still, state, x, target)
        return value, head, [_whole(layer) for layer in moved]

    losses, head, signals = jax.vmap(jax.vmap(one))(before, after, chunk.inputs, chunk.targets)
    return losses, jax.tree.map(lambda leaf: jnp.sum(leaf, axis=(0, 1)), head), signals
