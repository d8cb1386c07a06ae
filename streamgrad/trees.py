"""Trees of arrays: checks of them, which raise ValueError, and resets of a network's state.

They know of no record of the library, so that the records may use them.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from streamgrad._typing import Array, Bool, PyTree


def once_per_shape(check: Callable[..., None]) -> Callable[..., None]:
    """A check that looks at structures, shapes and dtypes alone, done once for each combination of them.

    A training loop calls with the same ones again and again: a look into a set then is enough.
    """
    passed = set()

    def remembering(*arguments: Any) -> None:
        leaves, structure = jax.tree.flatten(arguments)
        shapes = tuple((getattr(leaf, "shape", None), getattr(leaf, "dtype", type(leaf))) for leaf in leaves)
        if (structure, shapes) not in passed:
            check(*arguments)
            passed.add((structure, shapes))

    return remembering


def check_real(name: str, tree: PyTree) -> None:
    """Every leaf of `tree` is an array of real floating-point numbers, and there is at least one."""
    _check_kind(name, tree, jnp.floating, "real floating-point numbers", "")


def check_numbers(name: str, tree: PyTree) -> None:
    """Every leaf of `tree` is an array of numbers that can be differentiated, real or complex, and there is one."""
    hint = ": numbers that are not learnt belong into the step itself, or into the state"
    _check_kind(name, tree, jnp.inexact, "floating-point numbers", hint)


def _check_kind(name: str, tree: PyTree, kind: Any, words: str, hint: str) -> None:
    """Every leaf of `tree` is an array of that kind of numbers, and there is at least one."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    if not leaves:
        raise ValueError(f"{name} has no arrays in it.")
    for path, leaf in leaves:
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, kind):
            got = type(leaf).__name__ if dtype is None else dtype
            raise ValueError(f"{name}{jax.tree_util.keystr(path)} must be an array of {words}, not {got}{hint}.")


def check_like(name: str, expected: PyTree, tree: PyTree, whose: str) -> None:
    """`tree` has the structure and shapes of `expected`."""
    wanted, structure = jax.tree.flatten(expected)
    leaves, found = jax.tree.flatten(tree)
    if structure != found:
        raise ValueError(f"{name} must have the structure of {whose}: {_difference(name, expected, tree)}.")
    for index, (want, got) in enumerate(zip(wanted, leaves, strict=True)):
        if want.shape != np.shape(got):
            where = f"{name}{paths_of(tree)[index]}"
            raise ValueError(f"{where} must have the shape of {whose}, {want.shape}, but its shape is {np.shape(got)}.")


def check_same_state(old: PyTree, new: PyTree) -> None:
    """A cell's step returns a state like the one that it was given; known only once it is traced."""
    check_like("the state that the cell's step returns", old, new, "the state it was given")


def common_length(parts: Mapping[str, PyTree], axis: str) -> int:
    """The length of the leading axis that all leaves of a chunk's parts agree on; the first part must have one."""
    lengths = {}
    for part, tree in parts.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            where = part + jax.tree_util.keystr(path)
            if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
                raise ValueError(f"{where} must be an array, not {kind_of(leaf)}: numpy.asarray makes one of a list.")
            if not any(jnp.issubdtype(leaf.dtype, kind) for kind in (jnp.number, jnp.bool_, jax.dtypes.extended)):
                raise ValueError(f"{where} must be an array of numbers, not of {leaf.dtype}.")
            if not leaf.shape:
                raise ValueError(f"{where} has no axis for {axis}.")
            lengths[where] = leaf.shape[0]
    first = next(iter(parts))
    if not any(where.startswith(first) for where in lengths):
        raise ValueError(f"{first} has no arrays in it.")
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{where} {n}" for where, n in lengths.items())
        raise ValueError(f"all leaves of a chunk must have the same length along {axis}, but they have: {listed}.")
    length = next(iter(lengths.values()))
    if length < 1:
        raise ValueError("a chunk must have at least one step.")
    return length


def check_inputs(example: PyTree | None, inputs: PyTree, reset: Any) -> int:
    """Inputs and resets of some steps are ones for a cell with that `example_input`; returns how many steps."""
    length = common_length({"inputs": inputs, "reset": reset}, "time")
    if reset is not None and (np.shape(reset) != (length,) or reset.dtype != bool):
        raise ValueError(f"reset must be one bool per step, bool[{length}], not {kind_of(reset)}.")
    if example is not None:
        check_like("one step of inputs", example, one_step(inputs), "the cell's input")
        for index, (want, got) in enumerate(zip(jax.tree.leaves(example), jax.tree.leaves(inputs), strict=True)):
            if is_real(want.dtype) and not is_real(got.dtype):
                where = f"inputs{paths_of(inputs)[index]}"
                raise ValueError(f"{where} must be real numbers, as the cell's input is, not {got.dtype}.")
    return length


