"""Optimal Kronecker sums: the influence across chunks as a sum of a few Kronecker products."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from streamgrad._typing import Array, Float, PyTree
from streamgrad.base import Chunk, GradientEstimator, Model, real_dtype
from streamgrad.checks import check_at_most, check_size, find_cut
from streamgrad.contract import label_of
from streamgrad.engine.chunk import Across, Crossing, chunkwise
from streamgrad.engine.collectives import Columns
from streamgrad.engine.estimator import estimator
from streamgrad.noise.distributions import Noise, find_noise
from streamgrad.noise.kronecker_reduction import reduce, reduce_by, signs_needed, sketch
from streamgrad.step import cuts
from streamgrad.step.weights import Outer, sum_outer, zero_terms
from streamgrad.trees import cleared


class OkMemory(NamedTuple):
    """The estimate dh/dW ≈ Σ_i C_i ⊗ ã_i of every weight matrix W; in the structure of the parameters.

    Attributes:
      left: C_i, leaves `[rank, S, rows]`; of a matrix with fewer features, as many terms as it has.
      right: ã_i, leaves `[rank, A]`.
      sketch: of C_i, where each device has some of its rows alone; else None.
    """

    left: PyTree
    right: PyTree
    sketch: PyTree = None


def ok(model: Model, rank: int | None = None, noise: str | Noise = "rademacher") -> GradientEstimator:
    """The influence across chunks as a sum of `rank` Kronecker products, reduced once per chunk without bias.

        dL_chunk/dW = backpropagation inside the chunk + Σ_i (dL_chunk/dh_0 C_i) ã_i^T
        dh_K/dW     = Σ_i (Φ C_i) ⊗ ã_i + Σ_s G_s ⊗ a_s  ≈  Σ_i C'_i ⊗ ã'_i

    The first line of dh_K/dW is exact, and has K terms more than there is room for. The largest in the sense of
    singular values are kept, and the rest is mixed with random signs (`streamgrad.noise.kronecker_reduction`): the mean is
    right, and the noise is close to the least that so many terms allow. Each weight matrix has a sum of its own; one
    with no more features than terms is exact, such as a bias.

    Args:
      model: the model whose gradients are estimated; its cell must have the cut "preactivation".
      rank: how many terms, at most as many as the state has units. None for 8, or for all of them where there are less.
      noise: "rademacher", or "given" (the caller passes the signs in place of the key).

    Returns:
      The estimator. Memory is rank (S N + A). Time per step is S P beyond that of BPTT.
      `batched(ok(model), 16, watched=4)` takes the influence of 4 of 16 streams alone.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.gru(2, 4), sg.heads.softmax(3))
      >>> params = model.init(jax.random.key(0))
      >>> est = sg.ok(model, rank=2)
      >>> chunk = sg.Chunk(jnp.ones((5, 2)), jnp.zeros(5, int))
      >>> grads, state, info = est.update(params, est.init(params), chunk, jax.random.key(1))
      >>> state.memory.left["gates"].shape, state.memory.right["gates"].shape
      ((2, 4, 8), (2, 7))

    References:
      Benzing, Gauy, Mujika, Martinsson and Steger, Optimal Kronecker-sum approximation of real time recurrent learning,
      2019.
    """
    vertex = find_cut(model, "preactivation")
    source = find_noise(noise)
    layout = cuts.layout(model.cell, vertex)
    terms = min(8, layout.state_size) if rank is None else rank
    check_size(rank=terms)
    check_at_most("rank", terms, layout.state_size, "the number of state units")
    if source.name in ("gaussian", "uniform"):
        raise ValueError(f"ok mixes with random signs: noise must be 'rademacher' or 'given', not {source.name!r}.")

    def init(params: PyTree, state: PyTree) -> OkMemory:
        del state
        return OkMemory(*zero_terms(params, terms, layout.state_size))

    def draw(key: Any, length: int, dtype: Any) -> Float[Array, "M n"]:
        return source.draw(key, (len(layout.rows), signs_needed(length, terms)), dtype)

    def asks(memory: OkMemory, noise: Array) -> Float[Array, "S S"]:
        del noise
        return jnp.eye(layout.state_size, dtype=real_dtype(memory))

    def older(memory: OkMemory, dl_dstart: Float[Array, "b S"]) -> PyTree:
        mean = dl_dstart / len(dl_dstart)
        left = jax.tree.map(lambda leaf: jnp.einsum("bs,brsn->brn", mean, leaf), memory.left)
        return sum_outer(Outer(left, memory.right))

    def moving(own_rows: Callable[[Array], Array] | None) -> Callable[..., tuple[OkMemory, dict[str, Array]]]:
        """`Across.advance`, of all rows of C_i or of this device's."""

        def one(memory: OkMemory, signs: Array, back: Array, pulled: Outer) -> OkMemory:
            structure = jax.tree.structure(memory.right)
            leaves = [jax.tree.leaves(tree) for tree in (memory.left, memory.right, pulled.left, pulled.right)]
            sketches = jax.tree.leaves(memory.sketch) or [None] * len(leaves[0])
            found = []
            for c, a, new_c, new_a, own, short in zip(*leaves, signs, sketches, strict=True):
                moved = jnp.einsum("st,rtn->rsn", back, c)
                here = new_c if own_rows is None else own_rows(new_c)
                if len(a) == a.shape[1]:  # a term for each feature: ã_i is the i-th unit vector, nothing is left out
                    exact = moved + jnp.einsum("ksn,ka->asn", here, new_a)
                    found.append((exact, jnp.eye(len(a), dtype=a.dtype), short))
                elif short is None:
                    found.append((*reduce((moved, a), (new_c, new_a), own), None))
                else:
                    both = jnp.einsum("st,rtn->rsn", back, short), sketch(new_c, len(c))
                    found.append(reduce_by(both, (moved, a), (here, new_a), own))
            trees = [jax.tree.unflatten(structure, part) for part in zip(*found, strict=True)]
            return OkMemory(*trees) if memory.sketch is not None else OkMemory(*trees[:2])

        def advance(
            shared: PyTree, memory: OkMemory, noise: Array, crossing: Crossing
        ) -> tuple[OkMemory, dict[str, Array]]:
            del shared
            memory = cleared(crossing.reset, memory)
            return jax.vmap(one, in_axes=(0, 0, 0, 1))(memory, noise, crossing.back, crossing.pulled), {}

        return advance

    def spread(columns: Columns) -> Across:
        """By rows of C_i. What decides how terms are mixed is a sketch of all rows, which every device moves on.

        A single row is kept by every device.
        """

        def cut(by: Callable[[Array, int], Array]) -> Callable[[Array], Array]:
            return lambda left: by(left, 2) if left.shape[2] > 1 else left

        def whole(params: PyTree, state: PyTree) -> OkMemory:
            left, right, _ = init(params, state)
            filled = jax.tree.map(cut(columns.filled), left)
            return OkMemory(filled, right, jax.tree.map(lambda leaf: sketch(leaf, len(leaf)), left))

        return across._replace(init=whole, advance=moving(cut(columns.own)))

    def axes(memory: OkMemory) -> OkMemory:
        rows = jax.tree.map(lambda left: 2 if left.shape[2] > 1 else -1, memory.left)
        none = jax.tree.map(lambda _: -1, memory.right)
        return OkMemory(rows, none, none)

    def check(chunk: Chunk, length: int, key: Any) -> None:
        del chunk, length
        source.check(key)

    across = Across(init, asks, moving(None), older, draw=draw, axes=axes)
    return estimator(model, chunkwise(model, across._replace(spread=spread), check), label=label_of("ok", rank=terms))
