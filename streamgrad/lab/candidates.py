"""What `compare` compares: every registered estimator with its variants, and the theory of their variance."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from streamgrad._typing import Array
from streamgrad.adapt import carried
from streamgrad.base import Chunk, GradientEstimator, Model, Params
from streamgrad.checks import leading_length
from streamgrad.estimators import registry
from streamgrad.theory import Episode, c_matrix, collect, optimal_alpha, optimise
from streamgrad.theory.predictions import PREDICTIONS

LARGEST_JACOBIAN = 2e8  # numbers in J_t of all steps, which a prediction at the state cut needs
FITTED = {"rescale", "q0"}  # options of an estimator that can be given the α and Q_0 of the theory
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
      hindsight: whether it was fitted to the very chunk: a bound on what can be gained, not a choice.
    """

    name: str
    promise: str
    est: GradientEstimator
    predict: Callable[[Array | None], Array] | None = None
    bound: bool = False
    hindsight: bool = False


def candidates_for(
    model: Model, params: Params, chunk: Chunk, only: Sequence[str] | None = None
) -> Iterator[Candidate]:
    """All registered estimators with their variants, as far as the cell can have them.

    Args:
      model: the model.
      params: its parameters.
      chunk: one stream; those of hindsight are fitted to it.
      only: names of estimators; their variants come with them. None for all.

    Returns:
      What `compare` takes, one after the other.
    """
    if only is not None:
        for name in only:
            registry.find_estimator(name)
    return _candidates(model, params, chunk, only)


def _candidates(model: Model, params: Params, chunk: Chunk, only: Sequence[str] | None) -> Iterator[Candidate]:
    episode = functools.cache(functools.partial(_episode, model, params, chunk))
    length = leading_length(chunk, "time")
    for row in registry.ROWS:
        cut = next((cut for cut in ("preactivation", "state") if cut in row.cuts and cut in model.cell.cuts), None)
        if (only is not None and row.name not in only) or (row.cuts and cut is None):
            continue
        where = {"cut": cut} if cut else {}
        for changed in ({}, *row.variants):
            if changed and changed.items() <= where.items():
                continue  # that is where it cuts anyway
            named = {**row.options, **changed}
            if length % named.get("every", 1):
                continue  # whole blocks alone can be compared
            try:
                est = row.make(model, **{**(where if len(row.cuts) > 1 else {}), **named})
            except ValueError:  # such as groups that do not divide the cell's preactivations
                continue
            label = " ".join([row.name, *(f"{option}={value}" for option, value in named.items())])
            yield Candidate(label, row.promise, est, *_prediction(row, episode, {**where, **named}))
            if not changed:
                with contextlib.suppress(ValueError):  # not every estimator has noise to choose
                    yield Candidate(f"{label} carried", row.promise, carried(est))
        if cut == "preactivation" and row.name in PREDICTIONS and PREDICTIONS[row.name].options >= FITTED:
            yield from _hindsight(row, model, episode)


def _hindsight(row: registry.Row, model: Model, episode: Callable[[str], Episode | None]) -> Iterator[Candidate]:
    """The estimator with the α and Q_0 that are optimal for this very stream."""
    ep = episode("preactivation")
    assert ep is not None
    # α is indexed by the position in an episode, the theory by that in the chunk.
    if len(ep.rows) > 1 or not bool(jnp.all(ep.episode == ep.episode[0])):
        return
    alpha = jax.jit(lambda ep: optimal_alpha(c_matrix(ep)).alpha, compiler_options=_ONCE)(ep)
    best = jax.jit(optimise, compiler_options=_ONCE)(ep)
    for label, options in (
        ("optimal alpha", {"rescale": alpha}),
        ("optimal alpha, Q_0", {"rescale": best.alpha, "q0": best.q0}),
    ):
        prediction = _prediction(row, episode, {"cut": "preactivation", **options})
        yield Candidate(f"{row.name} {label}", row.promise, row.make(model, **options), *prediction, hindsight=True)


def _episode(model: Model, params: Params, chunk: Chunk, cut: str) -> Episode | None:
    if cut == "state":
        state = ravel_pytree(model.init_state(params))[0].size
        if len(jax.tree.leaves(chunk.inputs)[0]) * state * ravel_pytree(params.cell)[0].size > LARGEST_JACOBIAN:
            return None

    def all_of_it(params: Params, chunk: Chunk) -> Episode:
        return collect(model, params, chunk, cut)

    return jax.jit(all_of_it, compiler_options=_ONCE)(params, chunk)


def _prediction(
    row: registry.Row, episode: Callable[[str], Episode | None], options: Mapping[str, Any]
) -> tuple[Callable[[Array | None], Array] | None, bool]:
    """The theory's total variance, where there is one, and whether it is an over-estimate."""
    if not row.promise.startswith("unbiased"):
        return (lambda alpha: jnp.zeros(())), False
    theory = PREDICTIONS.get(row.name)
    if theory is None or not set(options) <= theory.options or (ep := episode(options["cut"])) is None:
        return None, False
    given = jnp.asarray(options["rescale"])[None] if "rescale" in options else None

    @functools.partial(jax.jit, compiler_options=_ONCE)
    def mean(ep: Episode, alphas: Array) -> Array:
        return jnp.mean(jax.vmap(lambda alpha: theory.variance(ep, alpha, options))(alphas))

    def predict(alpha: Array | None) -> Array:
        alphas = alpha if given is None else given
        return mean(ep, jnp.ones((1, 1)) if alphas is None else alphas)

    return predict, theory.rescaled and given is None
