"""A step as a list of operations: its jaxpr, with the calls in it opened and repeated operations done once."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jax.extend.core import primitives as p

from streamgrad._typing import PyTree

# Calls whose operations are done in place. A remat is no more than a hint to the reverse pass, and estimators that need
# less memory have hints of their own. A custom_jvp stays closed, for its rule is part of it.
CALLS = {p.jit_p, p.closed_call_p, p.remat_p}


class Op(NamedTuple):
    """One operation of JAX, with its static parameters; the values that it reads and makes are known by numbers."""

    primitive: Any
    params: dict[str, Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class Program(NamedTuple):
    """A function as operations in order.

    Attributes:
      ops: the operations.
      inputs: the values of the arguments, one tuple for each.
      outputs: the values returned.
      constants: the arrays of values that are constants.
      avals: shape and dtype of every value.
      maker: the operation that makes a value, for all but inputs and constants.
      structure: of the tree that is returned.
    """

    ops: list[Op]
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[int, ...]
    constants: dict[int, Any]
    avals: dict[int, Any]
    maker: dict[int, Op]
    structure: Any


def read(function: Callable[..., PyTree], *arguments: PyTree) -> Program:
    """Read a function of pytrees as a program, from the shapes and dtypes of its arguments.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> program = read(jax.jit(lambda w, x: jnp.tanh(w @ x)), jnp.ones((2, 3)), jnp.ones(3))
      >>> [op.primitive.name for op in program.ops]
      ['dot_general', 'tanh']
    """
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*arguments)
    reader = _Reader()
    operands = [reader.new(variable.aval) for variable in _inner(closed).invars]
    outputs = reader.open(closed, operands)
    rest = iter(operands)
    inputs = tuple(tuple(next(rest) for _ in jax.tree.leaves(argument)) for argument in arguments)
    ops = _alive(reader.ops, outputs)
    maker = {output: op for op in ops for output in op.outputs}
    return Program(ops, inputs, tuple(outputs), reader.constants, reader.avals, maker, jax.tree.structure(shape))


def do(op: Op, inputs: Sequence[Any]) -> list[Any]:
    """One operation on arrays, as JAX itself does it."""
    found = op.primitive.get_bind_params(op.params)
    functions, params = found if isinstance(found, tuple) else ((), found)  # functions stand apart before JAX 0.10
    result = op.primitive.bind(*functions, *inputs, **params)
    return list(result) if op.primitive.multiple_results else [result]


def _alive(ops: list[Op], outputs: Sequence[int]) -> list[Op]:
    """The operations that the outputs depend on."""
    needed, alive = set(outputs), []
    for op in reversed(ops):
        if not needed.isdisjoint(op.outputs):
            needed.update(op.inputs)
            alive.append(op)
    return alive[::-1]


def _inner(closed: Any) -> Any:
    """The jaxpr itself: the closed one and it became one in JAX 0.11."""
    return getattr(closed, "jaxpr", closed)


class _Reader:
    """Numbers values while it goes through a jaxpr."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.avals: dict[int, Any] = {}
        self.constants: dict[int, Any] = {}
        self.done: dict[Any, tuple[int, ...]] = {}

    def new(self, aval: Any) -> int:
        self.avals[len(self.avals)] = aval
        return len(self.avals) - 1

    def constant(self, value: Any, aval: Any) -> int:
        number = self.new(aval)
        self.constants[number] = value
        return number

    def open(self, closed: Any, operands: Sequence[int]) -> list[int]:
        """The values that a jaxpr returns."""
        jaxpr = _inner(closed)
        names = dict(zip(jaxpr.invars, operands, strict=True))
        for variable, value in zip(jaxpr.constvars, getattr(closed, "consts", ()), strict=True):
            names[variable] = self.constant(value, variable.aval)

        def number(atom: Any) -> int:
            return self.constant(atom.val, atom.aval) if isinstance(atom, Literal) else names[atom]

        for equation in jaxpr.eqns:
            inputs = tuple(map(number, equation.invars))
            inside = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
            if equation.primitive in CALLS and inside is not None:
                outputs = self.open(inside, inputs)
            else:
                outputs = self.once(equation, inputs)
            names.update(zip(equation.outvars, outputs, strict=True))
        return list(map(number, jaxpr.outvars))

    def once(self, equation: Any, inputs: tuple[int, ...]) -> tuple[int, ...]:
        """The outputs of an operation; of a reshape or cast done before, the same outputs again.

        Layers of a library cast and reshape their input each for itself, and one must see that they read the same.
        """
        key = (equation.primitive, str(equation.params), inputs)
        simple = not equation.effects and equation.primitive in shaping()
        if simple and key in self.done:
            return self.done[key]
        outputs = tuple(self.new(variable.aval) for variable in equation.outvars)
        self.ops.append(Op(equation.primitive, equation.params, inputs, outputs))
        self.done[key] = outputs
        return outputs


def shaping() -> set[Any]:
    """Operations whose result is the same array in another shape or dtype."""
    return {p.reshape_p, p.broadcast_in_dim_p, p.convert_element_type_p, p.squeeze_p, p.transpose_p, p.copy_p}


@functools.cache
def stack_primitive() -> Any:
    """The primitive of `jnp.stack`, which `jax.extend` does not name; before JAX 0.10 a concatenation."""
    closed = jax.make_jaxpr(lambda v: jnp.stack([v, v]))(jnp.zeros(2))
    return _inner(closed).eqns[-1].primitive


@functools.cache
def split_primitive() -> Any:
    """The primitive of `jax.lax.split`, which `jax.extend` does not name."""
    closed = jax.make_jaxpr(lambda v: jax.lax.split(v, (1, 1)))(jnp.zeros(2))
    return _inner(closed).eqns[0].primitive
