"""What `compare` compares: every registered estimator with its variants, and the theory of their variance."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from streamgrad import Chunk, GradientEstimator, Model, Params, carried, cuts
from streamgrad._typing import Array
from streamgrad.estimators import REGISTRY, Row, find_estimator
from streamgrad.theory import Episode, c_matrix, collect, collect_chunks, optimal_alpha, optimise
from streamgrad.theory.predictions import find_prediction

LARGEST_JACOBIAN = 2e8  # numbers in J of all steps, or of all chunks, which a prediction at the state needs
FITTED = {"rescale": None, "q0": None}  # options of an estimator that can be given the α and Q_0 of the theory
# The theory runs once: compiling fast is worth more than running fast.
_ONCE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


class Candidate(NamedTuple):
    """An estimator to be compared.

    Attributes:
      name: how it is shown.
      promise: as in the registry.
      est: the estimator.
      predict: `predict(α of some streams, K) -> total variance` for chunks of K steps, or None where no theory is at
        hand; it may itself return None, where the model is too large for it.
      bound: whether the prediction is an over-estimate: α that depends on the noise, as GIR's does, is treated as if it
        did not, and the prediction is the mean over several such α.
      hindsight: whether it was fitted to the very stream: a bound on what can be gained, not a choice.
      noisy: whether it depends on the key; if not, a few samples will do.
      least_streams: with fewer it does not run, and is left out.
      every: chunks must have a multiple of so many steps; else it is left out.
    """

    name: str
    promise: str
    est: GradientEstimator
    predict: "Predict | None" = None
    bound: bool = False
    hindsight: bool = False
    noisy: bool = True
    least_streams: int = 1
    every: int = 1


Predict = Callable[[Array | None, int], Array | None]


class Candidates:
    """What to compare, one after the other; how many there are is known before any is made.

    Args:
      makers: functions without arguments, one for each candidate, called when its turn comes.
    """

    def __init__(self, makers: Sequence[Callable[[], Candidate]]):
        self._makers = makers

    def __len__(self) -> int:
        return len(self._makers)

    def __iter__(self) -> Iterator[Candidate]:
        return (make() for make in self._makers)


def candidates_for(model: Model, params: Params, chunk: Chunk, only: Sequence[str] | None = None) -> Candidates:
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
        only = [find_estimator(name).name for name in only]
    return Candidates(list(_makers(model, params, chunk, only)))


def _makers(
    model: Model, params: Params, chunk: Chunk, only: Sequence[str] | None
) -> Iterator[Callable[[], Candidate]]:
    """A function for each candidate. To make an estimator is cheap, but for a fitted one, which waits its turn."""
    episodes = Episodes(model, params, chunk)
    for row in REGISTRY.values():
        cut = next((cut for cut in ("preactivation", "state") if cut in row.cuts and cut in model.cell.cuts), None)
        if (only is not None and row.name not in only) or (row.cuts and cut is None):
            continue
        for changed in ({}, *row.variants):
            named = {**row.options, **changed}
            where = {"cut": cut} if cut else {}
            if changed and changed.items() <= where.items():
                continue  # that is where it cuts anyway
            try:
                est = row.make(model, **{**(where if len(row.cuts) > 1 else {}), **named})
            except ValueError:  # such as groups that do not divide the cell's preactivations
                continue
            label = " ".join([row.name, *(f"{option}={value}" for option, value in named.items())])
            made = _candidate(row, label, est, episodes, {**where, **named})._replace(every=named.get("every", 1))
            yield functools.partial(_made, made)
            if not changed:
                with contextlib.suppress(ValueError):  # not every estimator has noise to choose
                    yield functools.partial(_made, Candidate(f"{label} carried", row.promise, carried(est)))
        if cut == "preactivation" and find_prediction(row.name, {"cut": cut, **FITTED}) and episodes.can_be_fitted:
            for label in FITS:
                yield functools.partial(_hindsight, row, model, episodes, label)


def _made(candidate: Candidate) -> Candidate:
    return candidate


def _candidate(
    row: Row,
    label: str,
    est: GradientEstimator,
    episodes: "Episodes",
    options: Mapping[str, Any],
    hindsight: bool = False,
) -> Candidate:
    """An estimator of the registry with what these options make of its promise."""
    noisy = row.noisy
    shrink = options.get("shrink", 1)
    truncated = not options.get("accumulate", True)
    promise = row.promise if shrink == 1 and not truncated else "biased"
    least = 2 if shrink == "auto" else 1  # it looks at the spread over streams
    return Candidate(label, promise, est, *_prediction(row, episodes, options, noisy), hindsight, noisy, least)


def _hindsight(row: Row, model: Model, episodes: "Episodes", label: str) -> Candidate:
    """The estimator with the α, or the α and Q_0, that are optimal for this very stream."""
    options = FITS[label](episodes.by_steps("preactivation"))
    est, given = row.make(model, **options), {"cut": "preactivation", **options}
    return _candidate(row, f"{row.name} {label}", est, episodes, given, hindsight=True)


def _best_alpha(ep: Episode) -> dict[str, Any]:
    alpha = jax.jit(lambda ep: optimal_alpha(c_matrix(ep)).alpha, compiler_options=_ONCE)(ep)
    return {"rescale": alpha}


def _best_of_both(ep: Episode) -> dict[str, Any]:
    best = jax.jit(optimise, compiler_options=_ONCE)(ep)
    return {"rescale": best.alpha, "q0": best.q0}


FITS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "optimal alpha": _best_alpha,
    "optimal alpha, Q_0": _best_of_both,
}


class Episodes:
    """What the theory needs of a stream, each once; None where the model is too large for it."""

    def __init__(self, model: Model, params: Params, chunk: Chunk) -> None:
        self.model, self.params, self.chunk = model, params, chunk
        self.length = len(jax.tree.leaves(chunk.inputs)[0])
        self.by_steps = functools.cache(self._by_steps)
        self.by_chunks = functools.cache(self._by_chunks)

    @property
    def can_be_fitted(self) -> bool:
        """Whether α can be: it is indexed by the position in an episode, the theory by that in the stream."""
        one_matrix = len(cuts.layout(self.model.cell, self.model.cell.cuts["preactivation"]).rows) == 1
        return one_matrix and (self.chunk.reset is None or not bool(jnp.any(self.chunk.reset[1:])))

    def _by_steps(self, cut: str) -> Episode | None:
        """Of every step, at a cut."""
        if cut == "state" and self._too_large(self.length):
            return None

        def all_of_it(params: Params, chunk: Chunk) -> Episode:
            return collect(self.model, params, chunk, cut)

        return jax.jit(all_of_it, compiler_options=_ONCE)(self.params, self.chunk)

    def _by_chunks(self, chunk_length: int) -> Episode | None:
        """Of every chunk but the last."""
        if self._too_large(-(-self.length // chunk_length) - 1):
            return None
        return collect_chunks(self.model, self.params, self.chunk, chunk_length)

    def _too_large(self, jacobians: int) -> bool:
        state = ravel_pytree(self.model.init_state(self.params))[0].size
        return jacobians * state * ravel_pytree(self.params.cell)[0].size > LARGEST_JACOBIAN


def _prediction(row: Row, episodes: Episodes, options: Mapping[str, Any], noisy: bool) -> tuple[Predict | None, bool]:
    """The theory's total variance, where there is one, and whether it is an over-estimate."""
    if not noisy:
        return (lambda alpha, chunk_length: jnp.zeros(())), False
    theory = find_prediction(row.name, options)
    if theory is None:
        return None, False
    given = jnp.asarray(options["rescale"])[None] if "rescale" in options else None

    @functools.partial(jax.jit, compiler_options=_ONCE)
    def mean(ep: Episode, alphas: Array) -> Array:
        return jnp.mean(jax.vmap(lambda alpha: theory.variance(ep, alpha, options))(alphas))

    def predict(alpha: Array | None, chunk_length: int) -> Array | None:
        if theory.across and chunk_length >= episodes.length:
            return jnp.zeros(())  # nothing lies before the only chunk
        ep = episodes.by_chunks(chunk_length) if theory.across else episodes.by_steps(options["cut"])
        if ep is None:
            return None
        alphas = alpha if given is None else given
        return mean(ep, jnp.ones((1, 1)) if alphas is None else alphas)

    return predict, theory.rescaled and given is None
