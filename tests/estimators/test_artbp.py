"""ARTBP is its recursion, truncation by truncation; its mean over them is the gradient of the whole stream."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import streamgrad as sg
from tests.reference import truncated as oracle
from tests.tools import bptt, error, few, made, make_chunk, make_model, make_params, one_sentence, run, split

slow = pytest.mark.slow
SCHEDULES = [(2, None), (1.5, 3.5), (6.0, 4)]  # mean_length and tail


def parts_of(chunk, numbers, sizes):
    borders = np.cumsum((0, *sizes))
    return list(split(chunk, sizes)), [numbers[a:b] for a, b in itertools.pairwise(borders)]


def patterns(length, begins, mean_length, tail):
    """Numbers that truncate, or do not, in every combination, and the probability of each by c_t of Equation 14."""
    found, shares = [], []
    for pattern in itertools.product([-2.0, 2.0], repeat=length):
        age, share = 0, 1.0
        for number, begin in zip(pattern, begins, strict=True):
            c = 1 / mean_length if tail is None else (tail - 1) / ((tail - 2) * mean_length + age)
            begin = begin or age == 0
            share *= 0.5 if begin else c if number < 0 else 1 - c  # where an episode begins it does not matter
            age = 1 if begin or number < 0 else age + 1
        found.append(pattern)
        shares.append(share)
    np.testing.assert_allclose(sum(shares), 1, rtol=1e-12)
    return np.array(found), np.array(shares)


def mean_of(est, params, chunk, sizes, found, shares):
    """The exact mean over truncations of the gradient of a stream in chunks."""

    def total(numbers):
        state, grads = est.init(params), []
        for part, mine in zip(*parts_of(chunk, numbers, sizes), strict=True):
            here, state, _ = est.update(params, state, part, mine)
            grads.append(here)
        return jax.tree.map(lambda *leaves: sum(leaves), *grads)

    each = jax.jit(jax.vmap(total))(jnp.asarray(found))
    return jax.tree.map(lambda leaf: np.tensordot(shares, leaf, axes=1), each)


@pytest.mark.parametrize("mean_length, tail", few(SCHEDULES, (1.5, 3.5)))
@pytest.mark.parametrize("sizes", [(2, 3, 1), *(pytest.param(s, marks=slow) for s in ((1,) * 6, (6,)))])
def test_unbiased(mean_length, tail, sizes):
    """The mean over all truncations, weighted by their probability, in any chunks, with a reset and without."""
    model = make_model("vanilla")
    params = make_params(model)
    est = made(sg.artbp, model, mean_length=mean_length, tail=tail, longest=6, noise="given")
    for reset in ((), (3,)):
        chunk = make_chunk(model, 6, reset=reset)
        found, shares = patterns(6, np.isin(np.arange(6), reset), mean_length, tail)
        assert error(mean_of(est, params, chunk, sizes, found, shares), bptt(model, params, chunk)) < 1e-10


@slow
@pytest.mark.parametrize("cell", ["lstm", "gru", "stack", "nested"])
def test_unbiased_for_any_cell(cell):
    model = make_model(cell)
    params, chunk = make_params(model), make_chunk(model, 5)
    est = made(sg.artbp, model, mean_length=3, tail=4, longest=4, noise="given")
    found, shares = patterns(5, np.zeros(5, bool), 3, 4)
    assert error(mean_of(est, params, chunk, (2, 1, 2), found, shares), bptt(model, params, chunk)) < 1e-10


@pytest.mark.slow
def test_the_bias_of_what_is_kept():
    """With step after step, and credit cut for certain after `longest` of them, the mean is that of truncated BPTT."""
    model = make_model("vanilla")
    params, chunk = make_params(model), make_chunk(model, 6)
    found, shares = patterns(6, np.zeros(6, bool), 2, None)
    for longest in (1, 3):
        est = made(sg.artbp, model, mean_length=2, tail=None, longest=longest, noise="given")
        mean = mean_of(est, params, chunk, (1,) * 6, found, shares)
        assert error(mean.cell, oracle.windowed_bptt(model, params, chunk, longest + 1)) < 1e-10
        assert error(mean, bptt(model, params, chunk)) > 1e-3


def changing(model, sizes, reset, mean_length, tail, longest):
    """A stream with other parameters for each chunk: what the library makes of it, and what the textbook does."""
    length = sum(sizes)
    numbers = np.random.default_rng(4).uniform(-np.sqrt(3), np.sqrt(3), size=length)
    parts, mine = parts_of(make_chunk(model, length, seed=1, reset=reset), numbers, sizes)
    params = [make_params(model, seed=seed) for seed in range(len(sizes))]
    est = made(sg.artbp, model, mean_length=mean_length, tail=tail, longest=longest, noise="given")
    state, got = est.init(params[0]), []
    for theta, part, here in zip(params, parts, mine, strict=True):
        grads, state, info = est.update(theta, state, part, jnp.asarray(here))
        got.append((ravel_pytree(grads.cell)[0], info.diagnostics))
    return got, oracle.artbp(model, params, parts, mine, mean_length, tail, longest)


@pytest.mark.parametrize(
    "cell, mean_length, tail, longest",
    [
        ("lstm", 4, None, 3),
        pytest.param("nested", 3, 4, 20, marks=slow),
        pytest.param("lstm", 2.5, 6, 4, marks=slow),
        pytest.param("gru", 8, 3, 5, marks=slow),
        pytest.param("stack", 3, None, 1, marks=slow),
    ],
)
def test_textbook_while_parameters_change(cell, mean_length, tail, longest):
    """Gradient, reach, and what was cut for certain; chunks that are longer and shorter than what is kept."""
    model = make_model(cell)
    for reset in ((), (0, 5, 6)):
        got, want = changing(model, (1, 1, 3, 1, 2, 6, 1, 1), reset, mean_length, tail, longest)
        for (grads, told), (textbook, reach, beyond) in zip(got, want, strict=True):
            np.testing.assert_allclose(grads, textbook, rtol=1e-9, atol=1e-11)
            assert told["reach"].tolist() == [reach]
            np.testing.assert_allclose(told["cut"][0], np.linalg.norm(beyond), rtol=1e-9, atol=1e-12)
        reached, lost = zip(*((reach, np.linalg.norm(beyond)) for _, reach, beyond in want), strict=True)
        assert max(reached) > 0 and min(reached) == 0
        assert (max(lost) > 0) == (longest < 20)


@pytest.mark.slow
def test_many_streams_with_reaches_of_their_own():
    """All of them go back as far as the one that goes farthest; it makes no difference to the others."""
    model = make_model("gru")
    est = made(sg.artbp, model, mean_length=3, tail=4, longest=5)
    many, params = sg.batched(est, 4), make_params(model)
    states, singles, reaches = many.init(params), [est.init(params) for _ in range(4)], []
    for update, length in enumerate((1, 2, 1, 1, 3, 1, 1)):
        keys = jax.random.split(jax.random.key(update), 4)
        chunks = [make_chunk(model, length, seed=10 * update + seed, reset=(seed - update,)) for seed in range(4)]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *chunks)
        grads, states, info = many.update(params, states, stacked, keys)
        results = [est.update(params, *each) for each in zip(singles, chunks, keys, strict=True)]
        singles = [state for _, state, _ in results]
        assert error(grads, jax.tree.map(lambda *leaves: sum(leaves) / 4, *(grads for grads, _, _ in results))) < 1e-12
        for name in ("truncated", "reach", "cut"):
            want = jnp.stack([told.diagnostics[name] for _, _, told in results])
            np.testing.assert_allclose(info.diagnostics[name], want, rtol=1e-12, atol=1e-14)
        reaches.append(np.ravel(info.diagnostics["reach"]))
    assert any(len(set(reach)) > 2 for reach in reaches)


@pytest.mark.parametrize("mean_length, tail", [(2, None), (8, None), (1.5, 6), (8, 6)])
def test_truncations_come_every_so_many_steps(mean_length, tail):
    """In the mean, by either schedule. For tail=6 and mean_length=8 the rate has a standard error below 1 %."""
    model = make_model("vanilla", n_hidden=1)
    params, chunk = make_params(model), make_chunk(model, 40_000)
    est = sg.artbp(model, mean_length=mean_length, tail=tail, longest=1)
    _, state, info = est.update(params, est.init(params), chunk, jax.random.key(0))
    rate = np.mean(info.diagnostics["truncated"])
    assert abs(rate * mean_length - 1) < 0.04
    assert state.memory.age >= 1


def test_factors_of_a_flow_that_goes_far():
    """Constant probabilities make them grow exponentially, those of Equation 14 as a power of the distance."""
    model = make_model("vanilla")
    params, chunk = make_params(model), make_chunk(model, 12)
    for tail, want in ((None, (4 / 3) ** 11), (4, np.prod([1 / (1 - 3 / (8 + t)) for t in range(1, 12)]))):
        est = sg.artbp(model, mean_length=4, tail=tail, longest=100, noise="given")
        _, state, _ = est.update(params, est.init(params), chunk, jnp.full(12, 2.0))
        np.testing.assert_allclose(np.prod(np.asarray(state.memory.factors)[-11:]), want, rtol=1e-12)


@slow
def test_float32():
    model = make_model("lstm")
    est = made(sg.artbp, model, mean_length=4, tail=4, longest=6, noise="given")
    numbers = np.random.default_rng(0).uniform(-np.sqrt(3), np.sqrt(3), size=8)
    params, chunk = make_params(model, dtype=jnp.float32), make_chunk(model, 8, reset=(5,), dtype=jnp.float32)
    totals = []
    for theta, stream in ((params, chunk), (make_params(model), make_chunk(model, 8, reset=(5,)))):
        state, total = est.init(theta), 0.0
        for part, mine in zip(*parts_of(stream, numbers, (2, 2, 4)), strict=True):
            grads, state, _ = est.update(theta, state, part, jnp.asarray(mine))
            total = total + ravel_pytree(grads)[0]
        totals.append((total, state))
    assert error(totals[0][0], totals[1][0]) < 1e-5
    floats = [leaf for leaf in jax.tree.leaves(totals[0]) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert len(floats) > 3 and all(leaf.dtype == jnp.float32 for leaf in floats)


def test_without_truncations_it_is_the_whole_gradient():
    """Also of a cell whose weight products were found in its step. Truncations as rare as that leave factors of 1."""

    def step(params, h, x):
        return params["leak"] * h + jnp.tanh(h @ params["w"] + x)

    def init(key):
        return {"leak": jnp.full(3, 0.5), "w": jax.random.normal(key, (3, 3))}

    cell = sg.cells.from_function(step, init, lambda: jnp.zeros(3), example_input=jnp.zeros(3))
    model = sg.Model(cell, sg.heads.squared_error(2))
    params = make_params(model)
    rng = np.random.default_rng(0)
    chunk = sg.Chunk(jnp.asarray(rng.normal(size=(7, 3))), jnp.asarray(rng.normal(size=(7, 2))))
    want = bptt(model, params, chunk)
    for tail in (None, 4):
        est = sg.artbp(model, mean_length=1e14, tail=tail, longest=7)
        got, _, _ = run(est, params, split(chunk, (3, 1, 3)), jax.random.key(0))
        assert error(got, want) < 1e-10


def test_a_stream_may_begin_with_another_state():
    """Nothing before it gets credit, whatever it is."""
    model = make_model("lstm")
    params, chunk = make_params(model), make_chunk(model, 4)
    est, exact = made(sg.artbp, model, mean_length=2, tail=None, longest=3, noise="given"), made(sg.bptt, model)
    start = jax.tree.map(lambda leaf: leaf + 0.5, exact.init(params).cell)
    truncated = jnp.full(4, -2.0)
    got = est.update(params, est.init(params)._replace(cell=start), chunk, truncated)
    want, state = 0.0, exact.init(params)._replace(cell=start)
    for part in split(chunk, (1,) * 4):
        grads, state, _ = exact.update(params, state, part, None)
        want = want + ravel_pytree(grads)[0]
    assert error(ravel_pytree(got[0])[0], want) < 1e-12
    assert error(got[1].cell, state.cell) < 1e-12


UNKNOWN = sg.Model(make_model("vanilla").cell._replace(example_input=None), make_model("vanilla").head)
OPTIONS = {
    "mean_length of 1": ({"mean_length": 1}, "mean_length must be above 1, .*, not 1"),
    "mean_length not a number": ({"mean_length": "long"}, "mean_length must be a finite number, not 'long'"),
    "infinite mean_length": ({"mean_length": np.inf}, "mean_length must be a finite number"),
    "tail of 2": ({"tail": 2}, "tail must be above 2"),
    "tail not a number": ({"tail": "heavy"}, "tail must be a finite number"),
    "nothing kept": ({"longest": 0}, "longest must be a whole number of at least 1, not 0"),
    "signs": ({"noise": "rademacher"}, "noise must be 'uniform' or 'given', not 'rademacher'"),
    "normal": ({"noise": "gaussian"}, "noise must be 'uniform' or 'given', not 'gaussian'"),
    "unknown noise": ({"noise": "pink"}, "noise must be one of"),
}


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize("case", OPTIONS)
def test_options(case):
    options, match = OPTIONS[case]
    with pytest.raises(ValueError, match=match) as error:
        sg.artbp(make_model("vanilla"), **options)
    assert one_sentence(error)


@pytest.mark.usefixtures("as_a_user")
def test_errors():
    with pytest.raises(ValueError, match="artbp stores inputs across chunks") as error:
        sg.artbp(UNKNOWN)
    assert one_sentence(error)
    model = make_model("vanilla")
    est, params, chunk = sg.artbp(model, noise="given"), make_params(model), make_chunk(model, 3)
    with pytest.raises(ValueError, match=r"given noise must have the shape \(3,\), not \(2,\)"):
        est.update(params, est.init(params), chunk, jnp.zeros(2))
    with pytest.raises(ValueError, match="key must be the noise itself"):
        est.update(params, est.init(params), chunk, jax.random.key(0))


def test_truncations_are_kept():
    """The sum over chunks is the same for the same numbers, in any chunks."""
    model = make_model("lstm")
    params, chunk = make_params(model), make_chunk(model, 8, reset=(5,))
    est = made(sg.artbp, model, mean_length=3, tail=5, longest=8, noise="given")
    numbers = np.random.default_rng(1).uniform(-np.sqrt(3), np.sqrt(3), size=8)
    want = run(est, params, [chunk], jnp.asarray(numbers))[0]
    for sizes in ((1,) * 8, (3, 5)):
        state, total = est.init(params), 0.0
        for part, mine in zip(*parts_of(chunk, numbers, sizes), strict=True):
            grads, state, _ = est.update(params, state, part, jnp.asarray(mine))
            total = total + ravel_pytree(grads)[0]
        assert error(total, ravel_pytree(want)[0]) < 1e-12
