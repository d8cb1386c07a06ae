"""PES: evolution strategies whose particles go on from chunk to chunk, with all noise of their episode remembered."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from streamgrad._typing import Array, Float, PyTree
from streamgrad.base import (
    Chunk,
    EstimatorState,
    GradientEstimator,
    Info,
    Model,
    Params,
    real_dtype,
    transition,
    worked,
)
from streamgrad.checks import check_flag
from streamgrad.engine.estimator import estimator
from streamgrad.engine.method import Method, Outcome, per_stream
from streamgrad.noise.distributions import Noise, find_noise
from streamgrad.noise.settings import NoiseSettings, check_sigma
from streamgrad.step.jacobian_sparsity import shapes_of
from streamgrad.trees import cleared, restart


class Particles(NamedTuple):
    """The particles of a stream. The second half has the noise of the first with its sign changed.

    Attributes:
      states: their states, leaves `[R, ...]`.
      score: Σ ε / σ² over the chunks of the episode, of the first half; that of the second is its negative.
    """

    states: PyTree
    score: Float[Array, "*B half P"]


def pes(
    model: Model,
    sigma: float | Array | Callable[[Any], Any] = 0.01,
    particles: int = 8,
    accumulate: bool = True,
    noise: str | Noise = "gaussian",
) -> GradientEstimator:
    """Persistent evolution strategies: particles with noisy parameters, and all noise of the episode times the loss.

        h_t^i = F(h_{t-1}^i, x_t; θ + ε_i),    ε_i ~ N(0, σ²), drawn anew for each chunk; pairs have ε and -ε
        ξ_i ← ξ_i + ε_i / σ²
        dL/dθ ≈ 1/R Σ_i ξ_i Σ_t L_t(h_t^i)

    Nothing is differentiated in time. Each particle has a state of its own, which carries the effect of earlier noise,
    and ξ remembers that noise: so there is no truncation. The estimate is unbiased for the loss that is smoothed by the
    noise, in which each chunk has an ε of its own. Its gradient differs from that of the network without noise by
    O(σ²). The variance grows with the number of parameters, and with the number of chunks in an episode: long chunks
    are better.

    The head stands outside of the recurrence and has no noise. Its gradient is exact, the mean over the particles.

    Args:
      model: the model whose gradients are estimated. Noise is added to the weights of `streamgrad.worked(model)`.
      sigma: σ > 0, or a schedule in the manner of optax, `sigma(updates made) -> σ`, positive throughout.
        `streamgrad.with_noise` changes a σ that follows none.
      particles: R, an even number, as they come in pairs. Each stream has its own.
      accumulate: False for plain evolution strategies, truncated at the chunk: all particles begin it with the
        state of the network without noise, and only the noise of this chunk counts. That is biased, as backpropagation
        in the chunk alone is.
      noise: "gaussian", or "given" (the caller passes ε / σ of the first of each pair, `[R/2, P]`, in place of the
        key).

    Returns:
      The estimator. It costs R + 1 forward passes; memory is R/2 times P. `info.loss` and `info.outputs` are those of
      the network without noise, which runs along. Its diagnostics, `[T]`, are the mean loss of the particles,
      `particles`, and its standard deviation, `spread`. `advance` gives the outputs of the network without noise.
      `credit` is the estimate for the loss that is linear in the output, dl_doutput · y_t: it is told no other.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.lstm(2, 4), sg.heads.softmax(3))
      >>> params = model.init(jax.random.key(0))
      >>> est = sg.pes(model, sigma=0.1)
      >>> chunk = sg.Chunk(jnp.ones((5, 2)), jnp.zeros(5, int))
      >>> grads, state, info = est.update(params, est.init(params), chunk, jax.random.key(1))
      >>> state.memory.score.shape, info.diagnostics["particles"].shape
      ((4, 112), (5,))

    References:
      Vicol, Metz and Sohl-Dickstein, Unbiased gradient estimation in unrolled computation graphs with persistent
      evolution strategies, 2021.
      Salimans, Ho, Chen, Sidor and Sutskever, Evolution strategies as a scalable alternative to reinforcement learning,
      2017.
    """
    model = worked(model)
    check_flag(accumulate=accumulate)
    if isinstance(particles, bool) or not isinstance(particles, int) or particles < 2 or particles % 2:
        raise ValueError(f"particles must be an even number of at least 2, as they come in pairs, not {particles!r}.")
    source = find_noise(noise)
    if source.kurtosis != 0:
        raise ValueError(f"pes multiplies by the score of Gaussian noise, and cannot do so for {source.name!r}.")
    schedule = sigma if callable(sigma) else None
    check_sigma("sigma" if schedule is None else "sigma(0)", sigma if schedule is None else schedule(0))
    half, size = particles // 2, sum(leaf.size for leaf in jax.tree.leaves(shapes_of(model)[0]))

    def init(params: Params) -> EstimatorState:
        dtype = real_dtype(params.cell)
        first = sigma if schedule is None else schedule(0)
        check_sigma("sigma", first, dtype)
        updates = None if schedule is None else jnp.zeros((), jnp.int32)
        state = model.init_state(params)
        memory = Particles(_each(state, particles), jnp.zeros((half, size), dtype)) if accumulate else ()
        return EstimatorState(state, memory, NoiseSettings(sigma=jnp.asarray(first, dtype), updates=updates))

    def draw(shared: NoiseSettings, key: Any, length: int, dtype: Any) -> Float[Array, "half P"]:
        del shared, length
        return source.draw(key, (half, size), dtype)

    def one(params: Params, state: EstimatorState, chunk: Chunk, noise: Float[Array, "half P"]) -> Outcome:
        shared = state.shared
        if schedule is not None:
            now = jnp.asarray(schedule(shared.updates), shared.sigma.dtype)
            shared = shared._replace(sigma=now, updates=shared.updates + 1)
        theta, unravel = ravel_pytree(params.cell)
        kicks = shared.sigma * jnp.concatenate([noise, -noise])
        starts = state.memory.states if accumulate else _each(state.cell, particles)

        def run_particle(kick: Float[Array, " P"], start: PyTree) -> tuple[PyTree, Float[Array, "T width"]]:
            return _walk(model, params._replace(cell=unravel(theta + kick)), start, chunk)

        end, outputs = _walk(model, params, state.cell, chunk)
        ends, noisy_outputs = jax.vmap(run_particle)(kicks, starts)

        def losses(head: PyTree, outputs: Float[Array, "T width"]) -> Float[Array, " T"]:
            return jax.vmap(model.loss, in_axes=(None, 0, 0))(head, outputs, chunk.targets).astype(theta.dtype)

        def smoothed(head: PyTree) -> tuple[Float[Array, ""], Float[Array, "R T"]]:
            each = jax.vmap(losses, in_axes=(None, 0))(head, noisy_outputs)
            return jnp.sum(each) / particles, each

        head_grads, each = jax.grad(smoothed, has_aux=True)(params.head)
        # Of each pair first the difference, so that a constant in the loss is no noise, however large.
        differences = (each[:half] - each[half:]) / particles
        score = noise / shared.sigma
        grads, memory = jnp.sum(differences, axis=1) @ score, ()
        if accumulate:
            older = state.memory.score
            credit, begun = _before_resets(differences, chunk.reset)
            begins = None if chunk.reset is None else chunk.reset[0]
            grads += jnp.sum(credit, axis=1) @ cleared(begins, older)
            memory = Particles(ends, score + cleared(begun, older))
        told = {"particles": jnp.mean(each, axis=0), "spread": jnp.std(each, axis=0)}
        info = Info(losses(params.head, outputs), told, outputs)
        return Outcome(Params(unravel(grads), head_grads), EstimatorState(end, memory, shared), info)

    shown = sigma if isinstance(sigma, int | float) else None
    return estimator(
        Method(
            name="pes",
            options={"sigma": shown, "particles": particles, "accumulate": accumulate},
            model=model,
            init=init,
            run=per_stream(one),
            draw=draw,
            check=lambda chunk, length, key: source.check(key),
        )
    )


def _each(state: PyTree, count: int) -> PyTree:
    """The same state for each particle."""
    return jax.tree.map(lambda leaf: jnp.repeat(leaf[None], count, axis=0), state)


def _walk(model: Model, params: Params, start: PyTree, chunk: Chunk) -> tuple[PyTree, Float[Array, "T width"]]:
    """The state after a chunk, and the outputs at its steps: of one particle, or of the network without noise."""
    fresh = model.init_state(params)

    def step(state: PyTree, now: tuple) -> tuple[PyTree, Array]:
        x, reset = now
        state = transition(model, params, restart(reset, fresh, state), x)
        return state, model.cell.output(state)

    return jax.lax.scan(step, start, (chunk.inputs, chunk.reset))


def _before_resets(
    differences: Float[Array, "half T"], reset: Array | None
) -> tuple[Float[Array, "half T"], Array | None]:
    """The differences with zeros from the first reset on, whose losses owe nothing to older noise; and if there is one.

    Zeros are selected, since the state before a reset may have gone to NaN.
    """
    if reset is None:
        return differences, None
    begun = jax.lax.cummax(reset.astype(jnp.int32)) > 0
    return jnp.where(begun[None], 0, differences), begun[-1]
