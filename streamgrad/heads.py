"""Read-outs with their losses. A head reads the cell's output and learns its width from it."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from streamgrad._typing import Array, Float, PyTree
from streamgrad.base import Head, work_dtype
from streamgrad.checks import accepts, check_arguments, check_callable, check_size


def softmax(n_classes: int) -> Head:
    """Classification: L_t = -log softmax(w y + b)[target], where y is the cell's output.

    Args:
      n_classes: at least 2.

    Returns:
      A head whose targets are whole numbers from 0 to n_classes - 1, one per step. Any other number is an error where
      the targets are on the host; on an accelerator, and inside `jax.jit`, it makes the loss NaN, rather than silently
      that of some other class. It predicts the probability of every class, `[n_classes]`.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> head = sg.heads.softmax(4)
      >>> zero = jax.tree.map(jnp.zeros_like, head.init_params(jax.random.key(0), 3))
      >>> round(float(head.loss(zero, jnp.ones(3), jnp.array(2))), 4)  # log 4
      1.3863
      >>> head.predict(zero, jnp.ones(3)).tolist()
      [0.25, 0.25, 0.25, 0.25]
    """
    check_size(least=2, n_classes=n_classes)

    def loss(logits: Array, target: Array) -> Array:
        log_p = jax.nn.log_softmax(logits)
        known = (target >= 0) & (target < n_classes)
        return jnp.where(known, -log_p[jnp.clip(target, 0, n_classes - 1)], jnp.nan)

    def check_target(target: PyTree) -> None:
        _check("softmax", target, (), jnp.integer, "a whole number")

    def check_values(targets: np.ndarray) -> None:
        _check_range("softmax", targets, 0, n_classes - 1, f"classes, whole numbers from 0 to {n_classes - 1}")

    return _of_logits(n_classes, loss, check_target, check_values, jax.nn.softmax)


def bernoulli(n: int) -> Head:
    """n independent bits: L_t is the sum over bits of the cross-entropy between target and σ(w y + b).

    Args:
      n: number of bits.

    Returns:
      A head whose targets are vectors [n] of numbers between 0 and 1, or bools. It predicts the probability that a bit
      is 1, `[n]`.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> head = sg.heads.bernoulli(2)
      >>> zero = jax.tree.map(jnp.zeros_like, head.init_params(jax.random.key(0), 3))
      >>> round(float(head.loss(zero, jnp.ones(3), jnp.array([0, 1]))), 4)  # 2 log 2
      1.3863
      >>> head.predict(zero, jnp.ones(3)).tolist()
      [0.5, 0.5]
    """
    check_size(n=n)

    def loss(logits: Array, target: Array) -> Array:
        return jnp.sum(jax.nn.softplus(logits) - jnp.asarray(target, logits.dtype) * logits)

    def check_target(target: PyTree) -> None:
        _check("bernoulli", target, (n,), None, "numbers")

    def check_values(targets: np.ndarray) -> None:
        _check_range("bernoulli", targets, 0, 1, "numbers between 0 and 1")

    return _of_logits(n, loss, check_target, check_values, jax.nn.sigmoid)


def squared_error(n: int) -> Head:
    """Regression: L_t = 1/2 ||w y + b - target||².

    Args:
      n: size of the prediction.

    Returns:
      A head whose targets are vectors [n]. It predicts w y + b, `[n]`.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> head = sg.heads.squared_error(2)
      >>> zero = jax.tree.map(jnp.zeros_like, head.init_params(jax.random.key(0), 3))
      >>> float(head.loss(zero, jnp.ones(3), jnp.array([3.0, 4.0])))
      12.5
      >>> head.predict(zero, jnp.ones(3)).tolist()
      [0.0, 0.0]
    """
    check_size(n=n)

    def loss(prediction: Array, target: Array) -> Array:
        return 0.5 * jnp.sum((prediction - jnp.asarray(target, prediction.dtype)) ** 2)

    def check_target(target: PyTree) -> None:
        _check("squared_error", target, (n,), None, "numbers")

    def check_values(targets: np.ndarray) -> None:
        limits = np.finfo(np.float64)
        _check_range("squared_error", targets, limits.min, limits.max, "finite numbers")

    return _of_logits(n, loss, check_target, check_values, lambda prediction: prediction)


def from_function(
    init_params: Callable[..., PyTree],
    loss: Callable[[PyTree, Array, PyTree], Array],
    predict: Callable[[PyTree, Array], PyTree] | None = None,
) -> Head:
    """Make a head of any differentiable loss.

    Args:
      init_params: `init_params(key, width) -> params`, or `init_params(key)` for one that needs no width; `width` is
        that of the cell's output. May return an empty pytree.
      loss: `loss(params, output, target) -> scalar`.
      predict: `predict(params, output)`, what the head makes of one output; nothing needs it but its user.

    Returns:
      The head.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> head = sg.heads.from_function(
      ...     init_params=lambda key, width: jax.random.normal(key, (width,)),
      ...     loss=lambda params, output, target: jnp.abs(params @ output - target),
      ...     predict=lambda params, output: params @ output,
      ... )
      >>> params = head.init_params(jax.random.key(0), 3)
      >>> params.shape, head.predict(params, jnp.zeros(3)).item()
      ((3,), 0.0)
    """
    check_callable(init_params=init_params)
    check_arguments("loss", loss, "params", "output", "target")
    predicts = {}
    if predict is not None:
        check_arguments("predict", predict, "params", "output")
        predicts["predict"] = predict

    def one_number(params: PyTree, output: Array, target: PyTree) -> Array:
        value = loss(params, output, target)
        if jnp.shape(value) != ():
            raise ValueError(f"loss must return one number, not an array of shape {jnp.shape(value)}.")
        return value

    if accepts(init_params, "key", "width"):
        return Head(init_params, one_number, **predicts)
    check_arguments("init_params", init_params, "key")
    return Head(lambda key, width: init_params(key), one_number, **predicts)


def _of_logits(
    n: int,
    loss: Callable[[Array, Array], Array],
    check_target: Callable[[PyTree], None],
    check_values: Callable[[np.ndarray], None],
    link: Callable[[Array], Array],
) -> Head:
    """A head over logits w y + b, `[n]`, with `loss(logits, target)`; it predicts `link(logits)`."""

    def init_params(key: Array, width: int) -> PyTree:
        return {"w": jax.random.normal(key, (n, width)) / jnp.sqrt(width), "b": jnp.zeros(n)}

    def logits(params: PyTree, output: Float[Array, " width"]) -> Float[Array, " n"]:
        dtype = work_dtype((params, output))  # that of cell and head may differ
        w, y, b = (jnp.asarray(x, dtype) for x in (params["w"], output, params["b"]))
        return w @ y + b

    return Head(
        init_params,
        lambda params, output, target: loss(logits(params, output), target),
        check_target,
        check_values,
        lambda params, output: link(logits(params, output)),
    )


def _check(head: str, target: PyTree, shape: tuple[int, ...], kind: type | None, what: str) -> None:
    """One target is a single array of this shape and kind."""
    leaves = jax.tree.leaves(target)
    single = len(leaves) == 1 and leaves[0] is target
    real = single and (
        target.dtype == bool or any(jnp.issubdtype(target.dtype, k) for k in (jnp.integer, jnp.floating))
    )
    if not real or target.shape != shape or (kind is not None and not jnp.issubdtype(target.dtype, kind)):
        got = f"{target.dtype}{list(target.shape)}" if single else "a tree of arrays" if leaves else "none at all"
        raise ValueError(f"one target of heads.{head} must be {what} of shape {list(shape)}, not {got}.")


def _check_range(head: str, targets: np.ndarray, low: int | float, high: int | float, what: str) -> None:
    """All targets are between `low` and `high`; NaN is not."""
    if not (np.min(targets) >= low and np.max(targets) <= high):
        wrong = targets[~((targets >= low) & (targets <= high))][0]
        raise ValueError(f"targets of heads.{head} must be {what}, but one of them is {wrong}.")
