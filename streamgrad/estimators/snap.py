"""Sparse n-step approximation: the influence at the entries that n steps can reach."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from streamgrad._typing import Array, Float, PyTree
from streamgrad.base import EstimatorState, GradientEstimator, Model, Params, real_dtype, worked
from streamgrad.checks import check_choice, check_size, find_cut
from streamgrad.engine import sparse_influence
from streamgrad.engine.by_steps import by_steps
from streamgrad.engine.estimator import estimator
from streamgrad.engine.method import Method, as_batch, only_stream
from streamgrad.engine.row_influence import by_own_units
from streamgrad.estimators.rtrl import rtrl_method
from streamgrad.step import cuts
from streamgrad.step.cuts import Step
from streamgrad.step.influence_sparsity import InfluencePattern, compose, influence_pattern_of
from streamgrad.step.jacobian_sparsity import find_jacobian_pattern
from streamgrad.step.row_units import find_row_units, reached_within


def snap(model: Model, order: int = 1, inside: str = "estimated") -> GradientEstimator:
    """SnAp-n: the influence M = dh/dθ, kept at the entries that are non-zero after n steps.

        M_t = mask ⊙ ((dh_t/dh_{t-1}) M_{t-1} + dh_t/dθ_t),    dL/dθ = Σ_t (dL_t/dh_t) M_t

    The mask is where the sum of n steps from M = 0 can be non-zero. It is found in the step
    (`streamgrad.step.jacobian_sparsity`): with n = 1 a weight influences the units that its preactivation enters. Two
    units that feed each other without weights, as both parts of a complex number do, count as one. Where the pattern is
    full, or the recurrence diagonal, this is `rtrl`, and is computed as such; else it is biased, for the influence
    through other units is left out.

    Args:
      model: the model whose gradients are estimated; its cell must have the cut "preactivation".
      order: n.
      inside: of the chunk itself, "estimated" as published; or "backprop": losses reach back exactly to the chunk's
        beginning, and through M beyond. For cells in which each row of weights enters few units and no preactivation is
        made of another one.

    Returns:
      The estimator. With n = 1 memory is P for each unit that a row of weights enters (an LSTM's: two, but one for its
      output gate), and time per step in chunks about that of BPTT. `state.memory` then is a list of blocks of rows,
      each with an array for every such unit.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.lstm(2, 4), sg.heads.softmax(3))
      >>> params = model.init(jax.random.key(0))
      >>> est = sg.snap(model)
      >>> chunk = sg.Chunk(jnp.ones((5, 2)), jnp.zeros(5, int))
      >>> grads, state, info = est.update(params, est.init(params), chunk)
      >>> [[place.shape for place in block] for block in state.memory]
      [[(12, 7), (12, 7)], [(4, 7)]]

    References:
      Menick, Elsen, Evci, Osindero, Simonyan and Graves, A practical sparse approximation for real time recurrent
      learning, 2020.
    """
    model = worked(model)
    find_cut(model, "preactivation")
    check_size(order=order)
    check_choice("inside", inside, ("estimated", "backprop"))
    options = {"order": order, "inside": inside}
    if is_exact(model, order):
        return estimator(dataclasses.replace(rtrl_method(model), name="snap", options=options))
    units = find_row_units(model, order)
    if units is not None:
        init, run = by_own_units(model, units, inside)
        return estimator(Method(name="snap", options=options, model=model, init=init, run=run, watchable=True))
    if inside == "backprop":
        raise ValueError(
            "snap(inside='backprop') needs a cell in which each row of weights enters few units and no preactivation "
            "is made of another one, such as vanilla, lstm or gru in one layer: for stacks and encoders use rtrl or "
            "local_rtrl, or snap with inside='estimated'."
        )
    return _by_steps(model, order)


def is_exact(model: Model, order: int) -> bool:
    """Whether nothing is left out: what a step makes of the entries that are kept lies among them."""
    pattern, without_weights = find_jacobian_pattern(model), find_jacobian_pattern(model, fixed_features=True)
    if pattern is None or without_weights is None:
        return False
    kept = reached_within(pattern, without_weights, order)
    return not np.any(compose(pattern.state, kept) & ~kept)


def _mask(model: Model, order: int) -> InfluencePattern:
    """The entries that are kept, with a colour for every unit, since whole Jacobians are at hand."""
    pattern, without_weights = find_jacobian_pattern(model), find_jacobian_pattern(model, fixed_features=True)
    if pattern is None or without_weights is None:
        raise ValueError(
            "snap asks where the derivatives of the cell's step can be non-zero, which is not known of a cell that "
            "does not say what its input is, or cannot be differentiated forwards: give it an example_input."
        )
    return influence_pattern_of(
        reached_within(pattern, without_weights, order), pattern.state, cuts.preactivation_rows(model.cell)
    )


def snap_by_steps(model: Model, order: int = 1) -> GradientEstimator:
    """M masked at every step, from whole Jacobians, as it was published; for any cell and pattern."""
    return _by_steps(worked(model), order)


def _by_steps(model: Model, order: int) -> GradientEstimator:
    kept = _mask(model, order)
    cut = model.cell.cuts["preactivation"]
    layout = cuts.layout(model.cell, cut)

    def init(params: Params) -> EstimatorState:
        return EstimatorState(model.init_state(params), sparse_influence.zeros(kept, params.cell), ())

    def advance(
        shared: PyTree, memory: PyTree, step: Step, noise: PyTree, dl_dstate: Array
    ) -> tuple[PyTree, dict[str, Array]]:
        del shared, noise, dl_dstate
        dtype = real_dtype(step.state)
        jacobian = jax.vmap(step.propagate)(jnp.eye(layout.state_size, dtype=dtype)).T
        pushed = jax.vmap(step.push)(jnp.eye(layout.size, dtype=dtype)).T  # dh_t/dz_t
        by_row = jax.tree.map(lambda leaf: leaf[None, None], jax.vmap(step.unravel)(pushed))
        entries = sparse_influence.pick(kept, by_row)
        moved = only_stream(sparse_influence.move(kept, jacobian[None], as_batch(memory)))
        moved = sparse_influence.truncated(kept, moved)  # units that all rows share are moved for all of them
        return jax.tree.map(lambda m, i, a: m + i[0, 0][:, :, None] * a[None, None], moved, entries, step.features), {}

    def contract(before: PyTree, after: PyTree, step: Step, dl_dstate: Float[Array, " S"]) -> PyTree:
        del before, step
        return sparse_influence.contract(kept, dl_dstate[None], as_batch(after))

    run = by_steps(model, cut, init, advance, contract)
    return estimator(
        Method(name="snap", options={"order": order, "inside": "estimated"}, model=model, init=init, run=run)
    )
