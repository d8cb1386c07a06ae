"""The entries of dh/dh and dh/dz that can be non-zero, read off the operations of a step's derivative.

The tangent is followed: an operation of the derivative is linear, and each entry of its result depends on some entries
of its operands. For an operation that is not known here, every entry depends on all of them. So a zero of the pattern
is a zero whatever the numbers are, and the rest may or may not be.
"""

import contextlib
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import primitives as p

from streamgrad._typing import Bool, PyTree
from streamgrad.base import Model, Params, users_model, widened
from streamgrad.keys import drawn_shapes
from streamgrad.step.jaxpr_reader import Op, Program, read, split_primitive, stack_primitive
from streamgrad.step.matvec import fixed_features as features_held_fixed

Rows = np.ndarray  # for each number of an array a row of bits, packed: the tangents that it depends on

# Pairs of entries beyond which no pattern is searched for: that would take minutes, and no influence is that large.
LARGEST = 1 << 30


class JacobianPattern(NamedTuple):
    """Where the derivatives of a step can be non-zero.

    Attributes:
      state: `state[j, i]`: whether unit j of h_t may depend on unit i of h_{t-1}.
      cut: `cut[j, n]`: whether it may depend on the preactivation n of this step.
    """

    state: Bool[np.ndarray, "S S"]
    cut: Bool[np.ndarray, "S N"]


def find_jacobian_pattern(model: Model, fixed_features: bool = False) -> JacobianPattern | None:
    """Find where the derivatives of a model's step can be non-zero.

    Args:
      model: the model.
      fixed_features: whether the features of all weights count as constants: dh/dh without weights.

    Returns:
      The pattern; None where it cannot be known: the cell has no preactivations, no example of an input, no forward
      derivative, or tens of thousands of units.

    Example:
      >>> import streamgrad as sg
      >>> found = find_jacobian_pattern(sg.Model(sg.cells.lstm(3, 2), sg.heads.softmax(2)))
      >>> found.state.astype(int).tolist()  # h and c read all of h, and of c each its own
      [[1, 1, 1, 0], [1, 1, 0, 1], [1, 1, 1, 0], [1, 1, 0, 1]]
    """
    program = _derivative(model, fixed_features)
    if program is None:
        return None
    found = _outputs(program, _dependence(program, (3, 4), _known_zeros(model)))
    size = sum(program.avals[value].size for value in program.inputs[3])
    return JacobianPattern(found[:, :size], found[:, size:])


def feature_pattern(model: Model) -> list[Bool[np.ndarray, "A S"]] | None:
    """For each weight matrix, whether a feature can depend on a unit of the state.

    Returns:
      The patterns; None where they cannot be known. That includes steps in which one preactivation is made of another,
      as in layers on top of each other: their features depend on the state through weights.
    """
    cell = model.cell
    program = _derivative(model, fixed_features=False)
    if program is None:
        return None
    after = _dependence(program, (4,), _known_zeros(model))
    if any(op.primitive is p.dot_general_p and any(value in after for value in op.inputs) for op in program.ops):
        return None
    features = cell.cuts["preactivation"].features
    assert features is not None

    def tangent(params: PyTree, state: PyTree, x: PyTree, along: PyTree) -> list[Any]:
        function = lambda state: jax.tree.leaves(features(params, state, x))  # noqa: E731
        return jax.jvp(function, (state,), (along,))[1]

    params, state = shapes_of(model)
    program = read(tangent, params, state, cell.example_input, state)
    found = _outputs(program, _dependence(program, (3,), _known_zeros(model)))
    return np.split(found, np.cumsum([leaf.shape[1] for leaf in jax.tree.leaves(params)])[:-1])


def shapes_of(model: Model) -> tuple[PyTree, PyTree]:
    """Shapes and dtypes of the cell's parameters and state, in the precision of the estimators."""
    params = drawn_shapes(lambda key: widened(Params(model.cell.init_params(key), ())))
    return params.cell, jax.eval_shape(model.init_state, params)


def _derivative(model: Model, fixed_features: bool) -> Program | None:
    """The program of (dh_t/dh_{t-1}) along + (dh_t/dz_t) pushed; its last two arguments are these tangents."""
    cell = model.cell
    cut = cell.cuts.get("preactivation")
    if cut is None or cell.example_input is None:
        return None
    params, state = shapes_of(model)
    dz = jax.eval_shape(cut.into, params, state, cell.example_input)
    units, rows = (sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (state, dz))
    if (units + rows) * max(units, rows) > LARGEST:
        return None

    def tangent(params: PyTree, state: PyTree, x: PyTree, along: PyTree, pushed: PyTree) -> PyTree:
        def step(state: PyTree, dz: PyTree) -> PyTree:
            return cut.inject(params, state, x, dz)

        zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), pushed)
        with features_held_fixed() if fixed_features else contextlib.nullcontext():
            return jax.jvp(step, (state, zero), (along, pushed))[1]

    try:
        return read(tangent, params, state, cell.example_input, state, dz)
    except TypeError as error:
        if "custom_vjp" not in str(error):  # which has no derivative forwards
            raise
        return None


