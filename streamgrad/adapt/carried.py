"""Q_0 and α carried over from past windows, for any noisy estimator. The statistics are in `learner`.

A flag in the shared state says for each chunk whether what is carried over is used. Where that is Q_0 alone, Q_0 is the
identity until then. Where it is α as well, there are two methods of the same parts, the other one with GIR, and only
the chosen one is computed: once the statistics are used, GIR's norms cost nothing.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from streamgrad._typing import Array, PyTree
from streamgrad.adapt.averages import CarriedShared
from streamgrad.adapt.learner import Carry, Learner
from streamgrad.base import Chunk, EstimatorState, GradientEstimator, Params
from streamgrad.checks import check_choice, check_decay, check_estimator, check_size
from streamgrad.engine.collectives import Devices
from streamgrad.engine.estimator import Engine, estimator
from streamgrad.engine.method import Method, Noisy, Outcome
from streamgrad.noise.rescale import Rescaling, Scales, Terms, find_rescaling, given
from streamgrad.noise.settings import NoiseSettings
from streamgrad.noise.shaping import Shaping
from streamgrad.theory.optimal_q import check_damping


def carried(
    est: GradientEstimator,
    episode: int | None = None,
    window: int = 64,
    decay: float = 0.99,
    damping: float = 0.005,
    refresh: int = 10,
    streams: int | None = 1,
    least: int | None = None,
    q0: str | None = None,
    alpha: str | None = None,
) -> GradientEstimator:
    """A noisy estimator with Q_0 and α from what past windows have shown, in place of the identity and GIR.

    The paper's optimal Q_0 and α need the future of the very episode they are used in. But whatever Q_0 and α are, the
    gradient stays unbiased as long as they do not depend on the noise they shape. So B and C are estimated from *past*
    windows, by one reverse pass over a window of one stream (`streamgrad.adapt.window`), averaged exponentially,
    and used for the next. Until enough passes have been made, and whenever an average makes no sense, Q_0 is the
    identity and α is that of GIR. All of it is state.

    On endless streams only Q_0 is carried over, and GIR chooses γ and β. An α that does not look at the two factors
    cannot keep them balanced for ever: where γ ρ(dh/dh) > 1 the tangent grows without bound while the cotangent
    shrinks. The product stays unbiased, but its variance diverges.

    Args:
      est: `uoro` at the preactivations or `preuoro`, with their default `q0` and `rescale`. `preuoro` has no spatial
        noise to shape, and takes α alone.
      episode: T, where every episode has at most that many steps: α is then one number for each position in it, and the
        window is the chunk, which should be a whole episode. None for endless streams: the window is `window` steps.
      window: for streams, how many steps a reverse pass goes back. Chunks that are shorter are gathered until they fill
        it; influence from before the window is not seen.
      decay: of the averages, for each window. Fewer streams need a longer memory.
      damping: how much of the mean eigenvalue of B is added to all of them.
      refresh: after how many windows Q_0 and α are solved for again.
      streams: how many streams of a batch are watched, in turns; None for all.
      least: how many reverse passes before the averages are used; by default 16, or as many as an episode has steps.
      q0: "full" (a block for each group), "diagonal" (cheap where there are many preactivations), or "none"; by default
        full for episodes and diagonal for streams, where a full one gains no more and can lose.
      alpha: "optimal" (for episodes, their default), or one that looks at the two factors at every step: "gir" (the
        default for streams), or "greedy" (Appendix D).

    Returns:
      The estimator. Its diagnostics tell, as `carried`, whether what is carried over was in use, `[T]`. Only `update`
      learns, since it takes the losses to know B and C; `advance` and `credit` use what has been learnt.

    Example:
      >>> import streamgrad as sg
      >>> model = sg.Model(sg.cells.lstm(28, 50), sg.heads.softmax(10))
      >>> est = sg.batched(sg.carried(sg.uoro(model), episode=28), 50)
    """
    noisy = _noisy(est)
    q0 = q0 or ("none" if not noisy.shaped else "diagonal" if episode is None else "full")
    alpha = alpha or ("gir" if episode is None else "optimal")
    carry = Carry(episode, window, decay, damping, refresh, streams, least, q0, alpha)
    _check(carry, noisy)
    rescaling = given(np.ones(episode or 1)) if alpha == "optimal" else find_rescaling(alpha)
    usual = noisy.rescaled(rescaling)
    otherwise = noisy.rescaled(until_ready(rescaling)) if alpha == "optimal" else None
    learner = Learner(usual.model, noisy.groups, carry)

    def init(params: Params) -> EstimatorState:
        return usual.init(params)._replace(shared=learner.init(params))

    def draw(shared: CarriedShared, key: Any, length: int, dtype: Any) -> PyTree:
        return usual.draw(NoiseSettings(_shaping_in_use(shared), shared.alpha), key, length, dtype)

    run = switched(usual, otherwise)
    method = dataclasses.replace(usual, init=init, run=run, draw=draw, learn=learner.learn)
    label = f"carried({est!r}, {'window' if episode is None else 'episode'}={episode or window})"
    return dataclasses.replace(estimator(method), label=label)


def _noisy(est: GradientEstimator) -> Noisy:
    check_estimator(est)
    if not isinstance(est, Engine) or est.method.noisy is None:
        raise ValueError(
            "carried needs an estimator with noise at the preactivations, for one stream, with q0 and rescale left as "
            f"they are, since it chooses Q_0 and alpha by itself, not {est!r}: batched and monitored go around it."
        )
    return est.method.noisy


def _check(carry: Carry, noisy: Noisy) -> None:
    """Raises ValueError if the user's choices are wrong, or do not go together."""
    episode, q0, alpha = carry.episode, carry.q0, carry.alpha
    for name, value in (("episode", episode), ("streams", carry.streams), ("least", carry.least)):
        if value is not None:
            check_size(**{name: value})
    check_size(least=2, window=carry.window)
    check_size(refresh=carry.refresh)
    check_decay(carry.decay)
    check_damping(carry.damping)
    check_choice("q0", q0, ("full", "diagonal", "none"))
    check_choice("alpha", alpha, ("optimal", "gir", "greedy"))
    if alpha == "optimal" and episode is None:
        raise ValueError("alpha='optimal' has a value for each position in an episode: give episode, or alpha='gir'.")
    if not noisy.shaped and episode is None:
        raise ValueError("this estimator has no Q_0, and alpha can be carried over for episodes alone: give episode.")
    if q0 == "none" and alpha != "optimal":
        raise ValueError(f"with q0='none' and alpha={alpha!r} there is nothing to carry over: use rescale={alpha!r}.")
    if not noisy.shaped and q0 != "none":
        raise ValueError("this estimator has no spatial noise for a q0 to shape: leave q0 as it is.")


