"""An estimator for parameters of any kind, from one for the matrices that they make.

    dL/dθ = (dL/dW) (dW/dθ)

The matrices W are a function of the parameters θ. An influence is kept of W, and a gradient goes back to θ once per
chunk. For parameters that stay as they are that is the chain rule; while they change, θ takes the place of the
parameters the past was made with, as it does everywhere in online learning.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from streamgrad._typing import Array, PyTree
from streamgrad.base import Chunk, EstimatorState, Info, Model, Params
from streamgrad.trees import check_like, check_numbers, kind_of, once_per_shape


def from_outside(model: Model, engine: Any) -> Any:
    """The estimator of a model whose cell is given in another form than it is worked on.

    Args:
      model: the model.
      engine: an `Engine` of `model.inner`.

    Returns:
      The `Engine` of the model: it takes its parameters, and its gradients are like them.
    """
    worked = model.given.worked
    assert worked is not None
    expected = jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.key(0)))

    @once_per_shape
    def check(params: Any) -> None:
        if not isinstance(params, Params):
            raise ValueError(f"params must be what model.init(key) returns, not {kind_of(params)}.")
        check_numbers("params.cell", params.cell)
        check_like("params", expected, params, "the model's own")

    enter = jax.jit(model.enter)

    @jax.jit
    def back(params: PyTree, grads: PyTree) -> PyTree:
        return jax.vjp(worked.weights, params)[1](grads)[0]

    def init(params: Params) -> EstimatorState:
        check(params)
        return engine.init(enter(params))

    def updating(inner: Callable[..., Any]) -> Callable[..., Any]:
        def update(
            params: Params, state: EstimatorState, chunk: Chunk, key: Any
        ) -> tuple[Params, EstimatorState, Info]:
            check(params)
            grads, state, info = inner(enter(params), state, chunk, key)
            return grads._replace(cell=back(params.cell, grads.cell)), state, info

        return update

    def advancing(inner: Callable[..., Any]) -> Callable[..., Any]:
        def advance(
            params: Params, state: EstimatorState, inputs: PyTree, key: Any, reset: Array | None = None
        ) -> tuple[Array, EstimatorState]:
            check(params)
            return inner(enter(params), state, inputs, key, reset)

        return advance

    def crediting(inner: Callable[..., PyTree], each: bool = False) -> Callable[..., PyTree]:
        def credit(params: Params, state: EstimatorState, dl_doutput: Array) -> PyTree:
            check(params)
            grads = inner(enter(params), state, dl_doutput)
            return jax.vmap(back, in_axes=(None, 0))(params.cell, grads) if each else back(params.cell, grads)

        return credit

    def spread(columns: Any) -> Any:
        inner = engine.columns(columns)
        return inner._replace(init=lambda params: inner.init(enter(params)))

    def around(streams: Any) -> Any:
        return streams._replace(
            update=updating(streams.update),
            advance=advancing(streams.advance),
            credit=crediting(streams.credit),
            credit_each=crediting(streams.credit_each, each=True),
        )

    return dataclasses.replace(
        engine,
        init=init,
        update=updating(engine.update),
        advance=advancing(engine.advance),
        credit=crediting(engine.credit),
        model=model,
        streams=around(engine.streams),
        on=lambda devices: around(engine.on(devices)),
        columns=spread if engine.columns else None,
    )
