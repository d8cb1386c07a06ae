"""Sums of weight products, z = Σ W a + b, followed through the operations of a step."""

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import primitives as p

from streamgrad._typing import Array, Float
from streamgrad.step.jaxpr_reader import Op, Program, do, split_primitive

Get = Callable[[int], Array]
Weights = Callable[[Get], Array]


class Feature(NamedTuple):
    """A real vector that weights multiply.

    Attributes:
      value: its array; None for the constant 1.
      dims: the order in which the array's axes are read; the others have one entry.
      part: "real" or "imag" of a complex array, "" of a real one.
    """

    value: int | None
    dims: tuple[int, ...] = ()
    part: str = ""

    def size(self, program: Program) -> int:
        """The number of its entries."""
        return 1 if self.value is None else program.avals[self.value].size

    def vector(self, get: Get, dtype: Any) -> Float[Array, " A"]:
        """The vector itself."""
        if self.value is None:
            return jnp.ones(1, dtype)
        array = get(self.value)
        rest = [axis for axis in range(array.ndim) if axis not in self.dims]
        vector = jnp.transpose(array, (*rest, *self.dims)).reshape(-1)
        return (getattr(vector, self.part) if self.part else vector).astype(dtype)


ONE = Feature(None)


class Affine(NamedTuple):
    """z = Σ W a, a sum over features.

    Attributes:
      shape: of z.
      dtype: of z.
      terms: for each feature the weights W, `[*shape, A]`, as a function of values that depend on parameters alone.
      sources: these values.
    """

    shape: tuple[int, ...]
    dtype: Any
    terms: dict[Feature, Weights]
    sources: frozenset[int]


def is_complex(dtype: Any) -> bool:
    """Whether numbers of this dtype are complex."""
    return jnp.issubdtype(dtype, jnp.complexfloating)


def absorb(
    op: Op,
    program: Program,
    affine: dict[int, Affine],
    is_weight: Callable[[int], bool],
    is_moving: Callable[[int], bool],
    readers: dict[int, list[Op]],
    uses: Counter,
) -> list[Affine] | None:
    """The outputs of an operation as sums of products; None where it needs the values of its operands.

    Args:
      op: the operation.
      program: the step it is from.
      affine: the sums found so far.
      is_weight: whether a value depends on parameters, and on nothing else but constants.
      is_moving: whether a value depends on the state or on the input.
      readers: the operations that read a value.
      uses: how often a value is used.
    """
    cutting = {p.slice_p, split_primitive()}

    def is_free(value: int) -> bool:
        """Whether no other operation needs all of it: it is used once, or cut into parts that may each be."""
        by = readers.get(value, [])
        return uses[value] == 1 or (len(by) == uses[value] and all(reader.primitive in cutting for reader in by))

    if op.primitive is p.dot_general_p:
        return _product(op, program, is_weight, is_moving)
    sums = [value for value in op.inputs if value in affine]
    if not sums or not all(map(is_free, sums)):
        return None
    shapes = [program.avals[output] for output in op.outputs]
    if op.primitive in _SUMS:
        return _sum(op, shapes[0], affine, is_moving)
    if op.primitive in (p.mul_p, p.div_p):
        return _scaled(op, shapes[0], affine, is_moving)
    if op.primitive is p.concatenate_p:
        return _stacked(op, shapes[0], affine)
    if op.primitive in (*_SHAPING, *cutting) and len(op.inputs) == 1:
        operand = affine[op.inputs[0]]
        no_larger = sum(shape.size for shape in shapes) <= int(np.prod(operand.shape))
        return [_mapped(operand, op, i, shape) for i, shape in enumerate(shapes)] if no_larger else None
    return None


_SUMS = (p.add_p, p.sub_p, p.add_jaxvals_p)
_SHAPING = (
    *(p.reshape_p, p.transpose_p, p.squeeze_p, p.broadcast_in_dim_p, p.rev_p, p.copy_p),
    *(p.neg_p, p.real_p, p.imag_p),
)


def _mapped(operand: Affine, op: Op, index: int, shape: Any) -> Affine:
    """A linear operation without weights of its own, done to every column of W."""

    def through(weights: Weights) -> Weights:
        def one(column: Array) -> Array:
            if op.primitive in (p.real_p, p.imag_p) and not is_complex(column.dtype):
                return column if op.primitive is p.real_p else jnp.zeros_like(column)
            return do(op, [column])[index]

        return lambda get: jax.vmap(one, in_axes=-1, out_axes=-1)(weights(get))

    terms = {feature: through(weights) for feature, weights in operand.terms.items()}
    return Affine(shape.shape, shape.dtype, terms, operand.sources)


