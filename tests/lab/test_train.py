"""Training: it is plain gradient descent, however long its calls, and a seed that diverges stops alone."""

import functools
import logging
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import streamgrad as sg
from streamgrad_lab.cli.main import main
from streamgrad_lab.tasks import Task, find_task
from streamgrad_lab.training import Diverged, Plan, begin, load_params, loop, metrics, read_metrics, train
from streamgrad_lab.training.checkpoint import Checkpoints, steps
from streamgrad_lab.training.measure import untrained_loss
from tests.lab.counting import PLAN, counting, parts, same
from tests.tools import ROOT, code_blocks


def test_training_is_gradient_descent_on_the_mean_loss(tmp_path):
    """Against a loop over updates, seeds, streams and steps, with jax.grad."""
    task = find_task("queue", delay=1, batch_size=2, length=2)
    model = sg.Model(sg.cells.vanilla(1, 2), task.head)
    optimizer = optax.sgd(0.5)
    plan = Plan(updates=3, every=3, checkpoint_every=3, seeds=2, checkpoints=False)
    got = train(tmp_path, plan, model, task, sg.batched(sg.bptt(model), 2), optimizer)

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def mean_loss(params, chunk, states):
        losses, ends = [], []
        for b, state in enumerate(states):
            for t in range(2):
                state = model.cell.step(params.cell, state, chunk.inputs[b, t])
                losses.append(model.head.loss(params.head, model.cell.output(state), chunk.targets[b, t]))
            ends.append(state)
        return sum(losses) / 4, ends

    columns, sample = read_metrics(tmp_path), jax.jit(task.sample)
    start = jax.jit(lambda key: begin(model, task, sg.batched(sg.bptt(model), 2), optimizer, key))
    for seed in range(2):
        ts = start(jax.random.key(seed))
        params, where, states, losses = ts.params, ts.task, [model.cell.init_state()] * 2, []
        for update in range(3):
            key = jax.random.split(jax.random.fold_in(jax.random.wrap_key_data(ts.key), update))[0]
            chunk, where = sample(task.data, where, key)
            (loss, states), grads = mean_loss(params, chunk, states)
            params = jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)
            losses.append(loss)
        mine = jax.tree.map(lambda leaf, seed=seed: leaf[seed], got.state.params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), mine, params)
        np.testing.assert_allclose(columns["loss"][columns["seed"] == seed], [np.mean(losses)])


def test_a_seed_that_is_not_finite_stops_alone(tmp_path, caplog):
    plan = Plan(updates=6, checkpoint_every=3, seeds=3)
    with caplog.at_level(logging.WARNING, logger="streamgrad"):
        got = train(tmp_path / "a", plan, *parts(counting({1: 3})))
    assert got.stopped == [None, 3, None]
    assert [record.message for record in caplog.records] == [
        "seed 1 stopped at update 4, where its loss, gradient or parameters were not finite"
    ]
    columns = read_metrics(got.folder)
    assert [np.sum(columns["seed"] == seed) for seed in range(3)] == [6, 3, 6]
    assert all(np.isfinite(values).all() for values in columns.values())
    # The one that stopped is where it was before, and the others go on as if nothing had happened.
    calm = train(tmp_path / "b", plan, *parts(counting()))
    template = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), calm.state)
    checkpoints = Checkpoints(calm.folder / "checkpoint")
    then = checkpoints.fit(3, checkpoints.read(3), template)
    for seed, other in ((0, calm.state), (1, then), (2, calm.state)):
        mine, its = jax.tree.map(lambda leaf, seed=seed: leaf[seed], (got.state, other))
        for name in ("params", "estimator", "optimizer"):
            assert same(getattr(mine, name), getattr(its, name))
        assert mine.task.made == its.task.made


def test_parameters_that_would_not_be_finite_are_not_taken():
    """Although loss and gradient are: the second update of this optimiser goes too far."""

    def update(grads, made, params):
        return jax.tree.map(lambda g: jnp.where(made == 1, jnp.inf, -0.1 * g), grads), made + 1

    far = optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)
    model, task, est, _ = parts(counting())
    step = loop.training_step(task, est, far)
    ts = loop.begin(model, task, est, far, jax.random.key(0))
    first, _ = step(task.data, ts)
    second, row = step(task.data, first)
    third, _ = step(task.data, second)
    assert int(first.stopped) == -1 and int(second.stopped) == int(third.stopped) == 1
    assert all(np.isfinite(value) for value in row.values())
    assert same(second.params, first.params) and same(third.params, first.params)


