"""Training: it is plain gradient descent, a resumed run is the unbroken one, and a seed that diverges stops alone."""

import dataclasses
import functools
import logging
import resource
import shutil
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import streamgrad as sg
from streamgrad.lab.cli.main import main
from streamgrad.lab.manifest import load_manifest
from streamgrad.lab.tasks import Task, find_task
from streamgrad.lab.training import Diverged, Plan, begin, load_params, metrics, read_metrics, train
from streamgrad.lab.training.checkpoint import Checkpoints, steps
from tests.tools import ROOT, code_blocks

PLAN = Plan(updates=12, every=2, checkpoint_every=4, seeds=2, seed=3)


class Count(NamedTuple):
    made: jax.Array
    end: jax.Array


def counting(end: dict[int, int] | None = None, seeds: int = 3) -> Task:
    """Noise as inputs; those of seed s are infinite at its update number end[s], counted from 0."""
    end = end or {}
    task_keys = [jax.random.key_data(jax.random.split(jax.random.key(seed), 3)[1]) for seed in range(seeds)]
    table = jnp.stack(task_keys), jnp.array([end.get(seed, -1) for seed in range(seeds)])

    def init(key):
        mine = jnp.all(table[0] == jax.random.key_data(key)[None], axis=1)
        return Count(jnp.zeros((), jnp.int32), jnp.max(jnp.where(mine, table[1], -1)))

    def sample(data, state, key):
        inputs = jax.random.normal(key, (2, 3, 1)) + jnp.where(state.made == state.end, jnp.inf, 0.0)
        return sg.Chunk(inputs, jnp.zeros((2, 3, 1))), state._replace(made=state.made + 1)

    def observe(state, chunk, info):
        return state, {"made": state.made}

    return Task("counting", 1, sg.heads.squared_error(1), 2, 3, False, (), init, sample, observe)


def parts(task: Task, hidden: int = 2, optimizer=None):
    model = sg.Model(sg.cells.vanilla(task.n_in, hidden), task.head)
    estimator = sg.batched(sg.uoro(model), task.batch_size)
    return model, task, estimator, optimizer or optax.adam(0.05)


def summarise(chunk, info, grads):
    return {"gamma": jnp.mean(info.diagnostics["gamma"], axis=(0, 2)), "bias": grads.head["b"][0]}


