"""Every estimator on one model and one stream: squared error, time and memory, measured and predicted.

Compiling takes longer than all that is measured. So there is one program for each estimator, for several streams at
once, that everything is measured with; and programs are compiled side by side.
"""

import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from streamgrad._typing import Array
from streamgrad.base import Chunk, EstimatorState, GradientEstimator, Model, Params, real_dtype
from streamgrad.checks import check_chunk, check_key, check_size
from streamgrad.engine.streams import batched
from streamgrad.estimators.bptt import bptt
from streamgrad.lab.candidates import Candidate, candidates_for
from streamgrad.lab.progress import Progress, silent
from streamgrad.lab.timing import state_bytes, take_turns, temp_bytes
from streamgrad.noise.rescale import total_log_alpha
from streamgrad.theory.empirical import Moments, merge, moments, summary

# For any weights, P(Σ λ χ² > x Σ λ) is at most P(χ²_1 > x) for the x that matter here (Székely and Bakirov, 2003), so
# that a mean without bias lies further away than this, in multiples of its expected distance, once in 1,000 times.
LIMIT = 3.3
LEAST = 4  # samples per stream: the error of the squared bias is found by leaving out one part of them at a time
PARTS = 16  # of the samples, at most
WARM_UP = 10_000  # steps, at most, until an estimator that learns from the past uses what it has learnt

Past = Callable[[int], Chunk]  # the index of a batch of chunks, one for each stream -> that batch


