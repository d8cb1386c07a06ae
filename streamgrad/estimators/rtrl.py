"""Real-time recurrent learning: the exact influence, carried forward."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from streamgrad._typing import Array, Float, PyTree
from streamgrad.base import GradientEstimator, Influence, Model, real_dtype
from streamgrad.checks import check_model, find_cut
from streamgrad.engine.stepwise import online
from streamgrad.step import cuts
from streamgrad.step.cuts import Step
from streamgrad.step.weights import outer


def rtrl(model: Model, cut: str | None = None) -> GradientEstimator:
    """The exact gradient, online: M_t = (dh_t/dh_{t-1}) M_{t-1} + dh_t/dθ_t with M_t = dh_t/dθ (Equation 4).

    Args:
      model: the model whose gradients are estimated.
      cut: how dh_t/dθ_t is obtained. At "preactivation", the default where the cell has it, as (dh_t/dz_t) ⊗ a_t^T,
        which is added without being built; elsewhere by one reverse pass for each unit of the state.

    Returns:
      The estimator. Memory is S P for S state units and P parameters, time S² P per step.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.gru(2, 4), sg.heads.softmax(3))
      >>> params = model.init(jax.random.key(0))
      >>> chunk = sg.Chunk(jnp.ones((5, 2)), jnp.zeros(5, int))
      >>> rtrl, bptt = sg.rtrl(model), sg.bptt(model)
      >>> online, _, _ = rtrl.update(params, rtrl.init(params), chunk, None)
      >>> offline, _, _ = bptt.update(params, bptt.init(params), chunk, None)
      >>> bool(jnp.allclose(online.cell["gates"], offline.cell["gates"], atol=1e-6))
      True

    References:
      Williams and Zipser, A learning algorithm for continually running fully recurrent neural networks, 1989.
    """
    check_model(model)
    if cut is None:
        cut = "preactivation" if "preactivation" in model.cell.cuts else "state"
    vertex = find_cut(model, cut)
    layout = cuts.layout(model.cell, vertex)

    def advance(
        shared: PyTree, memory: PyTree, step: Step, noise: PyTree, dl_dstate: Array
    ) -> tuple[PyTree, dict[str, Array]]:
        del shared, noise, dl_dstate
        new = _immediate(step, layout)
        return jax.tree.map(jnp.add, propagate(step, memory, layout.state_size), new), {}

    return online(model, Influence(vertex, empty_jacobian(layout.state_size), advance, contract))


def empty_jacobian(state_size: int) -> Callable[[PyTree, PyTree], PyTree]:
    """The `init` of an influence that is a whole matrix: leaves `[S, *shape]` of zeros."""

    def init(params: PyTree, state: PyTree) -> PyTree:
        del state
        return jax.tree.map(lambda leaf: jnp.zeros((state_size, *leaf.shape), leaf.dtype), params)

    return init


def propagate(step: Step, jacobian: PyTree, state_size: int) -> PyTree:
    """(dh_t/dh_{t-1}) M_{t-1}, as one matrix product for each leaf."""
    dtype = real_dtype(jacobian)
    columns = jax.vmap(step.propagate)(jnp.eye(state_size, dtype=dtype))
    return jax.tree.map(lambda leaf: jnp.tensordot(columns.T, leaf, axes=1), jacobian)


def contract(before: PyTree, after: PyTree, step: Step, dl_dstate: Float[Array, " S"]) -> PyTree:
    """dL_t/dθ = (dL_t/dh_t) M_t."""
    del before, step
    return jax.tree.map(lambda leaf: jnp.tensordot(dl_dstate, leaf, axes=1), after)


def _immediate(step: Step, layout: cuts.Layout) -> PyTree:
    """dh_t/dθ_t, with leaves `[S, *shape]`."""
    dtype = real_dtype(step.state)
    if step.features is None:
        return jax.vmap(step.backprop)(jnp.eye(layout.state_size, dtype=dtype))
    pushed = jax.vmap(step.push)(jnp.eye(layout.size, dtype=dtype))  # row i: dh_t/dz_i
    return outer(jax.vmap(step.unravel)(pushed.T), step.features)
