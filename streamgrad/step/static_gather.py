"""Gathers whose indices are known before anything is traced, written as slices where they are consecutive.

A gather is slow on a GPU, and so is its derivative, a scatter; a slice or a repetition costs nothing there.
"""

import jax
import jax.numpy as jnp
import numpy as np

from streamgrad._typing import Array

MOST_RUNS = 8  # slices that are joined; beyond, a gather is shorter


def static_gather(array: Array, index: np.ndarray, axis: int) -> Array:
    """The entries `index` along an axis, counted from the front; the axes of `index` stand in its place.

    An index beyond the end may give any entry.

    Example:
      >>> import jax.numpy as jnp
      >>> static_gather(jnp.arange(3), np.array([[0, 1, 2], [1, 2, 9]]), axis=0).tolist()
      [[0, 1, 2], [1, 2, 2]]
    """
    size = array.shape[axis]
    if index.ndim == 1 and len(index):
        times = len(index) // size if size else 0
        if times > 0 and np.array_equal(index, np.tile(np.arange(size), times)):
            if times == 1:
                return array
            shape = array.shape
            tiled = jnp.broadcast_to(jnp.expand_dims(array, axis), (*shape[:axis], times, *shape[axis:]))
            return tiled.reshape(*shape[:axis], times * size, *shape[axis + 1 :])
        runs = _runs(index, size)
        if len(runs) <= MOST_RUNS:
            parts = [jax.lax.slice_in_dim(array, begin, end, axis=axis) for begin, end in runs]
            return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=axis)
    if index.ndim == 2 and 0 < len(index) <= 4 and all(len(_runs(row, size)) <= MOST_RUNS for row in index):
        return jnp.stack([static_gather(array, row, axis) for row in index], axis=axis)
    return jnp.take(array, np.minimum(index, size - 1), axis=axis)


def _runs(index: np.ndarray, size: int) -> list[tuple[int, int]]:
    """Runs of consecutive indices, as pairs of begin and end."""
    known = np.minimum(index, size - 1)
    breaks = np.flatnonzero(np.diff(known) != 1) + 1
    return [(int(part[0]), int(part[-1]) + 1) for part in np.split(known, breaks)]