@pytest.mark.slow
def test_if_all_seeds_stop_the_run_ends_with_an_error(tmp_path):
    plan, task = Plan(updates=90, checkpoint_every=3, seeds=3), counting({0: 1, 1: 4, 2: 3})
    with pytest.raises(Diverged, match=r"every seed has stopped: seed 0 stopped at update 2, .*; seed 1 .* update 5, "):
        train(tmp_path / "a", plan, *parts(task))
    with pytest.raises(Diverged) as again:  # at once, from the checkpoint
        train(tmp_path / "a", plan, *parts(task), resume=True, progress=lambda *_: pytest.fail("it went on"))
    assert again.value.outcome.stopped == [1, 4, 3]
    with pytest.raises(Diverged) as fast:  # gradients are finite, but what they make of the parameters is not
        train(tmp_path / "b", plan, *parts(counting(), optimizer=optax.sgd(1e308)))
    for outcome in (again.value.outcome, fast.value.outcome):
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(outcome.state.params))


def test_wrong_plans_and_summaries(tmp_path):
    with pytest.raises(ValueError, match="updates must be a whole number of at least 1, not 0"):
        Plan(updates=0)
    with pytest.raises(ValueError, match="checkpoint_every must be a multiple of every, 3, not 500"):
        Plan(updates=6, every=3, checkpoint_every=500)
    with pytest.raises(ValueError, match="must not use the names loss"):
        train(tmp_path, PLAN, *parts(counting()), summarise=lambda chunk, info, grads: {"loss": info.loss[0, 0]})


CALLS = [("vanilla", "uoro")]
CALLS += [pytest.param(*pair, marks=pytest.mark.slow) for pair in (("gru", "rtrl"), ("lstm", "preuoro"))]


@pytest.mark.parametrize(("cell", "estimator"), CALLS)
def test_numbers_do_not_depend_on_the_length_of_calls(cell, estimator, tmp_path, monkeypatch):
    task = find_task("queue", delay=2, batch_size=3, length=2)
    model = sg.Model(getattr(sg.cells, cell)(task.n_in, 3), task.head)
    batch = sg.batched(getattr(sg, estimator)(model), 3)
    seen: dict[float, list[int]] = {}
    outcomes = []
    for seconds, interval in ((1e-9, 6), (1e9, None)):
        monkeypatch.setattr("streamgrad_lab.training.session.CALL_SECONDS", seconds)
        made = seen.setdefault(seconds, [])
        outcomes.append(
            train(
                tmp_path / str(len(outcomes)),
                Plan(updates=48, every=3, checkpoint_every=interval, seeds=2),
                *(model, task, batch, optax.adam(0.05)),
                progress=lambda done, of, words, made=made: made.append(done),
            )
        )
    assert seen == {1e-9: [0, *range(1, 49)], 1e9: [0, 1, 9, 48]}  # it does follow the clock
    first, other = outcomes
    assert same(other.state, first.state)
    assert (other.folder / metrics.CSV).read_bytes() == (first.folder / metrics.CSV).read_bytes()


@pytest.mark.slow
def test_a_seed_that_stops_within_a_row_ends_the_run_at_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr("streamgrad_lab.training.session.CALL_SECONDS", 1e-9)
    plan, task = Plan(updates=12, every=4, seeds=1), counting({0: 1})
    for resume in (False, True):
        with pytest.raises(Diverged, match="seed 0 stopped at update 2, where"):
            train(tmp_path, plan, *parts(task), resume=resume)
    assert steps(tmp_path / "checkpoint") == [0, 4]


def test_a_loss_that_explodes_is_said(tmp_path, caplog):
    task = find_task("queue", delay=1, batch_size=2, length=2)
    with caplog.at_level(logging.WARNING, logger="streamgrad"):
        got = train(tmp_path, Plan(updates=40, every=4, seeds=2), *parts(task, optimizer=optax.sgd(1e3)))
    assert got.stopped == [None, None] and all("its loss rose from 0." in words for words in got.risen)
    assert [record.message for record in caplog.records] == got.risen


def easy_first(batch_size=2, length=2):
    """The input of four steps ago, and zeros until then."""

    def sample(data, state, key):
        values = jnp.concatenate([state, 1 + jax.random.normal(key, (batch_size, length))], axis=1)
        return sg.Chunk(values[:, 4:, None], values[:, :length, None]), values[:, length:]

    head = sg.heads.squared_error(1)
    return Task("easy first", 1, head, batch_size, length, False, (), lambda key: jnp.zeros((batch_size, 4)), sample)


