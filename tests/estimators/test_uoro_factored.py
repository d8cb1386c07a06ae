"""The factored form of UORO is the plain one, to rounding: every cell, rescaling, Q_0, grouping, and resets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import streamgrad as sg
from streamgrad.engine.chunk import in_stretches
from streamgrad.estimators import uoro_factored
from streamgrad.estimators.uoro import uoro_plain
from tests.tools import cut_size, error, few, make_chunk, make_model, make_params, random_alpha, split

# Longer than a block of GIR (16 steps for so few rows), and no multiple of it nor of the few steps inside.
LENGTHS = (37, 5)


def both_forms(model, dtype, reset, lengths=LENGTHS, **options):
    """Sum of gradients, last state and diagnostics over the chunks, plain and factored."""
    params = make_params(model, dtype=dtype)
    chunks = list(split(make_chunk(model, sum(lengths), dtype=dtype, reset=reset), lengths))
    results = []
    for make in (uoro_plain, sg.uoro):
        est = make(model, **options)
        state, total = est.init(params), None
        for i, chunk in enumerate(chunks):
            grads, state, info = est.update(params, state, chunk, jax.random.key(i))
            total = grads if total is None else jax.tree.map(jnp.add, total, grads)
        results.append((total, state, info))
    return results


OPTIONS = {
    "gir": {},
    "gaussian": {"noise": "gaussian"},
    "none": {"rescale": "none"},
    "alpha": {"rescale": random_alpha(sum(LENGTHS))},
    "exact": {"immediate": "exact"},
    "groups": {"groups": 2},
    "all groups": {"groups": "N"},
}


# Every cell with GIR, every option with the LSTM, and groups where there are several matrices.
PAIRS = [(cell, "gir") for cell in ("vanilla", "gru", "stack")] + [("lstm", options) for options in OPTIONS]
PAIRS += [("gru", "groups"), ("stack", "groups"), ("stack", "all groups")]


@pytest.mark.parametrize("cell, options", few(PAIRS, ("lstm", "groups")))
def test_factored_is_plain(cell, options):
    model = make_model(cell)
    n = cut_size(model, "preactivation")
    options = dict(OPTIONS[options])
    options["groups"] = n if options.get("groups") == "N" else min(options.get("groups", 1), n)
    if n % options["groups"]:
        options["groups"] = 3
    plain, fast = both_forms(model, jnp.float64, reset=(3, 20, 37), **options)
    for a, b in zip(jax.tree.leaves(fast), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10 * float(jnp.max(jnp.abs(b)) + 1e-300))


@pytest.mark.slow
@pytest.mark.parametrize("cell", ["vanilla", "lstm"])
def test_float32(cell):
    """Within 1e-5 of the largest entry, resets in mid-chunk."""
    plain, fast = both_forms(make_model(cell, n_hidden=4), jnp.float32, reset=(3, 20))
    assert error(fast[0], plain[0]) < 1e-5
    assert error(fast[1].memory.cotangent, plain[1].memory.cotangent) < 1e-5


def test_shaped_noise():
    """A full Q_0 that is not symmetric, over several weight matrices."""
    model = make_model("gru")
    q0 = np.random.default_rng(0).normal(size=(8, 8)) + 2 * np.eye(8)
    plain, fast = both_forms(model, jnp.float64, reset=(20,), lengths=(21,), q0=q0, immediate="exact")
    assert error(fast, plain) < 1e-10


def test_the_form_is_chosen():
    """Groups of one size are factored, which rounds differently; groups of uneven size fall back on the plain form."""
    for cell, options, factors in (("vanilla", {}, True), ("stack", {"groups": 3}, False)):  # rows 1, 2, 2 and 4
        plain, chosen = both_forms(make_model(cell), jnp.float64, reset=None, lengths=(20,), **options)
        same = [np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (plain[0], chosen[0])), strict=True)]
        assert all(same) != factors


def test_no_norm_is_lost_to_cancellation():
    """Where w̃ all but cancels, the recursion's square stays positive, and the cotangent is not dropped."""
    terms = uoro_factored.Terms(jnp.ones(1), jnp.ones(1), jnp.ones(1), jnp.ones(1))
    square = uoro_factored.next_square_norm(terms, jnp.ones(1), jnp.ones(1), -jnp.ones(1))
    assert 0 < float(square[0]) < 1e-12


def test_blocks_cover_every_length():
    """Stretches of any size, the last one shorter, give what one long stretch gives."""

    def advance(carry, steps):
        return jax.lax.scan(lambda total, x: (total + x, total + x), carry, steps)

    steps = jnp.arange(23.0)
    for size in (1, 4, 8, 23):
        end, kept = in_stretches(advance, 0.0, steps, size)
        np.testing.assert_array_equal(kept, np.cumsum(steps))
        assert end == np.sum(steps)
