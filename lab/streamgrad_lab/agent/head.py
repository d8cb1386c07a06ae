"""The read-out of an agent: a policy and a value."""

import jax
import jax.numpy as jnp

from streamgrad import Head, heads
from streamgrad._typing import Array, Float, PyTree
from streamgrad.checks import check_size


def actor_critic_head(n_actions: int) -> Head:
    """A head that reads a policy and a value: logits = W y + b, V = w · y + c. It begins near the even policy.

    Args:
      n_actions: how many there are.

    Returns:
      The head. It predicts `(logits[n_actions], value)`. A target is a pair of an action and the return that followed,
      and the loss -(return - V) log π(action) + (return - V)² / 2, where V is held fixed in the first term.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> head = actor_critic_head(3)
      >>> params = head.init_params(jax.random.key(0), 5)
      >>> logits, value = head.predict(params, jnp.zeros(5))
      >>> logits.tolist(), float(value)
      ([0.0, 0.0, 0.0], 0.0)
    """
    check_size(n_actions=n_actions)

    def init_params(key: Array, width: int) -> PyTree:
        # Small, as a policy that is sure of itself before it has seen anything explores badly.
        return {"w": 0.01 * jax.random.normal(key, (n_actions + 1, width)), "b": jnp.zeros(n_actions + 1)}

    def predict(params: PyTree, output: Array) -> tuple[Float[Array, " n"], Float[Array, ""]]:
        read = params["w"] @ output + params["b"]
        return read[:-1], read[-1]

    def loss(params: PyTree, output: Array, target: tuple[Array, Array]) -> Array:
        logits, value = predict(params, output)
        gap = target[1] - value
        return -jax.lax.stop_gradient(gap) * jax.nn.log_softmax(logits)[target[0]] + gap**2 / 2

    return heads.from_function(init_params, loss, predict)
