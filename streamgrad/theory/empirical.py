"""The mean and the variance of any estimator, measured over many keys."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from streamgrad._typing import Array, Float
from streamgrad.base import Chunk, GradientEstimator, Params
from streamgrad.checks import check_estimator, check_key, check_size


class Empirical(NamedTuple):
    """A measured mean and variance.

    Attributes:
      mean: of the gradient estimate, like the parameters.
      mean_error: standard error of each entry of the mean.
      variance: of each entry of the estimate.
      total_variance: their sum.
      total_variance_error: its standard error.
      samples: the number of keys.
    """

    mean: Params
    mean_error: Params
    variance: Params
    total_variance: Float[Array, ""]
    total_variance_error: Float[Array, ""]
    samples: int


class Moments(NamedTuple):
    """Moments of a number of samples, to be merged.

    Attributes:
      size: the number of samples.
      mean: of x, the sample less a fixed centre.
      scatter: Σ (x - mean)² of each entry.
      norm: mean of d = ‖x‖².
      norm_scatter: Σ (d - mean of d)².
      product: Σ (d - mean of d) (x - mean), needed where the centre was not quite the mean.
    """

    size: Array
    mean: Array
    scatter: Array
    norm: Array
    norm_scatter: Array
    product: Array


def empirical(est: GradientEstimator, params: Params, chunk: Chunk, key: Any, n: int, block: int = 256) -> Empirical:
    """Measure the mean and the variance of an estimator of one chunk over n keys.

    Samples are drawn in blocks and merged by Welford's rule (in the form of Chan et al.), so that memory holds one
    block of gradients and a few vectors, whatever n is.

    Args:
      est: any estimator, also a batched one.
      params: the parameters.
      chunk: what `est.update` takes.
      key: split into n.
      n: how many samples, at least 2.
      block: how many at once: time against memory.

    Returns:
      Means, variances, and standard errors.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.vanilla(2, 3), sg.heads.softmax(2))
      >>> params = model.init(jax.random.key(0))
      >>> chunk = sg.Chunk(jnp.ones((4, 2)), jnp.zeros(4, int))
      >>> exact = sg.theory.empirical(sg.bptt(model), params, chunk, jax.random.key(1), 8)
      >>> float(exact.total_variance)
      0.0

    References:
      Chan, Golub and LeVeque, Algorithms for computing the sample variance, 1983.
    """
    check_estimator(est)
    check_size(least=2, n=n)
    check_size(block=block)
    check_key(key)
    block = min(block, n)
    state = est.init(params)
    _, unravel = ravel_pytree(params)

    def sample(key: Array) -> Float[Array, " P"]:
        return ravel_pytree(est.update(params, state, chunk, key)[0])[0]

    def measure(keys: Array, centre: Array) -> Moments:
        return moments(jax.vmap(sample)(keys), centre)

    @jax.jit
    def all_of_them(whole: Array, rest: Array | None) -> tuple[Moments, Array]:
        # Any centre would do; one close to the mean keeps the standard error's correction small.
        centre = jnp.mean(jax.vmap(sample)(whole[0]), axis=0)
        zero = jnp.zeros((), centre.dtype)
        start = Moments(zero, jnp.zeros_like(centre), jnp.zeros_like(centre), zero, zero, jnp.zeros_like(centre))
        sums, _ = jax.lax.scan(lambda sums, keys: (merge(sums, measure(keys, centre)), None), start, whole)
        if rest is not None:
            sums = merge(sums, measure(rest, centre))
        return sums._replace(mean=sums.mean + centre), sums.mean

    keys = jax.random.split(key, n)
    full = n - n % block
    whole = keys[:full].reshape(full // block, block, *keys.shape[1:])
    sums, offset = all_of_them(whole, keys[full:] if full < n else None)
    variance, total, error = summary(sums, offset)
    mean_error = jnp.sqrt(variance / n)
    return Empirical(unravel(sums.mean), unravel(mean_error), unravel(variance), total, error, n)


def moments(samples: Float[Array, "K P"], centre: Float[Array, " P"]) -> Moments:
    """The moments of a block of samples around a fixed centre."""
    x = samples - centre[None]
    d = jnp.sum(x**2, axis=1)
    mean, norm = jnp.mean(x, axis=0), jnp.mean(d)
    count = jnp.asarray(float(x.shape[0]), x.dtype)
    away = x - mean[None]
    return Moments(count, mean, jnp.sum(away**2, axis=0), norm, jnp.sum((d - norm) ** 2), (d - norm) @ away)


def summary(sums: Moments, offset: Float[Array, " P"]) -> tuple[Float[Array, " P"], Float[Array, ""], Float[Array, ""]]:
    """Variances, their sum and its standard error, where the mean lies `offset` away from the centre."""
    variance = sums.scatter / (sums.size - 1)
    # d measured from the mean instead of the centre is d - 2 x·offset + const.
    scatter = sums.norm_scatter - 4 * sums.product @ offset
    error = jnp.sqrt(jnp.maximum(scatter, 0) / (sums.size - 1) / sums.size)
    return variance, jnp.sum(variance), error


def merge(a: Moments, b: Moments) -> Moments:
    """The moments of two sets of samples together, by Chan's rule."""
    count = a.size + b.size
    apart, norm_apart = b.mean - a.mean, b.norm - a.norm
    share = b.size / count
    weight = a.size * share
    return Moments(
        count,
        a.mean + share * apart,
        a.scatter + b.scatter + weight * apart**2,
        a.norm + share * norm_apart,
        a.norm_scatter + b.norm_scatter + weight * norm_apart**2,
        a.product + b.product + weight * norm_apart * apart,
    )
