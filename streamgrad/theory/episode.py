"""Everything about one episode that the variance of its gradient estimate depends on."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from streamgrad._typing import Array, Float
from streamgrad.base import Chunk, Model, Params
from streamgrad.theory.sweep import check_episode, padded_length, record, rows_of, same_episode, sweep


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Episode:
    """All gradients and features of one episode; a pytree, so that it may be compiled over and mapped.

    Attributes:
      loss: L_t, `[T]`.
      b: b_s^(t) = dL_t/dz_s as `b[t, s]`, `[T, T, N]`; zero for s > t, and across resets.
      features: at preactivations a_t, `[T, A]`; with several weight matrices a tuple of such, in the order of the
        leaves of the cell's parameters. None at the state cut.
      gradient: of the summed loss, exact, like the model's parameters.
      episode: how many resets each step has behind it, `[T]`; the first step counts as one.
      jacobian: at the state cut J_t = dh_t/dθ_t, `[T, N, P]`, parameters ravelled. None at preactivations, where
        J_t = I ⊗ a_t^T is never worth building.
      cut: where it was cut.
      rows: how many preactivations each weight matrix has; (N,) at the state cut.
    """

    # Not annotated with shapes: mapped over, every leaf has a batch axis, and JAX puts other things in their places.
    loss: Any
    b: Any
    features: Any
    gradient: Any
    episode: Any
    jacobian: Any
    cut: str = dataclasses.field(metadata={"static": True})
    rows: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @property
    def length(self) -> int:
        """T."""
        return self.b.shape[0]

    @property
    def size(self) -> int:
        """N, the size of the cut."""
        return self.b.shape[-1]

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
    def future(self) -> Float[Array, "T T N"]:
        """g_{q,r} = Σ_{t>=q} b_r^(t) over the losses of q's own episode, as `future[q, r]`."""
        total = jnp.cumsum(self.b[::-1], axis=0)[::-1]
        return jnp.where(same_episode(self.episode)[:, :, None], total, 0)


def collect(
    model: Model, params: Params, chunk: Chunk, cut: str = "preactivation", block: int | None = None
) -> Episode:
    """Collect b_s^(t), features, losses and the exact gradient of an episode (Section 6.4).

        b[t, s] = dL_t/dz_s,    gradient = Σ_t Σ_s b[t, s]^T J_s

    The stream begins at the cell's initial state. Resets inside the chunk are honoured: they cut it into episodes that
    owe each other nothing. Written for one stream; `jax.vmap` it over chunks for many. `b` needs T² N numbers, so for
    long episodes see `streamgrad.theory.blockwise`.

    Args:
      model: the model.
      params: its parameters.
      chunk: one stream.
      cut: "preactivation", or "state" (which keeps J_t, `[T, N, P]`, and so is for small models).
      block: from how many steps t reverse passes go back together; the result does not depend on it.

    Returns:
      The episode.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.lstm(2, 4), sg.heads.softmax(3))
      >>> params = model.init(jax.random.key(0))
      >>> chunk = sg.Chunk(jnp.ones((5, 2)), jnp.zeros(5, int))
      >>> ep = sg.variance.collect(model, params, chunk)
      >>> ep.b.shape, ep.features.shape, ep.gradient.cell["w"].shape
      ((5, 5, 16), (5, 7), (16, 7))
    """
    length = check_episode(model, params, chunk, cut, block)
    tape = record(model, params, chunk, cut)
    size = tape.diagonal.shape[1]
    buffer = jnp.zeros((padded_length(length, block), length, size), tape.diagonal.dtype)

    def visit(b: Array, q: Array, r: Array, dz: Float[Array, "K N"]) -> Array:
        zero = jnp.zeros((), q.dtype)
        return jax.lax.dynamic_update_slice(b, dz[:, None, :], (q[0], jnp.asarray(r, q.dtype), zero))

    b = sweep(tape, tape.immediate, visit, buffer, block)[:length]
    features = tape.features
    if features is not None and len(features) == 1:
        features = features[0]
    return Episode(
        tape.loss, b, features, tape.gradient, tape.episode, tape.jacobian, cut=cut, rows=rows_of(model, cut)
    )


def matrix_of_row(rows: tuple[int, ...]) -> np.ndarray:
    """To which weight matrix each entry of z belongs, `[N]`."""
    return np.repeat(np.arange(len(rows)), rows)
