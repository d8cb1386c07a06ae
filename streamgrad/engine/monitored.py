"""An estimator that tells of each stream whether it is still finite."""

import dataclasses
from typing import Any

import jax

from streamgrad._typing import PyTree
from streamgrad.base import Chunk, EstimatorState, GradientEstimator, Info, Params
from streamgrad.checks import check_estimator
from streamgrad.engine.collectives import Devices
from streamgrad.engine.estimator import Engine, Result, estimator
from streamgrad.engine.method import Outcome, as_batch
from streamgrad.trees import finite_streams


def monitored(est: GradientEstimator) -> GradientEstimator:
    """The same estimator, with a flag in `info.diagnostics["finite"]`: whether a stream's state and memory are finite.

    A network may overflow, and so may an influence while the state of the network stays bounded. What is not finite
    stays so until the stream begins an episode: a reset clears everything. So a loop can begin a stream again that has
    gone, while the others go on; give what it returns to `optax.apply_if_finite`, for the mean is not finite then.

    Args:
      est: for one stream or for many: `monitored(batched(est, 16))` and `batched(monitored(est), 16)` are the same. It
        goes around `carried`, not into it.

    Returns:
      The estimator. The flag is a bool, and under `batched` and `sharded` one for each stream, `[B]`. Inside of
      `jax.jit` it is only computed where it is read; outside it costs one pass over the memory.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.vanilla(2, 3), sg.heads.squared_error(1))
      >>> params = model.init(jax.random.key(0))
      >>> est = sg.monitored(sg.batched(sg.rtrl(model), 2))
      >>> state = est.init(params)
      >>> state = state._replace(cell=state.cell.at[1].set(jnp.nan))
      >>> chunk = sg.Chunk(jnp.ones((2, 4, 2)), jnp.ones((2, 4, 1)))
      >>> grads, state, info = est.update(params, state, chunk, None)
      >>> info.diagnostics["finite"].tolist()
      [True, False]
      >>> again = jnp.zeros((2, 4), bool).at[:, 0].set(~info.diagnostics["finite"])
      >>> grads, state, info = est.update(params, state, chunk._replace(reset=again), None)
      >>> info.diagnostics["finite"].tolist()
      [True, True]
    """
    check_estimator(est)
    label = f"monitored({est!r})"
    if isinstance(est, Engine):
        method = est.method

        def run(params: Params, state: EstimatorState, chunk: Chunk, noise: PyTree, devices: Devices) -> Outcome:
            outcome = method.run(params, state, chunk, noise, devices)
            return outcome._replace(info=_flagged(outcome.state, outcome.info))

        new = estimator(dataclasses.replace(method, run=run, noisy=None))
        return dataclasses.replace(new, label=label)

    def update(params: Params, state: EstimatorState, chunk: Chunk, key: Any = None) -> Result:
        grads, state, info = est.update(params, state, chunk, key)
        return grads, state, flagged(state, info)

    flagged = jax.jit(_flagged)
    return dataclasses.replace(est, update=update, label=label)


def _flagged(state: EstimatorState, info: Info) -> Info:
    """`info` with the flag, for one stream or many: the shape of its losses, `[T]` or `[B, T]`, tells which."""
    parts = (state.cell, state.memory)
    one = info.loss.ndim == 1
    flag = finite_streams(as_batch(parts), 1)[0] if one else finite_streams(parts, len(info.loss))
    return info._replace(diagnostics={**info.diagnostics, "finite": flag})
