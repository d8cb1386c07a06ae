"""Where the streams of a batch live, seen from one device of a mesh: the only place that names a collective.

A program over a mesh is the program of one device, with its own streams, and a mean over devices where streams meet: in
the gradient, and in what streams share and learn.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from streamgrad._typing import Array, Int, PyTree


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
    """

    axis: str | None = None
    count: int = 1

    @property
    def index(self) -> Int[Array, ""]:
        """The number of this device among those of the streams."""
        return jnp.zeros((), jnp.int32) if self.axis is None else jax.lax.axis_index(self.axis)

    def mean(self, tree: PyTree) -> PyTree:
        """The mean over all streams, of a mean over those of each device: one all-reduce."""
        if self.axis is None:
            return tree
        # As one vector: a message for each leaf would wait for the network once for each.
        leaves, structure = jax.tree.flatten(tree)
        parts = [(leaf.real, leaf.imag) if jnp.iscomplexobj(leaf) else leaf for leaf in leaves]
        vector, unravel = ravel_pytree(parts)
        found = unravel(jax.lax.pmean(vector, self.axis))
        means = [jax.lax.complex(*part) if isinstance(part, tuple) else part for part in found]
        return jax.tree.unflatten(structure, means)


ALONE = Devices()


def everywhere(tree: PyTree) -> PyTree:
    """Arrays that every device is to have whole, where an axis of the mesh is left to the compiler; else as they are.

    An influence may be spread by the compiler. What meets it goes through here: the compiler would else cut that as
    well, and what it is made of, back to the steps of the chunk, at each of which devices then wait for each other.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.manual_axes or not mesh.auto_axes:
        return tree
    return jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, P()))
