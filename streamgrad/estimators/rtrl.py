"""Real-time recurrent learning: the exact influence, carried forward."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from streamgrad._typing import Array, Float, PyTree
from streamgrad.base import Chunk, EstimatorState, GradientEstimator, Model, Params, real_dtype, worked
from streamgrad.engine import sparse_influence
from streamgrad.engine.across import finish, older_credit, with_older
from streamgrad.engine.by_steps import by_steps
from streamgrad.engine.chunk import go_back, go_forward
from streamgrad.engine.collectives import Devices
from streamgrad.engine.estimator import estimator
from streamgrad.engine.method import Method, Outcome, watched_streams
from streamgrad.step import cuts
from streamgrad.step.cuts import Step
from streamgrad.step.influence_sparsity import find_influence_pattern
from streamgrad.step.jacobian_sparsity import JacobianPattern, find_jacobian_pattern
from streamgrad.step.weights import add_pulled, outer, steps_at_once, zero_each
from streamgrad.trees import cleared


def rtrl(model: Model) -> GradientEstimator:
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

    Returns:
      The estimator. Memory is S P for S state units and P parameters, or less, as above. Time per step is
      S P + S² P / K beyond that of BPTT, for chunks of K steps.
      `batched(rtrl(model), 16, watched=4)` takes the influence of 4 of 16 streams alone.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.gru(2, 4), sg.heads.softmax(3))
      >>> params = model.init(jax.random.key(0))
      >>> chunk = sg.Chunk(jnp.ones((5, 2)), jnp.zeros(5, int))
      >>> rtrl, bptt = sg.rtrl(model), sg.bptt(model)
      >>> online, _, _ = rtrl.update(params, rtrl.init(params), chunk)
      >>> offline, _, _ = bptt.update(params, bptt.init(params), chunk)
      >>> bool(jnp.allclose(online.cell["gates"], offline.cell["gates"], atol=1e-6))
      True

    References:
      Williams and Zipser, A learning algorithm for continually running fully recurrent neural networks, 1989.
      Schmidhuber, A fixed size storage O(n³) time complexity learning algorithm for fully recurrent continually running
      networks, 1992 (by chunks).
    """
    return estimator(rtrl_method(worked(model)))


def rtrl_method(model: Model) -> Method:
    """RTRL by chunks, with M in the shape that it has for the model's cell."""
    pattern = find_jacobian_pattern(model)
    influence = _dense(model) if pattern is None else _sparse(model, pattern)

    def init(params: Params) -> EstimatorState:
        return EstimatorState(model.init_state(params), influence.zeros(params.cell), ())

    def run(params: Params, state: EstimatorState, chunk: Chunk, noise: None, devices: Devices) -> Outcome:
        del noise, devices
        forward = go_forward(model, params, state.cell, chunk)
        watched, length = watched_streams(state), len(forward.losses)
        vectors = influence.cotangents(real_dtype(params.cell))
        back = go_back(
            forward,
            params.cell,
            jnp.broadcast_to(vectors, (watched, *vectors.shape)),
            steps_at_once=influence.steps_at_once(params.cell, length),
            pick=influence.pick,
        )
        older = older_credit(influence.contract, state, back.dl_dstart, forward)
        grads, memory = with_older(back.inside, older, state, forward)
        moved = cleared(forward.begun(watched), influence.move(back.asked, memory))
        return finish(model, params, forward, grads, add_pulled(moved, back.pulled))

    can = "preactivation" in model.cell.cuts  # else M has no axis of features to be cut along
    return Method(
        name="rtrl", model=model, init=init, run=run, watchable=True, sharded_axes=_by_features if can else None
    )


def _by_features(memory: PyTree) -> PyTree:
    """`Method.sharded_axes`: the last axis of every array; a bias, which has but one feature, is on every device."""
    return jax.tree.map(lambda leaf: leaf.ndim - 1 if leaf.shape[-1] > 1 else -1, memory)