def same(a, b) -> bool:
    """Bit for bit, in structure, types and dtypes."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs
    )


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "unbroken"
    return train(folder, PLAN, *parts(counting()), summarise=summarise, describe={"rate": 0.05})


def test_files_of_a_run(unbroken):
    columns = read_metrics(unbroken.folder)
    assert list(columns) == ["update", "seed", "loss", "gradient_norm", "bias", "gamma_0", "gamma_1", "gamma_2", "made"]
    assert columns["update"].tolist() == np.repeat([2, 4, 6, 8, 10, 12], 2).tolist()
    assert columns["seed"].tolist() == [3, 4] * 6
    np.testing.assert_array_equal(columns["made"], columns["update"] - 0.5)  # the mean of the row's updates
    run = load_manifest(unbroken.folder)
    assert run.kind == "training" and run.describe == {"rate": 0.05, "plan": dataclasses.asdict(PLAN)}
    assert run.versions["jax"] == jax.__version__ and "CPU" in run.device and run.device.endswith("float64")
    assert unbroken.stopped == [None, None]
    assert (unbroken.state.step == 12).all() and len(np.unique(unbroken.state.params.head["b"])) == 2


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


def test_a_run_stopped_by_ctrl_c_and_resumed_is_the_unbroken_one(unbroken, tmp_path):
    again = {"summarise": summarise, "describe": {"rate": 0.05}}

    def ctrl_c(done, of, words):
        assert of == 12 and words.startswith("loss" if done else "compiling")
        if done == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, PLAN, *parts(counting()), progress=ctrl_c, **again)
    # As after a kill in the middle of the next interval: rows past the checkpoint, and half a row.
    path, whole = tmp_path / metrics.CSV, (unbroken.folder / metrics.CSV).read_bytes()
    assert whole.startswith(path.read_bytes()) and len(path.read_bytes()) < len(whole)
    path.write_bytes(whole[:-20])
    resumed = train(tmp_path, PLAN, *parts(counting()), resume=True, **again)
    assert same(resumed.state, unbroken.state)
    for name in (metrics.CSV, "run.json"):
        assert (tmp_path / name).read_bytes() == (unbroken.folder / name).read_bytes()
    assert same(train(tmp_path, PLAN, *parts(counting()), resume=True, **again).state, unbroken.state)  # it has ended
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == ["12", "8"]


@pytest.mark.slow
def test_a_run_may_be_made_longer(unbroken, tmp_path):
    short = Plan(updates=4, every=2, checkpoint_every=4, seeds=2, seed=3)
    train(tmp_path, short, *parts(counting()), resume=True, summarise=summarise)
    longer = train(tmp_path, PLAN, *parts(counting()), resume=True, summarise=summarise)
    assert same(longer.state, unbroken.state)


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


def test_a_resume_that_does_not_fit_is_refused(unbroken):
    def go(plan=PLAN, hidden=2, describe=None, resume=True):
        train(unbroken.folder, plan, *parts(counting(), hidden), resume=resume, describe=describe or {"rate": 0.05})

    before = (unbroken.folder / metrics.CSV).read_bytes()
    with pytest.raises(ValueError, match="has a run already"):
        go(resume=False)
    with pytest.raises(
        ValueError, match=r"another configuration: rate was 0\.05 and is now 0\.1; cell was None and is"
    ):
        go(describe={"rate": 0.1, "cell": "lstm"})
    with pytest.raises(ValueError, match="updates was 12 and is now 8"):
        go(plan=Plan(updates=8, every=2, checkpoint_every=4, seeds=2, seed=3))
    with pytest.raises(
        ValueError, match=r"another run: its state\.params\.cell\['w'\] is .*\[2, 2, 4\], not .*\[2, 5, 7\]"
    ):
        go(hidden=5)
    with pytest.raises(ValueError, match="cannot go on without checkpoints"):
        go(plan=Plan(updates=12, every=2, checkpoint_every=4, seeds=2, seed=3, checkpoints=False))
    assert (unbroken.folder / metrics.CSV).read_bytes() == before


def test_a_folder_that_cannot_be_written_is_known_of_before_training(tmp_path):
    def go(folder):
        never = parts(counting()._replace(sample=lambda *_: pytest.fail("it trained")))
        train(folder, PLAN, *never)

    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot write about 0.1 MB into the folder .*file/run: Not a directory"):
        go(tmp_path / "file" / "run")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, limits[1]))  # as if the disk were full
    try:
        with pytest.raises(OSError, match=r"cannot write about 0.1 MB into the folder .*run: File too large"):
            go(tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list((tmp_path / "run").iterdir()) == []


def test_wrong_plans_and_summaries(tmp_path):
    with pytest.raises(ValueError, match="updates must be a whole number of at least 1, not 0"):
        Plan(updates=0)
    with pytest.raises(ValueError, match="checkpoint_every must be a multiple of every, 3, not 500"):
        Plan(updates=6, every=3, checkpoint_every=500)
    with pytest.raises(ValueError, match="must not use the names loss"):
        train(tmp_path, PLAN, *parts(counting()), summarise=lambda chunk, info, grads: {"loss": info.loss[0, 0]})


def test_checkpoints_keep_types_bits_and_the_newest(tmp_path):
    state = Count(
        ({"a": np.float32([np.nan, -0.0]), "b": np.zeros((0, 2))}, [np.uint32([1, 2])]),
        (np.array(True), None, np.int8(3)),
    )
    checkpoints = Checkpoints(tmp_path / "x")
    assert checkpoints.newest() is None
    for step in (5, 20):
        checkpoints.save(step, jax.tree.map(lambda leaf, step=step: leaf * (step == 20), state))
    left = tmp_path / "x" / "30.orbax-checkpoint-tmp"  # by a kill, while it was written
    shutil.copytree(tmp_path / "x" / "20", left)
    step, leaves = checkpoints.newest()
    template = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
    assert step == 20 and same(checkpoints.fit(step, leaves, template), state)
    with pytest.raises(ValueError, match=r"of another run: only the checkpoint has state\.end"):
        checkpoints.fit(step, leaves, template._replace(end=()))
    checkpoints.save(30, state)
    assert sorted(path.name for path in (tmp_path / "x").iterdir()) == ["20", "30"]
    assert same(checkpoints.fit(30, checkpoints.read(30), template), state)


def damage(folder, how):
    """The files of a checkpoint, emptied, cut in half, or with one bit of their numbers turned."""
    for file in [file for file in folder.rglob("*") if file.is_file()]:
        old = bytearray(file.read_bytes())
        if how == "bit" and old:
            old[len(old) // 2] ^= 1
        file.write_bytes({"empty": b"", "half": old[: len(old) // 2], "bit": old}[how])


@pytest.mark.parametrize("how", ["empty", "half", "bit"])
def test_a_damaged_checkpoint_is_passed_over(how, tmp_path, caplog):
    checkpoints = Checkpoints(tmp_path / "x")
    for step in (5, 20):
        checkpoints.save(step, {"a": np.arange(1000.0) * step})
    damage(tmp_path / "x" / "20", how)
    with caplog.at_level(logging.WARNING, logger="streamgrad"):
        step, leaves = checkpoints.newest()
    assert step == 5 and leaves["['a']"].tolist() == (np.arange(1000.0) * 5).tolist()
    (message,) = [record.message for record in caplog.records]
    assert "20 cannot be read" in message and "going on from the one before it" in message and len(message) < 300
    checkpoints.save(10, {"a": np.arange(1000.0)})
    assert steps(tmp_path / "x") == [5, 10]  # the damaged one is gone, although its number is higher
    for step in (5, 10):
        damage(tmp_path / "x" / str(step), how)
    with pytest.raises(ValueError, match=r"5 cannot be read .*no good one before it: put it back"):
        checkpoints.newest()


@pytest.mark.parametrize("case", ["garbage", "binary", "csv gone", "half a row", "checkpoint gone"])
def test_a_damaged_run_is_not_resumed_in_silence(case, unbroken, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(unbroken.folder, folder)
    csv = folder / metrics.CSV
    lines = csv.read_bytes().splitlines(keepends=True)
    words = r"metrics\.csv is damaged: line 4 is no row of metrics, not the row of update 4, seed 3: put it back"
    if case in ("garbage", "binary"):
        csv.write_bytes(b"".join([*lines[:3], b"what?\n" if case == "garbage" else b"\xff\x00\xfe\n", *lines[4:]]))
    elif case.endswith("gone"):
        path = {"csv gone": csv, "checkpoint gone": folder / "checkpoint"}[case]
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        words = rf"{path.name} is (missing|gone).*: put it back"
    else:
        csv.write_bytes(csv.read_bytes()[:-9])
        words = r"metrics\.csv is damaged: line 13 is the end of the file, not the row of update 12, seed 4"
    with pytest.raises(ValueError, match=words):
        train(folder, PLAN, *parts(counting()), summarise=summarise, describe={"rate": 0.05}, resume=True)


def test_garbage_past_the_checkpoint_is_dropped_and_said(unbroken, tmp_path, caplog):
    folder = tmp_path / "run"
    shutil.copytree(unbroken.folder, folder)
    whole = (folder / metrics.CSV).read_bytes()
    (folder / metrics.CSV).write_bytes(whole + b"\xff what?\n")
    train(folder, PLAN, *parts(counting()), summarise=summarise, describe={"rate": 0.05}, resume=True)
    assert (folder / metrics.CSV).read_bytes() == whole
    assert "metrics.csv: what followed the checkpoint's rows was no row" in caplog.text


CALLS = [("vanilla", "uoro")]
CALLS += [pytest.param(*pair, marks=pytest.mark.slow) for pair in (("gru", "rtrl"), ("lstm", "preuoro"))]


@pytest.mark.parametrize(("cell", "estimator"), CALLS)
def test_numbers_do_not_depend_on_the_length_of_calls(cell, estimator, tmp_path, monkeypatch):
    task = find_task("queue", delay=2, batch_size=3, length=2)
    model = sg.Model(getattr(sg.cells, cell)(task.n_in, 3), task.head)
    batch = sg.batched(getattr(sg, estimator)(model), 3)
    seen: dict[float, list[int]] = {}
    outcomes = []
    for seconds, interval in ((1e-9, 6), (1e9, None), (1e-9, None)):
        monkeypatch.setattr("streamgrad.lab.training.session.CALL_SECONDS", seconds)
        made = seen.setdefault(seconds, [])
        made.clear()
        outcomes.append(
            train(
                tmp_path / str(len(outcomes)),
                Plan(updates=48, every=3, checkpoint_every=interval, seeds=2),
                *(model, task, batch, optax.adam(0.05)),
                progress=lambda done, of, words, made=made: made.append(done),
            )
        )
    assert seen == {1e-9: [0, *range(1, 49)], 1e9: [0, 1, 9, 48]}  # it does follow the clock
    first = outcomes[0]
    for other in outcomes[1:]:
        assert same(other.state, first.state)
        assert (other.folder / metrics.CSV).read_bytes() == (first.folder / metrics.CSV).read_bytes()


def test_ctrl_c_saves_the_last_whole_row(tmp_path, monkeypatch):
    """Although no checkpoint was due; the updates of a row that is not whole are made again."""
    monkeypatch.setattr("streamgrad.lab.training.session.CALL_SECONDS", 1e-9)

    def ctrl_c(done, of, words):
        if done == 5:
            raise KeyboardInterrupt

    plan = Plan(updates=12, every=2, seeds=2, seed=3)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, plan, *parts(counting()), progress=ctrl_c)
    assert steps(tmp_path / "checkpoint") == [0, 4]
    seen = []
    train(tmp_path, plan, *parts(counting()), resume=True, progress=lambda *what: seen.append(what))
    assert seen[0] == (4, 12, "compiling") and seen[-1][:2] == (12, 12)


def test_a_seed_that_stops_within_a_row_ends_the_run_at_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr("streamgrad.lab.training.session.CALL_SECONDS", 1e-9)
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


def test_numbers_that_are_not_finite(tmp_path):
    rows = {"update": np.array([[1]]), "stopped": np.array([[-1]]), "loss": np.float32([[0.1]])}
    with metrics.Writer(tmp_path, [7]) as writer:
        writer.write(rows | {"gradient_norm": np.float32([[np.inf]]), "x": np.array([[[[np.nan, -np.inf]]]])})
    header, line = (tmp_path / metrics.CSV).read_text().splitlines()
    assert header == "update,seed,loss,gradient_norm,x_0_0,x_0_1" and line == "1,7,0.1,inf,nan,-inf"


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


def test_parameters_that_cannot_be_loaded(unbroken, tmp_path):
    with pytest.raises(ValueError, match=r"run\.json does not exist: .* has no run of"):
        load_params(tmp_path)
    with pytest.raises(ValueError, match="was not begun by `streamgrad train`"):
        load_params(unbroken.folder)
