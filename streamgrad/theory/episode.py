"""An episode, or a long stream, as the variance of its gradient estimate depends on it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from streamgrad._typing import Array, Bool, Float, Int, PyTree
from streamgrad.base import Chunk, Model, Params, fold_weight, widened
from streamgrad.checks import check_chunk, check_own_matrices, check_params, check_size, find_cut
from streamgrad.keys import drawn_shapes
from streamgrad.step import cuts
from streamgrad.theory.tape import Tape, padded_length, same_episode
from streamgrad.trees import restart


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Episode:
    """All gradients and features of one stream; a pytree, so it may be compiled over and mapped.

    Attributes:
      loss: L_t, `[T]`.
      gradient: of the summed loss, exact, like the model's parameters.
      episode: how many resets each step has behind it, `[T]`; the first step counts as one.
      features: at preactivations a_t, `[T, A]`; with several weight matrices a tuple of such, in the order of the
        leaves of the cell's parameters. None at the state cut.
      jacobian: at the state cut J_t = dh_t/dθ_t, `[T, N, P]`, parameters ravelled. None at preactivations, where
        J_t = I ⊗ a_t^T is never worth building.
      diagonal: g_{t,t} = Σ_{s>=t} b_t^(s), `[T, N]`.
      b: b_s^(t) = dL_t/dz_s as `b[t, s]`, `[T, T, N]`; zero for s > t, and across resets. None where it is not kept.
      tape: where b is not kept, what it is computed from whenever it is needed.
      cut: where it was cut.
      rows: how many preactivations each weight matrix has; (N,) at the state cut.
    """

    # Not annotated with shapes: mapped over, every leaf has a batch axis, and JAX puts other things in their places.
    loss: Any
    gradient: Any
    episode: Any
    features: Any
    jacobian: Any
    diagonal: Any
    b: Any
    tape: Any
    cut: str = dataclasses.field(metadata={"static": True})
    rows: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @property
    def length(self) -> int:
        """T."""
        return self.diagonal.shape[0]

    @property
    def size(self) -> int:
        """N, the size of the cut."""
        return self.diagonal.shape[-1]

    @property
    def dtype(self) -> Any:
        """Of the gradients."""
        return self.diagonal.dtype

    @property
    def all_features(self) -> tuple[Float[Array, "T _"], ...]:
        """a_t of every weight matrix, also where there is just one."""
        if self.features is None:
            raise ValueError(f"an episode at the cut {self.cut!r} has no features: collect at 'preactivation'.")
        return self.features if isinstance(self.features, tuple) else (self.features,)

    @property
    def feature_norms(self) -> Float[Array, "T M"]:
        """‖a_t‖² of every weight matrix."""
        return jnp.stack([jnp.sum(a**2, axis=1) for a in self.all_features], axis=1)

    @property
    def kept(self) -> Float[Array, "T T N"]:
        """b, where it was kept."""
        if self.b is None:
            raise ValueError("this needs all b at once, which were not kept: collect the episode with keep=True.")
        return self.b

    @property
    def future(self) -> Float[Array, "T T N"]:
        """g_{q,r} = Σ_{t>=q} b_r^(t) over the losses of q's own episode, as `future[q, r]`."""
        total = jnp.cumsum(self.kept[::-1], axis=0)[::-1]
        return jnp.where(same_episode(self.episode)[:, :, None], total, 0)

    @property
    def causal(self) -> Bool[Array, "T T"]:
        """Whether r >= q, in the same episode, as `causal[q, r]`: there g_{q,r} = g_{r,r}."""
        return same_episode(self.episode) & np.triu(np.ones((self.length, self.length), bool))

    @property
    def padded(self) -> int:
        """One more than the largest q that `fold` may show."""
        return self.length if self.tape is None else padded_length(self.length, self.tape.block)

    def fold(
        self,
        visit: Callable[[PyTree, Int[Array, " K"], Int[Array, " R"], Float[Array, "K R N"]], PyTree],
        init: PyTree,
    ) -> PyTree:
        """Show all g_{q,r} with r < q, tile by tile: at once where b is kept, else as reverse passes find them.

        Args:
          visit: `visit(carry, q[K], r[R], g[K, R, N]) -> carry`, for consecutive q and consecutive r; g is zero where
            r >= q, and in the last tiles q may lie past the end.
          init: the first carry.

        Returns:
          The last carry.
        """
        if self.tape is None:
            steps = jnp.arange(self.length)
            earlier = np.tri(self.length, k=-1, dtype=bool)
            return visit(init, steps, steps, jnp.where(earlier[:, :, None], self.future, 0))

        def one_row(carry: PyTree, q: Int[Array, " K"], r: Int[Array, ""], dz: Float[Array, "K N"]) -> PyTree:
            return visit(carry, q, r[None], jnp.where((r < q)[:, None], dz, 0)[:, None])

        return self.tape.sweep(self.tape.ahead, one_row, init)


