"""What is shown of a comparison: ranks, the frontier and its figure, and the command with its refusals."""

import csv
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.text import Text

from streamgrad_lab import Comparison, frontier, ranks
from streamgrad_lab.cli.compare import advice, heading
from streamgrad_lab.cli.main import main
from streamgrad_lab.report.frontier import _staircase, draw_frontier, write_frontier
from streamgrad_lab.report.labels import shared_area
from tests.lab.measured import measured

# What a row that nobody has measured might say.
BASE = Comparison(
    name="uoro",
    promise="unbiased",
    hindsight=False,
    length=6,
    chunk_length=4,
    streams=8,
    squared_error=1.0,
    squared_error_noise=0.1,
    squared_bias=0.0,
    squared_bias_noise=0.1,
    bias=0.1,
    bias_noise=0.1,
    verdict="none seen",
    variance=8.0,
    variance_error=0.1,
    predicted=None,
    predicted_is_bound=False,
    us_per_step=1.0,
    state_bytes=1,
    scratch_bytes=0,
    samples=2048,
)


def hand_made(**rows):
    """Rows of a name, an error, its noise, and where they matter a time and a memory each."""

    def row(name, error, noise, time=1.0, memory=1):
        verdict = "exact" if error == 0 else "none seen"
        found = BASE._replace(name=name, verdict=verdict, squared_error=error, squared_error_noise=noise)
        return found._replace(us_per_step=time, state_bytes=memory)

    return [row(name, *numbers) for name, numbers in rows.items()]


TABLE = hand_made(
    slow_exact=(0.0, 0.0, 100.0, 50),
    exact=(0.0, 0.0, 50.0, 500),
    cheap=(1.0, 0.01, 1.0, 10),
    same_but_slower=(0.99, 0.01, 2.0, 5),
    better=(0.1, 0.01, 10.0, 20),
    worse=(0.5, 0.01, 20.0, 30),
    hardly_measured=(0.6, 5.0, 5.0, 1),
)


def test_ranks_tell_noise_from_difference():
    table = hand_made(a=(1.0, 0.1), b=(1.2, 0.1), c=(2.0, 0.1), d=(0.5, 0.1))
    assert ranks(table) == [2, 2, 4, 1]
    assert ranks([table[0]._replace(hindsight=True), table[2]]) == [None, 1]


def test_the_frontier_is_what_no_other_row_beats():
    names = [row.name for row in frontier(TABLE)]
    assert names == ["cheap", "hardly_measured", "better", "exact"]
    names = [row.name for row in frontier(TABLE, "memory_bytes")]
    assert names == ["hardly_measured", "better", "slow_exact"]
    # Of hindsight is no choice.
    assert [row.name for row in frontier([TABLE[2]._replace(hindsight=True), TABLE[4]])] == ["better"]
    text = " ".join(advice(TABLE).split())
    assert "Least error for its time: cheap; hardly_measured; better; exact." in text
    assert "Least error for its memory: hardly_measured; better; slow_exact." in text


def test_the_heading_says_how_the_stream_was_cut():
    for length, chunk_length, says in (
        (6, 6, "one chunk"),
        (6, 4, "1 chunk of 4 and one of 2"),
        (6, 2, "3 chunks of 2"),
    ):
        text = heading(BASE._replace(length=length, chunk_length=chunk_length))
        assert text == f"A stream of 6 steps in {says}; B = 8 streams."


def check_figure(rows):
    """No name covers another or leaves the axes."""
    figure = draw_frontier(rows)
    figure.draw_without_rendering()
    for ax in figure.axes:
        boxes = np.array([Text.get_window_extent(text).extents for text in ax.texts])  # without the lines to them
        assert len(boxes) == sum(not row.hindsight for row in rows)
        shared = shared_area(boxes, boxes)
        assert np.all(shared[~np.eye(len(boxes), dtype=bool)] == 0)
        np.testing.assert_allclose(shared_area(boxes, ax.bbox.extents[None])[:, 0], shared.diagonal())


def test_the_figure_of_any_rows_can_be_drawn(tmp_path):
    """Several; only exact ones; only one. The PNG is one. A name that is half a formula is a name."""
    write_frontier(tmp_path / "frontier.png", [BASE._replace(name=r"mine $\frac{$")])
    assert (tmp_path / "frontier.png").read_bytes().startswith(b"\x89PNG")
    biased = BASE._replace(verdict="biased", us_per_step=3.0)
    for some in ([*TABLE, biased], TABLE[:1], [BASE]):
        check_figure(some)


