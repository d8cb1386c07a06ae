"""Checks of the caller's input before anything is traced; an error is one sentence.

Checks look at Python values, shapes and dtypes, so that they also work on traced arrays and cost microseconds. Only
`check_values` looks at numbers, and only where they are on the host already: it never waits for an accelerator. All of
them raise ValueError.
"""

import inspect
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from streamgrad._typing import PyTree
from streamgrad.base import CUT_NAMES, Cell, Chunk, Cut, EstimatorState, GradientEstimator, Model, Params, worked
from streamgrad.keys import check_key as check_key
from streamgrad.keys import drawn_shapes
from streamgrad.trees import (
    check_inputs,
    check_like,
    check_numbers,
    check_real,
    common_length,
    is_real,
    kind_of,
    on_host,
    paths_of,
)
from streamgrad.trees import check_same_state as check_same_state
from streamgrad.trees import is_traced as is_traced
from streamgrad.trees import once_per_shape as once_per_shape
from streamgrad.trees import one_step as one_step


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


def check_at_most(name: str, value: int, most: int, what: str) -> None:
    """`value` is at most `most`; `what` explains that limit."""
    if value > most:
        raise ValueError(f"{name} must be at most {most}, {what}, not {value}.")


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
    """Whether `function` can be called with these arguments; yes where Python cannot tell."""
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


def check_own_matrices(model: Any) -> None:
    """`model` is a `Model` whose cell is worked on as it was given, so that its parameters are those of the theory."""
    if worked(model).cell is not model.cell:
        raise ValueError(
            "the theory is over the matrices that this cell's parameters make: pass streamgrad.worked(model) for the "
            "model, and model.enter(params) for its parameters."
        )


def check_is_cell(cell: Any) -> None:
    """`cell` is a `Cell`."""
    if not isinstance(cell, Cell):
        raise ValueError(f"cell must be a Cell, such as streamgrad.cells.lstm(3, 8) returns, not {kind_of(cell)}.")


def check_estimator(est: Any) -> None:
    """`est` is a `GradientEstimator`."""
    if not isinstance(est, GradientEstimator):
        raise ValueError(f"est must be an estimator, such as streamgrad.rtrl(model) returns, not {kind_of(est)}.")


def check_cell(step: Any, init_params: Any, init_state: Any, output: Any, first: str = "params") -> PyTree:
    """The functions of a cell fit together, with `first` as the step's first argument; returns its params' shapes."""
    check_arguments("step", step, first, "state", "x")
    check_arguments("init_params", init_params, "key")
    check_arguments("init_state", init_state)
    check_arguments("output", output, "state")
    state = jax.eval_shape(init_state)
    if not any(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in jax.tree.leaves(state)):
        raise ValueError("state must have an array of floating-point numbers in it, else there is nothing to learn.")
    read = jax.eval_shape(output, state)
    if not hasattr(read, "shape") or len(read.shape) != 1:
        got = f"shape {read.shape}" if hasattr(read, "shape") else kind_of(read)
        raise ValueError(f"output must return one vector for the head to read, not {got}.")
    if not is_real(read.dtype):
        raise ValueError(f"output must return real numbers for the head to read, not {read.dtype}.")
    params = drawn_shapes(init_params)
    check_numbers("params", params)
    return params


def check_params(expected: Params, params: Any) -> None:
    """`params` are real and have the structure and shapes of `expected`, the model's own."""
    if not isinstance(params, Params):
        raise ValueError(f"params must be what model.init(key) returns, not {kind_of(params)}.")
    check_real("params.cell", params.cell)
    if jax.tree.leaves(params.head):
        check_real("params.head", params.head)
    check_like("params", expected, params, "the model's own")


def check_state(state: Any) -> None:
    """`state` is an estimator's."""
    if not isinstance(state, EstimatorState):
        raise ValueError(f"state must be what init(params) returns, not {kind_of(state)}.")


def check_own_state(expected: EstimatorState, state: EstimatorState) -> None:
    """`state` is like `expected`, the estimator's own `init(params)` for these parameters.

    Of the shared part only the type counts: Q_0 and α may be replaced by others.
    """
    check_like("state.cell", expected.cell, state.cell, "the cell's state")
    for part in ("memory", "shared"):
        own, found = getattr(expected, part), getattr(state, part)
        if not isinstance(own, jax.ShapeDtypeStruct) and type(own) is not type(found):
            raise ValueError(
                f"state must be what this estimator's own init(params) returns, but its {part} is of type "
                f"{kind_of(found)}, and this estimator's is of type {kind_of(own)}."
            )
    check_like("state.memory", expected.memory, state.memory, "what this estimator's own init(params) returns")
    wanted, leaves = jax.tree.leaves((expected.cell, expected.memory)), jax.tree.leaves((state.cell, state.memory))
    for index, (want, got) in enumerate(zip(wanted, leaves, strict=True)):
        # As JAX will read it: without 64 bits an array of numpy in float64 is one of float32.
        if want.dtype != getattr(got, "dtype", None) and want.dtype != jnp.result_type(got):
            where = paths_of(EstimatorState(state.cell, state.memory, ()))[index]
            raise ValueError(
                f"state{where} is {jnp.result_type(got)}, but for these params it must be {want.dtype}: "
                "cast one of them, or begin with init(params)."
            )


