"""Every estimator on one model and one stream: bias, variance, time and memory, measured and predicted."""

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from streamgrad._typing import Array, Float
from streamgrad.base import Chunk, GradientEstimator, Model, Params, real_dtype
from streamgrad.checks import check_chunk, check_key, check_size
from streamgrad.estimators import registry
from streamgrad.estimators.uoro import uoro
from streamgrad.online import batched
from streamgrad.variance import (
    Episode,
    c_matrix,
    collect,
    empirical,
    optimal_alpha,
    optimise,
    preuoro_total_variance,
    spatial_total_variance,
    total_variance,
)

SIGNS = -2.0  # excess kurtosis of the estimators' own noise
# For any weights, P(Σ λ χ² > x Σ λ) is at most P(χ²_1 > x) for the x that matter here (Székely and Bakirov, 2003), so
# that a mean without bias lies further away than this, in multiples of its expected distance, once in 1,000 times.
FALSE_ALARM, LIMIT = 0.001, 3.3
LARGEST_JACOBIAN = 2e8  # numbers in J_t of all steps, which a prediction at the state cut needs


class Candidate(NamedTuple):
    """An estimator to be compared.

    Attributes:
      name: how it is shown.
      promise: as in the registry.
      est: the estimator.
      predict: `predict(keys) -> total variance`, or None where no theory is at hand.
      bound: whether the prediction is an over-estimate: α that depends on the noise is treated as if it did not.
    """

    name: str
    promise: str
    est: GradientEstimator
    predict: Callable[[Array], Array] | None = None
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
    samples: int = 1024,
    streams: int = 8,
    repeats: int = 7,
    candidates: Sequence[Candidate] | None = None,
    progress: Callable[[str, int, int], None] = lambda name, done, total: None,
) -> list[Comparison]:
    """Measure bias, variance, time and memory of every estimator for a model, at its parameters.

        bias = ‖mean over keys - g‖ / ‖g‖,    expected to be sqrt(variance / samples) where there is none

    Args:
      model: the model.
      params: its parameters; noise depends on them, so that those of a trained network say more than fresh ones.
      chunk: one stream, from its beginning.
      key: of the noise.
      samples: how many estimates each noisy estimator makes.
      streams: how many run at once while time is taken.
      repeats: how often time is taken; all estimators take turns, and the median counts.
      candidates: what to compare; by default `candidates_for` them all.
      progress: called as `progress(name, done, of how many)`.

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
    check_size(least=2, samples=samples)
    check_size(streams=streams, repeats=repeats)
    check_key(key)
    length = check_chunk(model, chunk)
    if candidates is None:
        candidates = candidates_for(model, params, chunk)
    exact = registry.bptt(model)
    gradient, _ = ravel_pytree(exact.update(params, exact.init(params), chunk, None)[0].cell)
    norm = jnp.linalg.norm(gradient)
    if not bool(norm > 0) or not bool(jnp.isfinite(norm)):
        raise ValueError(f"the exact gradient has the norm {float(norm)}: there is nothing to compare with.")
    noise_key, alpha_key, time_key = jax.random.split(key, 3)

    rows = []
    for done, candidate in enumerate(candidates):
        progress(candidate.name, done, len(candidates) + 1)
        count = samples if candidate.promise.startswith("unbiased") else 2
        got = empirical(candidate.est, params, chunk, noise_key, count, block=min(128, count))
        mean, variance = ravel_pytree(got.mean.cell)[0], jnp.sum(ravel_pytree(got.variance.cell)[0])
        bias, noise = float(jnp.linalg.norm(mean - gradient) / norm), float(jnp.sqrt(variance / count) / norm)
        predicted = candidate.predict(jax.random.split(alpha_key, 32)) if candidate.predict else None
        rows.append(
            Comparison(
                candidate.name,
                candidate.promise,
                bias,
                noise,
                _verdict(bias, noise, float(jnp.finfo(real_dtype(params)).eps)),
                float(variance / norm**2),
                float(got.total_variance_error / norm**2),
                None if predicted is None else float(predicted / norm**2),
                candidate.bound,
                float("nan"),
                0,
                0,
                count,
            )
        )
    progress("time", len(candidates), len(candidates) + 1)
    costs = _costs(candidates, params, chunk, time_key, streams, repeats)
    return [
        row._replace(us_per_step=1e6 * seconds / length / streams, state_bytes=state, scratch_bytes=scratch // streams)
        for row, (seconds, state, scratch) in zip(rows, costs, strict=True)
    ]


def _verdict(bias: float, noise: float, eps: float) -> str:
    if bias < eps**0.5 and noise < eps**0.5:
        return "exact"
    return "none seen" if bias <= LIMIT * noise else "biased"


def candidates_for(model: Model, params: Params, chunk: Chunk, only: Sequence[str] | None = None) -> list[Candidate]:
    """All registered estimators as they come, and variants of `uoro`, as far as the cell has their cuts.

    Args:
      model: the model.
      params: its parameters.
      chunk: one stream; α and Q_0 of the variants are the optimal ones for it, which is more than any online method knows.
      only: names of estimators; variants come with "uoro". None for all.

    Returns:
      What `compare` takes.
    """
    if only is not None:
        for name in only:
            registry.find_estimator(name)
    return list(_candidates(model, params, chunk, only))


def _candidates(model: Model, params: Params, chunk: Chunk, only: Sequence[str] | None) -> Iterator[Candidate]:
    cuts = model.cell.cuts
    episode = functools.cache(functools.partial(_episode, model, params, chunk))
    for row in registry.ROWS:
        cut = next((cut for cut in ("preactivation", "state") if cut in row.cuts and cut in cuts), None)
        if (only is not None and row.name not in only) or (row.cuts and cut is None):
            continue
        est = row.make(model, **row.options, **({"cut": cut} if cut else {}))
        yield Candidate(row.name, row.promise, est, *_prediction(row, est, params, chunk, episode, cut))
        if row.name == "uoro":
            yield from _variants(model, params, chunk, row, episode, cut)


def _variants(
    model: Model,
    params: Params,
    chunk: Chunk,
    row: registry.Row,
    episode: Callable[[str], Episode | None],
    cut: str | None,
) -> Iterator[Candidate]:
    """UORO with groups, at the state, and with the α and Q_0 that are optimal for this very stream."""
    if cut != "preactivation":
        return

    def variant(label: str, groups: int = 1, cut: str = "preactivation", **options: Any) -> Candidate:
        est = uoro(model, cut=cut, groups=groups, **options)
        prediction = _prediction(row, est, params, chunk, episode, cut, groups, **options)
        return Candidate(f"uoro {label}", row.promise, est, *prediction)

    ep = episode("preactivation")
    assert ep is not None
    for groups in sorted({max(2, ep.size // 16), ep.size // 4}):
        if all(rows % groups == 0 for rows in ep.rows):
            yield variant(f"groups={groups}", groups)
    if "state" in model.cell.cuts:
        yield variant("cut=state", cut="state")
    # α is indexed by the position in an episode, the theory by that in the chunk.
    if len(ep.rows) == 1 and bool(jnp.all(ep.episode == ep.episode[0])):
        yield variant("optimal α", rescale=optimal_alpha(c_matrix(ep)).alpha)
        best = jax.jit(optimise)(ep)
        yield variant("optimal α, Q_0", rescale=best.alpha, q0=best.q0)


def _episode(model: Model, params: Params, chunk: Chunk, cut: str) -> Episode | None:
    if cut == "state":
        state = ravel_pytree(model.init_state(params))[0].size
        if len(jax.tree.leaves(chunk.inputs)[0]) * state * ravel_pytree(params.cell)[0].size > LARGEST_JACOBIAN:
            return None
    return jax.jit(lambda params, chunk: collect(model, params, chunk, cut))(params, chunk)


def _prediction(
    row: registry.Row,
    est: GradientEstimator,
    params: Params,
    chunk: Chunk,
    episode: Callable[[str], Episode | None],
    cut: str | None,
    groups: int = 1,
    rescale: Any = "gir",
    q0: Any = None,
) -> tuple[Callable[[Array], Array] | None, bool]:
    """The theory's total variance, where there is one, and whether it is an over-estimate."""
    if not row.promise.startswith("unbiased"):
        return (lambda keys: jnp.zeros(())), False
    if row.name not in ("uoro", "preuoro", "spatial_rtrl") or cut is None or (ep := episode(cut)) is None:
        return None, False
    if row.name == "spatial_rtrl":
        return (lambda keys: spatial_total_variance(ep, kurtosis=SIGNS)), False

    def given(alpha: Array) -> Array:
        if row.name == "preuoro":
            return preuoro_total_variance(ep, alpha, SIGNS)
        return total_variance(ep, alpha, q0, SIGNS, groups)

    if not isinstance(rescale, str):
        return (lambda keys: given(rescale)), False

    def by_gir(keys: Array) -> Array:
        def one(key: Array) -> Array:
            return given(alpha_of(est.update(params, est.init(params), chunk, key)[2].diagnostics))

        return jnp.mean(jax.jit(jax.vmap(one))(keys))

    return by_gir, True


