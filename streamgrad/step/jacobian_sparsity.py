"""Which entries of dh/dh and dh/dz can be non-zero, read off the operations of a step's derivative.

What is followed is the tangent: an operation of the derivative is linear, and each entry of its result depends on some
entries of what it is given. Where an operation is not known here, all of its result depends on all of that. So a zero
of the pattern is a zero whatever the numbers are, and the rest may or may not be.
"""

import contextlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import primitives as p

from streamgrad._typing import Bool, PyTree
from streamgrad.base import Model, Params, given, widened
from streamgrad.step.jaxpr_reader import Op, Program, read, split_primitive, stack_primitive
from streamgrad.step.matvec import still as still_products

Rows = np.ndarray  # for each number of an array a row of bits: the tangents it depends on, 8 of them in a byte


class Pattern(NamedTuple):
    """Where the derivatives of a step can be non-zero.

    Attributes:
      state: `state[j, i]`: whether unit j of h_t may depend on unit i of h_{t-1}.
      cut: `cut[j, n]`: whether it may depend on the preactivation n of this step.
    """

    state: Bool[np.ndarray, "S S"]
    cut: Bool[np.ndarray, "S N"]


def find_pattern(model: Model, still: bool = False) -> Pattern | None:
    """Find where the derivatives of a model's step can be non-zero.

    Args:
      model: the model.
      still: whether the features of all weights are held fixed: the pattern of what the state does by itself.

    Returns:
      The pattern; None where it cannot be known: the cell has no preactivations, it does not say what its input is, it
      cannot be differentiated forwards, or it has tens of thousands of units.

    Example:
      >>> import streamgrad as sg
      >>> found = find_pattern(sg.Model(sg.cells.lstm(3, 2), sg.heads.softmax(2)))
      >>> found.state.astype(int).tolist()  # h and c read all of h, and of c each its own
      [[1, 1, 1, 0], [1, 1, 0, 1], [1, 1, 1, 0], [1, 1, 0, 1]]
    """
    program = _derivative(model, still)
    if program is None:
        return None
    found = _outputs(program, _reached(program, (3, 4), _known_zeros(model)))
    size = sum(program.avals[value].size for value in program.inputs[3])
    return Pattern(found[:, :size], found[:, size:])


def feature_pattern(model: Model) -> list[Bool[np.ndarray, "A S"]] | None:
    """Which features of each weight matrix can depend on which units of the state; None where it cannot be known.

    That is so for steps too in which a preactivation is made of another one, as in layers on top of each other: what
    a feature depends on then goes through weights.
    """
    cell = model.cell
    program = _derivative(model, still=False)
    if program is None:
        return None
    after = _reached(program, (4,), _known_zeros(model))
    if any(op.primitive is p.dot_general_p and any(value in after for value in op.inputs) for op in program.ops):
        return None
    features = cell.cuts["preactivation"].features
    assert features is not None

    def tangent(params: PyTree, state: PyTree, x: PyTree, along: PyTree) -> list[Any]:
        function = lambda state: jax.tree.leaves(features(params, state, x))  # noqa: E731
        return jax.jvp(function, (state,), (along,))[1]

    params, state = shapes_of(model)
    program = read(tangent, params, state, cell.example_input, state)
    found = _outputs(program, _reached(program, (3,), _known_zeros(model)))
    return np.split(found, np.cumsum([leaf.shape[1] for leaf in jax.tree.leaves(params)])[:-1])


# Pairs of entries beyond which no pattern is looked for: to find it would take minutes, and no influence is that large.
LARGEST = 1 << 30