def find_cut(model: Model, name: Any) -> Cut:
    """The cut of that name. Raises ValueError if there is none, or the model's cell does not have it."""
    check_choice("cut", name, CUT_NAMES)
    if name not in model.cell.cuts:
        has = ", ".join(repr(cut) for cut in CUT_NAMES if cut in model.cell.cuts)
        way_out = f"choose one of {has} where the estimator leaves a choice, or an estimator that needs no cut"
        if model.cell.example_input is None and name == "preactivation":
            way_out = f"give cells.from_function an example_input, with which its weights are found, or {way_out}"
        raise ValueError(f"this cell has no cut {name!r}: {way_out}.")
    return model.cell.cuts[name]


def check_chunk(model: Model, chunk: Any) -> int:
    """The chunk is a `Chunk` that the model can read; returns its number of steps."""
    if not isinstance(chunk, Chunk):
        raise ValueError(f"chunk must be a streamgrad.Chunk, not {kind_of(chunk)}.")
    length = leading_length(chunk, "time")
    check_inputs(model.cell.example_input, chunk.inputs, chunk.reset)
    weight = chunk.weight
    if weight is not None and (np.shape(weight) != (length,) or not is_real(weight.dtype)):
        raise ValueError(f"weight must be one real number per step, float[{length}], not {kind_of(weight)}.")
    model.head.check_target(one_step(chunk.targets))
    check_values(model, chunk)
    return length


def check_fits(state: EstimatorState, streams: int = 1, memories: int = 1) -> None:
    """A state of these shapes fits into the memory of the device that is used by default, as far as that is known."""

    def size(tree: PyTree) -> int:
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree) if _has_bytes(leaf))

    needed, there = streams * size(state.cell) + memories * size(state.memory), _device_memory()
    if there is not None and needed > there:
        of = "" if streams == 1 else f" of {streams} streams, {memories} of them with a memory of their past,"
        raise ValueError(
            f"the state{of} would take {needed / 2**30:,.1f} GiB, but the device has {there / 2**30:,.1f} GiB: use a "
            "smaller network, fewer streams or an estimator that remembers less."
        )


def _has_bytes(leaf: Any) -> bool:
    return not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)


def _device_memory() -> int | None:
    """Bytes of memory of the device that is used by default; None where it does not say."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        names = getattr(os, "sysconf_names", {})
        if "SC_PHYS_PAGES" not in names:
            return None
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return (device.memory_stats() or {}).get("bytes_limit")


def check_batch(state: Any, chunk: Any, batch_size: int, memories: int) -> None:
    """Chunk and cell state have a leading axis for `batch_size` streams, the memory one for `memories` of them."""
    if not isinstance(chunk, Chunk):
        raise ValueError(f"chunk must be a streamgrad.Chunk, not {kind_of(chunk)}.")
    size = leading_length(chunk, "the batch")
    if size != batch_size:
        time_first = all(np.shape(leaf)[1:2] == (batch_size,) for leaf in jax.tree.leaves(chunk.inputs))
        way_out = ": streams come first and then time, [B, T, ...], so swap the first two axes" if time_first else ""
        raise ValueError(f"the chunk has {size} streams, but the estimator was made for {batch_size}{way_out}.")
    check_state(state)
    for part, count in (("cell", batch_size), ("memory", memories)):
        tree = getattr(state, part)
        for index, leaf in enumerate(jax.tree.leaves(tree)):
            if np.shape(leaf)[:1] != (count,):
                raise ValueError(
                    f"state must be that of {count} streams, but state.{part}{paths_of(tree)[index]} has the "
                    f"shape {np.shape(leaf)}: pass what this estimator's own init(params) returned."
                )


def check_values(model: Model, chunk: Chunk) -> None:
    """Cell and head can take the numbers of a chunk, as far as these can be read at no cost.

    Elsewhere, as on an accelerator, a class out of range makes the loss NaN. Where the weight is 0 the target may be
    anything.
    """
    inputs, targets, weight = on_host(chunk.inputs), on_host(chunk.targets), on_host(chunk.weight)
    if inputs is not None:
        model.cell.check_values(inputs)
    if weight is not None and not np.all(np.isfinite(weight)):
        raise ValueError(f"weight must be finite, but one of them is {weight[~np.isfinite(weight)][0]}.")
    if targets is None or (chunk.weight is not None and weight is None):
        return
    counts = None if weight is None else weight != 0
    if counts is None or np.all(counts):
        model.head.check_values(targets)
    elif np.any(counts):
        model.head.check_values(jax.tree.map(lambda leaf: leaf[counts], targets))


def leading_length(chunk: Chunk, axis: str) -> int:
    """The length of the leading axis that all leaves of a chunk agree on."""
    return common_length(chunk._asdict(), axis)
