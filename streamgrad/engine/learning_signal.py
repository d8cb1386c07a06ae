"""What is sent to the units as a learning signal: the gradient of the loss, or errors through fixed random weights."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from streamgrad._typing import Array, Float, PyTree
from streamgrad.base import Model, Params
from streamgrad.checks import check_choice, check_size
from streamgrad.engine.row_influence import Signal
from streamgrad.step_loss import Credit

FEEDBACKS = ("symmetric", "random")


def find_feedback(name: str, model: Model, feedback: str, seed: int) -> Signal | None:
    """The signal of this name.

        symmetric: dL_t/dy_t,    random: B^T (dL_t/do_t),    o_t = W y_t + b the head's preactivation

    Args:
      name: of the estimator, for errors.
      model: the model; for random feedback its head has parameters "w" and "b", as those of this library have.
      feedback: "symmetric", or "random": B in place of W, drawn once from a normal distribution with the variance that
        W begins with.
      seed: of B.

    Returns:
      The signal; None for the gradient itself.
    """
    check_choice("feedback", feedback, FEEDBACKS)
    check_size(least=0, seed=seed)
    if feedback == "symmetric":
        return None
    head = jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.key(0))).head
    known = isinstance(head, dict) and {"w", "b"} <= set(head) and head["w"].shape == (*head["b"].shape, model.width)
    if not known:
        raise ValueError(f"{name}(feedback='random') needs a head with parameters 'w' and 'b', such as heads.softmax.")
    shape = head["w"].shape

    def signal(
        params: Params, states: Float[Array, "K B S"], targets: PyTree, dl_dstate: Float[Array, "K B S"]
    ) -> Float[Array, "K B S"]:
        if isinstance(targets, Credit):  # the signal is given already
            return dl_dstate
        unravel = ravel_pytree(model.init_state(params))[1]
        b = random_weights(seed, shape, states.dtype)

        def one(vector: Array, target: PyTree) -> Array:
            output, back = jax.vjp(lambda vector: model.cell.output(unravel(vector)), vector)

            def loss(bias: Array) -> Array:
                return jnp.asarray(model.loss(params.head | {"b": bias}, output, target), vector.dtype)

            return back(jax.grad(loss)(params.head["b"]).astype(b.dtype) @ b)[0]

        return jax.vmap(jax.vmap(one))(states, targets)

    return signal


def random_weights(seed: int, shape: tuple[int, int], dtype: Any) -> Float[Array, "n width"]:
    """B: the same for the same seed."""
    return jnp.asarray(jax.random.normal(jax.random.key(seed), shape, jnp.float32), dtype) / shape[1] ** 0.5
