"""Every estimator on one model and one stream, in chunks: squared error, time and memory, measured and predicted."""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from streamgrad import Chunk, Model, Params, bptt
from streamgrad._typing import Array
from streamgrad.base import real_dtype
from streamgrad.checks import check_at_most, check_chunk, check_key, check_size
from streamgrad.theory.empirical import Moments, merge, moments, summary
from streamgrad_lab.candidates import Candidate, candidates_for
from streamgrad_lab.programs import Compiled, Past, compile_all
from streamgrad_lab.progress import Progress, silent
from streamgrad_lab.timing import take_turns

# For any weights, P(Σ λ χ² > x Σ λ) is at most P(χ²_1 > x) for the x that matter here (Székely and Bakirov, 2003), so
# that a mean without bias lies further away than this, in multiples of its expected distance, once in 1,000 times.
LIMIT = 3.3
LEAST = 4  # samples per stream: the error of the squared bias is found by leaving out one part of them at a time
PARTS = 16  # of the samples, at most
CHUNK_LENGTH = 16  # steps, unless the caller says otherwise
LEAST_SECONDS = 0.1  # in which a fast program is timed again and again


class Comparison(NamedTuple):
    """A row of the table; all is of the gradient of the cell's parameters, relative to the exact one, g.

    Attributes:
      name: of the estimator.
      promise: what the registry says of it.
      hindsight: whether it was fitted to the very stream: a bound, not a choice.
      length: T, the steps of the stream.
      chunk_length: K, the steps of a chunk.
      streams: B, over how many streams an estimate is averaged.
      squared_error: E‖ĝ - g‖² / ‖g‖² of the mean over B streams: squared bias + variance / B.
      squared_error_noise: its standard error.
      squared_bias: ‖E ĝ - g‖² / ‖g‖², estimated without bias, and then not below 0.
      squared_bias_noise: its standard error.
      bias: ‖mean - g‖ / ‖g‖ over all samples, noise and all.
      bias_noise: what that would be, in the root mean square, if there were no bias.
      verdict: "exact", "none seen" (not beyond noise), or "biased".
      variance: total variance / ‖g‖² of one stream's estimate, measured.
      variance_error: its standard error.
      predicted: total variance / ‖g‖² by the theory, or None.
      predicted_is_bound: whether that is an over-estimate, as for GIR.
      us_per_step: microseconds for one step of one stream, of several that run at once.
      state_bytes: of the state of one stream, and its share of what all streams have in common.
      scratch_bytes: what an update by a chunk needs beside it, for one stream.
      samples: how many estimates were drawn.
    """

    name: str
    promise: str
    hindsight: bool
    length: int
    chunk_length: int
    streams: int
    squared_error: float
    squared_error_noise: float
    squared_bias: float
    squared_bias_noise: float
    bias: float
    bias_noise: float
    verdict: str
    variance: float
    variance_error: float
    predicted: float | None
    predicted_is_bound: bool
    us_per_step: float
    state_bytes: int
    scratch_bytes: int
    samples: int

    @property
    def memory_bytes(self) -> int:
        """State and scratch of one stream."""
        return self.state_bytes + self.scratch_bytes


