"""Predict the next value of a series: three chaotic ones, or numbers from a file."""

from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from streamgrad import Chunk, heads
from streamgrad._typing import Array, Int
from streamgrad.checks import check_choice, check_size
from streamgrad_lab.tasks.base import Task
from streamgrad_lab.tasks.columns import read_series
from streamgrad_lab.tasks.file_end import next_values, split_end

SETTLE = 64  # first values of a lane, which may lie off the attractor, are left out
EPISODE = 200  # steps of an episode of a chaotic series, as in published comparisons


def series(
    kind: str = "mackey_glass",
    path: str | Path | None = None,
    column: int | str | None = None,
    episode: int | None = None,
    values: int = 20_000,
    batch_size: int = 8,
    length: int = 1,
    seed: int = 0,
    held_out: float = 0.1,
) -> Task:
    """A series, scaled to mean 0 and variance 1; the target is its next value, and the loss half the squared error.

    Args:
      kind: "henon", "mackey_glass" or "lorenz", of which only the first coordinate is seen.
      path: a text file of numbers, in place of `kind`: one on each line, or a table of several columns.
      column: of a table, which one: its name in the first line, or its number, from 1.
      episode: steps after which state and influence begin anew; 0 for never. By default 200 for a chaotic series, as in
        published comparisons, and never for a file, which is one stream until its end.
      values: how many of each lane are computed. At their end a stream starts over, with a reset.
      batch_size: B, streams at once: lanes with starts of their own, or places at equal distances in the file.
      length: T, steps of a chunk. Streams go on across chunks.
      seed: of the starts.
      held_out: the part at the end of a file that is not trained on, but measured; 0 for none. It is scaled by mean and
        variance of the rest.

    Returns:
      The task. As the variance is 1, twice its loss is the normalised squared error (NMSE). Of fewer than 20 numbers a
      tenth cannot be predicted, and nothing is held out.

    Example:
      >>> import jax
      >>> task = series("henon", batch_size=2, length=3, values=500)
      >>> chunk, state = task.sample(task.data, task.init(jax.random.key(0)), jax.random.key(1))
      >>> chunk.inputs.shape, bool((chunk.inputs[:, 1:] == chunk.targets[:, :-1]).all())
      ((2, 3, 1), True)
    """
    if episode is None:
        episode = EPISODE if path is None else 0
    check_size(least=0, episode=episode)
    check_size(batch_size=batch_size, length=length)
    if path is not None:
        first, last = split_end(read_series(Path(str(path)), column), held_out, "numbers")
        task = series_task(_lanes(first, batch_size), episode, length)
        if last is None:
            return task
        data = jnp.asarray((last - first.mean()) / first.std(), float)
        return task._replace(held_out=next_values(data, batch_size, _columns, _columns))
    if column is not None:
        raise ValueError(f"column is of a file, and none is given: column {column!r} needs a path.")
    return series_task(scaled(generate(kind, batch_size, values, np.random.default_rng(seed))), episode, length)


def series_task(lanes: np.ndarray, episode: int, length: int) -> Task:
    """Lanes of values, `[B, n]`, as a task."""
    batch_size, places = len(lanes), lanes.shape[1] - 1  # the last value has no next one
    data = jnp.asarray(lanes, float)

    def init(key: Array) -> Int[Array, ""]:
        del key
        return jnp.zeros((), jnp.int32)

    def sample(data: Array, state: Array, key: Array) -> tuple[Chunk, Array]:
        del key
        at = (state + jnp.arange(length, dtype=jnp.int32)) % places
        begins = at == 0 if episode == 0 else at % episode == 0
        reset = jnp.repeat(begins[None, :], batch_size, axis=0)
        return Chunk(data[:, at, None], data[:, at + 1, None], reset), (state + length) % places

    return Task("series", 1, heads.squared_error(1), batch_size, length, False, data, init, sample)


def generate(kind: str, lanes: int, values: int, rng: np.random.Generator) -> np.ndarray:
    """Lanes of a chaotic series, `[lanes, values]`, after they have settled, and before they are scaled.

    Args:
      kind: "henon", "mackey_glass" or "lorenz".
      lanes: how many.
      values: of each.
      rng: for the starts.

    Returns:
      The first coordinate at every step.
    """
    check_choice("kind", kind, tuple(KINDS))
    check_size(least=2, values=values)
    return KINDS[kind](lanes, values + SETTLE, rng)[:, SETTLE:]


def henon(lanes: int, values: int, rng: np.random.Generator) -> np.ndarray:
    """x' = 1 - 1.4 x² + y, y' = 0.3 x, from x = 0.1 + 0.01 lane and y = 0.

    Its starts are not random: the published comparison has them so.
    """
    del rng
    x, y, seen = 0.1 + 0.01 * np.arange(lanes), np.zeros(lanes), []
    for _ in range(values):
        seen.append(x)
        x, y = 1 - 1.4 * x**2 + y, 0.3 * x
    return np.stack(seen, axis=1)


def mackey_glass(lanes: int, values: int, rng: np.random.Generator) -> np.ndarray:
    """x' = x + 0.2 x_17 / (1 + x_17^10) - 0.1 x, where x_17 is that of 17 steps ago; history 1.2 + 0.2 uniform."""
    delay = 17
    seen = list(1.2 + 0.2 * rng.uniform(size=(delay + 1, lanes)))
    for _ in range(values - 1):
        late = seen[-1 - delay]
        seen.append(seen[-1] + 0.2 * late / (1 + late**10) - 0.1 * seen[-1])
    return np.stack(seen[-values:], axis=1)


def lorenz(lanes: int, values: int, rng: np.random.Generator) -> np.ndarray:
    """x of Lorenz's equations with σ 10, ρ 28, β 8/3: every second Euler step of 0.01, from 1 + 0.1 normal."""
    x, y, z = 1 + 0.1 * rng.normal(size=(3, lanes))
    seen = []
    for _ in range(values):
        seen.append(x)
        for _ in range(2):
            x, y, z = x + 0.1 * (y - x), y + 0.01 * (x * (28 - z) - y), z + 0.01 * (x * y - 8 / 3 * z)
    return np.stack(seen, axis=1)


KINDS: dict[str, Callable[[int, int, np.random.Generator], np.ndarray]] = {
    "henon": henon,
    "mackey_glass": mackey_glass,
    "lorenz": lorenz,
}


def scaled(lanes: np.ndarray) -> np.ndarray:
    """Each lane with mean 0 and variance 1."""
    return (lanes - lanes.mean(axis=1, keepdims=True)) / lanes.std(axis=1, keepdims=True)


def _columns(values: Array) -> Array:
    return values[..., None]


def _lanes(found: np.ndarray, batch_size: int) -> np.ndarray:
    """A series cut into lanes of equal length, after it was scaled as a whole."""
    each = len(found) // batch_size
    if each < 2:
        raise ValueError(
            f"a series for {batch_size} streams needs at least {2 * batch_size} numbers, not {len(found)}."
        )
    if found.std() == 0:
        raise ValueError("the series never changes: there is nothing to predict.")
    return scaled(found[None])[0, : each * batch_size].reshape(batch_size, each)
