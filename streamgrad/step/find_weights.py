"""The weight products of a step, found in its operations.

An *effective weight* is an operand of a `dot_general` that depends on parameters alone, through any operations. Linear
operations on its products (sums, biases, slices, splits, reshapes, scales) give one preactivation z = W a with all
their features a, until an operation needs its value: there it is displaced. Preactivations of the same features are
rows of one matrix. Parameters that meet the state or the input in any other way are displaced themselves: they are one
matrix more, of a single column, whose feature is 1.

So a step with any parameters becomes one over a few matrices, each used once, as all estimators like them. The matrices
are a function of the parameters, and gradients go back through it.
"""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from streamgrad._typing import Array, Float, PyTree
from streamgrad.step.affine_trace import Affine, Feature, absorb, is_complex
from streamgrad.step.jaxpr_reader import Program, do, read
from streamgrad.step.matvec import matvec


class Group(NamedTuple):
    """Preactivations of the same features.

    Attributes:
      features: of their weights; those that depend on the state come first.
      values: the preactivations, whose rows follow each other.
    """

    features: tuple[Feature, ...]
    values: tuple[int, ...]


class Plan(NamedTuple):
    """The use of a step's parameters.

    Attributes:
      program: the step.
      affine: the sums of products, by value.
      groups: a matrix each.
      rest: values that depend on parameters alone and are displaced themselves.
      made_of: for each value the leaves of the parameters that it comes from.
      ops: the other operations of a step, in order.
    """

    program: Program
    affine: dict[int, Affine]
    groups: list[Group]
    rest: list[int]
    made_of: dict[int, frozenset[int]]
    ops: list[Any]


class MatrixStep(NamedTuple):
    """A step whose parameters are matrices.

    Attributes:
      plan: how it was found.
      weights: `weights(params) -> [W]`, the matrices of given parameters, in the order of the plan's groups; where
        there is a rest, it is the last.
      run: `run(weights, state, x, dz) -> (state, [z], [a])`, the step with its preactivations displaced by dz, or not
        displaced for None; the preactivations; and the features.
    """

    plan: Plan
    weights: Callable[[PyTree], list[Float[Array, "N A"]]]
    run: Callable[..., tuple[PyTree, list[Array], list[Array]]]


def find_weights(step: Callable[..., PyTree], params: PyTree, state: PyTree, x: PyTree, dtype: Any) -> MatrixStep:
    """The step over matrices.

    Args:
      step: `step(params, state, x) -> state`.
      params: shapes and dtypes of its parameters.
      state: likewise.
      x: likewise.
      dtype: of the matrices; real.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> step = lambda params, h, x: jnp.tanh(params["w"] @ h + params["v"] @ x + params["b"])
      >>> params = {"w": jnp.ones((2, 2)), "v": jnp.ones((2, 3)), "b": jnp.ones(2)}
      >>> products = find_weights(step, params, jnp.zeros(2), jnp.ones(3), jnp.float32)
      >>> [w.shape for w in products.weights(params)]
      [(2, 6)]
    """
    program = read(step, params, state, x)
    plan = make_plan(program)

    def weights(params: PyTree) -> list[Array]:
        values = dict(zip(program.inputs[0], jax.tree.leaves(params), strict=True))
        get = functools.partial(_evaluate, program, values | program.constants)
        found = [_matrix(plan, group, get, dtype) for group in plan.groups]
        if plan.rest:
            column = jnp.concatenate([_as_real(get(value), dtype) for value in plan.rest])
            found.append(column[:, None])
        return found

    def run(weights: list[Array], state: PyTree, x: PyTree, dz: list[Array] | None) -> tuple[PyTree, list, list]:
        walk = _Walk(plan, weights, dz)
        walk.values |= zip(program.inputs[1], jax.tree.leaves(state), strict=True)
        walk.values |= zip(program.inputs[2], jax.tree.leaves(x), strict=True)
        for op in plan.ops:
            walk.values |= zip(op.outputs, do(op, [walk.get(value) for value in op.inputs]), strict=True)
        new = [walk.get(value) for value in program.outputs]
        for group in range(len(plan.groups)):  # also products without a reader
            walk.make(group)
        z = [walk.z[i] for i in range(len(weights))]
        a = [walk.a[i] for i in range(len(weights))]
        return jax.tree.unflatten(program.structure, new), z, a

    return MatrixStep(plan, weights, run)


