"""What is wrong with the caller's input, in one sentence, before anything is traced.

Checks look at Python values, shapes and dtypes, so that they also work on traced arrays and cost microseconds. Only
`check_values` looks at numbers, and only where they are on the host already: it never waits for an accelerator. All of
them raise ValueError.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from streamgrad._typing import PyTree
from streamgrad.base import CUT_NAMES, Cell, Chunk, Cut, EstimatorState, GradientEstimator, Model, Params
from streamgrad.keys import check_key as check_key


def once_per_shape(check: Callable[..., None]) -> Callable[..., None]:
    """A check that looks at structures, shapes and dtypes alone, done once for each combination of them.

    A training loop calls with the same ones again and again: what was right once is told by a look into a set.
    """
    passed = set()

    def remembering(*arguments: Any) -> None:
        leaves, structure = jax.tree.flatten(arguments)
        shapes = tuple((getattr(leaf, "shape", None), getattr(leaf, "dtype", type(leaf))) for leaf in leaves)
        if (structure, shapes) not in passed:
            check(*arguments)
            passed.add((structure, shapes))

    return remembering


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


def check_number(**numbers: Any) -> None:
    """Each of `numbers` is a single finite number."""
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not np.isfinite(value):
            raise ValueError(f"{name} must be a finite number, not {value!r}.")


def check_flag(**flags: Any) -> None:
    """Each of `flags` is True or False."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, not {value!r}.")


def check_callable(**functions: Any) -> None:
    """Each of `functions` can be called."""
    for name, value in functions.items():
        if not callable(value):
            raise ValueError(f"{name} must be a function, not {value!r}.")


def accepts(function: Callable[..., Any], *arguments: str) -> bool:
    """Whether `function` can be called with so many arguments; yes where Python cannot tell."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # a function without a signature, such as a builtin
        return True
    return True


def check_arguments(name: str, function: Any, *arguments: str) -> None:
    """`function` can be called with these arguments."""
    check_callable(**{name: function})
    if not accepts(function, *arguments):
        raise ValueError(f"{name} must be a function that is called as {name}({', '.join(arguments)}).")


def check_model(model: Any) -> None:
    """`model` is a `Model`."""
    if isinstance(model, Cell):
        raise ValueError("model must be a streamgrad.Model, not a Cell: make it one with Model(cell, head).")
    if not isinstance(model, Model):
        raise ValueError(f"model must be a streamgrad.Model(cell, head), not {_kind(model)}.")


def check_estimator(est: Any) -> None:
    """`est` is a `GradientEstimator`."""
    if not isinstance(est, GradientEstimator):
        raise ValueError(f"est must be an estimator, such as streamgrad.uoro(model) returns, not {_kind(est)}.")


def check_cell(step: Any, init_params: Any, init_state: Any, output: Any, first: str = "params") -> PyTree:
    """The functions of a cell fit together; returns shapes and dtypes of its parameters.

    `first` is what the step's first argument is called.
    """
    check_arguments("step", step, first, "state", "x")
    check_arguments("init_params", init_params, "key")
    check_arguments("init_state", init_state)
    check_arguments("output", output, "state")
    state = jax.eval_shape(init_state)
    check_real("state", state)
    read = jax.eval_shape(output, state)
    if not hasattr(read, "shape") or len(read.shape) != 1:
        got = f"shape {read.shape}" if hasattr(read, "shape") else _kind(read)
        raise ValueError(f"output must return one vector for the head to read, not {got}.")
    params = jax.eval_shape(init_params, jax.eval_shape(lambda: jax.random.key(0)))
    check_real("params", params)
    return params


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
    """`params` are real and have the structure and shapes of `expected`, the model's own; the cell's have one dtype."""
    if not isinstance(params, Params):
        raise ValueError(f"params must be what model.init(key) returns, not {_kind(params)}.")
    check_real("params.cell", params.cell)
    if jax.tree.leaves(params.head):
        check_real("params.head", params.head)
    check_like("params", expected, params, "the model's own")
    dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(params.cell)}
    if len(dtypes) > 1:
        raise ValueError(
            f"all arrays of params.cell must have the same dtype, but there are {' and '.join(sorted(dtypes))}."
        )


def check_like(name: str, expected: PyTree, tree: PyTree, whose: str) -> None:
    """`tree` has the structure and shapes of `expected`."""
    wanted, structure = jax.tree.flatten(expected)
    leaves, found = jax.tree.flatten(tree)
    if structure != found:
        raise ValueError(f"{name} must have the structure of {whose}: {_difference(name, expected, tree)}.")
    for index, (want, got) in enumerate(zip(wanted, leaves, strict=True)):
        if want.shape != np.shape(got):
            where = f"{name}{_paths(tree)[index]}"
            raise ValueError(f"{where} must have the shape of {whose}, {want.shape}, but its shape is {np.shape(got)}.")


def check_state(state: Any) -> None:
    """`state` is an estimator's."""
    if not isinstance(state, EstimatorState):
        raise ValueError(f"state must be what init(params) returns, not {_kind(state)}.")