def collect(
    model: Model, params: Params, chunk: Chunk, cut: str = "preactivation", block: int | None = None, keep: bool = True
) -> Episode:
    """Collect b_s^(t), features, losses and the exact gradient of an episode (Section 6.4).

        b[t, s] = dL_t/dz_s,    gradient = Σ_t Σ_s b[t, s]^T J_s

    The stream begins at the cell's initial state. Resets inside the chunk are honoured: they cut it into episodes that
    owe each other nothing. Written for one stream; `jax.vmap` it over chunks for many, together with what is made of
    it where b is not kept.

    Args:
      model: the model.
      params: its parameters.
      chunk: one stream.
      cut: "preactivation", or "state" (which keeps J_t, `[T, N, P]`, and so is for small models).
      block: from how many steps reverse passes go back together; the result does not depend on it.
      keep: whether to keep b, T² N numbers: half a gigabyte for 784 steps of an LSTM with 50 units. Without it C, B,
        V(Q) and the total variance go back through the stream each time, and memory grows with T times the size of the
        state, and with C itself.

    Returns:
      The episode.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.lstm(2, 4), sg.heads.softmax(3))
      >>> params = model.init(jax.random.key(0))
      >>> chunk = sg.Chunk(jnp.ones((5, 2)), jnp.zeros(5, int))
      >>> ep = sg.theory.collect(model, params, chunk)
      >>> ep.b.shape, ep.features.shape, ep.gradient.cell["w"].shape
      ((5, 5, 16), (5, 7), (16, 7))
      >>> long = sg.theory.collect(model, params, chunk, block=2, keep=False)
      >>> bool(jnp.allclose(sg.theory.v(long), sg.theory.v(ep), rtol=1e-3))
      True
    """
    _check(model, params, chunk, cut, block)
    params, chunk = widened(params), fold_weight(chunk)
    tape, loss, head_grads, immediate, found = _forward(model, params, chunk, cut, block)
    tape, cell_grads, diagonal = _backward(tape, immediate)
    features, jacobian = (None, found) if tape.cut.features is None else (found, None)
    if features is not None and len(features) == 1:
        features = features[0]
    return Episode(
        loss,
        Params(cell_grads, head_grads),
        jnp.cumsum(tape.reset),
        features,
        jacobian,
        diagonal,
        _all_gradients(tape, immediate, diagonal) if keep else None,
        None if keep else tape,
        cut=cut,
        rows=cuts.layout(model.cell, tape.cut).rows,
    )


def _check(model: Model, params: Any, chunk: Any, cut: Any, block: Any) -> None:
    check_own_matrices(model)
    check_params(drawn_shapes(model.init), params)
    find_cut(model, cut)
    if cut == "params":
        raise ValueError("the variance theory is for the cuts 'preactivation' and 'state', not 'params'.")
    if block is not None:
        check_size(block=block)
    check_chunk(model, chunk)


