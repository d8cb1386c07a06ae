"""Where the streams of a batch live, seen from one device of a mesh: the only place that names a collective.

A program over a mesh is the program of one device, with its own streams, and a mean over devices where streams meet: in
the gradient, and in what streams share and learn.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from streamgrad._typing import Array, Bool, Int, PyTree
from streamgrad.engine.columns import Columns


class PerDevice(NamedTuple):
    """What each device has of its own among what streams share; its arrays have a leading axis, cut by devices.

    Attributes:
      value: any pytree.
    """

    value: PyTree


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

    def own_features(self, features: PyTree) -> PyTree:
        """The features of this device's columns."""
        return features if self.columns is None else self.columns.own_features(features)

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
