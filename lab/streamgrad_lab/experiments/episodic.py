"""UORO on whole episodes, with α solved for each of them and Q_0 from those before (Section 7.2).

The paper's experiment has what an online algorithm has not: all of an episode's gradients, by backpropagation. Each
update does, in this order:

1. Q_0 = (B̄ + damping tr(B̄)/N I)^{-1/4} from the average B̄ over past episodes, or the identity;
2. for each stream of the minibatch C from its episode and Q_0, and from C the α that minimises V(Q); or GIR;
3. UORO on the episode with this Q_0 and α, for the total gradient estimate;
4. B̄ ← decay B̄ + (1 - decay) B, where B is the mean over the minibatch, each with the α that was used.

The exact gradient is there as well, and with it what the estimate should be off by, and what it is.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from streamgrad import Chunk, EstimatorState, GradientEstimator, Info, Model, Params, cuts, uoro, with_noise
from streamgrad._typing import Array, Float
from streamgrad.base import real_dtype
from streamgrad.checks import check_choice, check_size, leading_length
from streamgrad.noise import Shaping, find_noise
from streamgrad.noise.rescale import total_log_alpha
from streamgrad.theory import Episode, b_matrix, c_matrix, collect, optimal_alpha
from streamgrad.theory.matrices import c_by_group
from streamgrad.theory.objective import cross_term, kurtosis_term
from streamgrad.theory.spatial import spatial_of
from streamgrad_lab.experiments.roots import ROOTS, damped_q0
from streamgrad_lab.training.loop import Row, Summary

# V depends on the square of what is left of α's residual, and all streams wait for the slowest.
_TOLERANCE, _ITERATIONS = 1e-3, 20

MEASURED = ("intrinsic", "expected", "actual", "total", "total_actual")


class EpisodicShared(NamedTuple):
    """What one update leaves to the next. All of it may be mapped over: a sweep is one program.

    Attributes:
      b: B̄, `[N, N]`; None where Q_0 is the identity.
      decay: of B̄.
      damping: of Q_0.
    """

    b: Float[Array, "N N"] | None
    decay: Float[Array, ""]
    damping: Float[Array, ""]


def episodic_uoro(
    model: Model,
    batch_size: int,
    q0: str = "optimal",
    alpha: str = "optimal",
    decay: float = 0.9,
    damping: float = 0.005,
    noise: Any = "gaussian",
    root: str = "eigh",
) -> GradientEstimator:
    """UORO at the preactivations, on a minibatch of whole episodes, with the paper's choices of Q_0 and α.

    Args:
      model: the model; its cell must have a single weight matrix.
      batch_size: B, the number of streams.
      q0: "identity" or "optimal".
      alpha: "gir" or "optimal".
      decay: of B̄.
      damping: of Q_0, relative to the mean eigenvalue of B̄.
      noise: as in `uoro`.
      root: how the inverse fourth root is taken, see `damped_q0`.

    Returns:
      The estimator, for a batch: `chunk` has B streams, each one episode from its beginning. Its diagnostics, one of
      each per stream: `intrinsic` ‖g‖² of the cell's exact gradient g, `expected` V(Q) of the theory for the α that was
      used, `actual` ‖ĝ - g‖² - ‖g‖² as the paper measures it, `total` the total variance of the corrected theory,
      `total_actual` ‖ĝ - g‖², `residual` by which α missed the optimum (0 for GIR), and log α, `[B, T]`.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.lstm(2, 2), sg.heads.softmax(3))
      >>> params = model.init(jax.random.key(0))
      >>> est = episodic_uoro(model, 2)
      >>> chunk = sg.Chunk(jnp.ones((2, 3, 2)), jnp.zeros((2, 3), int))
      >>> grads, state, info = est.update(params, est.init(params), chunk, jax.random.key(1))
      >>> state.shared.b.shape, info.diagnostics["expected"].shape, info.diagnostics["log_alpha"].shape
      ((8, 8), (2,), (2, 3))
    """
    check_size(batch_size=batch_size)
    check_choice("q0", q0, ("identity", "optimal"))
    check_choice("alpha", alpha, ("gir", "optimal"))
    check_choice("root", root, ROOTS)
    for name, value in {"decay": decay, "damping": damping}.items():
        if not 0 < value < 1:
            raise ValueError(f"{name} must lie between 0 and 1, not {value!r}.")
    layout = cuts.layout(model.cell, model.cell.cuts["preactivation"])
    if len(layout.rows) != 1:
        raise ValueError("episodic_uoro needs a cell with a single weight matrix, such as the LSTM.")

    def init(params: Params) -> EstimatorState:
        dtype = real_dtype(params.cell)
        b = jnp.zeros((layout.size, layout.size), dtype) if q0 == "optimal" else None
        return EstimatorState((), (), EpisodicShared(b, jnp.asarray(decay, dtype), jnp.asarray(damping, dtype)))

    @jax.jit
    def update(params: Params, state: EstimatorState, chunk: Chunk, key: Any) -> tuple[Params, EstimatorState, Info]:
        shared = state.shared
        pair = None if shared.b is None else damped_q0(shared.b, shared.damping, root)
        keys = jax.random.split(key, batch_size)
        grads, episodes, info = _update(model, params, chunk, keys, pair, alpha == "optimal", noise)
        if shared.b is not None:
            b = jnp.mean(jax.vmap(b_matrix)(episodes, jnp.exp(info.diagnostics["log_alpha"])), axis=0)
            shared = shared._replace(b=shared.decay * shared.b + (1 - shared.decay) * b)
        mean = jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), grads)
        return mean, state._replace(shared=shared), info

    def checked(params: Params, state: EstimatorState, chunk: Chunk, key: Any) -> tuple[Params, EstimatorState, Info]:
        size = leading_length(chunk, "the batch")
        if size != batch_size:
            raise ValueError(f"the chunk has {size} streams, but the estimator was made for {batch_size}.")
        # Each chunk is one episode from its beginning: its resets say nothing new.
        return update(params, state, chunk._replace(reset=None), key)

    return GradientEstimator(init, checked)


def _update(
    model: Model, params: Params, chunk: Chunk, keys: Array, pair: Shaping | None, optimal: bool, noise: Any
) -> tuple[Params, Episode, Info]:
    """Gradients of all streams, their episodes, and an info with what was predicted and measured."""
    episodes = jax.vmap(lambda one: collect(model, params, one))(chunk)
    theory = jax.vmap(lambda ep: _theory(ep, pair, find_noise(noise).kurtosis))(episodes)
    log_alpha, residual = None, jnp.zeros(len(keys), theory.c.dtype)
    if optimal:
        best = jax.vmap(lambda c: optimal_alpha(c, _ITERATIONS, _TOLERANCE))(theory.c)
        log_alpha, residual = jnp.log(best.alpha), best.residual
    grads, info = estimates(model, params, chunk, keys, pair, log_alpha, noise)
    if log_alpha is None:
        log_alpha = jax.vmap(total_log_alpha)(info.diagnostics["gamma"], info.diagnostics["beta"])[..., 0]
    expected = jax.vmap(_v)(theory.c, log_alpha)
    off = jax.tree.map(jnp.subtract, grads.cell, episodes.gradient.cell)
    squared_error, intrinsic = square_norms(off), square_norms(episodes.gradient.cell)
    diagnostics = {
        "intrinsic": intrinsic,
        "expected": expected,
        "actual": squared_error - intrinsic,
        "total": expected + theory.rest,
        "total_actual": squared_error,
        "residual": residual,
        "log_alpha": log_alpha,
    }
    return grads, episodes, Info(info.loss, diagnostics)


def solve_alpha(ep: Episode, q0: Array) -> Float[Array, " T"]:
    """The optimal α of an episode for that Q_0, to a precision that V(Q) does not notice."""
    return optimal_alpha(c_matrix(ep, q0), _ITERATIONS, _TOLERANCE).alpha


def shown_steps(length: int, most: int = 8) -> list[int]:
    """At which steps s, counted from 0, log α_s is recorded: all, or `most` of them from the first to the last."""
    return sorted({round(s) for s in np.linspace(0, length - 1, min(most, length))})


def summarise_episodes(length: int) -> Summary:
    """What is recorded of an update: means over the minibatch, log α_s from its smallest on at a few steps s."""

    def summarise(chunk: Chunk, info: Info, grads: Params) -> Row:
        del chunk, grads
        found = info.diagnostics
        centred = found["log_alpha"] - jnp.min(found["log_alpha"], axis=1, keepdims=True)
        alphas = jnp.mean(centred, axis=0)
        row = {name: jnp.mean(found[name]) for name in (*MEASURED, "residual")}
        return row | {f"log_alpha_{s + 1}": alphas[s] for s in shown_steps(length)}

    return summarise


class _Theory(NamedTuple):
    """What the theory says of an episode before α is known: C, and what V(Q) lacks of the total variance."""

    c: Float[Array, "T T"]
    rest: Float[Array, ""]


def _theory(ep: Episode, pair: Shaping | None, kurtosis: float) -> _Theory:
    spatial = spatial_of(ep)
    if pair is not None:
        spatial = spatial._replace(q0=pair.q0, inverse=pair.inverse)
    rest = cross_term(ep)
    if kurtosis:
        rest = rest + kurtosis * kurtosis_term(ep, spatial)
    return _Theory(c_by_group(ep, spatial)[:, :, 0], rest)


def _v(c: Float[Array, "T T"], log_alpha: Float[Array, " T"]) -> Float[Array, ""]:
    """V(Q) = Σ_{q,r} (α_r² / α_q²) C[q, r]."""
    return jnp.sum(c * jnp.exp(2 * (log_alpha[None, :] - log_alpha[:, None])))


def estimates(
    model: Model, params: Params, chunk: Chunk, keys: Array, pair: Shaping | None, log_alpha: Array | None, noise: Any
) -> tuple[Params, Info]:
    """UORO on every stream, each with its own α; the gradients stay apart.

    Args:
      model: the model.
      params: its parameters.
      chunk: an episode for each stream.
      keys: one for each stream.
      pair: Q_0 and its inverse; None for the identity.
      log_alpha: `[B, T]`; None for GIR.
      noise: as in `uoro`.

    Returns:
      The gradients, with streams leading, and the info of each.
    """
    given = log_alpha is not None
    length = leading_length(jax.tree.map(lambda leaf: leaf[0], chunk), "time")
    identity = None if pair is None else np.ones(len(pair.q0)) if pair.q0.ndim == 1 else np.eye(len(pair.q0))
    est = uoro(model, noise=noise, rescale=np.ones(length) if given else "gir", q0=identity)
    state = est.init(params) if pair is None else with_noise(est.init(params), q0=pair)

    def one(chunk: Chunk, key: Array, alpha: Array | None) -> tuple[Params, Info]:
        here = state if alpha is None else with_noise(state, alpha=alpha)
        grads, _, info = est.update(params, here, chunk, key)
        return grads, info

    return jax.vmap(one)(chunk, keys, jnp.exp(log_alpha) if given else None)


def square_norms(tree: Any) -> Float[Array, " B"]:
    """‖·‖² of every stream, the leading axis."""
    return jax.vmap(lambda one: jnp.sum(ravel_pytree(one)[0] ** 2))(tree)
