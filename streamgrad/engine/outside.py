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

from streamgrad._typing import PyTree
from streamgrad.base import Model, Params
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

    def entering(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(params: Params, *rest: Any, **named: Any) -> Any:
            check(params)
            return function(enter(params), *rest, **named)

        return call

    def updating(update: Callable[..., Any]) -> Callable[..., Any]:
        def call(params: Params, *rest: Any) -> Any:
            check(params)
            grads, state, info = update(enter(params), *rest)
            return grads._replace(cell=back(params.cell, grads.cell)), state, info

        return call

    def crediting(credit: Callable[..., PyTree], each: bool = False) -> Callable[..., PyTree]:
        def call(params: Params, *rest: Any) -> PyTree:
            check(params)
            grads = credit(enter(params), *rest)
            return jax.vmap(back, in_axes=(None, 0))(params.cell, grads) if each else back(params.cell, grads)

        return call

    streams = engine.streams
    return dataclasses.replace(
        engine,
        init=entering(engine.init),
        update=updating(engine.update),
        advance=entering(engine.advance),
        credit=crediting(engine.credit),
        model=model,
        streams=streams._replace(
            update=updating(streams.update),
            advance=entering(streams.advance),
            credit=crediting(streams.credit),
            credit_each=crediting(streams.credit_each, each=True),
        ),
    )
