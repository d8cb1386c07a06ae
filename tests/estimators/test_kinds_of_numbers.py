"""Every registered estimator with numbers of every kind: it works, or says in one sentence that it does not.

What is asked of each is the same: gradients in the precisions of the parameters, leaf by leaf; a state whose dtypes
stay as they are; finite numbers; and the gradient that float64 finds for the same parameters, as closely as the kind
allows.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import streamgrad as sg
from streamgrad.estimators import REGISTRY
from tests.cells.libraries import have
from tests.estimators.registered import CASES, noise_shape, usual, where
from tests.tools import one_sentence

LENGTH = 3


class Kind(NamedTuple):
    """A kind of numbers.

    Attributes:
      dtypes: of the leaves of the parameters, in turns.
      tolerance: how far off a gradient may be, relative to its largest entry.
      settings: of JAX.
      head: of the head's parameters, where they have a dtype of their own.
    """

    dtypes: tuple[Any, ...]
    tolerance: float
    settings: tuple[Callable[[], Any], ...] = ()
    head: Any = None


def strict():
    return jax.numpy_dtype_promotion("strict")


def without_64_bits():
    return jax.enable_x64(False)


# Data is always in float64, where that exists: of another dtype than most of these.
KINDS = {
    "mixed": Kind((jnp.float32, jnp.float64), 1e-6),
    "float32": Kind((jnp.float32,), 1e-4, (without_64_bits,)),
    "float32-under-x64": Kind((jnp.float32,), 1e-4),
    "bfloat16": Kind((jnp.bfloat16,), 1e-2),
    "float16": Kind((jnp.float16,), 5e-3),
    "strict": Kind((jnp.float64,), 1e-12, (strict,)),
    "strict-mixed": Kind((jnp.float32, jnp.float64), 1e-6, (strict,)),
    "strict-float32": Kind((jnp.float32,), 1e-4, (strict, without_64_bits)),
    "narrow-and-mixed": Kind((jnp.bfloat16, jnp.float64, jnp.float16, jnp.float32), 1e-2),
    "wider-head": Kind((jnp.float32,), 1e-4, (strict,), jnp.float64),
    "narrower-head": Kind((jnp.float64,), 1e-6, (strict,), jnp.float32),
}
FOR_ALL_CELLS = list(KINDS)[:8]  # the others, and unusual cuts, are shown with one cell


def flax_gru():
    from flax import nnx

    return sg.cells.from_flax(nnx.GRUCell(1, 2, rngs=nnx.Rngs(1), param_dtype=jnp.float32))


CELLS = {
    "gru": lambda: sg.cells.gru(1, 3),
    "lru": lambda: sg.cells.lru(1, 2, n_out=2),
    "flax": flax_gru,
}


def new_model(cell):
    return sg.Model(CELLS[cell](), sg.heads.squared_error(2))


@functools.cache
def model_of(cell):
    return new_model(cell)


@contextlib.contextmanager
def settings(kind: Kind):
    with contextlib.ExitStack() as stack:
        for setting in kind.settings:
            stack.enter_context(setting())
        yield


@functools.cache
def numbers_of(cell):
    """Parameters of a cell's model, as numpy has them, away from any symmetry."""
    rng = np.random.default_rng(1)
    params = model_of(cell).init(jax.random.key(0))
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64) + 0.3 * rng.normal(size=leaf.shape), params)


def in_turns(tree, dtypes):
    """Leaves with these dtypes in turns."""
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten([jnp.asarray(x).astype(dtypes[i % len(dtypes)]) for i, x in enumerate(leaves)])


def of_kind(kind: Kind, params):
    """Parameters of that kind."""
    if kind.head is None:
        return in_turns(params, kind.dtypes)
    return sg.Params(in_turns(params.cell, kind.dtypes), in_turns(params.head, (kind.head,)))


def wide(tree):
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf, np.float64)), tree)


def chunks(length=LENGTH):
    """Two chunks, with resets and weights, as numpy has them."""
    rng = np.random.default_rng(0)

    def one(begins):
        inputs, targets = rng.normal(size=(length, 1)), rng.normal(size=(length, 2))
        return sg.Chunk(inputs, targets, np.arange(length) == begins, rng.normal(size=length))

    return [one(length), one(1)]