def shapes_of(model: Model) -> tuple[PyTree, PyTree]:
    """Of the cell's parameters and state, as they are worked on."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    params = jax.eval_shape(lambda key: widened(Params(model.cell.init_params(key), ())), key)
    return params.cell, jax.eval_shape(model.init_state, params)


def _derivative(model: Model, still: bool) -> Program | None:
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
        with still_products() if still else contextlib.nullcontext():
            return jax.jvp(step, (state, zero), (along, pushed))[1]

    try:
        return read(tangent, params, state, cell.example_input, state, dz)
    except TypeError as error:
        if "custom_vjp" not in str(error):  # which has no derivative forwards
            raise
        return None


def _known_zeros(model: Model) -> list[np.ndarray | None]:
    """For each weight matrix where it can be non-zero; None for everywhere. Masks in front of weights are seen."""
    user = given(model)
    worked = user.cell.worked
    if worked is None:
        return [None for _ in jax.tree.leaves(shapes_of(model)[0])]
    params = jax.eval_shape(user.cell.init_params, jax.eval_shape(lambda: jax.random.key(0)))
    program = read(worked.weights, params)
    known = dict(program.constants)
    masks: dict[int, np.ndarray] = {}
    for op in program.ops:
        _mask(op, program, known, masks)
    return [_mask_of(value, known, masks) for value in program.outputs]


def _reached(program: Program, along: tuple[int, ...], zeros: list[Any]) -> dict[int, Rows]:
    """On which entries of the arguments numbered `along` each value depends; values that do not are left out."""
    begins = [value for argument in along for value in program.inputs[argument]]
    sizes = [program.avals[value].size for value in begins]
    every = np.packbits(np.eye(sum(sizes), dtype=bool), axis=1)
    rows: dict[int, Rows] = dict(zip(begins, np.split(every, np.cumsum(sizes)[:-1]), strict=True))
    known = zip(program.inputs[0], zeros, strict=True)
    masks = {value: mask for value, mask in known if mask is not None}
    for op in program.ops:
        if any(value in rows for value in op.inputs):
            rows |= zip(op.outputs, _result(op, program, rows, masks), strict=True)
        else:
            _mask(op, program, program.constants, masks)
    return rows | {-1: every}


def _outputs(program: Program, rows: dict[int, Rows]) -> Bool[np.ndarray, "S n"]:
    """The same of what a program returns, as bools."""
    every = rows[-1]
    nothing = np.zeros((1, every.shape[1]), np.uint8)
    found = [rows.get(value, np.repeat(nothing, program.avals[value].size, axis=0)) for value in program.outputs]
    return np.unpackbits(np.concatenate(found), axis=1)[:, : len(every)].astype(bool)


_ELEMENTWISE = {
    *(p.add_p, p.sub_p, p.mul_p, p.div_p, p.neg_p, p.add_jaxvals_p, p.select_n_p, p.convert_element_type_p),
    *(p.real_p, p.imag_p, p.complex_p, p.conj_p, p.copy_p, p.integer_pow_p, p.reduce_precision_p),
}


def _result(op: Op, program: Program, rows: dict[int, Rows], masks: dict[int, np.ndarray]) -> list[Rows]:
    """What the outputs of an operation depend on."""
    shapes = [program.avals[value].shape for value in op.outputs]
    given = [rows.get(value) for value in op.inputs]
    avals = [program.avals[value] for value in op.inputs]
    if op.primitive in _ELEMENTWISE:
        return [_elementwise(given, avals, shapes[0])]
    if op.primitive is p.reduce_sum_p and given[0] is not None:
        return [_reduced(given[0], avals[0].shape, op.params["axes"])]
    if op.primitive is p.dot_general_p and (given[0] is None) != (given[1] is None):
        return [_dot(op, program, given, masks)]
    moved = rearrange(op, [np.arange(aval.size).reshape(aval.shape) for aval in avals])
    width = next(row for row in given if row is not None).shape[1]
    nothing = np.zeros((1, width), np.uint8)
    if moved is not None:
        whole = [
            np.repeat(nothing, aval.size, axis=0) if row is None else row
            for row, aval in zip(given, avals, strict=True)
        ]
        table = np.concatenate(whole)
        return [table[labels.ravel()] for labels in moved]
    everything = np.bitwise_or.reduce(np.concatenate([row for row in given if row is not None]), axis=0)[None]
    return [np.repeat(everything, math.prod(shape), axis=0) for shape in shapes]


def _elementwise(given: Sequence[Rows | None], avals: Sequence[Any], shape: tuple[int, ...]) -> Rows:
    """Entry by entry; what has one entry along an axis goes with every entry."""
    found = None
    for row, aval in zip(given, avals, strict=True):
        if row is not None:
            row = np.broadcast_to(row.reshape(*aval.shape, row.shape[1]), (*shape, row.shape[1]))
            row = row.reshape(-1, row.shape[-1])
            found = row if found is None else found | row
    assert found is not None
    return found


def _reduced(row: Rows, shape: tuple[int, ...], axes: tuple[int, ...]) -> Rows:
    array = row.reshape(*shape, row.shape[1])
    for axis in sorted(axes, reverse=True):
        array = np.bitwise_or.reduce(array, axis=axis)
    return array.reshape(-1, row.shape[1])


def _dot(op: Op, program: Program, given: Sequence[Rows | None], masks: dict[int, np.ndarray]) -> Rows:
    """A product with a matrix, of which some entries may be known to be zero."""
    contracting, batch = op.params["dimension_numbers"]
    side = 0 if given[0] is not None else 1
    row = given[side]
    assert row is not None
    shape, other = program.avals[op.inputs[side]].shape, program.avals[op.inputs[1 - side]].shape
    free = [axis for axis in range(len(shape)) if axis not in (*contracting[side], *batch[side])]
    free_other = [axis for axis in range(len(other)) if axis not in (*contracting[1 - side], *batch[1 - side])]
    array = row.reshape(*shape, row.shape[1]).transpose(*batch[side], *free, *contracting[side], len(shape))
    sizes = [math.prod(shape[axis] for axis in axes) for axes in (batch[side], free, contracting[side])]
    array = array.reshape(*sizes, row.shape[1])
    mask = masks.get(op.inputs[1 - side])
    n_other = math.prod(other[axis] for axis in free_other)
    if mask is None:
        out = np.repeat(np.bitwise_or.reduce(array, axis=2)[:, :, None], n_other, axis=2)
    else:
        matrix = mask.transpose(*batch[1 - side], *free_other, *contracting[1 - side]).reshape(
            sizes[0], n_other, sizes[2]
        )
        out = np.stack(
            [
                np.stack([np.bitwise_or.reduce(array[i][:, used], axis=1) for used in matrix[i]], axis=1)
                for i in range(sizes[0])
            ]
        )
    if side == 1:  # the result has the free axes of the first operand first
        out = out.swapaxes(1, 2)
    return out.reshape(-1, row.shape[1])


def rearrange(op: Op, arrays: Sequence[np.ndarray]) -> list[np.ndarray] | None:
    """What an operation that only moves entries does to integers that number them, the arrays one after the other.

    Args:
      op: the operation.
      arrays: of each operand the numbers of its entries.

    Returns:
      For each output where its entries come from. None for any other operation.
    """
    begins = np.cumsum([0, *(array.size for array in arrays)])
    numbered = [array + begin for array, begin in zip(arrays, begins, strict=False)]
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
    """Where a value that no tangent reaches can be non-zero; None for everywhere."""
    if value not in masks and value in constants:
        array = constants[value]
        if np.ndim(array) > 0 and jnp.issubdtype(jnp.result_type(array), jnp.number):
            try:
                masks[value] = np.asarray(array) != 0
            except jax.errors.TracerArrayConversionError:  # the model was made inside a traced function
                return None
    return masks.get(value)


def _mask(op: Op, program: Program, constants: dict[int, Any], masks: dict[int, np.ndarray]) -> None:
    """Follow zeros that are known through products and through what only moves entries."""
    given = [_mask_of(value, constants, masks) for value in op.inputs]
    if all(mask is None for mask in given):
        return
    shape = program.avals[op.outputs[0]].shape
    if op.primitive is p.mul_p:
        masks[op.outputs[0]] = np.logical_and.reduce([np.broadcast_to(m, shape) for m in given if m is not None])
    elif op.primitive in (p.neg_p, p.convert_element_type_p, p.copy_p) and given[0] is not None:
        masks[op.outputs[0]] = given[0]
    elif op.primitive is not p.pad_p:
        avals = [program.avals[value] for value in op.inputs]
        moved = rearrange(op, [np.arange(aval.size).reshape(aval.shape) for aval in avals])
        if moved is not None:
            known = [np.ones(aval.size, bool) if m is None else m.ravel() for m, aval in zip(given, avals, strict=True)]
            table = np.concatenate(known)
            masks |= {out: table[labels] for out, labels in zip(op.outputs, moved, strict=True)}
