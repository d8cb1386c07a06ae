"""Cells of other libraries have the gradients that `jax.grad` finds through those libraries' own calls.

Exact methods to 1e-10 for every leaf. Unbiased ones by their mean over patterns of signs (see `tests.tools`): all of
them where coefficients depend on the noise, else the rows of a Hadamard matrix.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import streamgrad as sg
from streamgrad.noise.kronecker_reduction import signs_needed
from tests.cells.zoo import CASES, Case
from tests.tools import all_signs, cut_size, few, made, mean_over, orthogonal_signs, random_alpha, run, split

LENGTH = 7
# One of each kind, where another of the same library would show nothing more.
KINDS = ("nnx.OptimizedLSTMCell", "linen.ConvLSTMCell", "linen, projected", "eqx.GRUCell", "eqx, two layers", "tied")
KINDS += ("haiku.LSTM", "embedding", "dropout", "lru", "counter", "bfloat16")


@functools.cache
def problem(name: str) -> tuple[Case, sg.Model, sg.Params, sg.Chunk]:
    """A case with parameters away from any symmetry, and a stream with a reset in its middle."""
    case = CASES[name].make()
    model = sg.Model(case.cell, sg.heads.squared_error(2))
    rng = np.random.default_rng(0)

    def move(leaf):
        noise = rng.normal(size=leaf.shape) + (1j * rng.normal(size=leaf.shape) if jnp.iscomplexobj(leaf) else 0)
        return jnp.asarray(leaf + 0.3 * noise, leaf.dtype)

    params = jax.tree.map(move, model.init(jax.random.key(0)))
    reset = jnp.asarray(np.arange(LENGTH) == 4)
    return case, model, params, sg.Chunk(case.inputs(rng, LENGTH), jnp.asarray(rng.normal(size=(LENGTH, 2))), reset)


def loss_of(head, y, target):
    """The head, written out."""
    return jnp.sum((head["w"] @ y + head["b"] - target) ** 2) / 2


def one_step(case, params, state, x, reset, target):
    """The library's call at one step of a stream with resets: the state, and the loss."""
    if reset is not None:
        state = jax.tree.map(lambda a, b: jnp.where(reset, a, b), case.begin, state)
    state, y = case.call(params.cell, state, x)
    return state, loss_of(params.head, y, target)


@functools.cache
def oracle(name: str, length: int = LENGTH):
    """`jax.grad` through `jax.lax.scan` of the library's own call; losses, too."""
    case, _, params, chunk = problem(name)
    chunk = jax.tree.map(lambda leaf: leaf[:length], chunk)

    def total(params):
        def step(state, now):
            return one_step(case, params, state, now.inputs, now.reset, now.targets)

        losses = jax.lax.scan(step, case.begin, chunk)[1]
        return jnp.sum(losses), losses

    return jax.jit(jax.grad(total, has_aux=True))(params)


@functools.cache
def truncated(name: str, window: int):
    """Each loss through the last steps alone, from the state that the stream was in before them."""
    case, _, params, chunk = problem(name)
    steps = [jax.tree.map(lambda leaf, t=t: leaf[t], chunk) for t in range(LENGTH)]

    def total(params):
        states, losses = [case.begin], []
        for t in range(LENGTH):
            state = states[max(0, t + 1 - window)]
            for now in steps[max(0, t + 1 - window) : t + 1]:
                state, loss = one_step(case, params, state, now.inputs, now.reset, now.targets)
            losses.append(loss)
            states.append(jax.lax.stop_gradient(state))
        return sum(losses)

    return jax.jit(jax.grad(total))(params)


