"""Real-time recurrent learning: the exact influence, carried forward."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from streamgrad._typing import Array, Float, PyTree
from streamgrad.base import GradientEstimator, Influence, Model, real_dtype
from streamgrad.checks import check_choice, check_model
from streamgrad.contract import label_of
from streamgrad.engine import sparse_influence
from streamgrad.engine.by_steps import online
from streamgrad.engine.chunk import Across, Crossing, by_features, chunkwise
from streamgrad.engine.estimator import estimator
from streamgrad.step import cuts
from streamgrad.step.cuts import Step
from streamgrad.step.influence_sparsity import InfluencePattern, find_influence_pattern
from streamgrad.step.jacobian_sparsity import find_jacobian_pattern
from streamgrad.step.weights import add_pulled, outer, steps_at_once, zero_each
from streamgrad.trees import cleared


def rtrl(model: Model, form: str = "chunks") -> GradientEstimator:
    """The exact gradient, online: the whole influence M = dh/dθ is carried forward (Equation 4).

        dL_chunk/dθ = backpropagation inside the chunk + (dL_chunk/dh_0) M_0
        M_K         = Φ M_0 + Σ_s G_s J_s,    Φ = dh_K/dh_0,    G_s = dh_K/dz_s

    For a chunk of one step this is M_t = (dh_t/dh_{t-1}) M_{t-1} + dh_t/dθ_t. For K steps it is the same gradient, and
    M is multiplied once instead of K times. Where weights multiply features, J_s = I ⊗ a_s^T, and the sum is one matrix
    product; for any other cell it comes from the reverse pass.

    M is kept where it can be non-zero, which is found in the step (`streamgrad.step.jacobian_sparsity`) and told by
    `streamgrad.cells.explain`. Where units do not hear each other from step to step, as in `cells.lru` and
    `cells.mingru`, that is one or two numbers for each parameter, and exact gradients cost about as much as BPTT. In a
    stack of such layers lower ones reach all units of the upper ones, and nothing is left out.

    Exact is for fixed parameters. If they change between chunks, M is that of the parameters the past was made with.

    Args:
      model: the model whose gradients are computed.
      form: how it is computed, not what: "chunks", or "steps", as it was published, which multiplies M at every step.

    Returns:
      The estimator. Memory is S P for S state units and P parameters, or less, as above. Time per step is
      S P + S² P / K beyond that of BPTT, for chunks of K steps; in the form "steps", which keeps all of M, S² P.
      `batched(rtrl(model), 16, watched=4)` takes the influence of 4 of 16 streams alone.

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
      Schmidhuber, A fixed size storage O(n³) time complexity learning algorithm for fully recurrent continually running
      networks, 1992 (by chunks).
    """
    check_model(model)
    check_choice("form", form, ("chunks", "steps"))
    if form == "steps":
        return online(model, _stepwise(model), label=label_of("rtrl", form=form))
    return estimator(model, chunkwise(model, find_across(model)), label=label_of("rtrl"))


def find_across(model: Model) -> Across:
    """M across chunks, in the shape that it has for this model's cell."""
    pattern = find_jacobian_pattern(model)
    return (
        _whole(model)
        if pattern is None
        else _in_shape(find_influence_pattern(pattern, cuts.preactivation_rows(model.cell)))
    )


def _whole(model: Model) -> Across:
    """M as a matrix, S times the parameters: where nothing is known of its shape."""
    state_size = cuts.layout(model.cell, model.cell.cuts["state"]).state_size

    def asks(memory: PyTree, noise: None) -> Float[Array, "S S"]:
        return jnp.eye(state_size, dtype=real_dtype(memory))

    def advance(shared: PyTree, memory: PyTree, noise: None, crossing: Crossing) -> tuple[PyTree, dict[str, Array]]:
        moved = jax.tree.map(lambda leaf: jnp.einsum("bst,bt...->bs...", crossing.back, leaf), memory)
        return add_pulled(cleared(crossing.reset, moved), crossing.pulled), {}

    def older(memory: PyTree, dl_dstart: Float[Array, "b S"]) -> PyTree:
        mean = dl_dstart / len(dl_dstart)
        return jax.tree.map(lambda leaf: jnp.tensordot(mean, leaf, axes=2), memory)

    def block(params: PyTree, length: int) -> int:
        return steps_at_once(params, state_size, length)

    factored = "preactivation" in model.cell.cuts  # else the reverse pass adds up, and keeps nothing of a step
    if not factored:
        return Across(empty_jacobian(state_size), asks, advance, older)
    across = Across(empty_jacobian(state_size), asks, advance, older, block=block)
    return across._replace(spread=by_features(across))


def _in_shape(reach: InfluencePattern) -> Across:
    """M where it can be non-zero: of a diagonal recurrence no more than a number or two for each parameter."""

    def init(params: PyTree, state: PyTree) -> PyTree:
        del state
        return sparse_influence.zeros(reach, params)

    def asks(memory: PyTree, noise: None) -> Float[Array, "R S"]:
        return sparse_influence.colour_vectors(reach, real_dtype(memory))

    def advance(shared: PyTree, memory: PyTree, noise: None, crossing: Crossing) -> tuple[PyTree, dict[str, Array]]:
        moved = cleared(crossing.reset, sparse_influence.move(reach, crossing.back, memory))
        return add_pulled(moved, crossing.pulled), {}

    def older(memory: PyTree, dl_dstart: Float[Array, "b S"]) -> PyTree:
        return sparse_influence.contract(reach, dl_dstart / len(dl_dstart), memory)

    def block(params: PyTree, length: int) -> int:
        return steps_at_once(params, reach.vectors, length)

    pick = functools.partial(sparse_influence.pick, reach)
    across = Across(init, asks, advance, older, block=block, pick=pick)
    return across._replace(spread=by_features(across))


def _stepwise(model: Model) -> Influence:
    """M advanced at every step. At preactivations dh_t/dθ_t = (dh_t/dz_t) ⊗ a_t^T is added without being built."""
    vertex = model.cell.cuts["preactivation" if "preactivation" in model.cell.cuts else "state"]
    layout = cuts.layout(model.cell, vertex)

    def advance(
        shared: PyTree, memory: PyTree, step: Step, noise: PyTree, dl_dstate: Array
    ) -> tuple[PyTree, dict[str, Array]]:
        del shared, noise, dl_dstate
        new = _immediate(step, layout)
        return jax.tree.map(jnp.add, propagate(step, memory, layout.state_size), new), {}

    return Influence(vertex, empty_jacobian(layout.state_size), advance, contract)


def empty_jacobian(state_size: int) -> Callable[[PyTree, PyTree], PyTree]:
    """The `init` of an influence that is a whole matrix: leaves `[S, *shape]` of zeros."""

    def init(params: PyTree, state: PyTree) -> PyTree:
        del state
        return zero_each(params, state_size)

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
