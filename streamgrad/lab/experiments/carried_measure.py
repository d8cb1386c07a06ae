"""V(Q) of several choices of Q_0 and α, measured at the same parameters on the same episodes."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

import streamgrad as sg
from streamgrad._typing import Array, PyTree
from streamgrad.adapt.carrying import make_learner
from streamgrad.adapt.choice import Carry
from streamgrad.base import Chunk, EstimatorState, Info, Model, Params
from streamgrad.engine.estimator import restart, transition
from streamgrad.estimators.uoro import UoroShared
from streamgrad.noise.groups import make_groups
from streamgrad.noise.shaping import Shaping


class Measured(NamedTuple):
    """What was measured.

    Attributes:
      v: mean of ‖ĝ - g‖² - ‖g‖² over streams and draws, divided by the mean ‖g‖² over streams.
      error: standard error of it over draws.
      square: mean ‖g‖².
    """

    v: Array
    error: Array
    square: Array


def measure(model: Model, length: int, draws: int, noise: str = "gaussian") -> Callable[..., Measured]:
    """Make `measured(params, chunk, q0, alpha, key)`; a chunk is an episode for each stream.

    `q0` is `[N, N]` or `[N]`, and `alpha` `[B, T]`, or None for GIR's.

    Args:
      model: the model.
      length: T.
      draws: how many gradient estimates of each stream.
      noise: as in `uoro`.

    Returns:
      The function.
    """
    exact = sg.bptt(model)

    def measured(params: Params, chunk: Chunk, q0: Array, alpha: Array | None, key: Array) -> Measured:
        rescale = "gir" if alpha is None else np.ones(length)
        est = sg.uoro(model, noise=noise, rescale=rescale, q0=np.ones(q0.shape[:1]))
        begin = est.init(params)
        shaping = Shaping(q0, 1 / q0 if q0.ndim == 1 else jnp.linalg.inv(q0))

        def of_stream(chunk: Chunk) -> PyTree:
            return exact.update(params, exact.init(params), chunk, None)[0].cell

        gradients = jax.vmap(of_stream)(chunk)
        squares = _squares(gradients)

        def deviation(chunk: Chunk, alpha: Array | None, gradient: PyTree, key: Array) -> Array:
            shared = UoroShared(shaping, None if alpha is None else alpha[:, None])
            state = EstimatorState(begin.cell, begin.memory, shared)
            estimate = est.update(params, state, chunk, key)[0].cell
            apart = jax.tree.map(lambda a, b: a - b, estimate, gradient)
            return sum((jnp.sum(leaf**2) for leaf in jax.tree.leaves(apart)), jnp.zeros(()))

        def draw(_: None, key: Array) -> tuple[None, Array]:
            keys = jax.random.split(key, len(squares))
            found = jax.vmap(deviation)(chunk, alpha, gradients, keys)
            return None, jnp.mean(found - squares)

        _, values = jax.lax.scan(draw, None, jax.random.split(key, draws))
        square = jnp.mean(squares)
        return Measured(jnp.mean(values) / square, jnp.std(values) / jnp.sqrt(draws) / square, square)

    return jax.jit(measured)


def alpha_of(ep: Any, q0: Array) -> Array:
    """The optimal α of an episode, to a precision that V(Q) does not notice."""
    return sg.variance.optimal_alpha(sg.variance.c_matrix(ep, q0), max_iterations=20, tolerance=1e-3).alpha


def hindsight(model: Model, damping: float, rounds: int = 3) -> Callable[[Params, Chunk], tuple[Array, Array]]:
    """Make `choose(params, chunk)`: α of each episode from its own C, Q_0 from B of this very batch, by turns.

    Nothing of it is known before the episodes have ended. As Q_0 is fitted to the few episodes that it is then measured
    on, no other can be expected to reach it.

    Args:
      model: the model.
      damping: of Q_0.
      rounds: how many turns.

    Returns:
      The function; it returns Q_0 and α, `[B, T]`.
    """

    def choose(params: Params, chunk: Chunk) -> tuple[Array, Array]:
        episodes = jax.vmap(lambda chunk: sg.variance.collect(model, params, chunk))(chunk)
        size = episodes.b.shape[-1]

        def turn(q0: Array, _: None) -> tuple[Array, Array]:
            alpha = jax.vmap(lambda ep: alpha_of(ep, q0))(episodes)
            b = jnp.mean(jax.vmap(sg.variance.b_matrix)(episodes, alpha), axis=0)
            return sg.variance.optimal_q0(b, damping), alpha

        q0, alphas = jax.lax.scan(turn, jnp.eye(size, dtype=episodes.b.dtype), length=rounds)
        return q0, alphas[-1]

    return jax.jit(choose)


class Exact(NamedTuple):
    """What the exact setting remembers: B averaged over batches, and Q_0 from it."""

    b: Array
    weight: Array
    q0: Array


class ExactSetting(NamedTuple):
    """The paper's setting "Q_0 and α ours" (Section 7.2).

    Attributes:
      init: `init(params) -> Exact`.
      look: `look(params, exact, chunk) -> Exact`, adds exact B of a batch to the average.
      choose: `choose(params, exact, chunk) -> (q0, alpha)`, α exact for each episode of the chunk.
      update: `update(params, exact, chunk, key) -> (grads, loss, exact)`, a gradient estimate with them.
    """

    init: Callable[[Params], Exact]
    look: Callable[..., Exact]
    choose: Callable[[Params, Exact, Chunk], tuple[Array, Array]]
    update: Callable[[Params, Exact, Chunk, Array], tuple[Params, Array, Exact]]


def exact_setting(model: Model, length: int, streams: int, damping: float, decay: float = 0.9) -> ExactSetting:
    """Q_0 from an exponential average of exact B over past batches, α exact for the very episode it is used in.

    Args:
      model: the model.
      length: T.
      streams: B, the streams of a batch.
      damping: of Q_0.
      decay: of the average.

    Returns:
      The setting.
    """
    size = sg.cuts.layout(model.cell, model.cell.cuts["preactivation"]).size
    est = sg.uoro(model, rescale=np.ones(length), q0=np.eye(size))

    def init(params: Params) -> Exact:
        dtype = jax.tree.leaves(params.cell)[0].dtype
        return Exact(jnp.zeros((size, size), dtype), jnp.zeros((), dtype), jnp.eye(size, dtype=dtype))

    def solve(params: Params, q0: Array, chunk: Chunk) -> tuple[Array, Array]:
        """α of each episode, and the mean of their B."""

        def one(chunk: Chunk) -> tuple[Array, Array]:
            ep = sg.variance.collect(model, params, chunk)
            alpha = alpha_of(ep, q0)
            return alpha, sg.variance.b_matrix(ep, alpha)

        alpha, b = jax.vmap(one)(chunk)
        return alpha, jnp.mean(b, axis=0)

    def add(exact: Exact, b: Array) -> Exact:
        total, weight = decay * exact.b + (1 - decay) * b, decay * exact.weight + (1 - decay)
        return Exact(total, weight, sg.variance.optimal_q0(total / weight, damping))

    def look(params: Params, exact: Exact, chunk: Chunk) -> Exact:
        return add(exact, solve(params, exact.q0, chunk)[1])

    def choose(params: Params, exact: Exact, chunk: Chunk) -> tuple[Array, Array]:
        return exact.q0, solve(params, exact.q0, chunk)[0]

    def update(params: Params, exact: Exact, chunk: Chunk, key: Array) -> tuple[Params, Array, Exact]:
        alpha, b = solve(params, exact.q0, chunk)
        shaping, begin = Shaping(exact.q0, jnp.linalg.inv(exact.q0)), est.init(params)

        def one(chunk: Chunk, alpha: Array, key: Array) -> tuple[Params, Array]:
            state = EstimatorState(begin.cell, begin.memory, UoroShared(shaping, alpha[:, None]))
            grads, _, info = est.update(params, state, chunk, key)
            return grads, info.loss

        grads, loss = jax.vmap(one)(chunk, alpha, jax.random.split(key, streams))
        return jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), grads), jnp.mean(loss), add(exact, b)

    return ExactSetting(init, look, jax.jit(choose), update)


class Seen(NamedTuple):
    """What the streams' estimator remembers, as far as `learn` asks for it: nothing, as nothing is estimated."""

    rescaling: Array
    tangent: Array
    cotangent: Array