def alpha_of(diagnostics: Any) -> Float[Array, "T G"]:
    """α_s = β_s γ_{s+1} … γ_T, from the coefficients that an estimator reports.

    Example:
      >>> import jax.numpy as jnp
      >>> gamma, beta = jnp.array([[0.0], [3.0], [2.0]]), jnp.array([[1.0], [1.0], [5.0]])
      >>> alpha_of({"gamma": gamma, "beta": beta}).round(3).T.tolist()
      [[6.0, 2.0, 5.0]]
    """

    def log(x: Array) -> Array:  # a scale of zero drops a term that is zero: any other will do
        return jnp.log(jnp.where(x > 0, x, 1))

    gamma, beta = diagnostics["gamma"], diagnostics["beta"]
    later = jnp.cumsum(log(gamma)[::-1], axis=0)[::-1]
    return jnp.exp(log(beta) + jnp.append(later[1:], jnp.zeros_like(later[:1]), axis=0))


def _costs(
    candidates: Sequence[Candidate], params: Params, chunk: Chunk, key: Any, streams: int, repeats: int
) -> list[tuple[float, int, int]]:
    """Median seconds per update, bytes of one stream's state, and scratch bytes of an update, of every candidate."""
    many = jax.tree.map(lambda leaf: jnp.repeat(leaf[None], streams, axis=0), chunk)
    programs, sizes = [], []
    for candidate in candidates:
        est = batched(candidate.est, streams)
        state = est.init(params)
        compiled = jax.jit(est.update).lower(params, state, many, key).compile()
        jax.block_until_ready(compiled(params, state, many, key))
        analysis = compiled.memory_analysis()
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(candidate.est.init(params)))
        sizes.append((size, 0 if analysis is None else analysis.temp_size_in_bytes))
        programs.append((compiled, state))
    times: list[list[float]] = [[] for _ in programs]
    for _ in range(repeats):
        for (compiled, state), taken in zip(programs, times, strict=True):
            begin = time.perf_counter()
            jax.block_until_ready(compiled(params, state, many, key))
            taken.append(time.perf_counter() - begin)
    return [(statistics.median(taken), *size) for taken, size in zip(times, sizes, strict=True)]
