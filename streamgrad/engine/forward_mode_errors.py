"""Functions that can only be differentiated backwards: which of them stand in a cell, when forward mode fails."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend.core import primitives

from streamgrad.base import Model, widened


def naming_reverse_only(model: Model, run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, which says in a sentence what to do where a step cannot be differentiated forwards.

    A `jax.custom_vjp` has no rule for forward mode, and JAX does not say which function it was.

    Args:
      model: the model.
      run: as in `streamgrad.Method`.

    Returns:
      The same function.
    """

    @functools.wraps(run)
    def named(params: Any, state: Any, chunk: Any, noise: Any, devices: Any) -> Any:
        try:
            return run(params, state, chunk, noise, devices)
        except TypeError as error:
            if "custom_vjp" not in str(error):
                raise
            x = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[2:], leaf.dtype), chunk.inputs)
            step = jax.make_jaxpr(model.cell.step)(widened(params).cell, model.init_state(params), x)
            found = sorted(set(_names(step)))
            raise ValueError(
                f"the cell's step cannot be differentiated forwards, for it has no rule for {', '.join(found)}: use "
                "jax.custom_jvp for it in place of jax.custom_vjp, or an estimator that only goes backwards, such as "
                "rtrl."
            ) from error

    return named


def _names(closed: Any) -> Iterator[str]:
    """The custom_vjp functions in a jaxpr."""
    for equation in getattr(closed, "jaxpr", closed).eqns:
        if equation.primitive is primitives.custom_vjp_call_p:
            inside = equation.params["call_jaxpr"]
            yield getattr(inside, "jaxpr", inside).debug_info.func_name
        for value in jax.tree.leaves(equation.params, is_leaf=lambda value: hasattr(value, "eqns")):
            if hasattr(value, "eqns"):
                yield from _names(value)