def noise_of(row, cut, cell):
    """What is passed as a key, one for each chunk: where an estimator is noisy, always the same noise."""
    if not row.noisy:
        return [None, None] if row.name != "artbp" else [jax.random.key(0)] * 2
    params = wide(numbers_of(cell))
    shape = noise_shape(row, cut, model_of(cell), params, jax.tree.map(jnp.asarray, chunks()[0]))
    rng = np.random.default_rng(2)
    return [np.sign(rng.normal(size=shape)) for _ in range(2)]


def options(row, cut):
    return where(row, cut) | ({"noise": "given"} if row.noisy else {})


def dtypes(tree):
    return [leaf.dtype for leaf in jax.tree.leaves(tree)]


def gradient(est, params, keys):
    """Of two chunks, summed in float64; dtypes are looked at on the way."""
    state, total, losses = est.init(params), None, []
    for chunk, key in zip(chunks(), keys, strict=True):
        key = jnp.asarray(key) if isinstance(key, np.ndarray) else key
        before = dtypes(state)
        grads, state, info = est.update(params, state, jax.tree.map(jnp.asarray, chunk), key)
        assert dtypes(state) == before
        assert jax.tree.structure(grads) == jax.tree.structure(params) and dtypes(grads) == dtypes(params)
        grads = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), grads)
        total = grads if total is None else jax.tree.map(np.add, total, grads)
        losses.append(np.asarray(info.loss, np.float64))
        assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves((grads, info)))
    return total, np.concatenate(losses)


def apart(got, want):
    """The largest difference, relative to the largest entry of the tree."""
    scale = max(np.abs(leaf).max() for leaf in jax.tree.leaves(want))
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(np.abs(a - b).max() for a, b in pairs) / scale


@functools.cache
def estimator_of(name, cut, cell):
    """In float64, with the usual settings; where it is not made for the cell, what it says."""
    row = REGISTRY[name]
    try:
        return row.make(model_of(cell), **options(row, cut))
    except ValueError as refusal:
        return str(refusal)


# What was broken once, and one of each way in.
QUICK = {
    ("rtrl", "flax", "float32-under-x64"),
    ("snap", "flax", "float32-under-x64"),
    ("ok", "gru", "strict"),
    ("windowed_bptt", "gru", "strict"),
    ("ok", "gru", "bfloat16"),
    ("sketch", "gru", "bfloat16"),
    ("rflo", "gru", "bfloat16"),
    ("uoro", "gru", "mixed"),
    ("eprop", "gru", "wider-head"),
    ("rtrl", "gru", "narrower-head"),
    ("rflo", "lru", "mixed"),
}
TABLE = [
    pytest.param(
        row,
        cut,
        cell,
        kind,
        marks=() if usual(row, cut) and (row.name, cell, kind) in QUICK else pytest.mark.slow,
        id="-".join(filter(None, (row.name, cut, cell, kind))),
    )
    for row, cut in CASES
    for cell in CELLS
    for kind in KINDS
    if cell == "gru" or (usual(row, cut) and kind in FOR_ALL_CELLS)
]


@pytest.mark.parametrize("row, cut, cell, kind", TABLE)
def test_table(row, cut, cell, kind):
    if cell == "flax" and not have("flax"):
        pytest.skip("flax cannot be imported here")
    kind, usual_one = KINDS[kind], estimator_of(row.name, cut, cell)
    if isinstance(usual_one, str):  # not made for this cell, whatever the numbers
        with settings(kind), pytest.raises(ValueError) as refusal:
            row.make(new_model(cell), **options(row, cut))
        assert str(refusal.value) == usual_one and one_sentence(refusal) and row.name in usual_one
        return
    keys = noise_of(row, cut, cell)
    with settings(kind):
        params = of_kind(kind, numbers_of(cell))
        got, losses = gradient(row.make(new_model(cell), **options(row, cut)), params, keys)
        params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    want, right = gradient(usual_one, wide(params), keys)
    assert apart(got, want) < kind.tolerance
    np.testing.assert_allclose(losses, right, atol=10 * kind.tolerance)


