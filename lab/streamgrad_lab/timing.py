"""How everything is timed: all programs take turns inside one run, and the median or the least of repeats counts."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax


class Program(NamedTuple):
    """A compiled program with what it works on.

    Attributes:
      call: `call()` goes on from where the last call ended, and returns arrays to wait for.
      compile_seconds: tracing and compiling together.
      temp_bytes: what it keeps at its peak beside arguments and results.
      state_bytes: of its state.
    """

    call: Callable[[], Any]
    compile_seconds: float
    temp_bytes: int
    state_bytes: int


def prepare(update: Callable, params: Any, state: Any, chunk: Any, key: Any) -> Program:
    """Compile `update(params, state, chunk, key)`, with the state's buffers donated, as in a training loop.

    Args:
      update: of an estimator: returns gradients, the state, and an info with the losses.
      params: its first argument, and so on.
      state: that of the first call; its buffers are gone after it.
      chunk: the same for all calls.
      key: likewise.

    Returns:
      The program; a call returns gradients, losses and the state.
    """
    begin = time.perf_counter()
    compiled = jax.jit(update, donate_argnums=1).lower(params, state, chunk, key).compile()
    seconds = time.perf_counter() - begin

    def call() -> Any:
        nonlocal state
        grads, state, info = compiled(params, state, chunk, key)
        return grads, info.loss, state

    return Program(call, seconds, temp_bytes(compiled), state_bytes(state))


def temp_bytes(compiled: Any) -> int:
    """What a compiled program keeps at its peak beside arguments and results; 0 where the device does not say."""
    analysis = compiled.memory_analysis()
    return 0 if analysis is None else analysis.temp_size_in_bytes


def state_bytes(state: Any) -> int:
    """The bytes of all arrays in a tree, or of what `jax.eval_shape` says of them."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def take_turns(
    calls: Mapping[Any, Callable[[], Any]],
    repeats: int,
    least_seconds: float = 0.0,
    warm_up: bool = True,
    fastest: bool = False,
    show: Callable[[int], None] | None = None,
) -> dict[Any, float]:
    """Median seconds of a call of each program; all take turns in each round, for noise to hit them alike.

    Args:
      calls: by name, functions without arguments that return arrays to wait for.
      repeats: how many rounds.
      least_seconds: a program that is faster is called several times in a round, up to 50, to take about that long.
      warm_up: whether each is called twice before, for compilation and for how long a call takes.
      fastest: whether the fastest of all calls counts instead. What disturbs a call only ever makes it slower: on a
        busy machine this is what tells programs apart that take almost the same time.
      show: is called with the number of rounds made, from 0.

    Returns:
      The medians by name, or the least.
    """
    times = {name: _seconds(call, 1) for name, call in calls.items()} if warm_up else {}
    times = {name: _seconds(calls[name], 1) for name in times}
    counts = {name: max(1, min(50, int(least_seconds / max(times.get(name, 1.0), 1e-9)))) for name in calls}
    taken: dict[Any, list[float]] = {name: [] for name in calls}
    for made in range(repeats):
        if show is not None:
            show(made)
        for name, call in calls.items():
            if fastest:
                taken[name] += [_seconds(call, 1) for _ in range(counts[name])]
            else:
                taken[name].append(_seconds(call, counts[name]))
    if show is not None:
        show(repeats)
    pick = min if fastest else statistics.median
    return {name: pick(values) for name, values in taken.items()}


def _seconds(call: Callable[[], Any], count: int) -> float:
    """Seconds of each of so many calls in a row."""
    begin, result = time.perf_counter(), None
    for _ in range(count):
        result = call()
    jax.block_until_ready(result)
    return (time.perf_counter() - begin) / count