def compare(
    model: Model,
    params: Params,
    chunk: Chunk,
    key: Any,
    samples: int = 2048,
    streams: int = 8,
    repeats: int = 7,
    candidates: Iterable[Candidate] | None = None,
    progress: Progress = silent,
    past: Past | None = None,
    seconds: float = math.inf,
    chunk_length: int | None = None,
) -> list[Comparison]:
    """Measure squared error, time and memory of every estimator for a model, at its parameters.

        E‖ĝ - g‖² = ‖E ĝ - g‖² + variance / B    for the mean ĝ over B streams

    The stream is cut into chunks, which an estimator takes in turn; ĝ is the sum of its gradients, and g is that of
    BPTT over the whole stream. So `bptt`, which looks back to the beginning of a chunk alone, shows its bias.

    Args:
      model: the model.
      params: its parameters; noise depends on them, so those of a trained network say more than fresh ones.
      chunk: one stream, from its beginning.
      key: of the noise.
      samples: how many estimates each noisy estimator makes, at least 4 for each stream; rounded down to a multiple.
      streams: B, over how many an estimate is averaged; they run at once.
      repeats: how often time is taken; all estimators take turns, and the fastest call counts.
      candidates: what to compare; by default `candidates_for` them all.
      progress: called as `progress("preparing", "measuring" or "timing", done, of how many, name)`.
      past: `past(i)` is the i-th batch of streams that estimators may learn from before they are measured, as `carried`
        ones do; of the same number and length. By default the stream itself, over and over.
      seconds: most time that the samples of one estimator may take; a slow one then gets fewer.
      chunk_length: K, the steps of a chunk; the last may be shorter. None for 16, or for the whole stream where that is
        shorter.

    Returns:
      A row for each.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> from streamgrad_lab.comparison import candidates_for, compare
      >>> model = sg.Model(sg.cells.vanilla(2, 3), sg.heads.softmax(2))
      >>> params = model.init(jax.random.key(0))
      >>> chunk = sg.Chunk(jnp.ones((4, 2)), jnp.zeros(4, int))
      >>> some = candidates_for(model, params, chunk, only=["rtrl"])
      >>> compare(model, params, chunk, jax.random.key(1), repeats=1, candidates=some)[0].verdict
      'exact'
    """
    check_size(streams=streams, repeats=repeats)
    check_size(least=LEAST * streams, samples=samples)
    check_key(key)
    length = check_chunk(model, chunk)
    if chunk_length is None:
        chunk_length = min(length, CHUNK_LENGTH)
    check_size(chunk_length=chunk_length)
    check_at_most("chunk_length", chunk_length, length, "the steps of the stream")
    exact = bptt(model)
    gradient, _ = ravel_pytree(exact.update(params, exact.init(params), chunk, None)[0].cell)
    norm = float(jnp.linalg.norm(gradient))
    if not 0 < norm < math.inf:
        raise ValueError(f"the exact gradient has the norm {norm}: there is nothing to compare with.")
    if candidates is None:
        candidates = candidates_for(model, params, chunk)
    many = jax.tree.map(lambda leaf: jnp.repeat(leaf[None], streams, axis=0), chunk)
    pairs = list(compile_all(candidates, params, many, chunk_length, key, past or (lambda index: many), progress))
    rows, eps = [], float(jnp.finfo(real_dtype(params)).eps)
    for done, (candidate, waiting) in enumerate(pairs):
        progress("measuring", done, len(pairs), candidate.name)
        program = waiting.result()
        batches = _affordable(program, key, samples // streams, seconds) if candidate.noisy else LEAST
        found = _measure(program, gradient, key, batches, streams)
        row = _row(candidate, program, found, (length, chunk_length), norm, eps)
        rows.append(row if candidate.noisy else row._replace(samples=1))
    progress("measuring", len(pairs), len(pairs), "done")
    calls = {index: functools.partial(waiting.result().run, key) for index, (_, waiting) in enumerate(pairs)}

    def show(made: int) -> None:
        progress("timing", made, repeats, "all in turn")

    times = take_turns(calls, repeats, LEAST_SECONDS, fastest=True, show=show)
    return [row._replace(us_per_step=1e6 * times[i] / length / streams) for i, row in enumerate(rows)]


def _row(
    candidate: Candidate, program: Compiled, found: "_Measured", lengths: tuple[int, int], norm: float, eps: float
) -> Comparison:
    """A row, but for its time."""
    predicted = None if candidate.predict is None else candidate.predict(found.alpha, lengths[1])
    square, streams = norm**2, program.streams
    bias, noise = found.bias / norm, math.sqrt(found.variance / found.samples) / norm
    squared_error = max(found.squared_bias, 0.0) + found.variance / streams
    return Comparison(
        name=candidate.name if program.warm else f"{candidate.name} (nothing learnt yet)",
        promise=candidate.promise,
        hindsight=candidate.hindsight,
        length=lengths[0],
        chunk_length=lengths[1],
        streams=streams,
        squared_error=squared_error / square,
        squared_error_noise=math.hypot(found.squared_bias_error, found.variance_error / streams) / square,
        squared_bias=max(found.squared_bias, 0.0) / square,
        squared_bias_noise=found.squared_bias_error / square,
        bias=bias,
        bias_noise=noise,
        verdict=_verdict(bias, noise, math.sqrt(found.variance) / norm, eps),
        variance=found.variance / square,
        variance_error=found.variance_error / square,
        predicted=None if predicted is None else float(predicted) / square,
        predicted_is_bound=candidate.bound and bool(predicted),
        us_per_step=math.nan,
        state_bytes=program.state_bytes,
        scratch_bytes=program.scratch_bytes // streams,
        samples=found.samples,
    )


class _Measured(NamedTuple):
    """What was measured over samples of a known gradient g.

    Attributes:
      bias: ‖mean - g‖.
      squared_bias: an unbiased estimate of ‖E ĝ - g‖²; may be below 0.
      squared_bias_error: its standard error.
      variance: the total variance of one stream's estimate.
      variance_error: its standard error.
      samples: how many.
      alpha: some α, or None.
    """

    bias: float
    squared_bias: float
    squared_bias_error: float
    variance: float
    variance_error: float
    samples: int
    alpha: Array | None


@jax.jit
def _block(samples: list[Array], centre: Array) -> Moments:
    return moments(jnp.stack(samples), centre)


def _affordable(program: Compiled, key: Any, batches: int, seconds: float) -> int:
    """How many batches the time allows, but no fewer than are needed and no more than are asked for."""
    if math.isinf(seconds):
        return batches
    run = functools.partial(program.run, key)
    each = take_turns({"": run}, 1)[""]
    return max(LEAST, min(batches, int(seconds / each)))


def _measure(program: Compiled, gradient: Array, key: Any, batches: int, streams: int) -> _Measured:
    """Moments of the means over batches of streams, whose noise is independent: `streams` times less variance."""
    alphas, several = [], max(1, min(16, batches // PARTS))
    blocks = batches // several

    def sample(index: int) -> tuple[Array, Array | None]:
        return program.run(jax.random.fold_in(key, index))

    # Around the gradient itself the spread of squared distances would drown in that of a bias.
    first = [sample(index) for index in range(min(batches, PARTS))]
    centre = jnp.mean(jnp.stack([mean for mean, _ in first]), axis=0)
    parts: list[Moments] = []
    for block in range(blocks):
        indices = range(block * several, (block + 1) * several)
        found = [first[index] if index < len(first) else sample(index) for index in indices]
        alphas += [alpha for _, alpha in found if alpha is not None][: 32 // streams + 1 - len(alphas)]
        sums = _block([mean for mean, _ in found], centre)
        if block < PARTS:
            parts.append(sums)
        else:
            parts[block % PARTS] = merge(parts[block % PARTS], sums)
    total = functools.reduce(merge, parts)
    _, variance, error = summary(total, total.mean)
    away = centre - gradient
    squared_bias, squared_bias_error = _squared_mean(
        np.array([part.size for part in parts]), [part.mean + away for part in parts]
    )
    return _Measured(
        float(jnp.linalg.norm(total.mean + away)),
        squared_bias,
        squared_bias_error,
        float(streams * variance),
        float(streams * error),
        int(total.size) * streams,
        jnp.concatenate(alphas) if alphas else None,
    )


def _squared_mean(sizes: np.ndarray, means: Sequence[Array]) -> tuple[float, float]:
    """The squared norm of a mean from products of independent parts, and its standard error by the jackknife.

    The squared norm of the mean of all samples is too large by their variance over their number; products of two
    different parts are not.
    """
    stacked = jnp.stack(means)
    products = np.outer(sizes, sizes) * np.asarray(stacked @ stacked.T, float)
    weights = np.outer(sizes, sizes).astype(float)
    np.fill_diagonal(products, 0.0)
    np.fill_diagonal(weights, 0.0)
    all_products, all_weights = products.sum(), weights.sum()
    without = (all_products - 2 * products.sum(axis=1)) / (all_weights - 2 * weights.sum(axis=1))
    count = len(sizes)
    error = math.sqrt((count - 1) / count * float(np.sum((without - without.mean()) ** 2)))
    return float(all_products / all_weights), error


def _verdict(bias: float, noise: float, spread: float, eps: float) -> str:
    """What is seen of a bias. Rounding adds up over a stream, but is the same for every key: noise is held to less."""
    if bias < eps**0.5 and spread < eps**0.75:
        return "exact"
    return "none seen" if bias <= LIMIT * noise else "biased"
