"""The registered estimators as cases of tests: each at each of its cuts, made once, or with noise that is passed in."""

import jax
import jax.numpy as jnp
import pytest

from streamgrad.estimators import REGISTRY
from streamgrad.noise import Noise
from tests.tools import made, run

ROWS = list(REGISTRY.values())
# Each estimator at each cut it has; those without a cut once.
CASES = [(row, cut) for row in ROWS for cut in (row.cuts or (None,))]
# One of each kind, by promise, and by whether it learns and is noisy: of each the one with most cuts.
BY_KIND = {(row.promise, row.learns, row.noisy): row.name for row in sorted(ROWS, key=lambda row: len(row.cuts))}
KINDS = set(BY_KIND.values())


def usual(row, cut) -> bool:
    """Of several cuts the last is the usual."""
    return cut is None or cut == row.cuts[-1]


def cases(which, quick=usual):
    """A mark for tests over all cases of some rows; those that are not quick are among the slow tests."""
    some = [(row, cut) for row, cut in CASES if which(row, cut)]
    return pytest.mark.parametrize(
        "row, cut",
        [pytest.param(row, cut, marks=() if quick(row, cut) else pytest.mark.slow) for row, cut in some],
        ids=[f"{row.name}-{cut}" if cut else row.name for row, cut in some],
    )


def of_each_kind(row, cut) -> bool:
    return row.name in KINDS and usual(row, cut)


def make(row, cut, model, **options):
    return made(row.make, model, **(where(row, cut) | options))


def refuses(row, cut, model) -> bool:
    """Whether the estimator is not made for this cell, and says so in a sentence; for vanilla all are made."""
    try:
        make(row, cut, model)
    except ValueError as refusal:
        assert row.promise == "biased"
        assert row.name in str(refusal) and str(refusal).endswith(".") and "\n" not in str(refusal)
        return True
    return False


def where(row, cut) -> dict:
    """The row's own options, with the cut where it can be chosen."""
    return dict(row.options) | ({"cut": cut} if cut and len(row.cuts) > 1 else {})


def recording_noise(shapes: list) -> Noise:
    """Noise that the caller passes in place of the key, and that notes the shape it was asked for."""

    def draw(key, shape, dtype):
        shapes.append(shape)
        return jnp.broadcast_to(jnp.asarray(key, dtype), shape)

    return Noise("recording", draw, 0.0, check=lambda key: None)


def noise_shape(row, cut, model, params, chunk) -> tuple[int, ...]:
    shapes: list = []
    est = row.make(model, **where(row, cut), noise=recording_noise(shapes))
    jax.eval_shape(est.update, params, est.init(params), chunk, jnp.zeros(()))
    return shapes[0]


def run_quietly(row, cut, model, params, chunk):
    """One chunk; where the noise is in the network itself without it, so that it is the network of BPTT."""
    if not row.promise.startswith("unbiased for"):
        return run(make(row, cut, model), params, [chunk], jax.random.key(0))
    still = jnp.zeros(noise_shape(row, cut, model, params, chunk), chunk.targets.dtype)
    return run(make(row, cut, model, noise="given"), params, [chunk], still)