def assert_same(got, want, tolerance=1e-10):
    """Every leaf, relative to the largest entry of all, in the same structure and dtype."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert [leaf.dtype for leaf in got] == [leaf.dtype for leaf in want]
    wide = [np.asarray(leaf, np.result_type(leaf.dtype, np.float64)) for leaf in want]
    scale = max(np.max(np.abs(leaf)) for leaf in wide)
    assert all(np.max(np.abs(leaf)) > 1e-3 * scale for leaf in wide), "a leaf whose gradient is nothing tests nothing"
    for a, b in zip(got, wide, strict=True):
        np.testing.assert_allclose(np.asarray(a, b.dtype), b, rtol=0, atol=tolerance * scale)


# One of each library.
LIBRARIES = ("nnx.OptimizedLSTMCell", "eqx.GRUCell", "haiku.LSTM")


@pytest.mark.parametrize("name", few(CASES, *LIBRARIES))
def test_exact(name):
    """bptt, and rtrl in chunks of three: the reset is inside the second, and the last is shorter."""
    _, model, params, chunk = problem(name)
    want, losses = oracle(name)
    tolerance = CASES[name].tolerance
    grads, found, _ = run(made(sg.bptt, model), params, [chunk])
    assert_same(grads, want, tolerance)
    np.testing.assert_allclose(found, losses, rtol=max(1e-10, tolerance / 100))
    assert_same(run(made(sg.rtrl, model), params, split_any(chunk, (3, 3, 1)))[0], want, tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_rtrl_by_single_steps(name):
    _, model, params, chunk = problem(name)
    found = run(made(sg.rtrl, model), params, split_any(chunk, (1,) * LENGTH))[0]
    assert_same(found, oracle(name)[0], CASES[name].tolerance)


WINDOWS = [(name, 2) for name in KINDS] + [("dropout", 8)]


@pytest.mark.parametrize("name, window", few(WINDOWS, ("embedding", 2)))
def test_windowed_bptt(name, window):
    _, model, params, chunk = problem(name)
    want = truncated(name, window) if window < LENGTH else oracle(name)[0]
    est = made(sg.windowed_bptt, model, window=window)
    assert_same(run(est, params, split_any(chunk, (3, 4)))[0], want, CASES[name].tolerance)


@pytest.mark.parametrize("name", few(["embedding", "eqx, two layers", "lru", "dropout", "counter"], "embedding"))
def test_many_streams(name):
    """The same stream twice and once with other targets, in one batch: the mean of what each has alone."""
    _, model, params, chunk = problem(name)
    other = chunk._replace(targets=-chunk.targets, reset=jnp.zeros(LENGTH, bool))
    both = jax.tree.map(lambda a, b: jnp.stack([a, b, a]), chunk, other)
    want = [run(made(sg.bptt, model), params, [part])[0] for part in (chunk, other, chunk)]
    mean = jax.tree.map(lambda *leaves: sum(leaves) / 3, *want)
    tolerance = CASES[name].tolerance
    for make in (sg.bptt, sg.rtrl):
        assert_same(run(sg.batched(make(model), 3), params, [both])[0], mean, tolerance)


def split_any(chunk: sg.Chunk, sizes: tuple[int, ...]):
    """`tests.tools.split`, also of keys, which are no arrays of numpy."""
    if all(jnp.issubdtype(leaf.dtype, jnp.number) or leaf.dtype == bool for leaf in jax.tree.leaves(chunk)):
        return split(chunk, sizes)
    ends = np.cumsum(sizes)
    return [jax.tree.map(lambda leaf, a=a, b=b: leaf[a:b], chunk) for a, b in zip(ends - sizes, ends, strict=True)]


def start_of(name: str, length: int):
    """The first steps of a case's stream, and their gradient by the oracle."""
    _, model, params, chunk = problem(name)
    return model, params, jax.tree.map(lambda leaf: leaf[:length], chunk), oracle(name, length)[0]


def assert_mean(name, mean, want):
    """A mean is what it should be, to what the numbers of the case hold."""
    cast = jax.tree.map(lambda got, leaf: np.asarray(got, leaf.dtype), mean, want)
    assert_same(cast, want, max(1e-10, CASES[name].tolerance))


def assert_unbiased(name, est, params, chunk, patterns, want):
    assert_mean(name, mean_over(est, params, chunk, patterns), want)


AT = [(name, "state") for name in ("nnx.GRUCell", *KINDS)]
AT += [(name, "params") for name in ("eqx, two layers", "tied", "lru", "embedding", "bfloat16")]


@pytest.mark.parametrize("name, cut", few(AT, ("lru", "state")))
def test_uoro(name, cut):
    """Rescaling that does not see the noise: a quadratic form of it."""
    model, params, chunk, want = start_of(name, 3)
    est = sg.uoro(model, cut=cut, noise="given", rescale=jnp.asarray(random_alpha(3)))
    assert_unbiased(name, est, params, chunk, orthogonal_signs(3, cut_size(model, cut)), want)


@pytest.mark.parametrize("name", few(KINDS, "tied"))
def test_uoro_gir(name):
    """At the state, all patterns of signs."""
    n = cut_size(problem(name)[1], "state")
    if n > 8:
        pytest.skip("too many patterns: test_uoro has this case by few of them")
    model, params, chunk, want = start_of(name, 3 if n < 5 else 2)
    est = sg.uoro(model, cut="state", noise="given", rescale="gir")
    assert_unbiased(name, est, params, chunk, all_signs(len(chunk.targets), n), want)