def _forward(
    model: Model, params: Params, chunk: Chunk, cut: str, block: int | None
) -> tuple[Tape, Float[Array, " T"], PyTree, Float[Array, "T S"], Any]:
    """Run the stream: a tape, L_t, the head's gradient, dL_t/dh_t, and a_t of each weight matrix, or J_t."""
    vertex, fresh = model.cell.cuts[cut], model.init_state(params)
    start, unravel_state = ravel_pytree(fresh)
    z = vertex.into(params.cell, fresh, jax.tree.map(lambda leaf: leaf[0], chunk.inputs))
    no_dz = jax.tree.map(jnp.zeros_like, z)
    zero = ravel_pytree(no_dz)[0]
    length = jax.tree.leaves(chunk.inputs)[0].shape[0]
    # An episode that begins inside a chunk owes nothing to the steps before it, nor does the chunk's first.
    reset = (jnp.zeros(length, bool) if chunk.reset is None else chunk.reset).at[0].set(True)
    tape = Tape(params.cell, fresh, no_dz, None, chunk.inputs, reset, None, cut=vertex, block=block)

    def jacobian(before: Array, x: PyTree) -> Float[Array, "N P"]:
        def into(cell_params: PyTree) -> Array:
            return ravel_pytree(vertex.into(cell_params, unravel_state(before), x))[0].astype(zero.dtype)

        pull = jax.vjp(into, params.cell)[1]
        return jax.vmap(lambda v: ravel_pytree(pull(v)[0])[0])(jnp.eye(zero.size, dtype=zero.dtype))

    def step(vector: Array, now: tuple) -> tuple[Array, tuple]:
        x, target, reset = now
        before = restart(reset, start, vector)
        after = tape.transition(params.cell, before, zero, x)
        loss, head_grads, immediate = model.read_out(params.head, unravel_state(after), target)
        if vertex.features is None:
            immediate_jacobian = jacobian(before, x)
        else:
            immediate_jacobian = tuple(jax.tree.leaves(vertex.features(params.cell, unravel_state(before), x)))
        return after, (before, loss, head_grads, immediate, immediate_jacobian)

    _, found = jax.lax.scan(step, start, (chunk.inputs, chunk.targets, reset))
    before, loss, head_grads, immediate, immediate_jacobian = found
    head_grads = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), head_grads)
    return dataclasses.replace(tape, before=before), loss, head_grads, immediate, immediate_jacobian


def _backward(tape: Tape, immediate: Float[Array, "T S"]) -> tuple[Tape, PyTree, Float[Array, "T N"]]:
    """One reverse pass over all losses: the tape with dL/dh_t, the cell's gradient, and g_{t,t}."""
    no_dz = ravel_pytree(tape.no_dz)[0]

    def step(carry: tuple, now: tuple) -> tuple[tuple, tuple]:
        later, grads = carry
        vector, x, reset, immediate = now
        ahead = immediate + later
        _, vjp = jax.vjp(lambda p, v, dz: tape.transition(p, v, dz, x), tape.params, vector, no_dz)
        cell_grads, earlier, diagonal = vjp(ahead)
        return (jnp.where(reset, 0, earlier), jax.tree.map(jnp.add, grads, cell_grads)), (ahead, diagonal)

    zero = (jnp.zeros_like(immediate[0]), jax.tree.map(jnp.zeros_like, tape.params))
    steps = (tape.before, tape.inputs, tape.reset, immediate)
    (_, cell_grads), (ahead, diagonal) = jax.lax.scan(step, zero, steps, reverse=True)
    return dataclasses.replace(tape, ahead=ahead), cell_grads, diagonal


def _all_gradients(tape: Tape, immediate: Float[Array, "T S"], like: Float[Array, "T N"]) -> Float[Array, "T T N"]:
    """b, by a sweep from every loss."""
    length, size = like.shape

    def visit(b: Array, q: Int[Array, " K"], r: Int[Array, ""], dz: Float[Array, "K N"]) -> Array:
        return jax.lax.dynamic_update_slice(b, dz[:, None], (q[0], r, jnp.zeros_like(r)))

    start = jnp.zeros((padded_length(length, tape.block), length, size), like.dtype)
    return tape.sweep(immediate, visit, start)[:length]
