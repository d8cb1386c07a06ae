"""The contract with a training loop: parameters, chunks of a stream, and what an estimator takes and returns."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from streamgrad._typing import Array, Bool, Float, PyTree
from streamgrad.step_loss import Weighted


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
      outputs: y_t, the cell's output at each step, which the loss was read from: what the network said while it
        learnt. `Model.predict(params, info.outputs)` is what the head made of it. None for estimators that do not
        report it.
    """

    loss: Float[Array, " T"]
    diagnostics: Mapping[str, Array]
    outputs: Float[Array, "T width"] | None = None


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


class Trace(NamedTuple):
    """A chunk that `advance` went over, for `credit` to go over again.

    Attributes:
      before: the state that it began with.
      inputs: as in `Chunk`.
      reset: likewise.
      key: as in `update`.
    """

    before: EstimatorState
    inputs: PyTree
    reset: Array | None
    key: Any


def _no_advance(params: Params, state: EstimatorState, inputs: PyTree, key: Any = None, reset: Any = None) -> Any:
    raise ValueError("this estimator has no advance: it was made of init and update alone.")


def _no_credit(params: Params, trace: Trace, dl_doutput: Array) -> Any:
    raise ValueError("this estimator has no credit: it was made of init and update alone.")


UNNAMED = "GradientEstimator(init, update)"  # the label of an estimator from elsewhere

# What `help` says of an estimator's functions.
HELP = {
    "init": """The state at the beginning of a stream, or of all streams of a batch.

    Args:
      params: from `model.init(key)`.

    Returns:
      An `EstimatorState`: pass it to the first `update` or `advance`.
    """,
    "update": """The gradient of a chunk's loss, and the state for the next chunk.

    Args:
      params: the parameters.
      state: from `init`, or from the update before.
      chunk: `Chunk(inputs, targets, reset, weight)`, `[T, ...]`, or `[B, T, ...]` for the B streams of a batch.
      key: of the noise; estimators that have none need none.

    Returns:
      `(grads, state, info)`. `grads` is like `params`: the gradient of the loss, summed over time; of a batch, the mean
      over streams. `info` has the loss of every step, `info.loss`, what the network said, `info.outputs`, and
      diagnostics.
    """,
    "advance": """The first half of `update`: network and influence move on, before any loss is known.

    Args:
      params: the parameters.
      state: from `init`, or from the chunk before.
      inputs: `[T, ...]`, or `[B, T, ...]` for the B streams of a batch.
      key: of the noise; estimators that have none need none.
      reset: where episodes begin, or None.

    Returns:
      `(output, state, trace)`: the cell's output at every step, the state for the next chunk, and a trace of this one
      for `credit`.
    """,
    "credit": """The second half of `update`: the gradient of the cell's parameters for any gradient at the output.

    Args:
      params: the parameters that `advance` was given.
      trace: that `advance` returned.
      dl_doutput: dL/dy_t, of the output's shape.

    Returns:
      A gradient like `params.cell`; of a batch, the mean over streams. `batched` and `sharded` have `per_stream=True`
      for each stream's own.
    """,
}


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class GradientEstimator:
    """The whole contract with a training loop.

    `advance` and `credit` are the two halves of `update`, for those who act on the output before they know the loss:

        output, state, trace = advance(params, state, inputs, key)
        grads = credit(params, trace, dl_doutput)    # Σ_t (dL_t/dy_t) (dy_t/dθ), y_t the cell's output

    Attributes:
      init: `init(params) -> state`, the state at the beginning of a stream.
      update: `update(params, state, chunk, key=None) -> (grads, state, info)`. `grads` is like `params`: the gradient
        of the chunk's loss, summed over time. A key may always be passed; estimators without noise ignore it.
      advance: `advance(params, state, inputs, key=None, reset=None) -> (output, state, trace)`. The network and the
        estimator's memory move on over the inputs of a chunk, as in `update`; `output` is y_t, `[T, width]`.
      credit: `credit(params, trace, dl_doutput) -> grads`, like `params.cell`, for any gradient `[T, width]` at the
        output of the chunk that the trace is of. Now or later, as often as you like. It goes over the chunk once more,
        with the parameters it is given; pass those of `advance`.
      label: how it was made, in a line; `repr` shows it.

    Example:
      An eligibility trace, e_t = 0.9 e_{t-1} + dV_t/dθ, of a value that the head reads from the output:

      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.gru(2, 4), sg.heads.squared_error(1))
      >>> params, est = model.init(jax.random.key(0)), sg.rtrl(model)
      >>> def step(carry, x):
      ...     state, eligibility = carry
      ...     output, state, trace = est.advance(params, state, x[None])
      ...     dv_doutput = jax.grad(lambda y: model.head.predict(params.head, y)[0])(output[0])
      ...     grads = est.credit(params, trace, dv_doutput[None])
      ...     eligibility = jax.tree.map(lambda e, g: 0.9 * e + g, eligibility, grads)
      ...     return (state, eligibility), output[0]
      >>> zero = jax.tree.map(jnp.zeros_like, params.cell)
      >>> (state, eligibility), outputs = jax.lax.scan(step, (est.init(params), zero), jnp.ones((5, 2)))
      >>> outputs.shape, eligibility["gates"].shape
      ((5, 4), (8, 7))
    """

    init: Callable[[Params], EstimatorState]
    update: Callable[..., tuple[Params, EstimatorState, Info]]
    advance: Callable[..., tuple[Array, EstimatorState, Trace]] = _no_advance
    credit: Callable[..., PyTree] = _no_credit
    label: str = dataclasses.field(default=UNNAMED, kw_only=True)

    def __post_init__(self) -> None:
        """Give the library's own functions the contract's words: `help(est.update)` is for users."""
        for name, text in HELP.items() if self.label != UNNAMED else ():
            function = getattr(self, name)
            if inspect.isfunction(function) and function.__doc__ is None:
                function.__doc__, function.__name__, function.__qualname__ = text, name, name

    def __repr__(self) -> str:
        return self.label


def fold_weight(chunk: Chunk) -> Chunk:
    """The chunk with its weights among the targets, where `Model.loss` finds them."""
    if chunk.weight is None:
        return chunk
    return chunk._replace(targets=Weighted(chunk.targets, chunk.weight), weight=None)