def _sum(op: Op, shape: Any, affine: dict[int, Affine], is_moving: Callable[[int], bool]) -> list[Affine] | None:
    """A sum or difference of products; an operand that depends on parameters alone is a bias."""
    terms: dict[Feature, Weights] = {}
    sources = frozenset()
    for sign, value in zip((1, -1 if op.primitive is p.sub_p else 1), op.inputs, strict=True):
        if value in affine:
            if affine[value].shape != shape.shape:
                return None
            here = affine[value].terms
            sources |= affine[value].sources
        elif is_moving(value):
            return None
        else:
            here = {ONE: lambda get, value=value: jnp.broadcast_to(get(value), shape.shape)[..., None]}
            sources |= {value}
        for feature, weights in here.items():
            terms[feature] = _added(terms.get(feature), sign, weights)
    return [Affine(shape.shape, shape.dtype, terms, sources)]


def _added(before: Weights | None, sign: int, weights: Weights) -> Weights:
    if before is None:
        return weights if sign == 1 else lambda get: -weights(get)
    return lambda get: before(get) + sign * weights(get)


def _scaled(op: Op, shape: Any, affine: dict[int, Affine], is_moving: Callable[[int], bool]) -> list[Affine] | None:
    """A product times, or divided by, a value that depends on parameters alone."""
    left, right = op.inputs
    value, by = (left, right) if left in affine else (right, left)
    if is_moving(by) or affine[value].shape != shape.shape or (op.primitive is p.div_p and by == left):
        return None

    def through(weights: Weights) -> Weights:
        def scaled(get: Get) -> Array:
            scale = jnp.broadcast_to(get(by), shape.shape)[..., None]
            return weights(get) / scale if op.primitive is p.div_p else weights(get) * scale

        return scaled

    terms = {feature: through(weights) for feature, weights in affine[value].terms.items()}
    return [Affine(shape.shape, shape.dtype, terms, affine[value].sources | {by})]


def _stacked(op: Op, shape: Any, affine: dict[int, Affine]) -> list[Affine] | None:
    """Products of the same features one behind the other."""
    parts = [affine[value] for value in op.inputs if value in affine]
    if len(parts) < len(op.inputs) or any(set(part.terms) != set(parts[0].terms) for part in parts):
        return None
    axis = op.params["dimension"]

    def stacked(feature: Feature) -> Weights:
        return lambda get: jnp.concatenate([part.terms[feature](get) for part in parts], axis=axis)

    terms = {feature: stacked(feature) for feature in parts[0].terms}
    return [Affine(shape.shape, shape.dtype, terms, frozenset().union(*(part.sources for part in parts)))]


def _product(
    op: Op, program: Program, is_weight: Callable[[int], bool], is_moving: Callable[[int], bool]
) -> list[Affine] | None:
    """The product of an effective weight with one vector, whatever the order and the axes."""
    (contracting, batch) = op.params["dimension_numbers"]
    sides = [side for side in (0, 1) if is_weight(op.inputs[side]) and is_moving(op.inputs[1 - side])]
    if not sides or batch[0]:
        return None
    side = sides[0]
    weight, value = op.inputs[side], op.inputs[1 - side]
    out, matrix, array = (program.avals[number] for number in (op.outputs[0], weight, value))
    dims = tuple(contracting[1 - side])
    if any(n != 1 for axis, n in enumerate(array.shape) if axis not in dims):  # several vectors at once
        return None
    if not all(jnp.issubdtype(aval.dtype, jnp.inexact) for aval in (matrix, array)):
        return None
    order = [axis for axis in range(len(matrix.shape)) if axis not in contracting[side]]

    def weights(get: Get) -> Array:
        return jnp.transpose(get(weight), (*order, *contracting[side])).reshape(*out.shape, -1)

    terms: dict[Feature, Weights] = {}
    begin = 0
    for feature, size, factor in _features(program, value, dims, is_moving):
        if feature.part == "imag":  # of the array whose real part came just before
            begin -= size
        terms[feature] = _added(terms.get(feature), 1, _columns_of(weights, begin, begin + size, factor))
        begin += size
    return [Affine(tuple(out.shape), out.dtype, terms, frozenset({weight}))]


def _columns_of(weights: Weights, begin: int, end: int, factor: int | complex) -> Weights:
    def some(get: Get) -> Array:
        found = weights(get)[..., begin:end]
        return found if factor == 1 else factor * found

    return some


def _features(
    program: Program, value: int, dims: tuple[int, ...], is_moving: Callable[[int], bool]
) -> list[tuple[Feature, int, int | complex]]:
    """The real vectors that an array is made of: each with its size, and a factor of its weights."""
    aval, maker = program.avals[value], program.maker.get(value)
    cast = maker.inputs[0] if maker is not None and maker.primitive is p.convert_element_type_p else None
    if cast is not None and is_complex(aval.dtype) and jnp.issubdtype(program.avals[cast].dtype, jnp.floating):
        return _features(program, cast, dims, is_moving)
    parts = maker.inputs if maker is not None and maker.primitive is p.concatenate_p else ()
    if parts and all(map(is_moving, parts)) and len(aval.shape) == 1 and not is_complex(aval.dtype):
        return [found for part in parts for found in _features(program, part, (0,), is_moving)]
    if is_complex(aval.dtype):
        return [(Feature(value, dims, "real"), aval.size, 1), (Feature(value, dims, "imag"), aval.size, 1j)]
    return [(Feature(value, dims), aval.size, 1)]