def check_own_state(expected: EstimatorState, state: EstimatorState) -> None:
    """`state` is like `expected`, what the estimator's own `init(params)` returns for these parameters.

    Of what the streams share only the type counts: Q_0 and α may be replaced by others.
    """
    check_like("state.cell", expected.cell, state.cell, "the cell's state")
    for part in ("memory", "shared"):
        own, found = getattr(expected, part), getattr(state, part)
        if not isinstance(own, jax.ShapeDtypeStruct) and type(own) is not type(found):
            raise ValueError(
                f"state must be what this estimator's own init(params) returns, but its {part} is of type "
                f"{_kind(found)}, and this estimator's is of type {_kind(own)}."
            )
    check_like("state.memory", expected.memory, state.memory, "what this estimator's own init(params) returns")
    wanted, leaves = jax.tree.leaves((expected.cell, expected.memory)), jax.tree.leaves((state.cell, state.memory))
    for index, (want, got) in enumerate(zip(wanted, leaves, strict=True)):
        # As JAX will read it: without 64 bits an array of numpy in float64 is one of float32.
        if want.dtype != getattr(got, "dtype", None) and want.dtype != jnp.result_type(got):
            where = _paths(EstimatorState(state.cell, state.memory, ()))[index]
            raise ValueError(
                f"state{where} is {jnp.result_type(got)}, but for these params it must be {want.dtype}: "
                "cast one of them, or begin with init(params)."
            )


def check_same_state(old: PyTree, new: PyTree) -> None:
    """A cell's step returns a state like the one that it was given; known only once it is traced."""
    check_like("the state that the cell's step returns", old, new, "the state it was given")


def find_cut(model: Model, name: Any) -> Cut:
    """The cut of that name; it must exist, and the model's cell must have it."""
    check_model(model)
    check_choice("cut", name, CUT_NAMES)
    if name not in model.cell.cuts:
        has = ", ".join(repr(cut) for cut in CUT_NAMES if cut in model.cell.cuts)
        raise ValueError(f"this cell has no cut {name!r}: choose one of {has}.")
    return model.cell.cuts[name]


def check_chunk(model: Model, chunk: Any) -> int:
    """The chunk is a `Chunk` that the model can read; returns its number of steps."""
    if not isinstance(chunk, Chunk):
        raise ValueError(f"chunk must be a streamgrad.Chunk, not {_kind(chunk)}.")
    length = leading_length(chunk, "time")
    reset = chunk.reset
    if reset is not None and (reset.shape != (length,) or reset.dtype != bool):
        raise ValueError(f"reset must be one bool per step, bool[{length}], not {reset.dtype}{list(reset.shape)}.")
    example = model.cell.example_input
    if example is not None:
        check_like("one step of inputs", example, one_step(chunk.inputs), "the cell's input")
        for index, (want, got) in enumerate(zip(jax.tree.leaves(example), jax.tree.leaves(chunk.inputs), strict=True)):
            if _is_real(want.dtype) and not _is_real(got.dtype):
                where = f"inputs{_paths(chunk.inputs)[index]}"
                raise ValueError(f"{where} must be real numbers, as the cell's input is, not {got.dtype}.")
    model.head.check_target(one_step(chunk.targets))
    check_values(model, chunk)
    return length


