"""What is wrong with the caller's input, in one sentence, before anything is traced.

Every check looks at Python values, shapes and dtypes alone, so that it also works on traced arrays and costs
microseconds. All of them raise ValueError.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from streamgrad._typing import PyTree
from streamgrad.base import CUT_NAMES, Chunk, Cut, EstimatorState, Model, Params


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """`value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}.")


def check_size(least: int = 1, **sizes: Any) -> None:
    """Each of `sizes` is a whole number, at least `least`."""
    for name, value in sizes.items():
        whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
        if not whole or value < least:
            raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}.")


def check_decay(decay: Any) -> None:
    """`decay`, of an exponential average, is a number of at least 0 and below 1."""
    if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay < 1:
        raise ValueError(f"decay must be a number of at least 0 and below 1, not {decay!r}.")


def check_callable(**functions: Any) -> None:
    """Each of `functions` can be called."""
    for name, value in functions.items():
        if not callable(value):
            raise ValueError(f"{name} must be a function, not {value!r}.")


def check_real(name: str, tree: PyTree) -> None:
    """Every leaf of `tree` is an array of real floating-point numbers, and there is at least one."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    if not leaves:
        raise ValueError(f"{name} has no arrays in it.")
    for path, leaf in leaves:
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            kind = type(leaf).__name__ if dtype is None else dtype
            raise ValueError(
                f"{name}{jax.tree_util.keystr(path)} must be an array of real floating-point numbers, not {kind}."
            )


def check_params(expected: Params, params: Any) -> None:
    """`params` are real and have the structure and shapes of `expected`, the model's own."""
    if not isinstance(params, Params):
        raise ValueError(f"params must be what model.init(key) returns, not {type(params).__name__}.")
    check_real("params.cell", params.cell)
    if jax.tree.leaves(params.head):
        check_real("params.head", params.head)
    check_like("params", expected, params, "the model's own")


def check_like(name: str, expected: PyTree, tree: PyTree, whose: str) -> None:
    """`tree` has the structure and shapes of `expected`."""
    ours, theirs = jax.tree.structure(expected), jax.tree.structure(tree)
    if ours != theirs:
        raise ValueError(f"{name} must have the structure of {whose}, {ours}, not {theirs}.")
    for (path, want), got in zip(jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(tree), strict=True):
        if want.shape != jnp.shape(got):
            where = f"{name}{jax.tree_util.keystr(path)}"
            raise ValueError(
                f"{where} must have the shape of {whose}, {want.shape}, but its shape is {jnp.shape(got)}."
            )


def check_state(state: Any) -> None:
    """`state` is an estimator's."""
    if not isinstance(state, EstimatorState):
        raise ValueError(f"state must be what init(params) returns, not {type(state).__name__}.")


def check_same_state(old: PyTree, new: PyTree) -> None:
    """A cell's step returns a state like the one that it was given; known only once it is traced."""
    check_like("the state that the cell's step returns", old, new, "the state it was given")


def find_cut(model: Model, name: Any) -> Cut:
    """The cut of that name; it must exist, and the cell must have it."""
    check_choice("cut", name, CUT_NAMES)
    if name not in model.cell.cuts:
        has = ", ".join(repr(cut) for cut in CUT_NAMES if cut in model.cell.cuts)
        raise ValueError(f"this cell has no cut {name!r}: choose one of {has}.")
    return model.cell.cuts[name]


def check_chunk(model: Model, chunk: Any) -> int:
    """The chunk is a `Chunk` that the model can read; returns its number of steps."""
    if not isinstance(chunk, Chunk):
        raise ValueError(f"chunk must be a streamgrad.Chunk, not {type(chunk).__name__}.")
    length = leading_length(chunk, "time")
    reset = chunk.reset
    if reset is not None and (reset.shape != (length,) or reset.dtype != bool):
        raise ValueError(f"reset must be one bool per step, bool[{length}], not {reset.dtype}{list(reset.shape)}.")
    if model.cell.example_input is not None:
        check_like("one step of inputs", model.cell.example_input, one_step(chunk.inputs), "the cell's input")
    model.head.check_target(one_step(chunk.targets))
    return length


def leading_length(chunk: Chunk, axis: str) -> int:
    """The length of the leading axis that all leaves of a chunk agree on."""
    lengths = {}
    for part in ("inputs", "targets", "reset"):
        for path, leaf in jax.tree_util.tree_leaves_with_path(getattr(chunk, part)):
            where = part + jax.tree_util.keystr(path)
            if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
                raise ValueError(f"{where} must be an array, not {type(leaf).__name__}.")
            if not leaf.shape:
                raise ValueError(f"{where} has no axis for {axis}.")
            lengths[where] = leaf.shape[0]
    if not any(where.startswith("inputs") for where in lengths):
        raise ValueError("inputs has no arrays in it.")
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{where} {n}" for where, n in lengths.items())
        raise ValueError(f"all leaves of a chunk must have the same length along {axis}, but they have: {listed}.")
    length = next(iter(lengths.values()))
    if length < 1:
        raise ValueError("a chunk must have at least one step.")
    return length


def one_step(tree: PyTree) -> PyTree:
    """Shapes and dtypes of a tree without its leading axis."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), tree)


def check_key(key: Any) -> None:
    """`key` is a single PRNG key, of the new style or the old."""
    if not is_key(key) or jnp.shape(key) != (() if _typed(key) else (2,)):
        raise ValueError("key must be a single JAX PRNG key, such as jax.random.key(0).")


def is_key(key: Any) -> bool:
    """Whether `key` is one PRNG key or an array of them, of the new style or the old (uint32[..., 2])."""
    if not hasattr(key, "dtype"):
        return False
    return _typed(key) or (key.dtype == jnp.uint32 and jnp.ndim(key) >= 1 and key.shape[-1] == 2)


def is_traced(value: Any) -> bool:
    """Whether `value` is an array whose numbers are not known yet, so that they cannot be checked."""
    return isinstance(value, Tracer)


def _typed(key: Any) -> bool:
    return bool(jnp.issubdtype(key.dtype, jax.dtypes.prng_key))