class _Shape(NamedTuple):
    """The linear algebra of M in the shape that it is kept in.

    Attributes:
      zeros: `zeros(params) -> memory`, of one stream.
      cotangents: `cotangents(dtype) -> [R, S]`, the vectors whose products with Φ and Σ_s G_s J_s are M's increment.
      move: `move(v Φ for each vector, memory) -> Φ M`, for all streams.
      contract: `contract(memory, dl_dstart) -> grads`, the mean of (dL/dh) M over streams.
      steps_at_once: `steps_at_once(params, length)`, as in `go_back`.
      pick: as in `go_back`.
    """

    zeros: Callable[[PyTree], PyTree]
    cotangents: Callable[[Any], Float[Array, "R S"]]
    move: Callable[[Float[Array, "b R S"], PyTree], PyTree]
    contract: Callable[[PyTree, Float[Array, "b S"]], PyTree]
    steps_at_once: Callable[[PyTree, int], int | None]
    pick: Callable[[PyTree], PyTree] = lambda left: left


def _dense(model: Model) -> _Shape:
    """M as a matrix, S times the parameters: where nothing is known of its sparsity."""
    state_size = cuts.layout(model.cell, model.cell.cuts["state"]).state_size
    factored = "preactivation" in model.cell.cuts  # else the reverse pass adds up, and keeps nothing of a step

    def move(back: Float[Array, "b S S"], memory: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: jnp.einsum("bst,bt...->bs...", back, leaf), memory)

    def contract(memory: PyTree, dl_dstart: Float[Array, "b S"]) -> PyTree:
        mean = dl_dstart / len(dl_dstart)
        return jax.tree.map(lambda leaf: jnp.tensordot(mean, leaf, axes=2), memory)

    return _Shape(
        zeros=lambda params: zero_each(params, state_size),
        cotangents=lambda dtype: jnp.eye(state_size, dtype=dtype),
        move=move,
        contract=contract,
        steps_at_once=lambda params, length: steps_at_once(params, state_size, length) if factored else None,
    )


def _sparse(model: Model, pattern: JacobianPattern) -> _Shape:
    """M where it can be non-zero: of a diagonal recurrence no more than a number or two for each parameter."""
    influence_pattern = find_influence_pattern(pattern, cuts.preactivation_rows(model.cell))

    def contract(memory: PyTree, dl_dstart: Float[Array, "b S"]) -> PyTree:
        return sparse_influence.contract(influence_pattern, dl_dstart / len(dl_dstart), memory)

    return _Shape(
        zeros=lambda params: sparse_influence.zeros(influence_pattern, params),
        cotangents=lambda dtype: sparse_influence.colour_vectors(influence_pattern, dtype),
        move=lambda back, memory: sparse_influence.move(influence_pattern, back, memory),
        contract=contract,
        steps_at_once=lambda params, length: steps_at_once(params, influence_pattern.vectors, length),
        pick=lambda left: sparse_influence.pick(influence_pattern, left),
    )


def rtrl_by_steps(model: Model) -> GradientEstimator:
    """The recursion as it was published, M_t = (dh_t/dh_{t-1}) M_{t-1} + dh_t/dθ_t: the same gradient for S² P a step.

    At preactivations dh_t/dθ_t = (dh_t/dz_t) ⊗ a_t^T is added without being built.
    """
    model = worked(model)
    cut = model.cell.cuts["preactivation" if "preactivation" in model.cell.cuts else "state"]
    layout = cuts.layout(model.cell, cut)

    def init(params: Params) -> EstimatorState:
        return EstimatorState(model.init_state(params), zero_each(params.cell, layout.state_size), ())

    def advance(
        shared: PyTree, memory: PyTree, step: Step, noise: PyTree, dl_dstate: Array
    ) -> tuple[PyTree, dict[str, Array]]:
        del shared, noise, dl_dstate
        new = _immediate(step, layout)
        return jax.tree.map(jnp.add, propagate(step, memory, layout.state_size), new), {}

    run = by_steps(model, cut, init, advance, contract)
    return estimator(Method(name="rtrl_by_steps", model=model, init=init, run=run))


def propagate(step: Step, jacobian: PyTree, state_size: int) -> PyTree:
    """(dh_t/dh_{t-1}) M_{t-1}, as one matrix product for each leaf."""
    dtype = real_dtype(jacobian)
    transposed = jax.vmap(step.propagate)(jnp.eye(state_size, dtype=dtype))
    return jax.tree.map(lambda leaf: jnp.tensordot(transposed.T, leaf, axes=1), jacobian)


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
