"""A comparison that several tests look at: every estimator on one small network, and one that is wrong."""

import functools

import jax

import streamgrad as sg
from streamgrad_lab import Candidate, candidates_for, compare
from tests import tools


def network():
    """The model, its parameters and a stream."""
    model = tools.make_model("vanilla", 1, 4)
    return model, tools.make_params(model, seed=2), tools.make_chunk(model, 6, seed=2)


@functools.cache
def measured(*names):
    """Rows of these estimators, or of all, on chunks of 4 and 2 steps; besides, of one that is wrong by a half."""
    model, params, chunk = network()
    pre = sg.preuoro(model)

    def wrong(params, state, chunk, key):
        grads, state, info = pre.update(params, state, chunk, key)
        return jax.tree.map(lambda leaf: 1.5 * leaf, grads), state, info

    off = Candidate("wrong", "unbiased", sg.GradientEstimator(pre.init, wrong))
    all_of_them = candidates_for(model, params, chunk, only=names or None)
    them = [*(one for one in all_of_them if not names or one.name in names), off]
    found = compare(model, params, chunk, jax.random.key(3), 2048, 8, repeats=2, candidates=them, chunk_length=4)
    return {row.name: row for row in found}
