"""The one way to write an estimator: a `Method`, which `streamgrad.estimator` checks, compiles and gives streams.

A method says how its memory begins, what noise it draws, and what becomes of gradient and memory when all streams of a
batch go through a chunk. Its `run` is a function to be read from top to bottom: it calls one pass through the chunk
(`streamgrad.engine.chunk`), or scans over its steps (`streamgrad.engine.by_steps`), and returns an `Outcome`.

Streams lead inside of `run`. `per_stream` makes a `run` of a function of one stream.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from streamgrad._typing import Array, Float, PyTree
from streamgrad.base import Chunk, EstimatorState, Info, Model, Params
from streamgrad.engine.collectives import Devices
from streamgrad.noise.groups import Groups
from streamgrad.noise.rescale import Rescaling


class Seen(NamedTuple):
    """States and gradients of a chunk, for `Method.learn`; of one stream with time leading.

    Attributes:
      state: h_t, ravelled.
      dl_dstate: dL_t/dh_t.
    """

    state: Float[Array, "*B T S"]
    dl_dstate: Float[Array, "*B T S"]


class Outcome(NamedTuple):
    """The result of a chunk.

    Attributes:
      grads: the gradient, summed over streams; of the function that `per_stream` maps, one stream's part of it.
      state: for the next chunk.
      info: losses `[B, T]`, diagnostics `[B, ...]` and the cell's outputs `[B, T, width]`.
      seen: for `Method.learn`, whatever it wants to know. Where nothing learns, the compiler drops it.
    """

    grads: PyTree
    state: EstimatorState
    info: Info
    seen: PyTree = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """An estimator before it is checked, compiled, and given streams and devices.

    Attributes:
      name: what it is called.
      options: its options by name, for `repr`; None is left out.
      model: the model as estimators work on it, from `streamgrad.base.worked`.
      init: `init(params) -> EstimatorState` of one stream.
      run: `run(params, state, chunk, noise, devices) -> Outcome` for all streams. Weights of the chunk are inside its
        targets, where `Model.loss` finds them. `devices` knows where streams are spread over a mesh.
      draw: `draw(shared, key, length, dtype) -> noise`, the noise of one stream for a chunk of `length` steps.
      check: `check(chunk, length, key)`, raises ValueError for input that this estimator in particular cannot take. It
        looks at shapes and dtypes alone, and is called once for each.
      learn: `learn(params, state before, outcome, chunk, devices) -> shared`, for statistics of the losses that all
        streams share; `update` calls it after `run`, `advance` does not. Shared state that needs no losses, or has to
        be known inside of the chunk, is returned by `run` itself. On several devices it must be the same on all of
        them: `devices.mean` makes it so.
      uses_loss: whether the estimator cannot `advance` before the losses are known: `memory` or `shared` depend on
        them in `run`, or the estimate is not linear in them, as with a prediction of the future.
      watchable: whether `run` takes a memory of fewer streams than there are, for `batched(est, n, watched=m)`.
      sharded_axes: `sharded_axes(memory) -> axes`, for each array of one stream the axis by which `sharded` may cut
        it, or -1 for an array that every device has whole; None where nothing can be cut.
      noisy: what of its noise `streamgrad.carried` may choose; None for nothing.

    Example:
      The gradient through the current step alone:

      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> def myopic(model):
      ...     model = sg.worked(model)
      ...     def init(params):
      ...         return sg.EstimatorState(model.init_state(params), (), ())
      ...     def advance(shared, memory, step, noise, dl_dstate):
      ...         return memory, {}
      ...     def contract(before, after, step, dl_dstate):
      ...         return step.backprop(dl_dstate)
      ...     run = sg.by_steps(model, model.cell.cuts["state"], init, advance, contract)
      ...     return sg.estimator(sg.Method(name="myopic", model=model, init=init, run=run))
      >>> model = sg.Model(sg.cells.gru(2, 4), sg.heads.softmax(3))
      >>> est = sg.batched(myopic(model), 8)
      >>> params = model.init(jax.random.key(0))
      >>> chunk = sg.Chunk(jnp.ones((8, 5, 2)), jnp.zeros((8, 5), int))
      >>> est.update(params, est.init(params), chunk)[2].loss.shape
      (8, 5)
    """

    name: str
    model: Model
    init: Callable[[Params], EstimatorState]
    run: Callable[[Params, EstimatorState, Chunk, PyTree, Devices], Outcome]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    draw: Callable[[PyTree, Any, int, Any], PyTree] = lambda shared, key, length, dtype: None
    check: Callable[[Chunk, int, Any], None] = lambda chunk, length, key: None
    learn: Callable[[Params, EstimatorState, Outcome, Chunk, Devices], PyTree] | None = None
    uses_loss: bool = False
    watchable: bool = False
    sharded_axes: Callable[[PyTree], PyTree] | None = None
    noisy: "Noisy | None" = None

    @property
    def label(self) -> str:
        """Name and options in a line."""
        shown = {option: value for option, value in self.options.items() if value is not None}
        words = [f"{o}=array{list(v.shape)}" if hasattr(v, "shape") else f"{o}={v!r}" for o, v in shown.items()]
        return f"{self.name}({', '.join(words)})"


class Noisy(NamedTuple):
    """The choices that an estimator's noise leaves, as `streamgrad.carried` makes them.

    Attributes:
      groups: the partition of its preactivations.
      shaped: whether its noise is spatial, and Q_0 shapes it.
      rescaled: `rescaled(rescaling) -> Method`, the same estimator with other coefficients. Its shared state is a
        `NoiseSettings`.
    """

    groups: Groups
    shaped: bool
    rescaled: Callable[[Rescaling], Method]


# The axes along which streams are mapped: all of the state but `shared`.
STREAMS = EstimatorState(cell=0, memory=0, shared=None)


def sum_over_streams(summands: PyTree) -> PyTree:
    """Add up along the leading axis.

    As a product with ones, since compilers fuse a plain sum with the computation of its terms, and then walk through
    memory stream by stream for each single entry.
    """

    def add(leaf: Array) -> Array:
        return jnp.tensordot(jnp.ones(len(leaf), leaf.dtype), leaf, axes=1, precision="highest")

    return jax.tree.map(add, summands)


def per_stream(
    one: Callable[[Params, EstimatorState, Chunk, PyTree], Outcome],
    total: Callable[[PyTree], Params] = sum_over_streams,
) -> Callable[..., Outcome]:
    """`Method.run` from a function of one stream.

    Args:
      one: `one(params, state, chunk, noise) -> Outcome`.
      total: the sum over streams of `Outcome.grads`, stacked along a leading axis. Where these are the factors of outer
        products, it is a single matrix product over all streams and steps.

    Returns:
      `run`.
    """

    def run(params: Params, state: EstimatorState, chunk: Chunk, noise: PyTree, devices: Devices) -> Outcome:
        del devices

        def single(state: EstimatorState, chunk: Chunk, noise: PyTree) -> tuple[Outcome, PyTree]:
            outcome = one(params, state, chunk, noise)
            return outcome._replace(state=outcome.state._replace(shared=None)), outcome.state.shared

        found, shared = jax.vmap(single, in_axes=(STREAMS, 0, 0), out_axes=(0, None))(state, chunk, noise)
        return found._replace(grads=total(found.grads), state=found.state._replace(shared=shared))

    return run


def as_batch(tree: PyTree) -> PyTree:
    """One stream as a batch of one: a leading axis of length 1."""
    return jax.tree.map(lambda leaf: leaf[None], tree)


def only_stream(tree: PyTree) -> PyTree:
    """The stream of a batch of one."""
    return jax.tree.map(lambda leaf: leaf[0], tree)


def watched_streams(state: EstimatorState) -> int:
    """How many streams have a memory, the first of all; all of them where there is nothing to remember."""
    leaves = jax.tree.leaves(state.memory) or jax.tree.leaves(state.cell)
    return leaves[0].shape[0]