def _known_zeros(model: Model) -> list[np.ndarray | None]:
    """For each weight matrix a mask of the entries that can be non-zero, found from constant factors; None for all."""
    user = users_model(model)
    worked = user.cell.worked
    if worked is None:
        return [None for _ in jax.tree.leaves(shapes_of(model)[0])]
    params = drawn_shapes(user.cell.init_params)
    program = read(worked.weights, params)
    masks: dict[int, np.ndarray] = {}
    for op in program.ops:
        _follow_mask(op, program, masks)
    return [_mask_of(value, program.constants, masks) for value in program.outputs]


def _dependence(program: Program, along: tuple[int, ...], zeros: list[Any]) -> dict[int, Rows]:
    """For each value the entries of the arguments numbered `along` that it depends on.

    Values that depend on none of them are left out.

    The key -1 has the rows of all these entries themselves.
    """
    begins = [value for argument in along for value in program.inputs[argument]]
    sizes = [program.avals[value].size for value in begins]
    every = np.packbits(np.eye(sum(sizes), dtype=bool), axis=1)
    rows: dict[int, Rows] = dict(zip(begins, np.split(every, np.cumsum(sizes)[:-1]), strict=True))
    masks = {value: mask for value, mask in zip(program.inputs[0], zeros, strict=True) if mask is not None}
    for op in program.ops:
        if any(value in rows for value in op.inputs):
            rows |= zip(op.outputs, _result(op, program, rows, masks), strict=True)
        else:
            _follow_mask(op, program, masks)
    return rows | {-1: every}


def _outputs(program: Program, rows: dict[int, Rows]) -> Bool[np.ndarray, "S n"]:
    """The dependence of a program's outputs, as bools."""
    every = rows[-1]
    found = [rows.get(value, _no_rows(program.avals[value].size, every)) for value in program.outputs]
    return np.unpackbits(np.concatenate(found), axis=1)[:, : len(every)].astype(bool)


def _no_rows(count: int, like: Rows) -> Rows:
    return np.zeros((count, like.shape[1]), np.uint8)


_ELEMENTWISE = {
    *(p.add_p, p.sub_p, p.mul_p, p.div_p, p.neg_p, p.add_jaxvals_p, p.select_n_p, p.convert_element_type_p),
    *(p.real_p, p.imag_p, p.complex_p, p.conj_p, p.copy_p, p.integer_pow_p, p.reduce_precision_p),
}


def _result(op: Op, program: Program, rows: dict[int, Rows], masks: dict[int, np.ndarray]) -> list[Rows]:
    """The dependence of an operation's outputs."""
    shapes = [program.avals[value].shape for value in op.outputs]
    operands = [rows.get(value) for value in op.inputs]
    avals = [program.avals[value] for value in op.inputs]
    if op.primitive in _ELEMENTWISE:
        return [_elementwise(operands, avals, shapes[0])]
    if op.primitive is p.reduce_sum_p and operands[0] is not None:
        return [_reduced(operands[0], avals[0].shape, op.params["axes"])]
    if op.primitive is p.dot_general_p and (operands[0] is None) != (operands[1] is None):
        return [_dot(op, program, operands, masks)]
    known = [row for row in operands if row is not None]
    moved = rearrange(op, [aval.shape for aval in avals])
    if moved is not None:
        whole = [
            _no_rows(aval.size, known[0]) if row is None else row for row, aval in zip(operands, avals, strict=True)
        ]
        table = np.concatenate(whole)
        return [table[labels.ravel()] for labels in moved]
    everything = np.bitwise_or.reduce(np.concatenate(known), axis=0)[None]
    return [np.repeat(everything, math.prod(shape), axis=0) for shape in shapes]


def _elementwise(operands: Sequence[Rows | None], avals: Sequence[Any], shape: tuple[int, ...]) -> Rows:
    """Entry by entry, with broadcasting along axes of one entry."""
    wide = [
        np.broadcast_to(row.reshape(*aval.shape, row.shape[1]), (*shape, row.shape[1])).reshape(-1, row.shape[1])
        for row, aval in zip(operands, avals, strict=True)
        if row is not None
    ]
    return functools.reduce(np.bitwise_or, wide)


def _reduced(row: Rows, shape: tuple[int, ...], axes: tuple[int, ...]) -> Rows:
    array = row.reshape(*shape, row.shape[1])
    for axis in sorted(axes, reverse=True):
        array = np.bitwise_or.reduce(array, axis=axis)
    return array.reshape(-1, row.shape[1])


