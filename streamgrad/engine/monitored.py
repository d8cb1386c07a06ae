"""An estimator that tells of each stream whether it is still finite."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from streamgrad.base import Chunk, EstimatorState, GradientEstimator, Params
from streamgrad.checks import check_estimator
from streamgrad.engine.collectives import ALONE, Devices
from streamgrad.engine.estimator import Engine, Result, Streams
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
    told = dataclasses.replace(est, update=_telling(est.update), label=f"monitored({est!r})")
    if not isinstance(est, Engine):
        return told

    def on(devices: Devices) -> Streams:
        streams = est.on(devices)
        return streams._replace(update=_telling(streams.update, devices))

    return dataclasses.replace(told, streams=on(ALONE), on=on, noisy=None)


def _telling(update: Callable[..., Result], devices: Devices = ALONE) -> Callable[..., Result]:
    """`update`, for one stream or many, whose losses tell which: `[T]` or `[B, T]`."""

    @jax.jit
    def finite(cell: Any, memory: Any, loss: Any) -> Any:
        if loss.ndim == 1:
            return finite_streams(jax.tree.map(lambda leaf: leaf[None], (cell, memory)), 1)[0]
        return devices.on_all_columns(finite_streams((cell, memory), len(loss)))

    def telling(params: Params, state: EstimatorState, chunk: Chunk, key: Any) -> Result:
        grads, state, info = update(params, state, chunk, key)
        flag = finite(state.cell, state.memory, info.loss)
        return grads, state, info._replace(diagnostics={**info.diagnostics, "finite": flag})

    telling.__doc__ = update.__doc__
    return telling