def check_batch(state: Any, chunk: Any, batch_size: int) -> None:
    """The chunk, and all of the state but what is shared, have a leading axis for so many streams."""
    if not isinstance(chunk, Chunk):
        raise ValueError(f"chunk must be a streamgrad.Chunk, not {_kind(chunk)}.")
    size = leading_length(chunk, "the batch")
    if size != batch_size:
        raise ValueError(f"the chunk has {size} streams, but the estimator was made for {batch_size}.")
    check_state(state)
    for part in ("cell", "memory"):
        tree = getattr(state, part)
        for index, leaf in enumerate(jax.tree.leaves(tree)):
            if np.shape(leaf)[:1] != (batch_size,):
                raise ValueError(
                    f"state must be that of {batch_size} streams, but state.{part}{_paths(tree)[index]} has the shape "
                    f"{np.shape(leaf)}: pass what this estimator's own init(params) returned."
                )


def check_values(model: Model, chunk: Chunk) -> None:
    """The numbers of a chunk are ones that the cell and the head can take, as far as they can be read at no cost.

    Arrays of numpy are checked, and arrays of JAX that are on the CPU. Those on an accelerator are not, because reading
    them would make the caller wait for it; nor are traced ones. There a class out of range makes the loss NaN.
    """
    for tree, check in ((chunk.inputs, model.cell.check_values), (chunk.targets, model.head.check_values)):
        leaves, structure = jax.tree.flatten(tree)
        if all(map(_on_host, leaves)):
            check(jax.tree.unflatten(structure, [np.asarray(leaf) for leaf in leaves]))


def _on_host(leaf: Any) -> bool:
    if isinstance(leaf, np.ndarray):
        return True
    if not isinstance(leaf, jax.Array) or is_traced(leaf) or jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
        return False
    return leaf.is_fully_addressable and all(device.platform == "cpu" for device in leaf.devices())


def leading_length(chunk: Chunk, axis: str) -> int:
    """The length of the leading axis that all leaves of a chunk agree on."""
    lengths = {}
    for part in ("inputs", "targets", "reset"):
        for path, leaf in jax.tree_util.tree_leaves_with_path(getattr(chunk, part)):
            where = part + jax.tree_util.keystr(path)
            if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
                raise ValueError(f"{where} must be an array, not {_kind(leaf)}: numpy.asarray makes one of a list.")
            if not any(jnp.issubdtype(leaf.dtype, kind) for kind in (jnp.number, jnp.bool_, jax.dtypes.extended)):
                raise ValueError(f"{where} must be an array of numbers, not of {leaf.dtype}.")
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


def is_traced(value: Any) -> bool:
    """Whether `value` is an array whose numbers are not known yet, so that they cannot be checked."""
    return isinstance(value, Tracer)


def _is_real(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.bool_) or jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)


def _kind(value: Any) -> str:
    """What a value is, in a few words."""
    if value is None:
        return "None"
    return f"the function {value.__name__}" if inspect.isfunction(value) else type(value).__name__


def _paths(tree: PyTree) -> list[str]:
    """Where each leaf of a tree is, as one would write it behind the tree's name."""
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def _difference(name: str, expected: PyTree, tree: PyTree) -> str:
    """What distinguishes the structure of `tree` from that of `expected`."""
    wanted, found = _paths(expected), _paths(tree)
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