def on_host(tree: PyTree) -> PyTree | None:
    """The tree as arrays of numpy, where all its numbers can be read at no cost; else None.

    Arrays of numpy can, and arrays of JAX that are on the CPU and have been computed. Those on an accelerator cannot,
    nor those that are still being computed, because reading them would make the caller wait; nor can traced ones.
    """
    leaves, structure = jax.tree.flatten(tree)
    if not all(map(_on_host, leaves)):
        return None
    return jax.tree.unflatten(structure, [np.asarray(leaf) for leaf in leaves])


def _on_host(leaf: Any) -> bool:
    if isinstance(leaf, np.ndarray):
        return True
    if not isinstance(leaf, jax.Array) or is_traced(leaf) or jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return False
    here = leaf.is_fully_addressable and all(device.platform == "cpu" for device in leaf.devices())
    return here and leaf.is_ready()  # pyright: ignore[reportAttributeAccessIssue], which JAX does not declare


def one_step(tree: PyTree) -> PyTree:
    """Shapes and dtypes of a tree without its leading axis."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), tree)


def is_traced(value: Any) -> bool:
    """Whether `value` is an array whose numbers are not known yet, so that they cannot be checked."""
    return isinstance(value, Tracer)


def is_real(dtype: Any) -> bool:
    """Whether numbers of this dtype are real; bools are 0 and 1."""
    return jnp.issubdtype(dtype, jnp.bool_) or jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)


def kind_of(value: Any) -> str:
    """The kind of a value, in a few words."""
    if value is None:
        return "None"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype}{list(value.shape)}"
    return f"the function {value.__name__}" if inspect.isfunction(value) else type(value).__name__


def paths_of(tree: PyTree) -> list[str]:
    """The path of each leaf of a tree, as one would write it behind the tree's name."""
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def restart(reset: Bool[Array, ""] | None, fresh: PyTree, current: PyTree) -> PyTree:
    """`fresh` where an episode begins, `current` where it goes on."""
    if reset is None:
        return current
    return jax.tree.map(lambda new, old: jnp.where(reset, new, old), fresh, current)


def cleared(begun: Bool[Array, " *lead"] | None, tree: PyTree) -> PyTree:
    """Arrays whose leading axes are streams, or steps and streams, with zeros where an episode has begun since.

    Zeros are selected. To multiply by zero would not do, for 0 times NaN or infinity is NaN, and never leaves again.

    Example:
      >>> import jax.numpy as jnp
      >>> cleared(jnp.array([True, False]), jnp.array([jnp.nan, 2.0])).tolist()
      [0.0, 2.0]
    """
    if begun is None:
        return tree

    def clear(leaf: Array) -> Array:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):  # such as keys, which have no zero
            return leaf
        return jnp.where(begun.reshape(*begun.shape, *(1,) * (leaf.ndim - begun.ndim)), jnp.zeros((), leaf.dtype), leaf)

    return jax.tree.map(clear, tree)


def all_finite(tree: PyTree) -> Bool[Array, ""]:
    """Whether all numbers in a tree are finite; keys, counters and flags always are."""
    return jnp.all(jnp.stack([jnp.ones((), bool), *(jnp.all(jnp.isfinite(leaf)) for leaf in _inexact(tree))]))


def finite_streams(tree: PyTree, count: int) -> Bool[Array, " count"]:
    """Whether all numbers of each of `count` streams are finite; arrays with fewer streams are those of the first.

    Example:
      >>> import jax.numpy as jnp
      >>> finite_streams({"h": jnp.array([[1.0], [jnp.nan], [2.0]]), "m": jnp.array([jnp.inf])}, 3).tolist()
      [False, False, True]
    """
    found = jnp.ones(count, bool)
    for leaf in _inexact(tree):
        each = jnp.all(jnp.isfinite(leaf), axis=tuple(range(1, leaf.ndim)))
        found &= jnp.pad(each, (0, count - len(each)), constant_values=True)
    return found


def _inexact(tree: PyTree) -> list[Array]:
    return [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]


def same_dtype(new: PyTree, state: PyTree) -> PyTree:
    """A new state in the dtypes of the old. Raises ValueError if its structure or shapes are others."""
    check_same_state(state, new)
    return jax.tree.map(lambda new, old: new.astype(old.dtype), new, state)


def _difference(name: str, expected: PyTree, tree: PyTree) -> str:
    """The difference between the structures of `tree` and `expected`, in words."""
    wanted, found = paths_of(expected), paths_of(tree)
    missing = _few([name + path for path in wanted if path not in found])
    extra = _few([name + path for path in found if path not in wanted])
    if not found:
        return "it has no arrays"
    if missing and extra:
        return f"it has {extra} where {missing} should be"
    if missing or extra:
        return f"it lacks {missing}" if missing else f"it has {extra} besides"
    return f"it is {jax.tree.structure(tree)} where {jax.tree.structure(expected)} should be"


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
