"""The noise settings that all streams of an estimator share, and the one way to change them."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from streamgrad._typing import Array
from streamgrad.base import EstimatorState
from streamgrad.checks import check_state, is_traced
from streamgrad.noise.rescale import check_alpha
from streamgrad.noise.shaping import Shaping, check_q0, shaping


class Shrinkage(NamedTuple):
    """Running averages of the correction c̄ for the past before the chunk, averaged over streams.

    Attributes:
      signal: ‖E c̄‖², estimated as ‖c̄‖² less the variance that the spread over the streams shows.
      square: ‖c̄‖².
    """

    signal: Array
    square: Array


class NoiseSettings(NamedTuple):
    """The shared state of a noisy estimator; each part is None where it has none.

    Attributes:
      shaping: Q_0 and its inverse.
      alpha: α for each position and group, `[T, G]`.
      sigma: σ of REINFORCE.
      updates: the number of updates so far, where σ follows a schedule.
      shrinkage: what `shrink="auto"` of `uoro_across` has learnt.
    """

    shaping: Shaping | None = None
    alpha: Array | None = None
    sigma: Array | None = None
    updates: Array | None = None
    shrinkage: Shrinkage | None = None


def with_noise(state: EstimatorState, q0: Any = None, alpha: Any = None, sigma: Any = None) -> EstimatorState:
    """The state with another Q_0, α or σ for the next updates, without a new trace.

    The estimate stays unbiased: what the past has added was shaped and rescaled on both sides alike.

    Args:
      state: of a noisy estimator, or of a batched one, whose streams share these.
      q0: Q_0, of the shape that the estimator was made with; or a `Shaping`, where its inverse is known.
      alpha: α, likewise; `[T]` for all groups alike.
      sigma: σ of `reinforce`, where it follows no schedule.

    Returns:
      The state. What is None stays as it is.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.gru(2, 4), sg.heads.softmax(3))
      >>> state = sg.uoro(model, q0=jnp.ones(16)).init(model.init(jax.random.key(0)))
      >>> sg.with_noise(state, q0=2 * jnp.ones(16)).shared.shaping.inverse[0].item()
      0.5
    """
    check_state(state)
    now = state.shared
    if not isinstance(now, NoiseSettings):
        raise ValueError(
            "with_noise needs the state of a noisy estimator, whose Q_0, alpha or sigma nothing else chooses."
        )
    if q0 is not None:
        present = _present("q0", None if now.shaping is None else now.shaping.q0)
        if not isinstance(q0, Shaping):
            check_q0(q0, len(present))
            q0 = shaping(q0, present.dtype)
        assert q0 is not None
        _check_shape("q0", q0.q0, present.shape)
        now = now._replace(shaping=q0)
    if alpha is not None:
        present = _present("alpha", now.alpha)
        check_alpha(alpha)
        values = jnp.asarray(alpha, present.dtype)
        values = jnp.repeat(values[:, None], present.shape[1], axis=1) if values.ndim == 1 else values
        _check_shape("alpha", values, present.shape)
        now = now._replace(alpha=values)
    if sigma is not None:
        present = _present("sigma", now.sigma)
        if now.updates is not None:
            raise ValueError("this sigma follows a schedule, which would set it again.")
        check_sigma("sigma", sigma, present.dtype)
        now = now._replace(sigma=jnp.asarray(sigma, present.dtype))
    return state._replace(shared=now)


def check_sigma(name: str, sigma: Any, dtype: Any = None) -> None:
    """σ is one positive, finite number, also in `dtype`, as far as that is known."""
    if is_traced(sigma):
        good = sigma.shape == ()
    else:
        value = np.asarray(sigma)
        good = value.shape == () and value.dtype.kind in "fiu" and bool(np.isfinite(value))
        good = good and bool(value.astype(value.dtype if dtype is None else dtype) > 0)
    if not good:
        raise ValueError(f"{name} must be one positive, finite number, not {sigma!r}.")


def _present(name: str, value: Array | None) -> Array:
    if value is None:
        raise ValueError(f"this state has no {name} to replace: give the estimator one when you make it.")
    return value


def _check_shape(name: str, value: Any, shape: tuple[int, ...]) -> None:
    if jnp.shape(value) != shape:
        raise ValueError(f"{name} must keep the shape {shape} of the estimator's own, not {jnp.shape(value)}.")
