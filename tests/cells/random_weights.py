"""The many ways to write a product of weights with features, for `tests.cells.random_steps`."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Times = Callable[[dict, jax.Array], jax.Array]
WAYS = (
    "left", "right", "transposed", "einsum", "einsum back", "general", "general back", "row", "flat", "slice", "part",
    "joined", "stacked", "heads", "blocks", "normalised", "scaled", "masked", "low rank", "symmetric", "tied", "tied",
    "rows apart", "bias column",
)  # fmt: skip


class Weights:
    """Parameters by name as a step is being made, and products with them."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}

    def new(self, *shape: int) -> str:
        """The name of a new one."""
        name = f"p{len(self.shapes)}"
        self.shapes[name] = shape
        return name

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        """Normal numbers of a scale at which nothing saturates; all different, biases too."""
        sizes = [int(np.prod(shape)) for shape in self.shapes.values()]
        parts = jnp.split(jax.random.normal(key, (sum(sizes),)), np.cumsum(sizes)[:-1])  # one program, not one for each
        return {
            name: part.reshape(shape) / np.sqrt(shape[-1] if len(shape) > 1 else 2)
            for part, (name, shape) in zip(parts, self.shapes.items(), strict=True)
        }

    def product(self, pick: Callable[[Sequence], Any], m: int, n: int) -> Times:
        """`times(params, a)`: an [m, n] matrix made of parameters, times a; written in one of many ways."""
        way = pick(WAYS)
        if way == "tied":
            fitting = [name for name, shape in self.shapes.items() if shape in ((m, n), (n, m))]
            if fitting:
                w = pick(fitting)
                back = self.shapes[w] != (m, n)
                return lambda p, a: a @ p[w] if back else p[w] @ a
        if way == "heads" and m % 2:
            way = "einsum"
        if way == "blocks" and (m % 2 or n % 2):
            way = "general"
        return getattr(self, "_" + way.replace(" ", "_"), self._left)(m, n)

    def _left(self, m: int, n: int) -> Times:
        w = self.new(m, n)
        return lambda p, a: p[w] @ a

    def _right(self, m: int, n: int) -> Times:
        w = self.new(n, m)
        return lambda p, a: a @ p[w]

    def _transposed(self, m: int, n: int) -> Times:
        w = self.new(n, m)
        return lambda p, a: p[w].T @ a

    def _einsum(self, m: int, n: int) -> Times:
        w = self.new(m, n)
        return lambda p, a: jnp.einsum("ij,j->i", p[w], a)

    def _einsum_back(self, m: int, n: int) -> Times:
        w = self.new(n, m)
        return lambda p, a: jnp.einsum("j,ji->i", a, p[w])

    def _general(self, m: int, n: int) -> Times:
        w = self.new(m, n)
        return lambda p, a: jax.lax.dot_general(p[w], a, (((1,), (0,)), ((), ())))

    def _general_back(self, m: int, n: int) -> Times:
        w = self.new(m, n)
        return lambda p, a: jax.lax.dot_general(a, p[w], (((0,), (1,)), ((), ())))

    def _row(self, m: int, n: int) -> Times:
        """A batch of one, as of libraries whose cells want one."""
        w = self.new(n, m)
        return lambda p, a: (a[None] @ p[w])[0]

    def _flat(self, m: int, n: int) -> Times:
        w = self.new(m * n)
        return lambda p, a: p[w].reshape(m, n) @ a

    def _slice(self, m: int, n: int) -> Times:
        w = self.new(3, m, n)
        return lambda p, a: p[w][1] @ a + p[w][2] @ jnp.tanh(a)

    def _part(self, m: int, n: int) -> Times:
        """Rows and columns of a larger matrix, all of which is also used in one piece."""
        w = self.new(m + 1, n + 1)
        return lambda p, a: p[w][1:, :n] @ a + (p[w] @ jnp.append(a, 1.0))[:m]

    def _joined(self, m: int, n: int) -> Times:
        """One matrix of several leaves, as fast LSTMs put their gates together."""
        w, v = self.new(m, n), self.new(1, n)
        return lambda p, a: (jnp.concatenate([p[w], p[v]]) @ a)[:m] * 1.5

    def _stacked(self, m: int, n: int) -> Times:
        rows = [self.new(n) for _ in range(m)]
        return lambda p, a: jnp.stack([p[row] for row in rows]) @ a

    def _rows_apart(self, m: int, n: int) -> Times:
        rows = [self.new(n) for _ in range(m)]
        return lambda p, a: jnp.stack([jnp.dot(p[row], a) for row in rows])

    def _heads(self, m: int, n: int) -> Times:
        w = self.new(2, m // 2, n)
        return lambda p, a: jnp.einsum("hij,j->hi", p[w], a).reshape(m)

    def _blocks(self, m: int, n: int) -> Times:
        """Block-diagonal: a product with a batch axis."""
        w = self.new(2, m // 2, n // 2)
        return lambda p, a: jnp.einsum("bij,bj->bi", p[w], a.reshape(2, n // 2)).reshape(m)

    def _normalised(self, m: int, n: int) -> Times:
        """Weight normalisation: rows of a learned length."""
        w, g = self.new(m, n), self.new(m)
        return lambda p, a: (p[g][:, None] * p[w] / jnp.linalg.norm(p[w], axis=1, keepdims=True)) @ a

    def _scaled(self, m: int, n: int) -> Times:
        w, s = self.new(m, n), self.new(1)
        return lambda p, a: (jnp.exp(p[s][0]) * p[w]) @ a

    def _masked(self, m: int, n: int) -> Times:
        w, mask = self.new(m, n), (np.arange(m * n).reshape(m, n) % 3 > 0).astype(float)
        return lambda p, a: (p[w] * mask) @ a

    def _low_rank(self, m: int, n: int) -> Times:
        left, right = self.new(m, 1), self.new(1, n)
        return lambda p, a: (p[left] @ p[right]) @ a

    def _symmetric(self, m: int, n: int) -> Times:
        if m != n:
            return self._left(m, n)
        w = self.new(m, n)
        return lambda p, a: (p[w] + p[w].T) @ a

    def _bias_column(self, m: int, n: int) -> Times:
        w = self.new(m, n + 1)
        return lambda p, a: p[w] @ jnp.concatenate([a, jnp.ones(1)])


def own_jvp(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """The function with a forward rule of its own, which is the one it has."""
    wrapped = jax.custom_jvp(function)
    wrapped.defjvp(lambda primals, tangents: jax.jvp(function, primals, tangents))
    return wrapped
