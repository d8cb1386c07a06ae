"""The contract with a training loop: parameters, chunks of a stream, and what an estimator takes and returns."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from streamgrad._typing import Array, Bool, Float, PyTree
from streamgrad.targets import Weighted


class Params(NamedTuple):
    """Parameters of a model: `cell` (θ, the recurrent ones) and `head` (those of the read-out)."""

    cell: PyTree
    head: PyTree


class Chunk(NamedTuple):
    """A stretch of a stream; every leaf has time, at least one step of it, as its leading axis.

    Attributes:
      inputs: x_t, a pytree of `[T, ...]`.
      targets: what the head compares its prediction with, a pytree of `[T, ...]`.
      reset: where true, the step begins an episode: state, tangent and cotangent start again *before* it.
      weight: of the loss at each step, any real numbers; None weighs all alike, by 1. Where it is 0 the step does not
        count, and its target may be anything, such as NaN or a class of -1. The network still reads its input.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.gru(2, 4), sg.heads.softmax(3))
      >>> params, est = model.init(jax.random.key(0)), sg.rtrl(model)
      >>> padded = sg.Chunk(jnp.ones((4, 2)), jnp.array([0, 2, -1, -1]), weight=jnp.array([1.0, 0.5, 0.0, 0.0]))
      >>> est.update(params, est.init(params), padded, None)[2].loss[2:].tolist()
      [0.0, 0.0]
    """

    inputs: PyTree
    targets: PyTree
    reset: Bool[Array, " T"] | None = None
    weight: Float[Array, " T"] | None = None


class Info(NamedTuple):
    """What an update tells about itself, and the next one does not need.

    Attributes:
      loss: L_t, one per step, times its weight: what is differentiated is their sum.
      diagnostics: by name, arrays with time as leading axis, such as UORO's `gamma` and `beta`.
    """

    loss: Float[Array, " T"]
    diagnostics: Mapping[str, Array]


class EstimatorState(NamedTuple):
    """What the next update needs.

    Attributes:
      cell: h_t, the whole recurrent state (for an LSTM: h and c).
      memory: what the estimator remembers of the stream's past, such as UORO's tangent and cotangent.
      shared: what all streams of a batch have in common, such as Q_0 and α. Without a batch axis under `batched`.
    """

    cell: PyTree
    memory: PyTree
    shared: PyTree


@dataclasses.dataclass(frozen=True, eq=False)
class GradientEstimator:
    """The whole contract with a training loop.

    Attributes:
      init: `init(params) -> state`, the state at the beginning of a stream.
      update: `update(params, state, chunk, key) -> (grads, state, info)`. `grads` is like `params`: the gradient of
        the chunk's loss, summed over time. `key` is always passed, and ignored by those that need none.
    """

    init: Callable[[Params], EstimatorState]
    update: Callable[[Params, EstimatorState, Chunk, Any], tuple[Params, EstimatorState, Info]]


def fold_weight(chunk: Chunk) -> Chunk:
    """The chunk with its weights among the targets, where `Model.loss` finds them."""
    if chunk.weight is None:
        return chunk
    return chunk._replace(targets=Weighted(chunk.targets, chunk.weight), weight=None)
