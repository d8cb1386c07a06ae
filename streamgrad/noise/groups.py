"""Groups of preactivations, each a UORO of its own for the rows of the weights that feed it.

A group has its own tangent and its own rescaling, and as cotangent its rows of w̃. The rows tile the weights, so that G
groups need no more cotangent memory than one. Cross terms between groups vanish, and the variances add. One group is
UORO; as many groups as preactivations are PreUORO.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from streamgrad._typing import Array, Float, PyTree
from streamgrad.checks import check_size, is_traced
from streamgrad.step.cuts import Layout
from streamgrad.step.weights import by_matrix, row_squares, scale_rows


@dataclasses.dataclass(frozen=True)
class Groups:
    """A partition of the N entries of z.

    Attributes:
      count: G.
      index: the group of each entry of the ravelled z, `[N]`.
      rows: the number of preactivations of each weight matrix, in the order of the ravelled z.
    """

    count: int
    index: np.ndarray
    rows: tuple[int, ...]

    def split(self, dz: Float[Array, " N"]) -> Float[Array, "G N"]:
        """One vector for each group, zero outside it."""
        if self.count == 1:
            return dz[None]
        return jnp.where(self.index == np.arange(self.count)[:, None], dz[None], 0)

    def of_matrix(self) -> list[np.ndarray]:
        """The groups that each weight matrix has rows of."""
        return [np.unique(part) for part in by_matrix(self.index, self.rows)]

    @property
    def even(self) -> bool:
        """Whether the groups inside each weight matrix have the same number of rows, one after the other."""
        return all(
            rows % len(members) == 0 and np.array_equal(index, np.repeat(members, rows // len(members)))
            for rows, members, index in zip(self.rows, self.of_matrix(), by_matrix(self.index, self.rows), strict=True)
        )

    def scale(self, cotangent: PyTree, by: Float[Array, " G"]) -> PyTree:
        """Multiply each group's rows of a cotangent by its own number."""
        if self.count == 1:
            return jax.tree.map(lambda leaf: by[0] * leaf, cotangent)
        return scale_rows(cotangent, by[self.index])

    def square_norms(self, cotangent: PyTree) -> Float[Array, " G"]:
        """The squared norm of each group's rows of a cotangent."""
        leaves = jax.tree.leaves(cotangent)
        if self.count == 1:
            return jnp.reshape(sum(jnp.sum(leaf**2) for leaf in leaves), (1,))
        by_row = row_squares(cotangent)
        return jnp.zeros(self.count, by_row.dtype).at[self.index].add(by_row)


def make_groups(layout: Layout, cut: str, count: Any, q0: Any = None) -> Groups:
    """Split the N entries of z into `count` groups of the same size.

    A group that would span two weight matrices is split where one ends. That keeps J J^T a multiple of the identity
    inside a group, which the theory of Sections 7.1 and 7.2 asks for. The exception is one group with a full `q0` that
    mixes the preactivations of two matrices: it stays one group of all of them.

    Args:
      layout: the sizes at the cut.
      cut: its name; only preactivations can be grouped.
      count: a divisor of N.
      q0: None, a diagonal `[N]`, or a matrix `[N, N]` that must not mix two groups.

    Example:
      >>> from streamgrad.step.cuts import Layout
      >>> make_groups(Layout(size=8, state_size=2, rows=(2, 2, 4)), "preactivation", 2).index.tolist()
      [0, 0, 1, 1, 2, 2, 2, 2]
    """
    check_size(groups=count)
    if count > 1 and cut != "preactivation":
        raise ValueError(f"groups need the cut 'preactivation': at {cut!r} there is one group, not {count}.")
    if layout.size % count:
        divisors = [n for n in range(1, layout.size + 1) if layout.size % n == 0]
        raise ValueError(
            f"groups must divide the {layout.size} preactivations into groups of the same size: "
            f"choose one of {', '.join(map(str, divisors))}, not {count}."
        )
    even = np.arange(layout.size) // (layout.size // count)
    matrix = np.repeat(np.arange(len(layout.rows)), layout.rows)
    index = np.unique(np.stack([even, matrix]), axis=1, return_inverse=True)[1].reshape(-1)
    if q0 is not None and np.ndim(q0) == 2:
        across = index[:, None] != index[None, :]
        mixes = bool(np.any(across)) and (is_traced(q0) or bool(np.any(np.asarray(q0)[across] != 0)))
        if mixes and count == 1:
            index = np.zeros(layout.size, int)
        elif mixes and not is_traced(q0):
            raise ValueError("q0 must not mix two groups: its entries between groups must be zero.")
    return Groups(int(index.max()) + 1, index, layout.rows)
