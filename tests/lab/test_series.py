"""The task `series`: its maps step by step, the file it reads, and what it says of a bad one."""

import jax
import numpy as np
import pytest

from streamgrad.lab.tasks import find_task
from streamgrad.lab.tasks.series import KINDS, SETTLE, generate, scaled


def test_henon_step_by_step():
    got, x, y = KINDS["henon"](3, 5, np.random.default_rng(0)), 0.12, 0.0
    for value in got[2]:
        assert value == pytest.approx(x, abs=1e-14)
        x, y = 1 - 1.4 * x * x + y, 0.3 * x


def test_mackey_glass_step_by_step():
    """The delay is 17 steps of size 1."""
    got = KINDS["mackey_glass"](2, 60, np.random.default_rng(0))
    for t in range(18, 60):
        late = got[:, t - 18]
        want = got[:, t - 1] + 0.2 * late / (1 + late**10) - 0.1 * got[:, t - 1]
        np.testing.assert_allclose(got[:, t], want, rtol=1e-12)


def test_lorenz_by_a_finer_solution():
    """Euler steps of 0.01, every second of them: the same by hand, and the known range of the attractor."""
    rng = np.random.default_rng(1)
    point = 1 + 0.1 * np.random.default_rng(1).normal(size=(3, 2))
    got = KINDS["lorenz"](2, 2000, rng)
    for t in range(4):
        np.testing.assert_allclose(got[:, t], point[0], rtol=1e-12)
        for _ in range(2):
            x, y, z = point
            point = point + 0.01 * np.array([10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z])
    assert 15 < np.abs(got[:, 500:]).max() < 22


@pytest.mark.parametrize("kind", KINDS)
def test_lanes_are_scaled_and_settled(kind):
    raw = generate(kind, 2, 400, np.random.default_rng(0))
    whole = KINDS[kind](2, 400 + SETTLE, np.random.default_rng(0))
    np.testing.assert_array_equal(raw, whole[:, SETTLE:])
    lanes = scaled(raw)
    np.testing.assert_allclose(lanes.mean(axis=1), 0, atol=1e-12)
    np.testing.assert_allclose(lanes.var(axis=1), 1)


def test_streams_go_on_and_begin_anew(tmp_path):
    path = tmp_path / "numbers.csv"
    path.write_text("1, 2, 4, 8\n16\n32 64 128 5 6 7 8")
    task = find_task("series", path=path, batch_size=2, length=2, episode=4)
    numbers = np.array([1, 2, 4, 8, 16, 32, 64, 128, 5, 6, 7, 8.0])
    lanes = ((numbers - numbers.mean()) / numbers.std()).reshape(2, 6)
    state, seen, targets, resets = task.init(jax.random.key(0)), [], [], []
    for _ in range(5):
        chunk, state = task.sample(task.data, state, jax.random.key(0))
        seen.append(chunk.inputs[..., 0])
        targets.append(chunk.targets[..., 0])
        resets.append(chunk.reset)
    order = np.arange(10) % 5
    np.testing.assert_allclose(np.concatenate(seen, axis=1), lanes[:, order], rtol=1e-6)
    np.testing.assert_allclose(np.concatenate(targets, axis=1), lanes[:, order + 1], rtol=1e-6)
    np.testing.assert_array_equal(np.concatenate(resets, axis=1)[0], np.isin(order, (0, 4)))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read, No such file"),
        ("", "needs at least 4 numbers, not 0"),
        ("1 2 nan 4", "has 'nan' at place 3: leave out or fill in"),
        ("1 2 3 four 5", "has 'four' where a number should be, at place 4"),
        ("2 2 2 2", "never changes"),
        (b"\xff\xfe", "not text in UTF-8"),
    ],
)
def test_a_bad_series_is_one_sentence(tmp_path, content, words):
    if content is not None:
        (tmp_path / "x").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=words) as caught:
        find_task("series", path=tmp_path / "x", batch_size=2)
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


def test_wrong_options():
    with pytest.raises(ValueError, match="kind must be one of 'henon', 'mackey_glass', 'lorenz'"):
        find_task("series", kind="sunspots")
    with pytest.raises(ValueError, match="values must be a whole number of at least 2"):
        find_task("series", values=1)