class Comparison(NamedTuple):
    """A row of the table; all is of the gradient of the cell's parameters, relative to the exact one, g.

    Attributes:
      name: of the estimator.
      promise: what the registry says of it.
      hindsight: whether it was fitted to the very chunk: a bound, not a choice.
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
      scratch_bytes: what an update of the chunk needs beside it, for one stream.
      samples: how many estimates were drawn.
    """

    name: str
    promise: str
    hindsight: bool
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
) -> list[Comparison]:
    """Measure squared error, time and memory of every estimator for a model, at its parameters.

        E‖ĝ - g‖² = ‖E ĝ - g‖² + variance / B    for the mean ĝ over B streams

    Args:
      model: the model.
      params: its parameters; noise depends on them, so those of a trained network say more than fresh ones.
      chunk: one stream, from its beginning.
      key: of the noise.
      samples: how many estimates each noisy estimator makes, at least 4 for each stream; rounded down to a multiple.
      streams: B, over how many an estimate is averaged; they run at once.
      repeats: how often time is taken; all estimators take turns, and the median counts.
      candidates: what to compare; by default `candidates_for` them all.
      progress: called as `progress("preparing" or "measuring", done, of how many, name)`.
      past: `past(i)` is the i-th of the chunks that estimators may learn from before they are measured, as those with
        `carried` ones do; a chunk of the same length for each stream. By default the chunk itself, over and over.
      seconds: most time that the samples of one estimator may take; a slow one then gets fewer.

    Returns:
      A row for each.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> from streamgrad.lab.comparison import candidates_for, compare
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
    exact = bptt(model)
    gradient, _ = ravel_pytree(exact.update(params, exact.init(params), chunk, None)[0].cell)
    norm = float(jnp.linalg.norm(gradient))
    if not 0 < norm < math.inf:
        raise ValueError(f"the exact gradient has the norm {norm}: there is nothing to compare with.")
    if candidates is None:
        candidates = candidates_for(model, params, chunk)
    many = jax.tree.map(lambda leaf: jnp.repeat(leaf[None], streams, axis=0), chunk)
    pairs = list(_compile(candidates, params, many, key, past or (lambda index: many), progress))
    rows, eps = [], float(jnp.finfo(real_dtype(params)).eps)
    for done, (candidate, waiting) in enumerate(pairs):
        progress("measuring", done, len(pairs), candidate.name)
        program = waiting.result()
        noisy = candidate.promise.startswith("unbiased")
        batches = _affordable(program, key, samples // streams, seconds) if noisy else LEAST
        found = _measure(program, gradient, key, batches, streams)
        rows.append(_row(candidate, program, found, norm, eps)._replace(samples=found.samples if noisy else 1))
    progress("measuring", len(pairs), len(pairs), "done")
    calls = {index: functools.partial(waiting.result().run, key) for index, (_, waiting) in enumerate(pairs)}
    times = take_turns(calls, repeats, warm_up=False)
    return [row._replace(us_per_step=1e6 * times[i] / length / streams) for i, row in enumerate(rows)]


def ranks(rows: Sequence[Comparison]) -> list[int | None]:
    """The place of each row by squared error; the same for those that differ by no more than the noise.

    Args:
      rows: from `compare`.

    Returns:
      Numbers from 1, None for those of hindsight. A row shares the place of the best row with that place if their
      difference is within its 95% interval.
    """
    order = sorted((i for i, row in enumerate(rows) if not row.hindsight), key=lambda i: rows[i].squared_error)
    found: list[int | None] = [None] * len(rows)
    best = None
    for place, index in enumerate(order, 1):
        row = rows[index]
        if best is None or not same_error(rows[best], row):
            best = index
            found[index] = place
        else:
            found[index] = found[best]
    return found


def same_error(a: Comparison, b: Comparison) -> bool:
    """Whether the squared errors of two rows differ by no more than the noise of the measurement, or by rounding."""
    noise = 1.96 * math.hypot(a.squared_error_noise, b.squared_error_noise)
    return abs(a.squared_error - b.squared_error) <= noise or a.verdict == b.verdict == "exact"


def _row(candidate: Candidate, program: "_Program", found: "_Measured", norm: float, eps: float) -> Comparison:
    """A row, but for its time."""
    predicted = None if candidate.predict is None else candidate.predict(found.alpha)
    square, streams = norm**2, program.streams
    bias, noise = found.bias / norm, math.sqrt(found.variance / found.samples) / norm
    squared_error = max(found.squared_bias, 0.0) + found.variance / streams
    return Comparison(
        name=candidate.name if program.warm else f"{candidate.name} (nothing learnt yet)",
        promise=candidate.promise,
        hindsight=candidate.hindsight,
        streams=streams,
        squared_error=squared_error / square,
        squared_error_noise=math.hypot(found.squared_bias_error, found.variance_error / streams) / square,
        squared_bias=max(found.squared_bias, 0.0) / square,
        squared_bias_noise=found.squared_bias_error / square,
        bias=bias,
        bias_noise=noise,
        verdict=_verdict(bias, noise, eps),
        variance=found.variance / square,
        variance_error=found.variance_error / square,
        predicted=None if predicted is None else float(predicted) / square,
        predicted_is_bound=candidate.bound,
        us_per_step=math.nan,
        state_bytes=program.state_bytes,
        scratch_bytes=program.scratch_bytes // streams,
        samples=found.samples,
    )


class _Program(NamedTuple):
    """A compiled estimator.

    Attributes:
      run: `run(key)` gives the mean gradient of the cell over the streams, and α of each, or None.
      streams: how many.
      warm: whether what it learns from the past, if anything, is in use.
      state_bytes: of one stream.
      scratch_bytes: of all.
    """

    run: Callable[[Any], tuple[Array, Array | None]]
    streams: int
    warm: bool
    state_bytes: int
    scratch_bytes: int


def _compile(
    candidates: Iterable[Candidate], params: Params, many: Chunk, key: Any, past: Past, progress: Progress
) -> Iterator[tuple[Candidate, Future[_Program]]]:
    """The programs, side by side on as many cores as there are, while the theory of the next one is worked out."""
    streams, length = jax.tree.leaves(many.targets)[0].shape[:2]

    def finish(lowered: Any, state: EstimatorState) -> _Program:
        compiled = lowered.compile()
        carried, now = None, state
        # The stream begins with the chunk for all estimators; of the past only what was learnt is kept.
        for index in range(WARM_UP // length):
            _, _, carried, _, now = compiled(params, now, past(index), jax.random.fold_in(key, 2**31 + index))
            if carried is None or bool(carried):
                break
        state = state._replace(shared=now.shared)
        warm, each = carried is None or bool(carried), state_bytes(state) // streams
        return _Program(lambda key: compiled(params, state, many, key)[:2], streams, warm, each, temp_bytes(compiled))

    def update(est: GradientEstimator, params: Params, state: Any, chunk: Chunk, key: Any) -> tuple[Any, ...]:
        grads, state, info = est.update(params, state, chunk, key)
        found = info.diagnostics
        alpha = None
        if {"gamma", "beta"} <= set(found):
            alpha = jnp.exp(jax.vmap(total_log_alpha)(found["gamma"], found["beta"]))
        carried = jnp.all(found["carried"] > 0) if "carried" in found else None
        return ravel_pytree(grads.cell)[0], alpha, carried, grads.head, state

    pool = ThreadPoolExecutor(os.cpu_count())
    for number, candidate in enumerate(candidates):
        progress("preparing", number, number + 1, candidate.name)
        est = batched(candidate.est, streams)
        state = est.init(params)
        lowered = jax.jit(functools.partial(update, est)).lower(params, state, many, key)
        yield candidate, pool.submit(finish, lowered, state)
    pool.shutdown(wait=False)


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


def _affordable(program: _Program, key: Any, batches: int, seconds: float) -> int:
    """How many batches the time allows, but no fewer than are needed and no more than are asked for."""
    if math.isinf(seconds):
        return batches
    run = functools.partial(program.run, key)
    each = take_turns({"": run}, 1)[""]
    return max(LEAST, min(batches, int(seconds / each)))


def _measure(program: _Program, gradient: Array, key: Any, batches: int, streams: int) -> _Measured:
    """Moments of the means over batches of streams, whose noise is independent: `streams` times less variance."""
    alphas, several = [], max(1, min(16, batches // PARTS))
    blocks = batches // several
    parts: list[Moments] = []
    for block in range(blocks):
        found = [program.run(jax.random.fold_in(key, block * several + index)) for index in range(several)]
        alphas += [alpha for _, alpha in found if alpha is not None][: 32 // streams + 1 - len(alphas)]
        sums = _block([mean for mean, _ in found], gradient)
        if block < PARTS:
            parts.append(sums)
        else:
            parts[block % PARTS] = merge(parts[block % PARTS], sums)
    total = functools.reduce(merge, parts)
    _, variance, error = summary(total, total.mean)
    squared_bias, squared_bias_error = _squared_mean(np.array([part.size for part in parts]), [p.mean for p in parts])
    return _Measured(
        float(jnp.linalg.norm(total.mean)),
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


def _verdict(bias: float, noise: float, eps: float) -> str:
    if bias < eps**0.5 and noise < eps**0.5:
        return "exact"
    return "none seen" if bias <= LIMIT * noise else "biased"