def _dot(op: Op, program: Program, operands: Sequence[Rows | None], masks: dict[int, np.ndarray]) -> Rows:
    """A product of one operand that depends on tangents with a matrix, whose mask of non-zero entries may be known."""
    contracting, batch = op.params["dimension_numbers"]
    side = 0 if operands[0] is not None else 1
    row = operands[side]
    assert row is not None

    def axes_of(side: int) -> tuple[tuple[int, ...], list[int]]:
        """The axes in the order batch, free, contracting; and the number of entries of each kind."""
        shape = program.avals[op.inputs[side]].shape
        free = [axis for axis in range(len(shape)) if axis not in (*contracting[side], *batch[side])]
        kinds = (batch[side], free, contracting[side])
        return tuple(axis for axes in kinds for axis in axes), [math.prod(shape[a] for a in axes) for axes in kinds]

    (order, sizes), (other_order, other_sizes) = axes_of(side), axes_of(1 - side)
    array = row.reshape(*program.avals[op.inputs[side]].shape, row.shape[1])
    array = array.transpose(*order, len(order)).reshape(*sizes, row.shape[1])
    mask = masks.get(op.inputs[1 - side])
    if mask is None:
        out = np.repeat(np.bitwise_or.reduce(array, axis=2)[:, :, None], other_sizes[1], axis=2)
    else:
        matrices = mask.transpose(other_order).reshape(other_sizes)
        pairs = zip(array, matrices, strict=True)
        out = [[np.bitwise_or.reduce(one[:, used], axis=1) for used in matrix] for one, matrix in pairs]
        out = np.array(out).swapaxes(1, 2)
    if side == 1:  # the result has the free axes of the first operand first
        out = out.swapaxes(1, 2)
    return out.reshape(-1, row.shape[1])


def rearrange(op: Op, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray] | None:
    """For an operation that only moves entries, the number of the entry that stands at each place of its outputs.

    Args:
      op: the operation.
      shapes: of its operands, whose entries are numbered one operand after the other.

    Returns:
      An array of numbers for each output; None for any other operation.
    """
    begins = np.cumsum([0, *map(math.prod, shapes)])
    numbered = [
        begin + np.arange(math.prod(shape)).reshape(shape) for begin, shape in zip(begins, shapes, strict=False)
    ]
    first, params = numbered[0], op.params
    if op.primitive is p.reshape_p:
        return [first.reshape(params["new_sizes"])]
    if op.primitive is p.squeeze_p:
        return [first.squeeze(tuple(params["dimensions"]))]
    if op.primitive is p.transpose_p:
        return [first.transpose(params["permutation"])]
    if op.primitive is p.broadcast_in_dim_p:
        shape = [1] * len(params["shape"])
        for axis, size in zip(params["broadcast_dimensions"], first.shape, strict=True):
            shape[axis] = size
        return [np.broadcast_to(first.reshape(shape), params["shape"])]
    if op.primitive is p.slice_p:
        strides = params["strides"] or (1,) * first.ndim
        limits = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
        return [first[tuple(slice(*limit) for limit in limits)]]
    if op.primitive is p.rev_p:
        return [np.flip(first, params["dimensions"])]
    if op.primitive is p.concatenate_p:
        return [np.concatenate(numbered, axis=params["dimension"])]
    if op.primitive is stack_primitive():
        return [np.stack(numbered, axis=params["axis"])]
    if op.primitive is split_primitive():
        return np.split(first, np.cumsum(params["sizes"])[:-1], axis=params["axis"])
    if op.primitive is p.pad_p:
        return _padded(first, params["padding_config"], int(begins[1]))
    return None


def _padded(array: np.ndarray, config: Any, value: int) -> list[np.ndarray] | None:
    if any(min(low, high, inner) < 0 or inner for low, high, inner in config):
        return None
    return [np.pad(array, [(low, high) for low, high, _ in config], constant_values=value)]


def _mask_of(value: int, constants: dict[int, Any], masks: dict[int, np.ndarray]) -> np.ndarray | None:
    """The entries that can be non-zero in a value without tangents; None for all."""
    if value not in masks and value in constants:
        array = constants[value]
        if np.ndim(array) > 0 and jnp.issubdtype(jnp.result_type(array), jnp.number):
            try:
                masks[value] = np.asarray(array) != 0
            except jax.errors.TracerArrayConversionError:  # the model was made inside a traced function
                return None
    return masks.get(value)


def _follow_mask(op: Op, program: Program, masks: dict[int, np.ndarray]) -> None:
    """Follow known zeros through products and through operations that only move entries."""
    operands = [_mask_of(value, program.constants, masks) for value in op.inputs]
    if all(mask is None for mask in operands):
        return
    shape = program.avals[op.outputs[0]].shape
    if op.primitive is p.mul_p:
        masks[op.outputs[0]] = np.logical_and.reduce([np.broadcast_to(m, shape) for m in operands if m is not None])
    elif op.primitive in (p.neg_p, p.convert_element_type_p, p.copy_p) and operands[0] is not None:
        masks[op.outputs[0]] = operands[0]
    elif op.primitive is not p.pad_p:
        avals = [program.avals[value] for value in op.inputs]
        moved = rearrange(op, [aval.shape for aval in avals])
        if moved is not None:
            whole = [np.ones(a.size, bool) if m is None else m.ravel() for m, a in zip(operands, avals, strict=True)]
            table = np.concatenate(whole)
            masks |= {out: table[labels] for out, labels in zip(op.outputs, moved, strict=True)}