def test_zeros_as_first_targets_are_no_alarm(tmp_path, caplog):
    """The loss rises from nearly nothing to that of a task that cannot be solved in so few updates, and no further."""
    with caplog.at_level(logging.WARNING, logger="streamgrad"):
        got = train(tmp_path / "a", Plan(updates=60, every=4, seeds=2), *parts(easy_first(), make=sg.bptt))
    loss = read_metrics(tmp_path / "a")["loss"]
    assert loss[-4:].mean() > 4 * got.state.first_loss.max() and got.risen == [None, None] and not caplog.records
    # One that does explode is told from it, by a loss that is not that of the first update.
    with caplog.at_level(logging.WARNING, logger="streamgrad"):
        got = train(tmp_path / "b", Plan(updates=60, every=4), *parts(easy_first(), 2, optax.sgd(1.5), sg.bptt))
    (words,) = got.risen
    before = float(re.search(r"rose from ([\d.]+), that of the untrained network, to", words)[1])
    assert 0.5 < before < 2 and float(got.state.first_loss[0]) < 0.2, words


def test_the_untrained_loss_is_that_of_a_loop():
    task = find_task("queue", delay=2, batch_size=2, length=100)
    model, _, estimator, optimizer = parts(task, make=sg.bptt)
    begun = jax.jit(jax.vmap(lambda seed: begin(model, task, estimator, optimizer, jax.random.key(seed))))
    seeds = jnp.arange(3, 5, dtype=jnp.uint32)
    ts = begun(seeds)._replace(step=jnp.full(2, 7, jnp.int32))
    got = untrained_loss(model, task, ts, seeds)
    for index, seed in enumerate(seeds):
        mine = jax.tree.map(lambda leaf, index=index: leaf[index], ts)
        params, where, found = begin(model, task, estimator, optimizer, jax.random.key(seed)).params, mine.task, []
        states = [model.init_state(params)] * 2
        for update in (7, 8, 9):  # 256 steps, in chunks of 100
            key = jax.random.split(jax.random.fold_in(jax.random.wrap_key_data(mine.key), update))[0]
            chunk, where = task.sample(task.data, where, key)
            for b in range(2):
                outputs, states[b] = model.run(params, states[b], chunk.inputs[b])
                found += [model.head.loss(params.head, y, t) for y, t in zip(outputs, chunk.targets[b], strict=True)]
        np.testing.assert_allclose(got[index], np.mean(found), rtol=1e-6)


@pytest.mark.slow
def test_example_of_the_docs_runs(tmp_path, monkeypatch):
    """As printed; and the task of the last one gives what it says."""
    monkeypatch.chdir(tmp_path)
    scope: dict = {}
    first, predict, last = code_blocks(ROOT / "docs" / "training.md")
    exec(first, scope)
    assert scope["columns"]["update"].tolist() == np.repeat(np.arange(20, 201, 20), 3).tolist()
    options = "--task queue --cell gru --hidden 8 --updates 20 --seeds 2 --seed 4 --estimator bptt"
    assert main(["train", "runs/bits", *options.split()]) == 0
    exec(predict, scope)
    predictions, found = np.asarray(scope["predictions"]), scope["loaded"]
    assert predictions.shape == (100, 1) and np.all((predictions > 0) & (predictions < 1)) and found.update == 20
    # They are those of the model's own loss, for this seed and no other.
    model, params, state, losses = found.model, found.params, found.model.init_state(found.params), []
    for x in scope["bits"]:
        state = model.cell.step(params.cell, state, x)
        losses.append(float(model.head.loss(params.head, model.cell.output(state), jnp.ones(1))))
    np.testing.assert_allclose(losses, -np.log(predictions[:, 0]), rtol=1e-6)
    assert not same(params, load_params("runs/bits", seed=4).params)
    with pytest.raises(ValueError, match="has the seeds 4 to 5, not 6"):
        load_params("runs/bits", seed=6)
    exec(last, scope)
    task = scope["sine"]()
    chunk, state = task.sample(task.data, task.init(jax.random.key(0)), jax.random.key(0))
    after = task.sample(task.data, state, jax.random.key(0))[0]
    np.testing.assert_allclose(chunk.targets[:, -1], after.inputs[:, 0])
    np.testing.assert_allclose(chunk.targets[:, :-1], chunk.inputs[:, 1:])
    # And as a module, from the command line.
    (tmp_path / "mine.py").write_text(last)
    monkeypatch.setattr(sys, "path", [*sys.path])
    options = "--task mine:sine --cell mine:leaky --hidden 16 --learning-rate 0.01 --estimator rtrl"
    assert main(["train", "runs/sine", *options.split()]) == 0
    assert read_metrics("runs/sine")["loss"][-1] < 0.01