def make_plan(program: Program) -> Plan:
    """Sort the values of a step: those of parameters alone, sums of products, and all others."""
    leaves, states, inputs = program.inputs
    made_of = {value: frozenset() for value in program.avals}
    made_of |= {leaf: frozenset([index]) for index, leaf in enumerate(leaves)}
    moving, by_state = {*states, *inputs}, {*states}
    for op in program.ops:
        for known in (moving, by_state):
            if any(value in known for value in op.inputs):
                known.update(op.outputs)
        of = frozenset().union(*(made_of[value] for value in op.inputs))
        made_of |= dict.fromkeys(op.outputs, of)

    readers: dict[int, list[Any]] = {}
    for op in program.ops:
        for value in op.inputs:
            readers.setdefault(value, []).append(op)
    uses = Counter({value: len(ops) for value, ops in readers.items()}) + Counter(program.outputs)

    affine: dict[int, Affine] = {}
    needed: dict[int, None] = {}  # as an ordered set
    rest: dict[int, None] = {}
    ops = []

    def is_weight(value: int) -> bool:
        return value not in moving and bool(made_of[value])

    def claim(value: int) -> None:
        """Displace this value where it is no larger than the leaves it comes from, else its operands."""
        if not made_of[value] or value in rest:
            return
        size = sum(program.avals[leaves[index]].size for index in made_of[value])
        inexact = jnp.issubdtype(program.avals[value].dtype, jnp.inexact)
        if inexact and (value in leaves or program.avals[value].size <= size):
            rest[value] = None
            return
        for operand in program.maker[value].inputs:
            claim(operand)

    def need(value: int) -> None:
        if value in affine:
            needed[value] = None
            for feature in affine[value].terms:
                if feature.value is not None:
                    need(feature.value)
        elif is_weight(value):
            claim(value)

    for op in program.ops:
        if not any(output in moving for output in op.outputs):
            continue
        found = absorb(op, program, affine, is_weight, lambda value: value in moving, readers, uses)
        if found is None:
            ops.append(op)
            for value in op.inputs:
                need(value)
        else:
            affine |= zip(op.outputs, found, strict=True)
    for value in program.outputs:
        need(value)
    return Plan(program, affine, _grouped(affine, needed, by_state), list(rest), made_of, ops)


def _grouped(affine: dict[int, Affine], needed: Any, by_state: set[int]) -> list[Group]:
    """Preactivations by their features."""

    def order(feature: Feature) -> tuple:
        value = feature.value
        return value is None, value not in by_state, value or 0, feature.dims, feature.part

    groups: dict[tuple[Feature, ...], list[int]] = {}
    for value in needed:
        groups.setdefault(tuple(sorted(affine[value].terms, key=order)), []).append(value)
    return [Group(features, tuple(values)) for features, values in groups.items()]


def _evaluate(program: Program, values: dict[int, Any], value: int) -> Any:
    """A value that does not depend on state or input; every operation is done once."""
    if value not in values:
        op = program.maker[value]
        values |= zip(op.outputs, do(op, [_evaluate(program, values, v) for v in op.inputs]), strict=True)
    return values[value]


def _matrix(plan: Plan, group: Group, get: Callable[[int], Array], dtype: Any) -> Float[Array, "N A"]:
    """The weights of a group: its preactivations' rows by its features."""
    rows = []
    for value in group.values:
        one = plan.affine[value]
        size = int(np.prod(one.shape))
        parts = [one.terms[feature](get) for feature in group.features]
        flat = jnp.concatenate([part.reshape(size, part.shape[-1]) for part in parts], axis=1)
        rows += [flat.real, flat.imag] if is_complex(one.dtype) else [flat]
    return jnp.concatenate(rows).astype(dtype)


def _as_real(array: Array, dtype: Any) -> Float[Array, " n"]:
    """An array as a real vector; of complex numbers the real parts come first."""
    flat = jnp.ravel(array)
    return (jnp.concatenate([flat.real, flat.imag]) if is_complex(array.dtype) else flat).astype(dtype)


def _from_real(vector: Float[Array, " n"], aval: Any) -> Array:
    """The inverse of `_as_real`."""
    if is_complex(aval.dtype):
        real, imag = jnp.split(vector, 2)
        vector = jax.lax.complex(real, imag)
    return vector.reshape(aval.shape).astype(aval.dtype)


def real_size(aval: Any) -> int:
    """The number of an array's real numbers."""
    return aval.size * (2 if is_complex(aval.dtype) else 1)


class _Walk:
    """One step with its values; preactivations are made when the first of their group is needed."""

    def __init__(self, plan: Plan, weights: list[Array], dz: list[Array] | None) -> None:
        self.plan, self.weights, self.dz = plan, weights, dz
        self.values: dict[int, Any] = dict(plan.program.constants)
        self.group_of = {value: i for i, group in enumerate(plan.groups) for value in group.values}
        self.z: dict[int, Array] = {}
        self.a: dict[int, Array] = {}
        if plan.rest:
            last = len(plan.groups)
            self.a[last] = jnp.ones(1, weights[last].dtype)
            self.displace(last, weights[last][:, 0], plan.rest)

    def displace(self, index: int, z: Array, values: Any) -> None:
        """Displace the z of a matrix, and split it into its values."""
        self.z[index] = z = z if self.dz is None else z + self.dz[index]
        avals = [self.plan.program.avals[value] for value in values]
        # One split: backwards it is one concatenation, where slices would be a sum of as many padded vectors.
        parts = jax.lax.split(z, [real_size(aval) for aval in avals]) if len(avals) > 1 else [z]
        self.values |= {value: _from_real(part, aval) for value, part, aval in zip(values, parts, avals, strict=True)}

    def make(self, index: int) -> None:
        """z = W a of a group."""
        if index in self.z:
            return
        group, weights = self.plan.groups[index], self.weights[index]
        parts = [feature.vector(self.get, weights.dtype) for feature in group.features]
        self.a[index] = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
        self.displace(index, matvec(weights, *parts), group.values)

    def get(self, value: int) -> Any:
        """A value, computed at its first use."""
        if value not in self.values:
            if value in self.group_of:
                self.make(self.group_of[value])
            else:  # from parameters that are displaced, or from constants
                op = self.plan.program.maker[value]
                self.values |= zip(op.outputs, do(op, [self.get(v) for v in op.inputs]), strict=True)
        return self.values[value]
