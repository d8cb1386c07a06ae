"""Tasks keep their word: the right target at the right step, streams that go on, and errors that name the file."""

import gzip
import hashlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.datasets import load_digits

import streamgrad as sg
from streamgrad_lab.tasks import TASKS, find_task, mnist
from streamgrad_lab.tasks.images import image_task
from streamgrad_lab.tasks.mnist import IdxFile


def stream(task, chunks: int, seed: int = 0) -> tuple[sg.Chunk, object]:
    """Consecutive chunks of a task joined along time, as numpy arrays, and the state after them."""
    state, found, sample = task.init(jax.random.key(seed)), [], jax.jit(task.sample)
    for at in range(chunks):
        chunk, state = sample(task.data, state, jax.random.key(at))
        assert chunk.inputs.shape == (task.batch_size, task.length, task.n_in)
        found.append(chunk)
    return jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=1), *found), state


@pytest.mark.parametrize(("delay", "length"), [(4, 1), (4, 3), (3, 7), (0, 2)])
def test_queue_gives_back_the_bit_of_delay_steps_ago(delay, length):
    chunk, _ = stream(find_task("queue", delay=delay, batch_size=5, length=length), 42 // length)
    bits, targets = chunk.inputs[..., 0], chunk.targets[..., 0]
    assert chunk.reset is None
    assert not targets[:, :delay].any()
    np.testing.assert_array_equal(targets[:, delay:], bits[:, : 42 - delay])
    assert 0.35 < bits.mean() < 0.65
    assert len(np.unique(bits, axis=0)) == 5  # each stream has bits of its own


@pytest.mark.parametrize(("read", "length"), [("rows", None), ("rows", 4), ("pixels", 16)])
def test_digits_are_read_to_their_end_and_then_drawn_anew(read, length):
    task = find_task("digits", read=read, length=length, batch_size=7)
    steps = 8 if read == "rows" else 64
    assert task.episodic == (length is None)
    chunk, _ = stream(task, 2 * steps // task.length)
    known = {image.tobytes(): label for image, label in zip(load_digits().images, load_digits().target, strict=True)}
    seen = set()
    for first in (0, steps):
        images = (chunk.inputs[:, first : first + steps] * 16).reshape(7, 8, 8)
        for image, targets in zip(images, chunk.targets[:, first : first + steps], strict=True):
            assert set(targets) == {known[image.tobytes()]}
            seen.add(image.tobytes())
    assert len(seen) > 7
    np.testing.assert_array_equal(chunk.reset, np.tile(np.arange(2 * steps) % steps == 0, (7, 1)))


def test_parts_of_the_digits_do_not_meet():
    train, test = (find_task("digits", split=split).data for split in ("train", "test"))
    assert (len(train.labels), len(test.labels)) == (1500, 297)
    np.testing.assert_array_equal(jnp.concatenate([train.labels, test.labels]), load_digits().target)


def idx(array: np.ndarray) -> bytes:
    return np.array([0x0800 + array.ndim, *array.shape], ">i4").tobytes() + array.astype(np.uint8).tobytes()


@pytest.fixture
def small_mnist(tmp_path, monkeypatch):
    """A data folder with four files of the right kind, and those in place of the published ones."""
    rng, files = np.random.default_rng(0), {}
    for (split, part), file in mnist.FILES.items():
        array = rng.integers(0, 10, (6, *file.shape[1:])) * (28 if part == "images" else 1)
        content = idx(array)
        files[split, part] = IdxFile(file.name, array.shape, hashlib.md5(content).hexdigest())
        inside = tmp_path / "mnist" if split == "train" else tmp_path
        inside.mkdir(exist_ok=True)
        if part == "images":
            (inside / f"{file.name}.gz").write_bytes(gzip.compress(content))
        else:
            (inside / file.name).write_bytes(content)
    monkeypatch.setattr(mnist, "FILES", files)
    return tmp_path


def test_mnist_from_compressed_and_plain_files(small_mnist, monkeypatch):
    task = find_task("mnist", folder=small_mnist, batch_size=4)
    chunk, _ = stream(task, 1)
    assert chunk.inputs.shape == (4, 28, 28)
    assert chunk.inputs.max() == 9 * 28 / 255
    monkeypatch.setenv("STREAMGRAD_DATA", str(small_mnist))
    test = find_task("mnist", read="pixels", batch_size=2, split="test")
    assert (test.length, test.n_in, test.data.steps.dtype) == (784, 1, jnp.uint8)


def damage(folder, how):
    images = folder / "mnist" / "train-images-idx3-ubyte.gz"
    labels = folder / "mnist" / "train-labels-idx1-ubyte"
    content = bytearray(labels.read_bytes())
    match how:
        case "missing":
            images.unlink()
        case "truncated":
            images.write_bytes(images.read_bytes()[:200])
        case "no gzip":
            images.write_bytes(b"<html>not found</html>")
        case "empty":
            labels.write_bytes(b"")
        case "short":
            labels.write_bytes(content[:-1])
        case "changed":
            content[-1] ^= 1
            labels.write_bytes(content)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("missing", "no file train-images-idx3-ubyte"),
        ("truncated", "train-images-idx3-ubyte.gz cannot be read"),
        ("no gzip", "train-images-idx3-ubyte.gz cannot be read"),
        ("empty", "train-labels-idx1-ubyte is not an IDX file of 6 bytes"),
        ("short", "train-labels-idx1-ubyte is not an IDX file of 6 bytes"),
        ("changed", "train-labels-idx1-ubyte is not the published .* md5"),
    ],
)
def test_a_bad_file_of_mnist_is_named_with_what_to_do(small_mnist, how, words):
    damage(small_mnist, how)
    with pytest.raises(ValueError, match=words + ".*streamgrad data mnist"):
        find_task("mnist", folder=small_mnist)


