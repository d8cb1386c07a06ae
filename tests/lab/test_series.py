"""The task `series`: its maps step by step, the file it reads, and what it says of a bad one."""

import jax
import numpy as np
import pytest

from streamgrad_lab.tasks import find_task
from streamgrad_lab.tasks.series import KINDS, SETTLE, generate, scaled
from tests.tools import one_sentence


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


TABLE = "day,price,volume\n2024-01-01,1.5,7\n2024-01-02,2.5,8\n2024-01-03,4.5,6\n2024-01-04,3.0,5\n"
PRICES = [1.5, 2.5, 4.5, 3.0]


@pytest.mark.parametrize(
    ("content", "column", "want"),
    [
        (TABLE, "price", PRICES),
        (TABLE, 2, PRICES),
        (TABLE.replace(",", ";"), "price", PRICES),
        (TABLE.replace(",", "\t"), "price", PRICES),
        ("1 10\n2 20\n\n3 30\n4 40", 2, [10, 20, 30, 40]),
        ("\ufeffprice\n1.5\n2.5\n4.5\n3.0\n", None, PRICES),  # a single column may have a name
        ("1,\n2,\n3,\n5,\n", None, [1, 2, 3, 5]),  # and a separator at the end of its lines
        ('"the day, in words",price\n"a, b",1.5\n"c, d",2.5\n', "price", [1.5, 2.5]),
        ("x;y\n;1\n;2\n", "y", [1, 2]),
        ("1 2 3\n4\n5 6 7 8", None, [1, 2, 3, 4, 5, 6, 7, 8]),
    ],
)
def test_a_column_of_a_table(tmp_path, content, column, want):
    (tmp_path / "x").write_text(content, encoding="utf-8")
    task = find_task("series", path=tmp_path / "x", column=column, batch_size=1)
    want = np.array(want, float)
    np.testing.assert_allclose(task.data[0], (want - want.mean()) / want.std(), rtol=1e-6)


@pytest.mark.parametrize(
    ("content", "column", "words"),
    [
        (TABLE, None, "has 3 columns, day, price and volume: choose one with the option column, such as column=volume"),
        ("1 10\n2 20\n3 30\n", None, "has 2 columns: choose one with .* column=2, or write one number on each line"),
        ("1,2,3\n4,5,6\n7,8\n", None, "has 3 columns, and 2 in line 3: mend the line, or write one number on each"),
        ("1 2\n3 4\n5\n7 8\n", 1, "has 2 columns, and 1 in line 3"),
        (TABLE, "prize", "by its number, from 1, or by one of those names, not 'prize'"),
        ("1 10\n2 20\n", 3, "has 2 columns: choose one by its number, from 1, not 3"),
        (TABLE, "day", "has '2024-01-01' where a number should be, in line 2"),
        ("a,b\n1,2\n3,\n5,6\n", "b", "has an empty cell in line 3: leave out or fill in"),
        ("a,b\n1,2\n3,nan\n", "b", "has 'nan' in line 3: leave out or fill in"),
        ("a;b\n1;1,5\n2;2,5\n", "b", "has '1,5' where a number should be, in line 2"),
        ("1 2 3\n4\n5 6\n", 2, "has no columns, as its lines differ in length: leave column out"),
    ],
)
def test_columns_are_not_read_as_one_series(tmp_path, content, column, words):
    (tmp_path / "x").write_text(content)
    with pytest.raises(ValueError, match=words) as caught:
        find_task("series", path=tmp_path / "x", column=column, batch_size=1)
    assert one_sentence(caught)


def test_a_file_is_a_stream_and_a_chaotic_series_has_episodes(tmp_path):
    """Unless they are asked for; a stream begins anew at the end of the file."""
    path = tmp_path / "numbers"
    path.write_text("\n".join(map(str, range(1001))))

    def resets(**options):
        task = find_task("series", batch_size=1, length=2000, held_out=0.0, **options)
        chunk, _ = task.sample(task.data, task.init(jax.random.key(0)), jax.random.key(0))
        return np.flatnonzero(np.asarray(chunk.reset)[0]).tolist()

    assert resets(path=path) == [0, 1000]
    assert resets(path=path, episode=400) == [0, 400, 800, 1000, 1400, 1800]
    assert resets(kind="henon", values=501) == [0, 200, 400, 500, 700, 900, 1000, 1200, 1400, 1500, 1700, 1900]
    assert resets(kind="henon", values=501, episode=0) == [0, 500, 1000, 1500]


def test_wrong_options():
    with pytest.raises(ValueError, match="column is of a file, and none is given: column 2 needs a path"):
        find_task("series", column=2)
    with pytest.raises(ValueError, match="kind must be one of 'henon', 'mackey_glass', 'lorenz'"):
        find_task("series", kind="sunspots")
    with pytest.raises(ValueError, match="values must be a whole number of at least 2"):
        find_task("series", values=1)
