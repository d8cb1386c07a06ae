"""Every estimator on one model and one stream: bias, variance, time and memory, measured and predicted.

Compiling takes longer than all that is measured, so that there is one program for each estimator, for several streams
at once, that everything is measured with; and programs are compiled side by side.
"""

import functools
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from streamgrad._typing import Array
from streamgrad.base import Chunk, GradientEstimator, Model, Params, real_dtype
from streamgrad.checks import check_chunk, check_key, check_size
from streamgrad.estimators import registry
from streamgrad.estimators.rescale import total_log_alpha
from streamgrad.estimators.uoro import uoro
from streamgrad.online import batched
from streamgrad.variance import (
    Episode,
    c_matrix,
    collect,
    optimal_alpha,
    optimise,
    preuoro_total_variance,
    spatial_total_variance,
    total_variance,
)
from streamgrad.variance.empirical import merge, moments, summary

SIGNS = -2.0  # excess kurtosis of the estimators' own noise
# For any weights, P(Σ λ χ² > x Σ λ) is at most P(χ²_1 > x) for the x that matter here (Székely and Bakirov, 2003), so
# that a mean without bias lies further away than this, in multiples of its expected distance, once in 1,000 times.
LIMIT = 3.3
LARGEST_JACOBIAN = 2e8  # numbers in J_t of all steps, which a prediction at the state cut needs
# The theory runs once: compiling fast is worth more than running fast.
_ONCE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


class Candidate(NamedTuple):
    """An estimator to be compared.

    Attributes:
      name: how it is shown.
      promise: as in the registry.
      est: the estimator.
      predict: `predict(α of some streams) -> total variance`, or None where no theory is at hand.
      bound: whether the prediction is an over-estimate: α that depends on the noise, as GIR's does, is treated as if it
        did not, and the prediction is the mean over several such α.
    """

    name: str
    promise: str
    est: GradientEstimator
    predict: Callable[[Array | None], Array] | None = None
    bound: bool = False


