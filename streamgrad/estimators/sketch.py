"""Sketched RTRL: SnAp-1, what it leaves out as a matrix of low rank, and a bound of the error while the stream runs."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from streamgrad._typing import Array, Bool, Float, Int, PyTree
from streamgrad.base import EstimatorState, GradientEstimator, Model, Params, real_dtype, worked
from streamgrad.checks import check_at_most, check_size, find_cut
from streamgrad.engine.by_steps import by_steps
from streamgrad.engine.estimator import estimator
from streamgrad.engine.method import Method
from streamgrad.step import cuts
from streamgrad.step.cuts import Step
from streamgrad.step.influence_sparsity import own_units
from streamgrad.step.jacobian_sparsity import find_jacobian_pattern
from streamgrad.step.weights import by_matrix, zero_each


class SketchMemory(NamedTuple):
    """The estimate dh_t/dθ ≈ S_t + L_t R_t.

    Attributes:
      near: S, for each weight matrix `[w, rows, A]`: the units that its rows reach in one step, w of them at most.
      left: L, with orthonormal columns.
      right: R, leaves `[rank, rows, A]`.
      bound: e, which ‖dh_t/dθ - S_t - L_t R_t‖ does not exceed.
    """

    near: PyTree
    left: Float[Array, "S r"]
    right: PyTree
    bound: Float[Array, ""]


def sketch(model: Model, rank: int | None = None, append: int | None = None) -> GradientEstimator:
    """SnAp-1, and the rest of the influence as a matrix of low rank; it says how far off it can be.

        M_t ≈ S_t + L_t R_t
        S_t     = near(A_t S_{t-1}) + dh_t/dθ_t,    A_t = dh_t/dh_{t-1}
        L_t R_t = the largest `rank` singular values of A_t L_{t-1} R_{t-1} + far(A_t S_{t-1})
        e_t     = ‖A_t‖ e_{t-1} + η_t  >=  ‖M_t - S_t - L_t R_t‖

    "Near" are the entries that one step can make non-zero, which are those of dh_t/dθ_t, and "far" are the others. S_t
    is SnAp-1, to which `rank=0` comes down; with as many terms as state units the estimate is exact. η_t is the
    Frobenius norm of what is left out at step t, with an allowance for rounding, and e_t bounds what all of it has
    become: the gradient of a loss at step t is off by ‖dL_t/dh_t‖ e_t at most. Where ‖A_t‖ stays above one, e_t grows
    without end, and says nothing.

    The low rank is that of all weights together. It is found from a matrix of S x S, the products of the rows of what
    is to be approximated, so that nothing larger than S_t and R_t is made.

    Args:
      model: the model whose gradients are estimated; its cell must have the cut "preactivation", and must tell which
        units a preactivation reaches.
      rank: how many singular values are kept, at most as many as the state has units. None for 8, or for all of them
        where there are less.
      append: how many singular values of far(A_t S_{t-1}) are added; None for all of them. As published it was
        max(4, ⌈rank / 4⌉), to have less to decompose; here it saves nothing.

    Returns:
      The estimator. Its diagnostics are `certificate`, e_t, and `discarded`, η_t, `[T]` each. For rows that reach w
      units in one step (a tanh network's and a GRU's 1, an LSTM's 2) memory is (w + rank) P and time per step
      (w + rank) rank P + S² (S + w N).

    Notes:
      Each step decomposes a matrix of S x S, which for small networks takes longer than RTRL itself. What it saves is
      memory: S P of `rtrl` become (w + rank) P.

      A variant without bias, which keeps the largest singular values and mixes the others with random signs as `ok`
      does, is not offered: at the same memory `ok` has far less noise.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.gru(2, 4), sg.heads.softmax(3))
      >>> params = model.init(jax.random.key(0))
      >>> est = sg.sketch(model, rank=2)
      >>> chunk = sg.Chunk(jnp.ones((5, 2)), jnp.zeros(5, int))
      >>> grads, state, info = est.update(params, est.init(params), chunk)
      >>> state.memory.near["gates"].shape, state.memory.right["gates"].shape
      ((1, 8, 7), (2, 8, 7))
      >>> bool(jnp.all(info.diagnostics["certificate"] >= info.diagnostics["discarded"]))
      True

    References:
      Yi and Wang, Certified low-rank real-time recurrent learning for dense recurrent neural networks, 2026, for tanh
      networks. There ‖A_t‖ is min(‖A_t‖_F, √(‖A_t‖_1 ‖A_t‖_∞)); the spectral norm, which is taken here, is no larger.
    """
    model = worked(model)
    vertex = find_cut(model, "preactivation")
    layout = cuts.layout(model.cell, vertex)
    size = layout.state_size
    terms = min(8, size) if rank is None else rank
    check_size(0, rank=terms)
    check_at_most("rank", terms, size, "the number of state units")
    fresh = size if append is None else append
    check_size(append=fresh)
    pattern = find_jacobian_pattern(model)
    if pattern is None:
        raise ValueError(
            "sketch must know which units each preactivation reaches: give the cell an example_input and a step that "
            "can be differentiated forwards."
        )
    tables = [
        Near(own_units(reached, np.zeros(size, int)), ~reached) for reached in by_matrix(pattern.cut, layout.rows)
    ]
    in_two = fresh < size and 0 < terms < size  # what is new is cut down before it is added

    def init(params: Params) -> EstimatorState:
        leaves, structure = jax.tree.flatten(params.cell)
        near = [jnp.zeros((len(table.units), *w.shape), w.dtype) for table, w in zip(tables, leaves, strict=True)]
        dtype = real_dtype(params.cell)
        left, right = jnp.zeros((size, terms), dtype), zero_each(params.cell, terms)
        memory = SketchMemory(structure.unflatten(near), left, right, jnp.zeros((), dtype))
        return EstimatorState(model.init_state(params), memory, ())

    def advance(
        shared: PyTree, memory: SketchMemory, step: Step, noise: None, dl_dstate: Array
    ) -> tuple[SketchMemory, dict[str, Array]]:
        del shared, noise, dl_dstate
        dtype = memory.left.dtype
        structure = jax.tree.structure(memory.near)
        near, right, features = map(jax.tree.leaves, (memory.near, memory.right, step.features))
        back = jax.vmap(step.propagate)(jnp.eye(size, dtype=dtype)).T
        pushed = by_matrix(jax.vmap(step.push)(jnp.eye(layout.size, dtype=dtype)).T, layout.rows)
        with jax.default_matmul_precision("highest"):  # the bound allows for the rounding of the dtype, and no more
            # Squares are taken of numbers of about one.
            on_state, on_weights = _scale([back]), _scale(near + right)
            back_to_one = back / on_state
            rest = Rest(back_to_one @ memory.left, right, [table.spread(back_to_one) for table in tables], near)
            squares = rest.scaled(1 / on_weights)
            lost = jnp.zeros((), dtype)
            if in_two:
                few, lost = _largest(squares.new_gram(), fresh)
                rest, squares = rest.projected(few), squares.projected(few)
            left, lost_of_all = _largest(squares.gram(), terms)
            kept = [on_state * leaf for leaf in rest.along(left)]
            near = [
                jnp.einsum("kln,lna->kna", table.among(back), s) + table.pick(dh_dz)[..., None] * a[None, None]
                for table, s, dh_dz, a in zip(tables, near, pushed, features, strict=True)
            ]
            discarded = on_state * on_weights * (lost + lost_of_all)
            norm = on_state * jnp.sqrt(jnp.maximum(jnp.linalg.eigvalsh(back_to_one @ back_to_one.T)[-1], 0))
            # What overflows is no bound, but must not become NaN at the next step.
            bound = jnp.minimum(norm * memory.bound + discarded, jnp.finfo(dtype).max)
            memory = SketchMemory(structure.unflatten(near), left, structure.unflatten(kept), bound)
            return memory, {"certificate": bound, "discarded": discarded}

    def contract(before: SketchMemory, after: SketchMemory, step: Step, dl_dstate: Float[Array, " S"]) -> PyTree:
        del before, step
        near, right = jax.tree.leaves(after.near), jax.tree.leaves(after.right)
        seen = dl_dstate @ after.left
        found = [
            jnp.einsum("kn,kna->na", table.of(dl_dstate), s) + jnp.tensordot(seen, r, axes=1)
            for table, s, r in zip(tables, near, right, strict=True)
        ]
        return jax.tree.structure(after.near).unflatten(found)

    run = by_steps(model, vertex, init, advance, contract)
    options = {"rank": terms, "append": append}
    return estimator(Method(name="sketch", options=options, model=model, init=init, run=run))


class Near(NamedTuple):
    """Which units the rows of one weight matrix reach in one step.

    Attributes:
      units: of each row; S where a row has fewer than others.
      far: the units that a row does not reach.
    """

    units: Int[np.ndarray, "w rows"]
    far: Bool[np.ndarray, "S rows"]

    def of(self, vector: Float[Array, " S"]) -> Float[Array, "w rows"]:
        """The entries of a vector at the units of each row."""
        return jnp.append(vector, 0)[self.units]

    def pick(self, matrix: Float[Array, "S rows"]) -> Float[Array, "w rows"]:
        """Of each row's column its own units."""
        return jnp.take_along_axis(jnp.pad(matrix, ((0, 1), (0, 0))), self.units, axis=0)

    def among(self, matrix: Float[Array, "S S"]) -> Float[Array, "w w rows"]:
        """From the units of a row to the units of the same row."""
        return jnp.pad(matrix, ((0, 1), (0, 1)))[self.units[:, None], self.units[None]]

    def spread(self, matrix: Float[Array, "S S"]) -> Float[Array, "S w rows"]:
        """From the units of a row to all that are not its own."""
        return jnp.where(self.far[:, None], jnp.pad(matrix, ((0, 0), (0, 1)))[:, self.units], 0)


