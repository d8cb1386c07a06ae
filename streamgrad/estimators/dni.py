"""DNI: what the future will ask of the state at the chunk's end is predicted, by synthetic gradients learnt online."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from streamgrad._typing import Array, Float
from streamgrad.base import Chunk, EstimatorState, GradientEstimator, Model, Params, worked
from streamgrad.checks import check_arguments, check_number
from streamgrad.engine.across import finish
from streamgrad.engine.chunk import go_back, go_forward
from streamgrad.engine.collectives import Devices
from streamgrad.engine.estimator import estimator
from streamgrad.engine.method import Method, Outcome
from streamgrad.trees import cleared, finite_streams, is_real, kind_of


class Predictor(NamedTuple):
    """The prediction of dL_future/dh, which all streams share: A φ(h), with 1 as the last entry of φ.

    Attributes:
      weights: A.
    """

    weights: Float[Array, "S F"]


def _identity(vector: Array) -> Array:
    return vector


def dni(
    model: Model,
    learning_rate: float | int = 0.1,
    discount: float | int = 1,
    features: Callable[[Array], Array] | None = None,
) -> GradientEstimator:
    """Backpropagation in the chunk, and beyond its end a learnt prediction of the gradient that the future will send.

        ĝ = d/dθ (Σ_t L_t + s(h_K) · h_K),    s(h) = λ A φ(h), held constant,    φ(h) = (h, 1)

    Credit goes to the chunk's own steps for losses of the chunk and, by way of s, for all that come after it.
    What other estimators remember of the past, this one expects of the future: no step is ever gone through
    again, and memory does not depend on how far credit goes. A is learnt from chunk to chunk. At the chunk's beginning,
    A φ(h_0) should have been

        y = dL_chunk/dh_0 + s(h_K) (dh_K/dh_0)

    which the same reverse pass leaves there, and with means over streams

        A ← A - η mean((A φ(h_0) - y) φ(h_0)^T) / mean(‖φ(h_0)‖²)

    as in temporal-difference learning, with which it shares that it need not converge. Where A φ cannot express
    what the future sends, or lags behind parameters that change, the gradient is biased. An episode that begins in the
    chunk cuts both: y is what flows back from before it.

    Args:
      model: the model whose gradients are estimated.
      learning_rate: η, between 0 and 2. The step is normalised, so that it fits states of any size.
      discount: λ, from 0 to 1: how much the prediction counts. Below 1 it forgets what lies far ahead, and is stabler;
        with 0 this is `bptt` of each chunk.
      features: `features(h) -> vector`, what the prediction is linear in, of the ravelled state; 1 is appended.
        None for the state itself. Counters, masks and random keys in the state are left out of h.

    Returns:
      The estimator. It costs what `bptt` does, and S F for the prediction, once per chunk. `state.shared` is the
      `Predictor`, which under `batched` all streams have in common. Its diagnostics, both `[1]`, are the norms of the
      prediction at the chunk's end, `predicted`, and of the error of that at its beginning, `missed`. As it learns from
      losses, it cannot `advance` before they are known.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.gru(2, 4), sg.heads.softmax(3))
      >>> params = model.init(jax.random.key(0))
      >>> est = sg.batched(sg.dni(model), 8)
      >>> chunk = sg.Chunk(jnp.ones((8, 5, 2)), jnp.zeros((8, 5), int))
      >>> grads, state, info = est.update(params, est.init(params), chunk)
      >>> state.shared.weights.shape, info.diagnostics["missed"].shape
      ((4, 5), (8, 1))

    References:
      Jaderberg et al., Decoupled neural interfaces using synthetic gradients, 2017.
      Czarnecki et al., Understanding synthetic gradients and decoupled neural interfaces, 2017.
      Marschall, Cho and Savin, A unified framework of online learning algorithms for training recurrent neural
      networks, 2020.
    """
    model = worked(model)
    check_number(learning_rate=learning_rate, discount=discount)
    if not 0 < learning_rate < 2:
        raise ValueError(
            f"learning_rate must be above 0 and below 2, where a normalised step goes too far, not {learning_rate!r}."
        )
    if not 0 <= discount <= 1:
        raise ValueError(f"discount must be a number from 0 to 1, not {discount!r}.")
    read = _of_numbers(model, _identity if features is None else features)
    width = _width(model, read)
    rate, weight = float(learning_rate), float(discount)

    def init(params: Params) -> EstimatorState:
        state = model.init_state(params)
        vector = ravel_pytree(state)[0]
        return EstimatorState(state, (), Predictor(jnp.zeros((vector.size, width + 1), vector.dtype)))

    def described(vectors: Float[Array, "B S"]) -> Float[Array, "B F"]:
        found = jax.vmap(read)(vectors).astype(vectors.dtype)
        return jnp.concatenate([found, jnp.ones((len(found), 1), found.dtype)], axis=1)

    def run(params: Params, state: EstimatorState, chunk: Chunk, noise: None, devices: Devices) -> Outcome:
        del noise, devices
        forward = go_forward(model, params, state.cell, chunk)
        start = jax.vmap(lambda cell: ravel_pytree(cell)[0])(state.cell)
        weights = state.shared.weights.T
        predicted = described(forward.end) @ weights
        back = go_back(forward, params.cell, future=weight * predicted)
        missed = described(start) @ weights - back.dl_dstart
        told = {
            "predicted": jnp.linalg.norm(predicted, axis=1)[:, None],
            "missed": jnp.linalg.norm(missed, axis=1)[:, None],
        }
        outcome = finish(model, params, forward, back.inside, (), state.shared, told)
        return outcome._replace(seen=(missed, described(start)))

    def learn(params: Params, before: EstimatorState, outcome: Outcome, chunk: Chunk, devices: Devices) -> Predictor:
        del params, chunk
        missed, known = outcome.seen
        # All streams share A: one whose state has gone to NaN, or came from there, must not take it along.
        missed, known = cleared(~finite_streams((missed, known), len(known)), (missed, known))
        step, size = devices.mean((jnp.einsum("bs,bf->sf", missed, known), jnp.sum(known**2)))
        return Predictor(before.shared.weights - rate * step / jnp.where(size > 0, size, 1))

    options = {"learning_rate": learning_rate, "discount": discount}
    return estimator(Method(name="dni", options=options, model=model, init=init, run=run, learn=learn, uses_loss=True))


def _of_numbers(model: Model, features: Any) -> Callable[[Array], Array]:
    """The features of what are numbers in the state: digits of a counter or a key are large and mean nothing."""
    check_arguments("features", features, "h")
    if model.numbers.all():
        return features
    known = np.flatnonzero(model.numbers)
    return lambda vector: features(vector[known])


def _width(model: Model, features: Callable[[Array], Array]) -> int:
    """The number of features."""
    found = jax.eval_shape(lambda: features(ravel_pytree(model.cell.init_state())[0]))
    if getattr(found, "ndim", None) != 1 or not is_real(found.dtype):
        raise ValueError(f"features must return one vector of real numbers, not {kind_of(found)}.")
    return found.shape[0]