class Comparison(NamedTuple):
    """A row of the table; bias and variance are those of the gradient of the cell's parameters.

    Attributes:
      name: of the estimator.
      promise: what the registry says of it.
      bias: ‖mean - g‖ / ‖g‖ over all samples.
      bias_noise: what that would be, in the root mean square, if there were no bias.
      verdict: "exact", "none seen" (not beyond noise), or "biased".
      variance: total variance / ‖g‖², measured.
      variance_error: its standard error.
      predicted: total variance / ‖g‖² by the theory, or None.
      predicted_is_bound: whether that is an over-estimate, as for GIR.
      us_per_step: microseconds for one step of one stream, of several that run at once.
      state_bytes: of the state of one stream.
      scratch_bytes: what an update of the chunk needs beside it, for one stream.
      samples: how many estimates were drawn.
    """

    name: str
    promise: str
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
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> list[Comparison]:
    """Measure bias, variance, time and memory of every estimator for a model, at its parameters.

        bias = ‖mean over keys - g‖ / ‖g‖,    expected to be sqrt(variance / samples) where there is none

    Args:
      model: the model.
      params: its parameters; noise depends on them, so that those of a trained network say more than fresh ones.
      chunk: one stream, from its beginning.
      key: of the noise.
      samples: how many estimates each noisy estimator makes; a multiple of `streams` is made of it.
      streams: how many run at once.
      repeats: how often time is taken; all estimators take turns, and the median counts.
      candidates: what to compare; by default `candidates_for` them all.
      progress: called as `progress(name, done, of how many)`; while programs are prepared nothing is done yet.

    Returns:
      A row for each.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> from streamgrad.compare import candidates_for, compare
      >>> model = sg.Model(sg.cells.vanilla(2, 3), sg.heads.softmax(2))
      >>> params = model.init(jax.random.key(0))
      >>> chunk = sg.Chunk(jnp.ones((4, 2)), jnp.zeros(4, int))
      >>> some = candidates_for(model, params, chunk, only=["rtrl"])
      >>> compare(model, params, chunk, jax.random.key(1), repeats=1, candidates=some)[0].verdict
      'exact'
    """
    check_size(streams=streams, repeats=repeats)
    check_size(least=2 * streams, samples=samples)
    check_key(key)
    length = check_chunk(model, chunk)
    exact = registry.bptt(model)
    gradient, _ = ravel_pytree(exact.update(params, exact.init(params), chunk, None)[0].cell)
    norm = jnp.linalg.norm(gradient)
    if not bool(norm > 0) or not bool(jnp.isfinite(norm)):
        raise ValueError(f"the exact gradient has the norm {float(norm)}: there is nothing to compare with.")
    if candidates is None:
        candidates = candidates_for(model, params, chunk)
    pairs = list(_compile(candidates, params, chunk, key, streams, progress))
    rows = []
    for done, (candidate, waiting) in enumerate(pairs):
        progress(candidate.name, done, len(pairs))
        program = waiting.result()
        noisy = candidate.promise.startswith("unbiased")
        found = _measure(program, gradient, key, samples // streams if noisy else 2, streams)
        predicted = None if candidate.predict is None else candidate.predict(found.alpha)
        bias, noise = float(found.bias / norm), float(jnp.sqrt(found.variance / found.samples) / norm)
        row = Comparison(
            candidate.name,
            candidate.promise,
            bias,
            noise,
            _verdict(bias, noise, float(jnp.finfo(real_dtype(params)).eps)),
            float(found.variance / norm**2),
            float(found.variance_error / norm**2),
            None if predicted is None else float(predicted / norm**2),
            candidate.bound,
            float("nan"),  # once all are compiled
            sum(leaf.nbytes for leaf in jax.tree.leaves(candidate.est.init(params))),
            program.scratch_bytes // streams,
            found.samples if noisy else 1,
        )
        rows.append(row)
    progress("done", len(pairs), len(pairs))
    times = _take_turns([waiting.result() for _, waiting in pairs], key, repeats)
    return [
        row._replace(us_per_step=1e6 * seconds / length / streams) for row, seconds in zip(rows, times, strict=True)
    ]


class _Program(NamedTuple):
    """`run(key)` gives the mean gradient of the cell over the streams, and α of each, or None; compiled."""

    run: Callable[[Any], tuple[Array, Array | None]]
    scratch_bytes: int


def _compile(
    candidates: Iterable[Candidate], params: Params, chunk: Chunk, key: Any, streams: int, progress: Callable
) -> Iterator[tuple[Candidate, Future[_Program]]]:
    """The programs, side by side on as many cores as there are, while the theory of the next one is worked out."""
    many = jax.tree.map(lambda leaf: jnp.repeat(leaf[None], streams, axis=0), chunk)

    def finish(lowered: Any, state: Any) -> _Program:
        compiled = lowered.compile()
        analysis = compiled.memory_analysis()
        size = 0 if analysis is None else analysis.temp_size_in_bytes

        def run(key: Any) -> tuple[Array, Array | None]:
            return compiled(params, state, many, key)[:2]

        return _Program(run, size)

    def update(est: GradientEstimator, params: Params, state: Any, chunk: Chunk, key: Any) -> tuple[Any, ...]:
        grads, state, info = est.update(params, state, chunk, key)
        found = info.diagnostics
        alpha = None
        if {"gamma", "beta"} <= set(found):
            alpha = jnp.exp(jax.vmap(total_log_alpha)(found["gamma"], found["beta"]))
        return ravel_pytree(grads.cell)[0], alpha, grads.head, state

    pool = ThreadPoolExecutor(os.cpu_count())
    for candidate in candidates:
        progress(f"preparing {candidate.name}", 0, 1)
        est = batched(candidate.est, streams)
        state = est.init(params)
        lowered = jax.jit(functools.partial(update, est)).lower(params, state, many, key)
        yield candidate, pool.submit(finish, lowered, state)
    pool.shutdown(wait=False)


class _Measured(NamedTuple):
    """‖mean - g‖, total variance of one stream's estimate with its standard error, how many, and some α."""

    bias: Array
    variance: Array
    variance_error: Array
    samples: int
    alpha: Array | None


@jax.jit
def _block(samples: list[Array], centre: Array) -> Any:
    return moments(jnp.stack(samples), centre)


def _measure(program: _Program, gradient: Array, key: Any, batches: int, streams: int) -> _Measured:
    """Moments of the means over batches of streams, whose noise is independent: `streams` times less variance."""
    alphas, sums, several = [], None, min(16, batches)
    for first in range(0, batches - batches % several, several):
        found = [program.run(jax.random.fold_in(key, first + index)) for index in range(several)]
        alphas += [alpha for _, alpha in found if alpha is not None][: 32 // streams + 1 - len(alphas)]
        block = _block([mean for mean, _ in found], gradient)
        sums = block if sums is None else merge(sums, block)
    assert sums is not None
    _, variance, error = summary(sums, sums.mean)
    samples = int(sums.size) * streams
    alpha = jnp.concatenate(alphas) if alphas else None
    return _Measured(jnp.linalg.norm(sums.mean), streams * variance, streams * error, samples, alpha)


def _take_turns(programs: Sequence[_Program], key: Any, repeats: int) -> list[float]:
    """Median seconds of a call of each program; all take turns, so that noise hits them alike."""
    times: list[list[float]] = [[] for _ in programs]
    for _ in range(repeats):
        for program, taken in zip(programs, times, strict=True):
            begin = time.perf_counter()
            jax.block_until_ready(program.run(key))
            taken.append(time.perf_counter() - begin)
    return [statistics.median(taken) for taken in times]


def _verdict(bias: float, noise: float, eps: float) -> str:
    if bias < eps**0.5 and noise < eps**0.5:
        return "exact"
    return "none seen" if bias <= LIMIT * noise else "biased"


def candidates_for(
    model: Model, params: Params, chunk: Chunk, only: Sequence[str] | None = None
) -> Iterator[Candidate]:
    """All registered estimators as they come, and variants of `uoro`, as far as the cell has their cuts.

    Args:
      model: the model.
      params: its parameters.
      chunk: one stream; the optimal α and Q_0 are those for it, and so know more than any online method.
      only: names of estimators; variants come with "uoro". None for all.

    Returns:
      What `compare` takes, one after the other.
    """
    if only is not None:
        for name in only:
            registry.find_estimator(name)
    return _candidates(model, params, chunk, only)


def _candidates(model: Model, params: Params, chunk: Chunk, only: Sequence[str] | None) -> Iterator[Candidate]:
    episode = functools.cache(functools.partial(_episode, model, params, chunk))
    for row in registry.ROWS:
        cut = next((cut for cut in ("preactivation", "state") if cut in row.cuts and cut in model.cell.cuts), None)
        if (only is not None and row.name not in only) or (row.cuts and cut is None):
            continue
        est = row.make(model, **row.options, **({"cut": cut} if cut else {}))
        yield Candidate(row.name, row.promise, est, *_prediction(row, episode, cut))
        if row.name == "uoro" and cut == "preactivation":
            yield from _variants(model, row, episode)


def _variants(model: Model, row: registry.Row, episode: Callable[[str], Episode | None]) -> Iterator[Candidate]:
    """UORO with groups, at the state, and with the α and Q_0 that are optimal for this very stream."""

    def variant(label: str, groups: int = 1, cut: str = "preactivation", **options: Any) -> Candidate:
        est = uoro(model, cut=cut, groups=groups, **options)
        return Candidate(f"uoro {label}", row.promise, est, *_prediction(row, episode, cut, groups, **options))

    ep = episode("preactivation")
    assert ep is not None
    groups = ep.size // 4
    if groups > 1 and all(rows % groups == 0 for rows in ep.rows):
        yield variant(f"groups={groups}", groups)
    if "state" in model.cell.cuts:
        yield variant("cut=state", cut="state")
    # α is indexed by the position in an episode, the theory by that in the chunk.
    if len(ep.rows) == 1 and bool(jnp.all(ep.episode == ep.episode[0])):
        alpha = jax.jit(lambda ep: optimal_alpha(c_matrix(ep)).alpha, compiler_options=_ONCE)(ep)
        yield variant("optimal alpha", rescale=alpha)
        best = jax.jit(optimise, compiler_options=_ONCE)(ep)
        yield variant("optimal alpha, Q_0", rescale=best.alpha, q0=best.q0)


def _episode(model: Model, params: Params, chunk: Chunk, cut: str) -> Episode | None:
    if cut == "state":
        state = ravel_pytree(model.init_state(params))[0].size
        if len(jax.tree.leaves(chunk.inputs)[0]) * state * ravel_pytree(params.cell)[0].size > LARGEST_JACOBIAN:
            return None

    def all_of_it(params: Params, chunk: Chunk) -> Episode:
        return collect(model, params, chunk, cut)

    return jax.jit(all_of_it, compiler_options=_ONCE)(params, chunk)


def _prediction(
    row: registry.Row,
    episode: Callable[[str], Episode | None],
    cut: str | None,
    groups: int = 1,
    rescale: Any = "gir",
    q0: Any = None,
) -> tuple[Callable[[Array | None], Array] | None, bool]:
    """The theory's total variance, where there is one, and whether it is an over-estimate."""
    if not row.promise.startswith("unbiased"):
        return (lambda alpha: jnp.zeros(())), False
    if row.name not in ("uoro", "preuoro", "spatial_rtrl") or cut is None or (ep := episode(cut)) is None:
        return None, False
    if row.name == "spatial_rtrl":
        spatial = jax.jit(functools.partial(spatial_total_variance, kurtosis=SIGNS), compiler_options=_ONCE)
        return (lambda alpha: spatial(ep)), False

    def mean(ep: Episode, alphas: Array) -> Array:
        def one(alpha: Array) -> Array:
            if row.name == "preuoro":
                return preuoro_total_variance(ep, alpha, SIGNS)
            return total_variance(ep, alpha, q0, SIGNS, groups)

        return jnp.mean(jax.vmap(one)(alphas))

    known = None if isinstance(rescale, str) else jnp.asarray(rescale)[None]

    def predict(alpha: Array | None) -> Array:
        assert alpha is not None
        return jax.jit(mean, compiler_options=_ONCE)(ep, alpha if known is None else known)

    return predict, known is None