class Rest(NamedTuple):
    """A matrix over state units and weights, D = A L R + far(A S), in factors.

    Attributes:
      left: A L.
      right: R, for each weight matrix `[r, rows, A]`.
      spread: for each weight matrix, A from the units of a row to all others, `[S, w, rows]`.
      near: S, for each weight matrix `[w, rows, A]`.
    """

    left: Float[Array, "S r"]
    right: Sequence[Array]
    spread: Sequence[Array]
    near: Sequence[Array]

    def scaled(self, by: Float[Array, ""]) -> "Rest":
        """The matrix times a number."""
        return self._replace(right=[by * leaf for leaf in self.right], near=[by * leaf for leaf in self.near])

    def projected(self, basis: Float[Array, "S c"]) -> "Rest":
        """With far(A S) projected on a basis."""
        onto = basis @ basis.T
        return self._replace(spread=[jnp.tensordot(onto, leaf, axes=1) for leaf in self.spread])

    def along(self, basis: Float[Array, "S c"]) -> list[Float[Array, "c rows A"]]:
        """basis^T D, for each weight matrix."""
        turned = basis.T @ self.left
        return [
            jnp.tensordot(turned, r, axes=1) + jnp.einsum("ckn,kna->cna", jnp.tensordot(basis.T, b, axes=1), s)
            for r, b, s in zip(self.right, self.spread, self.near, strict=True)
        ]

    def gram(self) -> Float[Array, "S S"]:
        """D D^T."""
        squares, mixed = [], []
        for r, b, s in zip(self.right, self.spread, self.near, strict=True):
            squares.append(jnp.einsum("rna,qna->rq", r, r))
            mixed.append(jnp.tensordot(jnp.einsum("rna,kna->rkn", r, s), b, axes=((1, 2), (1, 2))))
        cross = self.left @ _sum(mixed)
        return self.left @ _sum(squares) @ self.left.T + cross + cross.T + self.new_gram()

    def new_gram(self) -> Float[Array, "S S"]:
        """far(A S) far(A S)^T."""
        parts = []
        for b, s in zip(self.spread, self.near, strict=True):
            weighed = jnp.einsum("skn,kln->sln", b, jnp.einsum("kna,lna->kln", s, s))
            parts.append(jnp.tensordot(weighed, b, axes=((1, 2), (1, 2))))
        return _sum(parts)


def _largest(gram: Float[Array, "S S"], count: int) -> tuple[Float[Array, "S c"], Float[Array, ""]]:
    """The left singular vectors of the largest singular values, and the norm of all that is left without them.

    Eigenvalues are known to S eps of the largest; as much is allowed for.
    """
    values, vectors = jnp.linalg.eigh((gram + gram.T) / 2)
    values = jnp.maximum(values[::-1], 0)
    allowed = 4 * len(gram) * jnp.finfo(gram.dtype).eps * values[0]
    return vectors[:, ::-1][:, :count], jnp.sqrt(jnp.sum(values[count:]) + allowed)


def _scale(arrays: Sequence[Array]) -> Float[Array, ""]:
    """The largest entry; one where all are zero."""
    largest = functools.reduce(jnp.maximum, [jnp.max(jnp.abs(array), initial=0) for array in arrays])
    return jnp.where(largest >= jnp.finfo(largest.dtype).tiny, largest, 1)


def _sum(arrays: Sequence[Array]) -> Array:
    return functools.reduce(jnp.add, arrays)