@pytest.mark.parametrize("make", [sg.bptt, pytest.param(sg.rtrl, marks=pytest.mark.slow)])
def test_sums_over_many_steps_are_not_kept_in_narrow_numbers(make):
    """In bfloat16 a sum stops to grow at 256 times its terms."""
    model = model_of("gru")
    params = in_turns(numbers_of("gru"), (jnp.bfloat16,))
    chunk = sg.Chunk(jnp.ones((1000, 1)), jnp.ones((1000, 2)))
    got, want = (make(model).update(p, make(model).init(p), chunk, None)[0] for p in (params, wide(params)))
    assert apart(wide(got), wide(want)) < 1e-2


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.bfloat16])
def test_a_head_of_ones_own_reads_the_output_in_its_precision(dtype):
    """Under strict promotion it multiplies the two, and neither casts nor knows of the cell's."""
    head = sg.heads.from_function(
        lambda key, width: {"w": jax.random.normal(key, (2, width))},
        lambda params, y, target: jnp.sum((params["w"] @ y - target.astype(y.dtype)) ** 2),
    )
    model = sg.Model(sg.cells.gru(1, 3), head)
    params = model.init(jax.random.key(0))
    params = sg.Params(in_turns(params.cell, (jnp.float32,)), in_turns(params.head, (dtype,)))
    want, _ = gradient(sg.rtrl(model), wide(params), [None, None])
    with strict():
        got, _ = gradient(sg.rtrl(model), params, [None, None])
    assert apart(got.cell, want.cell) < 1e-5
    assert apart(got.head, want.head) < (1e-2 if dtype == jnp.bfloat16 else 1e-5)


@pytest.mark.parametrize("cell", ["gru", pytest.param("lru", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["bfloat16", pytest.param("strict-mixed", marks=pytest.mark.slow)])
def test_many_streams_acting_and_running(kind, cell):
    """The other ways to call an estimator, and the network without one, have the same dtypes."""
    kind, chunk = KINDS[kind], jax.tree.map(jnp.asarray, chunks()[1])._replace(weight=None)
    with settings(kind):
        model = new_model(cell)
        params, est = of_kind(kind, numbers_of(cell)), sg.rtrl(model)
        grads, state, _ = est.update(params, est.init(params), chunk, None)
        output, _, trace = est.advance(params, est.init(params), chunk.inputs, None, chunk.reset)
        predicted = jax.vmap(model.head.predict, in_axes=(None, 0))(params.head, output)
        missed, weights = predicted - chunk.targets.astype(predicted.dtype), params.head["w"].astype(predicted.dtype)
        credit = est.credit(params, trace, missed @ weights)
        assert dtypes(credit) == dtypes(params.cell)
        assert apart(wide(credit), wide(grads.cell)) < kind.tolerance
        outputs, end = model.run(params, model.init_state(params), chunk.inputs, chunk.reset)
        assert dtypes(end) == dtypes(state.cell) and outputs.dtype == output.dtype
        np.testing.assert_allclose(outputs, output, atol=1e-5)
        many = sg.batched(est, 2, watched=1)
        two = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), chunk)
        mean, _, _ = many.update(params, many.init(params), two, None)
        assert dtypes(mean) == dtypes(params)
        assert apart(wide(mean), wide(grads)) < kind.tolerance


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixed", "bfloat16", "strict", "strict-float32"])
def test_what_is_carried_over(kind):
    """Q_0 and α are learnt in every kind of numbers."""
    kind = KINDS[kind]
    with settings(kind):
        params = of_kind(kind, numbers_of("gru"))
        est = sg.batched(sg.carried(sg.uoro(new_model("gru")), q0="full", alpha="optimal", episode=LENGTH, least=1), 2)
        two = jax.tree.map(lambda leaf: jnp.stack([jnp.asarray(leaf)] * 2), chunks()[1])
        state = est.init(params)
        for seed in range(3):
            before = dtypes(state)
            grads, state, _ = est.update(params, state, two, jax.random.key(seed))
            assert dtypes(state) == before and dtypes(grads) == dtypes(params)
        assert bool(state.shared.solved)
        assert all(np.all(np.isfinite(np.asarray(leaf, np.float64))) for leaf in jax.tree.leaves((grads, state)))


