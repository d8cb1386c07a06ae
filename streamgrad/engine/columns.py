"""An influence cut by columns of θ over the devices of a mesh axis: all there is to know of it, in one place.

Each device keeps some columns of M = dh/dθ. Φ is small, and the same on all of them, so that Φ M needs no traffic; the
increment of a device's columns is made of its own features; and of (dL/dh) M each device has its columns, which the one
all-reduce of the gradient joins. The compiler's own sharding cannot do the same: the number of features is rarely a
multiple of the number of devices, and to cut an array that was filled up moves its columns from device to device.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from streamgrad._typing import Array, PyTree


@dataclasses.dataclass(frozen=True)
class Columns:
    """The mesh axis over which an influence is cut.

    Attributes:
      axis: its name.
      count: how many devices it has.
    """

    axis: str
    count: int

    def filled(self, array: Array, axis: int) -> Array:
        """An array with zeros at its end, so that it can be cut evenly."""
        widths = [(0, 0)] * array.ndim
        widths[axis] = (0, -array.shape[axis] % self.count)
        return jnp.pad(array, widths)

    def own(self, array: Array, axis: int) -> Array:
        """This device's part of an array that all of them have; filled up where it does not divide evenly."""
        whole = self.filled(array, axis)
        size = whole.shape[axis] // self.count
        return jax.lax.dynamic_slice_in_dim(whole, jax.lax.axis_index(self.axis) * size, size, axis)

    def own_features(self, features: PyTree) -> PyTree:
        """This device's features of each weight matrix, `[..., A]`; a bias, which has but one, is on every device."""
        return jax.tree.map(lambda a: self.own(a, a.ndim - 1) if a.shape[-1] > 1 else a, features)

    def whole(self, grads: PyTree, params: PyTree) -> PyTree:
        """A gradient like the parameters from the columns that this device has, for `Devices.mean_gradient`."""

        def one(part: Array, w: Array) -> Array:
            cut = [axis for axis in range(w.ndim) if part.shape[axis] != w.shape[axis]]
            return self._among_zeros(part, cut[0], w.shape[cut[0]]) if cut else part

        return jax.tree.map(one, grads, params)

    def _among_zeros(self, part: Array, axis: int, size: int) -> Array:
        """A whole array with this device's part in its place, times the number of devices: their mean is the whole."""
        shape = list(part.shape)
        shape[axis] *= self.count
        at = jax.lax.axis_index(self.axis) * part.shape[axis]
        whole = jax.lax.dynamic_update_slice_in_dim(jnp.zeros(shape, part.dtype), self.count * part, at, axis)
        return jax.lax.slice_in_dim(whole, 0, size, axis=axis)


class ColumnCut(NamedTuple):
    """A state whose memory is cut by columns of θ.

    Attributes:
      init: `init(params) -> state` of one stream, whole, in shapes that can be cut evenly.
      axes: `axes(memory) -> axes`, for each array of one stream the axis that is cut, or -1 for an array that every
        device has whole.
    """

    init: Callable[..., Any]
    axes: Callable[[PyTree], PyTree]

    def part(self, columns: Columns) -> Callable[..., Any]:
        """`init` as one device has it."""

        def cut(leaf: Array, axis: int) -> Array:
            return leaf if axis < 0 else jnp.split(leaf, columns.count, axis)[0]

        def init(params: PyTree) -> Any:
            state = self.init(params)
            return state._replace(memory=jax.tree.map(cut, state.memory, self.axes(state.memory)))

        return init


def by_features(init: Callable[..., Any]) -> Callable[[Columns], ColumnCut]:
    """`Method.columns` of a memory whose arrays have the features of the weights as their last axis.

    A bias, which has but one feature, is kept by every device.
    """

    def filled(columns: Columns, params: PyTree) -> Any:
        state = init(params)
        memory = jax.tree.map(lambda a: columns.filled(a, a.ndim - 1) if a.shape[-1] > 1 else a, state.memory)
        return state._replace(memory=memory)

    def axes(memory: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: leaf.ndim - 1 if leaf.shape[-1] > 1 else -1, memory)

    return lambda columns: ColumnCut(functools.partial(filled, columns), axes)
