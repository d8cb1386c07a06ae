"""RTRL inside each layer, backpropagation across layers at the same step."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from streamgrad._typing import Array, Float, PyTree
from streamgrad.base import Cell, Chunk, EstimatorState, GradientEstimator, Info, Model, Params, worked
from streamgrad.engine.collectives import Devices
from streamgrad.engine.estimator import estimator
from streamgrad.engine.method import Method, Outcome
from streamgrad.estimators.rtrl import rtrl_method
from streamgrad.heads import squared_error
from streamgrad.step.platform import unroll
from streamgrad.step_loss import Credit
from streamgrad.trees import restart, same_dtype


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
      >>> grads, state, info = est.update(params, est.init(params), chunk)
      >>> len(state.memory)
      2

    References:
      Zucchet, Meier, Schug, Mujika and Sacramento, Online learning of long-range dependencies, 2023.
    """
    model = worked(model)
    layers = model.cell.layers
    if len(layers) < 2:
        return estimator(dataclasses.replace(rtrl_method(model), name="local_rtrl"))
    # Each layer by itself: its inputs are known, and so is the gradient at all of its state.
    parts = [rtrl_method(Model(layer._replace(output=_ravelled, worked=None), squared_error(1))) for layer in layers]

    def own(params: Params) -> list[Params]:
        return [Params(cell, ()) for cell in params.cell]

    def init(params: Params) -> EstimatorState:
        memory = tuple(part.init(theta).memory for part, theta in zip(parts, own(params), strict=True))
        return EstimatorState(model.init_state(params), memory, ())

    def run(params: Params, state: EstimatorState, chunk: Chunk, noise: None, devices: Devices) -> Outcome:
        before, after, inputs = _forward(model, params, state.cell, chunk)
        losses, head, signals = _spatial(model, params, before, after, chunk)
        found = []
        for i, (part, theta) in enumerate(zip(parts, own(params), strict=True)):
            one = Chunk(inputs[i], Credit(signals[i]), chunk.reset)
            found.append(part.run(theta, EstimatorState(state.cell[i], state.memory[i], ()), one, noise, devices))
        grads = Params(tuple(one.grads.cell for one in found), head)
        ends, memories = tuple(one.state.cell for one in found), tuple(one.state.memory for one in found)
        info = Info(losses, {}, jax.vmap(jax.vmap(model.cell.output))(after))
        return Outcome(grads, EstimatorState(ends, memories, ()), info)

    def sharded_axes(memory: tuple) -> tuple:
        return tuple(axes(one) for axes, one in zip(known, memory, strict=True))

    known = [part.sharded_axes for part in parts if part.sharded_axes is not None]
    can = sharded_axes if len(known) == len(parts) else None
    return estimator(Method(name="local_rtrl", model=model, init=init, run=run, watchable=True, sharded_axes=can))


def _ravelled(state: PyTree) -> Float[Array, " S"]:
    return ravel_pytree(state)[0]


def _climb(layers: tuple[Cell, ...], params: PyTree, state: PyTree, x: PyTree, moved: PyTree) -> tuple[tuple, tuple]:
    """The new states of all layers, each displaced; and what each of them was given."""
    new, inputs = [], []
    for layer, theta, old, by in zip(layers, params, state, moved, strict=True):
        inputs.append(x)
        here = same_dtype(layer.step(theta, old, x), old)
        new.append(jax.tree.map(jnp.add, here, by))
        x = layer.output(new[-1])
    return tuple(new), tuple(inputs)


def _forward(model: Model, params: Params, start: PyTree, chunk: Chunk) -> tuple[PyTree, PyTree, tuple]:
    """Of every stream and step the state before it, where an episode begins the fresh one; after it; and all inputs."""
    fresh = model.init_state(params)
    no_displacement = jax.tree.map(jnp.zeros_like, fresh)

    def one(start: PyTree, inputs: PyTree, reset: Array | None) -> tuple:
        def step(state: PyTree, now: tuple) -> tuple[PyTree, tuple]:
            x, reset = now
            state = restart(reset, fresh, state)
            new, inputs = _climb(model.cell.layers, params.cell, state, x, no_displacement)
            return new, (state, new, inputs)

        return jax.lax.scan(step, start, (inputs, reset), unroll=unroll())[1]

    return jax.vmap(one)(start, chunk.inputs, chunk.reset)


def _spatial(model: Model, params: Params, before: PyTree, after: PyTree, chunk: Chunk) -> tuple[Array, PyTree, list]:
    """L_t, the head's gradient, and δ_t of every layer: how L_t depends on its state through this step alone."""

    def loss(head: PyTree, moved: PyTree, state: PyTree, x: PyTree, target: PyTree) -> Array:
        new, _ = _climb(model.cell.layers, params.cell, state, x, moved)
        return jnp.asarray(model.loss(head, model.cell.output(new), target), jax.tree.leaves(new)[0].dtype)

    def one(state: PyTree, new: PyTree, x: PyTree, target: PyTree) -> tuple:
        no_displacement = jax.tree.map(jnp.zeros_like, new)
        value, (head, moved) = jax.value_and_grad(loss, argnums=(0, 1))(params.head, no_displacement, state, x, target)
        return value, head, [_ravelled(layer) for layer in moved]

    losses, head, signals = jax.vmap(jax.vmap(one))(before, after, chunk.inputs, chunk.targets)
    return losses, jax.tree.map(lambda leaf: jnp.sum(leaf, axis=(0, 1)), head), signals