NATIVE = {
    "vanilla": lambda: sg.cells.vanilla(1, 2),
    "lstm": lambda: sg.cells.lstm(1, 2),
    "rtu": lambda: sg.cells.rtu(1, 2),
    "elstm": lambda: sg.cells.elstm(1, 2),
    "mingru": lambda: sg.cells.mingru(1, 2),
    "lif": lambda: sg.cells.lif(1, 2, beta=0.1),
    "stack": lambda: sg.cells.stack(sg.cells.lru(1, 2, n_out=2), sg.cells.gru(2, 2)),
}


@pytest.mark.parametrize("cell", [pytest.param(c, marks=() if c == "stack" else pytest.mark.slow) for c in NATIVE])
@pytest.mark.parametrize("kind", ["strict", "strict-float32", pytest.param("strict-mixed", marks=pytest.mark.slow)])
def test_native_cells_under_strict_promotion(cell, kind):
    """Drawing parameters, and every estimator, of which a trace tells all."""
    with settings(KINDS[kind]):
        model = sg.Model(NATIVE[cell](), sg.heads.bernoulli(2))
        params = of_kind(KINDS[kind], model.init(jax.random.key(0)))
        chunk = jax.tree.map(jnp.asarray, chunks()[1])._replace(targets=jnp.ones((LENGTH, 2), bool))
        some = [(row, cut) for row, cut in CASES if usual(row, cut)]
        for row, cut in some if cell != "stack" else some[::4]:
            try:
                est = row.make(model, **where(row, cut))
            except ValueError as refusal:
                assert row.name in str(refusal) and row.promise == "biased"
                continue
            grads, state, _ = jax.eval_shape(est.update, params, est.init(params), chunk, jax.random.key(0))
            assert dtypes(grads) == dtypes(params) and dtypes(state) == dtypes(est.init(params))


VARIANTS = [(row, variant) for row, _ in CASES for variant in row.variants]
VARIANTS = {f"{row.name}-{'-'.join(map(str, variant.values()))}": (row, variant) for row, variant in VARIANTS}


@pytest.mark.slow
@pytest.mark.parametrize("case", VARIANTS)
def test_variants(case):
    """What `streamgrad compare` shows of an estimator, in a batch, by its trace."""
    row, variant = VARIANTS[case]
    for kind in (KINDS[name] for name in ("mixed", "bfloat16", "strict-mixed", "strict-float32", "wider-head")):
        with settings(kind):
            model = sg.Model(sg.cells.gru(1, 16), sg.heads.squared_error(2))
            params = of_kind(kind, model.init(jax.random.key(0)))
            est = sg.batched(row.make(model, **variant), 2)
            two = jax.tree.map(lambda leaf: jnp.stack([jnp.asarray(leaf)] * 2), chunks(4)[1])
            state = jax.eval_shape(est.init, params)
            grads, new, _ = jax.eval_shape(est.update, params, state, two, jax.random.key(0))
            assert dtypes(grads) == dtypes(params) and dtypes(new) == dtypes(state)


def test_a_step_of_ones_own_that_promotes_says_so():
    """Under strict promotion a user's own sum of two precisions is an error, and JAX's message names them."""
    cell = functools.partial(
        sg.cells.from_function,
        lambda params, h, x: jnp.tanh(params["w"] @ h + jnp.arange(2)),
        lambda key: {"w": jax.random.normal(key, (2, 2))},
        lambda: jnp.zeros(2),
        example_input=jnp.zeros(1),
    )
    cell()
    with strict(), pytest.raises(ValueError, match=r"int64.* no available implicit dtype promotion path"):
        cell()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float32, marks=pytest.mark.slow)])
def test_theory_of_narrow_parameters(dtype):
    model = model_of("gru")
    params = in_turns(numbers_of("gru"), (dtype, jnp.float32))
    chunk = jax.tree.map(jnp.asarray, chunks()[1])
    got = sg.theory.collect(model, params, chunk)
    want = sg.theory.collect(model, wide(params), chunk)
    assert got.b.dtype == jnp.float32
    assert apart(wide(got.gradient), wide(want.gradient)) < 1e-5
