"""The files of a run: what is in them, a resumed run is the unbroken one, and what is damaged is said."""

import dataclasses
import logging
import resource
import shutil

import jax
import numpy as np
import pytest

import streamgrad as sg
from streamgrad_lab.manifest import load_manifest, new_manifest, save_manifest
from streamgrad_lab.training import Plan, load_params, metrics, read_metrics, train
from streamgrad_lab.training.checkpoint import Checkpoints, steps
from tests.lab.counting import PLAN, Count, counting, parts, same, summarise


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


def test_ctrl_c_saves_the_last_whole_row(tmp_path, monkeypatch):
    """Although no checkpoint was due; the updates of a row that is not whole are made again."""
    monkeypatch.setattr("streamgrad_lab.training.session.CALL_SECONDS", 1e-9)

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
    with pytest.raises(OSError, match=r"cannot write into the folder .*file/run: Not a directory"):
        go(tmp_path / "file" / "run")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, limits[1]))  # as if the disk were full
    try:
        with pytest.raises(OSError, match=r"cannot write about 0.1 MB into the folder .*run: File too large"):
            go(tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "run").exists()


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


def test_one_bit_of_an_array_is_noticed(tmp_path, caplog):
    """Which the storage does not notice by itself: numbers that cannot be compressed lie in their file as they are."""
    checkpoints, numbers = Checkpoints(tmp_path), np.random.default_rng(0).integers(0, 1 << 62, 500)
    for step in (5, 20):
        checkpoints.save(step, {"a": numbers + step})
    stored = (numbers + 20).tobytes()
    (file,) = [path for path in (tmp_path / "20").rglob("*") if path.is_file() and stored in path.read_bytes()]
    whole = bytearray(file.read_bytes())
    whole[whole.index(stored) + 8 * 123] ^= 1
    file.write_bytes(whole)
    with pytest.raises(ValueError, match=r"20 cannot be read \(its checksum is wrong\)"):
        checkpoints.read(20)
    step, leaves = checkpoints.newest()
    assert step == 5 and np.array_equal(leaves["['a']"], numbers + 5)
    assert "its checksum is wrong" in caplog.text


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


def test_numbers_that_are_not_finite(tmp_path):
    rows = {"update": np.array([[1]]), "stopped": np.array([[-1]]), "loss": np.float32([[0.1]])}
    with metrics.Writer(tmp_path, [7]) as writer:
        writer.write(rows | {"gradient_norm": np.float32([[np.inf]]), "x": np.array([[[[np.nan, -np.inf]]]])})
    header, line = (tmp_path / metrics.CSV).read_text().splitlines()
    assert header == "update,seed,loss,gradient_norm,x_0_0,x_0_1" and line == "1,7,0.1,inf,nan,-inf"


def test_parameters_that_cannot_be_loaded(unbroken, tmp_path):
    with pytest.raises(ValueError, match=r"run\.json does not exist: .* has no run of"):
        load_params(tmp_path)
    with pytest.raises(ValueError, match="was not begun by `streamgrad train`: pass the model that it was"):
        load_params(unbroken.folder)
    with pytest.raises(ValueError, match=r"the model that was passed: params\.cell\['w'\] is \[2, 4\], not \[5, 7\]"):
        load_params(unbroken.folder, model=parts(counting(), 5)[0])
    other = sg.Model(sg.cells.gru(1, 2), sg.heads.squared_error(1))
    with pytest.raises(ValueError, match=r"fit the model that was passed: only one of them has params\.cell"):
        load_params(unbroken.folder, model=other)
    experiments = new_manifest("experiments", {"preset": "smoke"}, command="reproduce", started="2026-01-01")
    save_manifest(tmp_path, experiments)
    with pytest.raises(ValueError, match="has no parameters: name the folder of a training run"):
        load_params(tmp_path, model=other)


def test_parameters_of_a_run_that_was_begun_in_python(unbroken):
    model, task, *_ = parts(counting())
    for seed in (3, 4):
        found = load_params(unbroken.folder, seed, model=model)
        mine = jax.tree.map(lambda leaf, seed=seed: leaf[seed - 3], unbroken.state.params)
        assert same(found.params, mine) and (found.model, found.task, found.update) == (model, None, 12)
    assert load_params(unbroken.folder, model=model, task=task).task is task
    with pytest.raises(ValueError, match="has the seeds 3 to 4, not 5"):
        load_params(unbroken.folder, 5, model=model)