@pytest.mark.parametrize("name", few(KINDS, "eqx.GRUCell"))
def test_uoro_across(name):
    """Backpropagation inside the chunk; the signs are those of the state, once per chunk."""
    model, params, chunk, want = start_of(name, 4)
    est, n = sg.uoro_across(model, noise="given", rescale="none"), cut_size(model, "state")
    first, second = split_any(chunk, (2, 2))

    def both(signs):
        before, state, _ = est.update(params, est.init(params), first, signs[0])
        after, _, _ = est.update(params, state, second, signs[1])
        return jax.tree.map(jnp.add, before, after)

    grads = jax.jit(jax.vmap(both))(jnp.asarray(orthogonal_signs(2, n)).reshape(-1, 2, n))
    assert_mean(name, jax.tree.map(lambda leaf: leaf.mean(axis=0), grads), want)


# From here on, at the products with weights that are found in the step.


PRODUCTS = [(name, "one", "estimated") for name in KINDS]
PRODUCTS += [(name, "all", "exact") for name in ("linen.ConvLSTMCell", "eqx, two layers", "tied", "lru")]


@pytest.mark.parametrize(
    "name, groups, immediate",
    few(PRODUCTS, ("nnx.OptimizedLSTMCell", "one", "estimated"), ("tied", "one", "estimated")),
)
def test_uoro_at_products(name, groups, immediate):
    """In as few groups as there can be, or one for each preactivation."""
    model, params, chunk, want = start_of(name, 3)
    n = cut_size(model, "preactivation")
    est = sg.uoro(model, noise="given", rescale="none", groups=1 if groups == "one" else n, immediate=immediate)
    assert_unbiased(name, est, params, chunk, orthogonal_signs(3, n), want)


@pytest.mark.parametrize("name", few(KINDS, "tied"))
def test_preuoro(name):
    """With GIR, whose coefficients depend on the noise: all patterns, one sign for each step."""
    model, params, chunk, want = start_of(name, 6)
    assert_unbiased(name, sg.preuoro(model, noise="given"), params, chunk, all_signs(6), want)


@pytest.mark.parametrize("name", few(KINDS, "tied"))
def test_ok(name):
    """Chunks of one step, one term: all patterns of one product's signs.

    The gradient of a product is read from its own sum alone, so that all of them may have the same signs.
    """
    model, params, chunk, want = start_of(name, 3)
    count, n = len(jax.tree.leaves(model.enter(params).cell)), signs_needed(1, 1)
    est, parts = sg.ok(model, rank=1, noise="given"), list(split_any(chunk, (1, 1, 1)))

    def all_chunks(signs):
        state, total = est.init(params), None
        for part, own in zip(parts, signs, strict=True):
            grads, state, _ = est.update(params, state, part, jnp.broadcast_to(own, (count, n)))
            total = grads if total is None else jax.tree.map(jnp.add, total, grads)
        return total

    grads = jax.jit(jax.vmap(all_chunks))(jnp.asarray(all_signs(3, n)))
    assert_mean(name, jax.tree.map(lambda leaf: leaf.mean(axis=0), grads), want)


@pytest.mark.slow
@pytest.mark.parametrize("make", [sg.uoro, sg.ok])
@pytest.mark.parametrize("name", ["nnx.OptimizedLSTMCell", "eqx, two layers", "tied", "dropout", "bfloat16"])
def test_means_of_many_draws(name, make):
    """By their defaults, with keys, in chunks of two: means of 4,000 draws.

    A z-test of each leaf along a fixed random direction, 4.9 standard errors either way: with a Gaussian mean one in a
    million fails by chance. Draws are by fixed seeds, so that what passes once always passes.
    """
    _, model, params, chunk = problem(name)
    parts, est = list(split_any(chunk, (2, 2, 3))), make(model)
    rng = np.random.default_rng(1)
    want = oracle(name)[0].cell
    aims = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), want)

    def project(grads):
        return jax.tree.map(lambda leaf, aim: jnp.sum((leaf * aim).real), grads, aims)

    def one(key):
        state, total = est.init(params), None
        for part, k in zip(parts, jax.random.split(key, len(parts)), strict=True):
            grads, state, _ = est.update(params, state, part, k)
            total = grads.cell if total is None else jax.tree.map(jnp.add, total, grads.cell)
        return project(total)

    found = jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(2), 4000))
    for got, exact in zip(jax.tree.leaves(found), jax.tree.leaves(project(want)), strict=True):
        error = np.std(got) / np.sqrt(len(got))
        assert abs(np.mean(got) - exact) < 4.9 * error + CASES[name].tolerance * abs(exact)