def test_the_line_of_the_frontier_says_what_can_be_had_for_a_cost():
    """Between two rows that is the cheaper one: the line goes to the right first, and down where the better one is."""
    best = frontier(TABLE)
    line = list(_staircase(best, "us_per_step", 1e-3, 200.0))
    spots = [(1.0, 1.0), (5.0, 0.6), (10.0, 0.1), (50.0, 1e-3)]  # time and error, the exact one at the floor
    want = []
    for (x, y), (after, below) in itertools.pairwise([*spots, (200.0, 1e-3)]):
        want += [((x, y), (after, y)), ((after, y), (after, below))]
    np.testing.assert_allclose(line, want)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_the_figure_of_all_rows_can_be_drawn(seed):
    """With times of any kind: those measured differ from run to run."""
    all_rows = list(measured().values())
    times = np.random.default_rng(seed).lognormal(2, 1, len(all_rows))
    rows = zip(all_rows, times.tolist(), strict=True)
    check_figure([row._replace(us_per_step=time) for row, time in rows])


# The further back, the less error.
WINDOWS = ["windowed_bptt window=10", "windowed_bptt window=8 every=4", "windowed_bptt window=3"]


COMMAND = ["compare", "--cell", "vanilla", "--hidden", "2", "--length", "12", "--updates", "2", "--samples", "32"]


@pytest.mark.slow
def test_command(tmp_path, capsys):
    table = tmp_path / "table.csv"
    assert main([*COMMAND, "--estimators", "rtrl", "windowed_bptt", "--csv", str(table)]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0] == "A stream of 12 steps in one chunk; B = 8 streams."
    assert lines[3].split()[:2] == ["1", "rtrl"] and "How to read it" in out
    assert "measuring: 0 of 4, windowed_bptt window=3" in err
    assert max(map(len, out.splitlines())) <= 80
    with table.open(newline="") as file:
        assert [row["name"] for row in csv.DictReader(file)] == ["rtrl", *WINDOWS]
    assert main([*COMMAND, "--estimators", "rtrl", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["name"] == "rtrl"


@pytest.mark.slow
def test_command_draws_the_frontier(tmp_path, capsys):
    table, figure = tmp_path / "table.csv", tmp_path / "frontier.svg"
    command = ["compare", "--cell", "vanilla", "--hidden", "2", "--length", "9", "--updates", "2", "--samples", "32"]
    command += ["--chunk-length", "4", "--estimators", "bptt", "rtrl"]
    assert main([*command, "--csv", str(table), "--figure", str(figure)]) == 0
    out, _ = capsys.readouterr()
    assert "A stream of 9 steps in 2 chunks of 4 and one of 1; B = 8 streams." in out
    assert "Least error for its time: " in out
    with table.open(newline="") as file:
        found = {row["name"]: row for row in csv.DictReader(file)}
    assert found["rtrl"]["best_for_memory"] == "True" and found["bptt"]["chunk_length"] == "4"
    text = figure.read_text()
    assert all(word in text for word in ("bptt", "rtrl", "exact", "9 steps in chunks of 4, mean over 8 streams"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["frontier.svg", "table.csv"]


def test_wrong_choices_are_answered(capsys):
    assert main(["compare", "--estimators", "rtlr"]) == 2
    assert "'rtlr'" in capsys.readouterr().err
    assert main([*COMMAND, "--hidden", "0"]) == 2
    assert "hidden must be a whole number" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options, code, says",
    [
        (["--samples", "1"], 2, "--samples must be a whole number of at least 32, not 1"),
        (["--csv", "/nowhere/table.csv"], 2, "--csv /nowhere/table.csv must be a file in a folder that exists"),
        (["--csv", "."], 2, "must be a file"),
        (["--seconds", "0"], 2, "--seconds must be above 0"),
        (["--csv", "/proc/table.csv"], 1, "cannot write"),
        (["--figure", "/nowhere/frontier.svg"], 2, "--figure /nowhere/frontier.svg must be a file in a folder"),
        (["--figure", "frontier.pdf"], 2, "--figure frontier.pdf must end in .svg or .png"),
        (["--chunk-length", "0"], 2, "--chunk-length must be a whole number of at least 1, not 0"),
        (["--chunk-length", "33"], 2, "--chunk-length must be at most 32, the steps of the stream, not 33"),
    ],
)
def test_what_is_wrong_is_said_before_training(options, code, says, capsys, monkeypatch):
    monkeypatch.setattr("streamgrad_lab.cli.compare.prepare", lambda *args: pytest.fail("it has begun to train"))
    if options[-1].startswith("/proc") and not Path("/proc").is_dir():
        pytest.skip("no folder that nobody may write to")
    assert main(["compare", *options]) == code
    assert says in capsys.readouterr().err