def test_copy_shows_symbols_and_asks_for_them_and_grows():
    """Against the plain story of one stream, while the curriculum rises in the middle of an episode."""
    task = find_task("copy", symbols=3, first=2, longest=4, threshold=0.5, decay=0.5, batch_size=3, length=3)
    state, chunks, levels = task.init(jax.random.key(0)), [], [2]
    sample, observe = jax.jit(task.sample), jax.jit(task.observe)
    for at in range(16):
        chunk, state = sample(task.data, state, jax.random.key(at))
        loss = jnp.where(chunk.targets == 3, 9.0, 0.0 if at else 9.0)  # losses where nothing is recalled do not count
        state, row = observe(state, chunk, sg.Info(loss, {}))
        chunks.append(chunk)
        levels.append(int(row["copy_length"]))
    assert levels[-1] == 4  # as long as it gets
    whole = jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=1), *chunks)
    for b in range(3):
        at, sizes = 0, []
        while at < 48:
            size = levels[at // 3]
            end = min(at + 2 * size, 48)
            shown = whole.inputs[b, at : min(at + size, end)]
            assert whole.reset[b, at] and not whole.reset[b, at + 1 : end].any()
            assert (shown[:, :3].sum(axis=1) == 1).all() and (whole.targets[b, at : at + len(shown)] == 3).all()
            asked = whole.targets[b, at + size : end]
            np.testing.assert_array_equal(asked, shown.argmax(axis=1)[: len(asked)])
            assert (whole.inputs[b, at + size : end] == [0, 0, 0, 1]).all()
            sizes.append(size)
            at += 2 * size
        assert sizes[:1] == [2] and sizes[-1] == 4 and sizes == sorted(sizes)


def test_lengths_of_the_copy_task_are_spread():
    """From level - 2 to level, and from 1 where that is less; each as often as the others."""
    task = find_task("copy", first=4, spread=2, batch_size=600, length=1)
    for level, sizes in ((4, {2, 3, 4}), (2, {1, 2})):
        state = task.init(jax.random.key(0))._replace(level=jnp.asarray(level))
        drawn = np.asarray(task.sample(task.data, state, jax.random.key(1))[1].size)
        assert set(drawn.tolist()) == sizes
        for size in sizes:
            assert abs(np.mean(drawn == size) - 1 / len(sizes)) < 0.1


def test_the_curriculum_averages_the_loss_of_recalled_symbols():
    task = find_task("copy", first=1, decay=0.9, threshold=0.3, batch_size=1, length=2)
    state = task.init(jax.random.key(0))
    chunk, _ = task.sample(task.data, state, jax.random.key(0))
    state, _ = task.observe(state, chunk, sg.Info(jnp.array([[7.0, 0.2]]), {}))
    np.testing.assert_allclose(state.average, 0.9 * np.log(2) + 0.1 * 0.2)
    state, row = task.observe(state._replace(average=jnp.array(0.3)), chunk, sg.Info(jnp.array([[7.0, 0.2]]), {}))
    assert (int(row["copy_length"]), int(state.level)) == (2, 2)
    np.testing.assert_allclose(state.average, np.log(2))  # starts again
    blank = chunk._replace(targets=jnp.full_like(chunk.targets, 2))
    assert task.observe(state, blank, sg.Info(jnp.zeros((1, 2)), {}))[0] == state


def test_text_streams_go_on_across_chunks_and_begin_anew_at_the_end(tmp_path):
    (tmp_path / "text").write_text("the quick brøwn føx", encoding="utf-8")
    content = "the quick brøwn føx"
    task = find_task("text", path=tmp_path / "text", batch_size=3, length=5)
    vocabulary = sorted(set(content))
    assert task.n_in == len(vocabulary)
    chunk, _ = stream(task, 8, seed=1)
    letters = ["".join(vocabulary[code] for code in row) for row in chunk.inputs.argmax(axis=2)]
    nexts = ["".join(vocabulary[code] for code in row) for row in chunk.targets]
    starts = set()
    for line, following, reset in zip(letters, nexts, chunk.reset, strict=True):
        start = (content[:-1] * 2).index(line[:18])
        starts.add(start)
        again = content[:-1] * 4  # the last letter is only ever a target
        assert line == again[start : start + 40]
        assert [content[(start + at) % 18 + 1] for at in range(40)] == list(following)
        np.testing.assert_array_equal(reset, (start + np.arange(40)) % 18 == 0)
    assert {(start - min(starts)) % 6 for start in starts} == {0} and len(starts) == 3


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read, No such file"),
        (b"", "two different characters, and has 0"),
        (b"\xff\xfe", "not text in UTF-8"),
    ],
)
def test_a_bad_text_is_named(tmp_path, content, words):
    if content is not None:
        (tmp_path / "text").write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / "text")) + ".*" + words):
        find_task("text", path=tmp_path / "text")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "cue"}, "task must be one of 'digits', .*not 'cue'"),
        ({"name": "queue", "delay": -1}, "delay must be a whole number of at least 0"),
        ({"name": "queue", "size": 3}, "the task queue has no option 'size': choose from delay, batch_size, length"),
        ({"name": "text"}, "the task text needs the option path"),
        ({"name": "queue", "length": 0}, "length must be a whole number"),
        ({"name": "digits", "read": "columns"}, "read must be one of 'rows', 'pixels'"),
        ({"name": "digits", "length": 3}, "length must divide the 8 steps"),
        ({"name": "digits", "split": "valid"}, "split must be one of"),
        ({"name": "copy", "first": 9, "longest": 5}, "first must not be more than longest"),
        ({"name": "copy", "spread": -1}, "spread must be a whole number of at least 0"),
        ({"name": "copy", "decay": 1.0}, "decay must be"),
        ({"name": "copy", "threshold": 0.0}, "threshold must be"),
        ({"name": "mnist"}, "STREAMGRAD_DATA"),
    ],
)
def test_wrong_options(monkeypatch, options, words):
    monkeypatch.delenv("STREAMGRAD_DATA", raising=False)
    with pytest.raises(ValueError, match=words):
        find_task(**options)


@pytest.mark.parametrize(
    ("images", "labels", "words"),
    [
        (np.zeros((4, 2)), np.zeros(4, int), r"images must be whole numbers \[n, rows, columns\] from 0 to 9"),
        (np.full((4, 2, 2), 0.5), np.zeros(4, int), "images must be whole numbers"),
        (np.full((4, 2, 2), 10), np.zeros(4, int), "images must be whole numbers"),
        (np.zeros((4, 2, 2)), np.array([0, 1, 2, 3]), "labels must be whole numbers from 0 to 2, one for each of 4"),
        (np.zeros((4, 2, 2)), np.array([0, 1, -1, 2]), "labels must be whole numbers from 0 to 2"),
        (np.zeros((4, 2, 2)), np.zeros(3, int), "labels must be whole numbers from 0 to 2, one for each of 4"),
    ],
)
def test_images_and_labels_that_do_not_fit(images, labels, words):
    with pytest.raises(ValueError, match=words):
        image_task("few", images, labels, brightest=9, n_classes=3)


def test_every_task_of_the_table_is_there():
    from streamgrad_lab.tasks import task_function

    assert all(callable(task_function(name)) for name in TASKS)