def until_ready(rescaling: Rescaling) -> Rescaling:
    """GIR, which keeps `rescaling`'s memory up to date while it stands in for it."""
    gir = find_rescaling("gir")

    def coefficients(alpha: PyTree, memory: PyTree, terms: Terms) -> tuple[Scales, Scales, PyTree]:
        past, present, _ = gir.coefficients(None, None, terms)
        return past, present, rescaling.coefficients(alpha, memory, terms)[2]

    return rescaling._replace(name="gir", coefficients=coefficients, uses_norms=True)


def switched(usual: Method, otherwise: Method | None) -> Callable[..., Outcome]:
    """`run` of one of two methods, by the flag in the shared state, which it passes through.

    Args:
      usual: with Q_0 and α.
      otherwise: with the identity and GIR; None where α is not carried over, and only Q_0 differs.

    Returns:
      `run`.
    """

    def run(params: Params, state: EstimatorState, chunk: Chunk, noise: PyTree, devices: Devices) -> Outcome:
        shared: CarriedShared = state.shared

        def branch(method: Method, shaping: Shaping | None) -> Callable[[EstimatorState], Outcome]:
            def run(state: EstimatorState) -> Outcome:
                inner = state._replace(shared=NoiseSettings(shaping, shared.alpha))
                outcome = method.run(params, inner, chunk, noise, devices)
                return outcome._replace(state=outcome.state._replace(shared=None))

            return run

        inner = state._replace(shared=None)
        if otherwise is None:
            outcome = branch(usual, _shaping_in_use(shared))(inner)
        else:
            outcome = jax.lax.cond(shared.ready, branch(usual, shared.shaping), branch(otherwise, None), inner)
        loss, diagnostics = outcome.info.loss, outcome.info.diagnostics
        flag = jnp.broadcast_to(shared.ready.astype(loss.dtype), loss.shape)
        info = outcome.info._replace(diagnostics={**diagnostics, "carried": flag})
        return outcome._replace(state=outcome.state._replace(shared=shared), info=info)

    return run


def _shaping_in_use(shared: CarriedShared) -> Shaping | None:
    """Q_0, which is the identity until it is carried over."""
    return jax.tree.map(lambda q: jnp.where(shared.ready, q, identity_like(q)), shared.shaping)


def identity_like(q0: Array) -> Array:
    """The identity as a matrix or as a diagonal."""
    return jnp.ones_like(q0) if q0.ndim == 1 else jnp.eye(len(q0), dtype=q0.dtype)
