"""Where the streams of a batch live, seen from one device of a mesh: the only place that names a collective.

A program over a mesh is the program of one device, with its own streams, and a mean over devices where streams meet: in
the gradient, and in what streams share and learn.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from streamgrad._typing import Array, Bool, Int, PyTree


class PerDevice(NamedTuple):
    """What each device has of its own among what streams share; its arrays have a leading axis, cut by devices.

    Attributes:
      value: any pytree.
    """

    value: PyTree


@dataclasses.dataclass(frozen=True)
class Columns:
    """The mesh axis over which an influence is spread, by columns of θ.

    Attributes:
      axis: its name.
      count: how many devices it has.
    """

    axis: str
    count: int

    def own(self, array: Array, axis: int) -> Array:
        """This device's part of what all of them have; filled up with zeros where it does not divide evenly."""
        whole = self.filled(array, axis)
        size = whole.shape[axis] // self.count
        return jax.lax.dynamic_slice_in_dim(whole, jax.lax.axis_index(self.axis) * size, size, axis)

    def filled(self, array: Array, axis: int) -> Array:
        """An array that can be cut evenly."""
        widths = [(0, 0)] * array.ndim
        widths[axis] = (0, -array.shape[axis] % self.count)
        return jnp.pad(array, widths)

    def among_zeros(self, part: Array, axis: int, size: int) -> Array:
        """A whole array with this device's part in its place, times the number of devices: their mean is the whole."""
        shape = list(part.shape)
        shape[axis] *= self.count
        at = jax.lax.axis_index(self.axis) * part.shape[axis]
        whole = jax.lax.dynamic_update_slice_in_dim(jnp.zeros(shape, part.dtype), self.count * part, at, axis)
        return jax.lax.slice_in_dim(whole, 0, size, axis=axis)


class Spread(NamedTuple):
    """A state whose memory is kept by columns of θ.

    Attributes:
      init: `init(params) -> state` of one stream, whole, in shapes that can be cut evenly.
      axes: `axes(memory) -> axes`, for each array of one stream: which of its axes is cut, or -1 for one that every
        device has whole.
    """

    init: Callable[..., Any]
    axes: Callable[[PyTree], PyTree]


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices that streams are spread over.

    Attributes:
      axis: the mesh axis of the streams; None where there is one device, and nothing below does anything.
      count: how many devices it has.
      columns: the mesh axis of an influence's columns; None where every device has all of them.
    """

    axis: str | None = None
    count: int = 1
    columns: Columns | None = None

    @property
    def index(self) -> Int[Array, ""]:
        """The number of this device among those of the streams."""
        return jnp.zeros((), jnp.int32) if self.axis is None else jax.lax.axis_index(self.axis)

    def mean(self, tree: PyTree) -> PyTree:
        """The mean over all streams, of a mean over those of each device: one all-reduce."""
        if self.axis is None:
            return tree
        return _mean(tree, (self.axis,))

    def mean_gradient(self, grads: PyTree) -> PyTree:
        """The same for a gradient, to which also the devices of an influence's columns have added their parts."""
        if self.axis is None:
            return grads
        return _mean(grads, (self.axis,) if self.columns is None else (self.axis, self.columns.axis))

    def on_all_columns(self, flags: Bool[Array, " b"]) -> Bool[Array, " b"]:
        """Whether it holds for every device of an influence's columns."""
        return flags if self.columns is None else jax.lax.pmin(flags.astype(jnp.int32), self.columns.axis) > 0


ALONE = Devices()


def _mean(tree: PyTree, axes: tuple[str, ...]) -> PyTree:
    """As one vector: a message for each leaf would wait for the network once for each."""
    leaves, structure = jax.tree.flatten(tree)
    parts = [(leaf.real, leaf.imag) if jnp.iscomplexobj(leaf) else leaf for leaf in leaves]
    vector, unravel = ravel_pytree(parts)
    found = unravel(jax.lax.pmean(vector, axes))
    means = [jax.lax.complex(*part) if isinstance(part, tuple) else part for part in found]
    return jax.tree.unflatten(structure, means)
