"""What a task holds out: it is not trained on, its loss is what a plain loop says, and a resumed run is the same."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.datasets import load_digits

import streamgrad as sg
from streamgrad_lab.cli.main import main
from streamgrad_lab.tasks import Task, find_task
from streamgrad_lab.tasks.base import HeldOut
from streamgrad_lab.training import Plan, begin, metrics, read_metrics, train
from streamgrad_lab.training.measure import held_out_loss, measured_every
from tests.lab.counting import parts, same

TEXT = "the quick brown fox jumps over the lazy dog, " * 9  # 405 characters, of which 40 are held out


@pytest.fixture
def path(tmp_path):
    (tmp_path / "text").write_text(TEXT)
    return tmp_path / "text"


def begun(task: Task, seeds: int = 2):
    model, _, estimator, optimizer = parts(task)
    make = jax.vmap(lambda seed: begin(model, task, estimator, optimizer, jax.random.key(seed)))
    return model, jax.jit(make)(jnp.arange(seeds, dtype=jnp.uint32))


def by_hand(model, params, inputs, targets):
    """The losses of one stream from its beginning."""
    outputs, _ = model.run(params, model.init_state(params), inputs)
    return [float(model.head.loss(params.head, y, t)) for y, t in zip(outputs, jnp.asarray(targets), strict=True)]


def seed_of(tree, seed):
    return jax.tree.map(lambda leaf: leaf[seed], tree)


def test_the_last_tenth_of_a_text_is_not_trained_on(path):
    task = find_task("text", path=path, batch_size=2, length=5)
    vocabulary = sorted(set(TEXT))
    np.testing.assert_array_equal(task.data, [vocabulary.index(letter) for letter in TEXT[:-40]])
    assert task.n_in == len(vocabulary)
    whole = find_task("text", path=path, batch_size=2, length=5, held_out=0.0)
    assert whole.held_out is None and len(whole.data) == 405
    for held_out in (-0.1, 1.0, float("nan")):
        with pytest.raises(ValueError, match="held_out must be a "):
            find_task("text", path=path, held_out=held_out)
    with pytest.raises(ValueError, match="held_out leaves 1 of 405 characters to train on: lower it"):
        find_task("text", path=path, held_out=0.999)


@pytest.mark.parametrize("batch_size, lanes", [(2, 2), (7, 7), (100, 39)])
def test_the_loss_of_a_held_out_text(path, batch_size, lanes, monkeypatch):
    """Lanes of equal length, each from its beginning, in several chunks of which the last is not full."""
    monkeypatch.setattr("streamgrad_lab.tasks.file_end.LANE", 4)
    task = find_task("text", path=path, batch_size=batch_size, length=5)
    model, ts = begun(task)
    got = held_out_loss(model, task, ts)(ts)
    codes = np.array([sorted(set(TEXT)).index(letter) for letter in TEXT[-40:]])
    each = 39 // lanes
    for seed in range(2):
        params, found = seed_of(ts.params, seed), []
        for lane in range(lanes):
            mine = codes[lane * each : lane * each + each + 1]
            found += by_hand(model, params, jax.nn.one_hot(mine[:-1], task.n_in), mine[1:])
        assert len(found) == lanes * each
        np.testing.assert_allclose(got[seed], np.mean(found), rtol=1e-6)


def test_the_end_of_a_series_is_held_out_and_scaled_as_the_rest(tmp_path):
    numbers = np.cumsum(np.random.default_rng(0).normal(size=50))
    (tmp_path / "numbers").write_text("\n".join(map(str, numbers)))
    task = find_task("series", path=tmp_path / "numbers", batch_size=2)
    scaled = (numbers - numbers[:45].mean()) / numbers[:45].std()
    np.testing.assert_allclose(task.data, scaled[:44].reshape(2, 22))
    model, ts = begun(task, 1)
    found = []
    for lane in (scaled[45:48], scaled[47:50]):
        found += by_hand(model, seed_of(ts.params, 0), lane[:-1, None], lane[1:, None])
    np.testing.assert_allclose(held_out_loss(model, task, ts)(ts), [np.mean(found)], rtol=1e-6)
    assert find_task("series", path=tmp_path / "numbers", held_out=0.0).held_out is None
    assert find_task("series", values=100).held_out is None


def test_the_loss_of_held_out_digits():
    """All 297, each once, in batches of which the last is not full."""
    task = find_task("digits", batch_size=50)
    model, ts = begun(task, 1)
    got, params, found = held_out_loss(model, task, ts)(ts), seed_of(ts.params, 0), load_digits()
    run = jax.jit(jax.vmap(lambda image: model.run(params, model.init_state(params), image)[0]))
    outputs = run(found.images[1500:] / 16)
    loss = jax.jit(jax.vmap(jax.vmap(model.head.loss, (None, 0, None)), (None, 0, 0)))
    np.testing.assert_allclose(got, [loss(params.head, outputs, found.target[1500:]).mean()], rtol=1e-6)
    assert find_task("digits", split="test").held_out is None


def test_weights_of_any_kind():
    inputs = jax.random.normal(jax.random.key(0), (3, 2, 2, 1))
    weights = jnp.array([[1.0, 0.5], [0.0, 2.0]])

    def chunk(data, index):
        return sg.Chunk(data[index], jnp.zeros((2, 2, 1)), weight=weights)

    task = find_task("queue", batch_size=2, length=2)._replace(
        head=sg.heads.squared_error(1), held_out=HeldOut(inputs, 3, chunk)
    )
    model, ts = begun(task, 1)
    params = seed_of(ts.params, 0)
    found = [by_hand(model, params, inputs[:, b].reshape(6, 1), np.zeros((6, 1))) for b in range(2)]
    want = np.average(found, weights=np.tile(weights, 3))
    np.testing.assert_allclose(held_out_loss(model, task, ts)(ts), [want], rtol=1e-6)
    plain = task._replace(held_out=HeldOut(inputs, 3, lambda data, index: chunk(data, index)._replace(weight=None)))
    np.testing.assert_allclose(held_out_loss(model, plain, ts)(ts), [np.mean(found)], rtol=1e-6)


@pytest.fixture
def often(monkeypatch):
    monkeypatch.setattr("streamgrad_lab.training.measure.OFTEN", 4)


PLAN = Plan(updates=24, every=2, seeds=2)


def test_how_often(path, often):
    """Not more steps than are about a tenth of the work, at the end of a row, whatever the length of the run is."""
    task = find_task("text", path=path, batch_size=2, length=5)
    assert measured_every(task, 1) == 13  # 38 steps held out, and 3 for each update
    assert measured_every(task, 5) == 15 and measured_every(task, 20) == 20
    assert measured_every(find_task("text", path=path, batch_size=20, length=50), 3) == 6
    assert measured_every(find_task("queue"), 1) is None


def test_rows_of_a_run_and_of_one_that_goes_on(path, tmp_path, often):
    task = find_task("text", path=path, batch_size=3, length=5)
    whole = train(tmp_path / "whole", PLAN, *parts(task, make=sg.bptt))
    columns = read_metrics(whole.folder)
    assert list(columns) == ["update", "seed", "loss", "gradient_norm", "held_out_loss"]
    seen = np.isfinite(columns["held_out_loss"])
    assert measured_every(task, 2) == 10 and sorted({*columns["update"][seen]}) == [10, 20, 24]
    model = parts(task)[0]
    np.testing.assert_array_equal(
        columns["held_out_loss"][columns["update"] == 24].astype(np.float32),
        held_out_loss(model, task, whole.state)(whole.state),
    )
    assert ",\n" in (whole.folder / metrics.CSV).read_text()  # empty where it was not measured

    def ctrl_c(done, of, words):
        if done >= 12:
            raise KeyboardInterrupt

    broken, longer = tmp_path / "broken", tmp_path / "longer"
    with pytest.raises(KeyboardInterrupt):
        train(broken, PLAN, *parts(task, make=sg.bptt), progress=ctrl_c)
    train(longer, dataclasses.replace(PLAN, updates=16), *parts(task, make=sg.bptt))
    assert np.isfinite(read_metrics(longer)["held_out_loss"][-2:]).all()  # of update 16, the end
    for folder in (broken, longer):
        again = train(folder, PLAN, *parts(task, make=sg.bptt), resume=True)
        assert same(again.state, whole.state)
        assert (folder / metrics.CSV).read_bytes() == (whole.folder / metrics.CSV).read_bytes()


def test_on_the_screen_and_on_the_page(path, tmp_path, capsys, as_a_user):
    options = ["--task", "text", "--task-options", f"path={path}", "--cell", "vanilla", "--hidden", "2", "--seeds", "2"]
    command = ["train", str(tmp_path / "run"), *options, "--updates", "10", "--every", "5", "--estimator", "bptt"]
    assert main(command) == 0
    out = capsys.readouterr().out
    last = read_metrics(tmp_path / "run")["held_out_loss"][-2:]
    assert out.splitlines()[0].endswith(f", held-out loss {last[0]:.4g}")
    assert main([*command, "--resume", "--json"]) == 0
    assert [seed["held_out_loss"] for seed in json.loads(capsys.readouterr().out)["seeds"]] == last.tolist()
    assert main(["report", str(tmp_path / "run")]) == 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert "held-out loss, last" in page and "Dots are the loss on what the task holds out" in page
    assert "Other columns" not in page
