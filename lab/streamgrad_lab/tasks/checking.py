"""What is wrong with a task, in one sentence, before anything is trained on it."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from streamgrad import Chunk, Head
from streamgrad._typing import PyTree
from streamgrad.checks import check_arguments, check_size
from streamgrad.trees import kind_of
from streamgrad_lab.tasks.base import HeldOut, Task

_ADDRESS = re.compile("0x[0-9a-f]+")  # of functions inside a program, which differ from trace to trace


def check_task(task: Any) -> None:
    """A task keeps the promises of `Task`; ValueError where it does not.

    Its chunks have the streams and time that it says, `sample` gives back a state like the one that it got, and depends
    on its arguments alone. A training loop is compiled: what `sample` reads elsewhere, such as the next item of a
    Python generator, it reads once, and every update would get the same.

    Args:
      task: to be trained on.

    Example:
      >>> import itertools, jax.numpy as jnp, streamgrad as sg
      >>> from streamgrad_lab import Task
      >>> ones, count = jnp.ones((2, 3, 1)), itertools.count()
      >>> def sample(data, state, key):
      ...     return sg.Chunk(ones, next(count) * ones), state
      >>> task = Task("count", 1, sg.heads.squared_error(1), 2, 3, False, (), lambda key: (), sample)
      >>> check_task(task)  # doctest: +ELLIPSIS
      Traceback (most recent call last):
      ...
      ValueError: sample of the task count gives other numbers each time that it is traced, as it reads a Python ...
    """
    if not isinstance(task, Task):
        raise ValueError(f"task must be a streamgrad_lab.Task, not {kind_of(task)}.")
    check_size(n_in=task.n_in, batch_size=task.batch_size, length=task.length)
    if not isinstance(task.head, Head):
        raise ValueError(f"the head of the task {task.name} must be one of streamgrad.heads, not {kind_of(task.head)}.")
    if task.held_out is not None and not isinstance(task.held_out, HeldOut):
        raise ValueError(f"held_out of the task {task.name} must be a HeldOut or None, not {kind_of(task.held_out)}.")
    check_arguments("init", task.init, "key")
    check_arguments("sample", task.sample, "data", "state", "key")
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = jax.eval_shape(task.init, key)
    program, returned = _traced(task, state, key)
    _check_returned(task, state, returned)
    if not _same_again(task, state, key, program):
        raise ValueError(
            f"sample of the task {task.name} gives other numbers each time that it is traced, as it reads a Python "
            "generator, numpy's random numbers or the like, of which a compiled loop sees the first alone: put what it "
            "reads into Task.data, where it stands into its state, and draw random numbers with its key."
        )


def _check_returned(task: Task, state: PyTree, returned: Any) -> None:
    if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[0], Chunk):
        raise ValueError(
            f"sample of the task {task.name} must return a streamgrad.Chunk and the state after it, not "
            f"{kind_of(returned)}."
        )
    chunk, after = returned
    axes = (task.batch_size, task.length)
    for name, part in chunk._asdict().items():
        for leaf in jax.tree.leaves(part):
            if leaf.shape[:2] != axes:
                raise ValueError(
                    f"chunks of the task {task.name} must have {axes[0]} streams and {axes[1]} steps as their first "
                    f"two axes, as its batch_size and length say, and their {name} are {kind_of(leaf)}."
                )
    if jax.tree.structure(after) != jax.tree.structure(state):
        raise ValueError(
            f"sample of the task {task.name} must return a state like that of init, {jax.tree.structure(state)}, not "
            f"{jax.tree.structure(after)}."
        )
    for (path, old), new in zip(jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(after), strict=True):
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise ValueError(
                f"sample of the task {task.name} must return a state like that of init: "
                f"state{jax.tree_util.keystr(path)} is {kind_of(old)}, and {kind_of(new)} after it."
            )


def _same_again(task: Task, state: PyTree, key: Any, program: Any) -> bool:
    """Whether `sample`, traced once more, is the program that it was; or another one that gives the same numbers."""
    try:
        again, _ = _traced(task, state, key)
    except Exception:  # such as a generator that has ended
        return False
    if _same_program(program, again):
        return True
    begun = task.init(jax.random.key(0))
    try:
        one, other = (jax.jit(_fresh(task.sample))(task.data, begun, jax.random.key(1)) for _ in range(2))
    except Exception:
        return False
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return jax.tree.structure(one) == jax.tree.structure(other) and all(_same_bits(*pair) for pair in pairs)


def _traced(task: Task, state: PyTree, key: Any) -> tuple[Any, Any]:
    """The program of `sample`, and what it returns, as shapes."""
    return jax.make_jaxpr(_fresh(task.sample), return_shape=True)(task.data, state, key)


def _fresh(sample: Callable[..., Any]) -> Callable[..., Any]:
    """The function in a new wrapper, for JAX to trace it again; one that is compiled already without that."""
    compiled = hasattr(sample, "lower") and hasattr(sample, "__wrapped__")
    inner: Any = sample.__wrapped__ if compiled else sample  # type: ignore[attr-defined]
    return lambda data, state, key: inner(data, state, key)


def _same_program(one: Any, other: Any) -> bool:
    texts = [_ADDRESS.sub("", str(program)) for program in (one, other)]
    constants = [list(_constants(program)) for program in (one, other)]
    if texts[0] != texts[1] or len(constants[0]) != len(constants[1]):
        return False
    return all(map(_same_bits, *constants))


def _constants(program: Any) -> Iterator[Any]:
    """Those of a jaxpr, and of the programs inside it."""
    yield from getattr(program, "consts", ())
    for equation in getattr(program, "jaxpr", program).eqns:
        for value in equation.params.values():
            for inside in value if isinstance(value, tuple | list) else (value,):
                if hasattr(inside, "eqns") or hasattr(inside, "jaxpr"):
                    yield from _constants(inside)


def _same_bits(one: Any, other: Any) -> bool:
    one, other = (
        np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(jnp.asarray(leaf).dtype, jax.dtypes.prng_key) else leaf)
        for leaf in (one, other)
    )
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