def watch(model: Model, params: Params, cell: PyTree, chunk: Chunk) -> tuple[PyTree, Info]:
    """States of a batch of streams and gradients of their losses, as an estimator leaves them for `learn`.

    Args:
      model: the model.
      params: its parameters.
      cell: the states before the chunk.
      chunk: of all streams.

    Returns:
      `cell`, and an info with losses and diagnostics.
    """
    fresh = model.init_state(params)

    def one(cell: PyTree, chunk: Chunk) -> tuple[Array, Array, Array]:
        def step(state: PyTree, now: tuple) -> tuple[PyTree, PyTree]:
            x, reset = now
            state = transition(model, params, restart(reset, fresh, state), x)
            return state, state

        _, states = jax.lax.scan(step, cell, (chunk.inputs, chunk.reset))
        loss, _, dl_dstate = model.read_out_chunk(params.head, states, chunk.targets)
        return loss, jax.vmap(lambda state: ravel_pytree(state)[0])(states), dl_dstate

    loss, states, dl_dstate = jax.vmap(one)(cell, chunk)
    return cell, Info(loss, {"state": states, "dl_dstate": dl_dstate})


def watcher(model: Model, carry: Carry) -> tuple[Callable[[Params], Any], Callable[..., Any]]:
    """Statistics that are gathered without an estimator: `init(params)`, and `look(params, shared, seen, chunk)`.

    Args:
      model: the model, with one weight matrix.
      carry: what to gather.

    Returns:
      Both functions. `seen` is from `watch`; where α is not carried over, it counts as 1.
    """
    layout = sg.cuts.layout(model.cell, model.cell.cuts["preactivation"])
    init, learn = make_learner(model, make_groups(layout, "preactivation", 1), carry)

    def look(params: Params, shared: Any, seen: tuple[PyTree, Info], chunk: Chunk) -> Any:
        cell, info = seen
        one = jnp.ones((*info.loss.shape, 1), info.loss.dtype)
        nothing = jnp.zeros((len(one), 1))
        none = Seen(jnp.zeros(len(one), jnp.int32), nothing, nothing)
        state = EstimatorState(cell, none, shared)
        info = Info(info.loss, {**info.diagnostics, "gamma": one, "beta": one})
        return learn(params, state, state, chunk, info)[0]

    return init, look


def _squares(gradients: PyTree) -> Array:
    return sum(
        (jnp.sum(leaf**2, axis=tuple(range(1, leaf.ndim))) for leaf in jax.tree.leaves(gradients)), jnp.zeros(())
    )
