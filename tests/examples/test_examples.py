"""The examples are short, learn at a small size, and print what they say."""

import importlib.util
import re
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from tests.cells.libraries import library
from tests.tools import ROOT

FOLDER = ROOT / "examples"
NAMES = ("stream", "characters", "agent", "your_cell")
NEEDS = {"stream": ("orbax.checkpoint", "streamgrad[lab]"), "your_cell": ("equinox", "streamgrad[equinox]")}
# What these libraries say about themselves is not ours.
orbax = pytest.mark.filterwarnings("ignore")


def load(name):
    """The module, run as a file, as `python examples/NAME.py` does."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def promised(name):
    """The command in an example's docstring, and what it says that this prints."""
    text = re.match(r'"""(.*?)"""', (FOLDER / f"{name}.py").read_text(), flags=re.DOTALL)[1]
    command, *lines = re.findall(r"^    (.*)$", text, flags=re.MULTILINE)
    return command, lines


def form(lines):
    """Lines without their numbers."""
    return [re.sub(r"[\d.]+", "#", line) for line in lines]


def last(lines, pattern):
    """The number in the last line that has one."""
    return [float(found[1]) for line in lines if (found := re.search(pattern, line))][-1]


def run(capsys, module, *arguments):
    capsys.readouterr()
    module.main(list(arguments))
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("name", NAMES)
def test_short_and_in_the_table(name):
    """Under 80 lines, and the table has its command and the last line it prints."""
    assert len((FOLDER / f"{name}.py").read_text().splitlines()) < 80
    command, lines = promised(name)
    assert command.startswith(f"$ python examples/{name}.py")
    row = next(line for line in (FOLDER / "README.md").read_text().splitlines() if f"({name}.py)" in line)
    assert f"`{command[2:]}`" in row
    assert f"`{lines[-1]}`" in row


def test_no_other_example():
    assert sorted(path.stem for path in FOLDER.glob("*.py")) == sorted(NAMES)


@pytest.mark.parametrize("name", NEEDS)
def test_a_missing_library_is_one_sentence(name, monkeypatch):
    module, extra = NEEDS[name]
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SystemExit, match=re.escape(f'pip install "{extra}"')):
        load(name)


@pytest.mark.slow
@orbax
def test_stream_goes_on(capsys, tmp_path):
    """From the last checkpoint but one it comes to the same numbers, and to the same state, bit for bit."""
    ocp, stream = library("orbax.checkpoint"), load("stream")
    arguments = ("--updates", "180", "--every", "60", "--folder", str(tmp_path / "run"))

    def state():
        return jax.tree.leaves(ocp.StandardCheckpointer().restore(tmp_path / "run" / "180" / "default"))

    unbroken = run(capsys, stream, *arguments)
    assert form(unbroken) == form(promised("stream")[1])
    assert last(unbroken, r"loss ([\d.]+)") < 0.65  # truncated BPTT is still at 0.69
    want = state()
    shutil.rmtree(tmp_path / "run" / "180")  # as if it had been killed before
    assert run(capsys, stream, *arguments) == ["going on from update 120", unbroken[-1]]
    for one, other in zip(state(), want, strict=True):
        np.testing.assert_array_equal(one, other)
    assert run(capsys, stream, *arguments) == ["going on from update 180"]


@pytest.mark.slow
def test_stream_survives_a_kill(tmp_path):
    """Without any warning, in an interpreter of its own."""
    command = [sys.executable, str(FOLDER / "stream.py"), "--updates", "600", "--every", "200", "--folder"]
    killed = subprocess.Popen([*command, str(tmp_path / "killed")], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    first = [killed.stdout.readline(), killed.stdout.readline()]
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    again, whole = (
        subprocess.run([*command, str(tmp_path / folder)], capture_output=True, text=True, check=True, cwd=ROOT)
        for folder in ("killed", "whole")
    )
    lines = whole.stdout.splitlines()
    assert [line.strip() for line in first] == lines[:2]
    going, *rest = again.stdout.splitlines()
    assert going in ("going on from update 200", "going on from update 400")
    assert rest == lines[-len(rest) :]


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("characters", ["--updates", "2"], "--updates must be at least 3"),
        ("agent", ["--steps", "1"], "--steps must be at least 33"),
        ("your_cell", ["--updates", "0"], "--updates must be at least 3"),
        ("stream", ["--every", "0", "--folder", "unused"], "--every must be at least 1"),
        ("stream", ["--folder", __file__], "is a file: name a folder"),
    ],
)
@orbax
def test_wrong_options_are_said(capsys, name, arguments, words):
    """Before anything is compiled, and no folder is made."""
    if name in NEEDS:
        library(NEEDS[name][0])
    with pytest.raises(SystemExit):
        load(name).main(arguments)
    assert words in capsys.readouterr().err


def test_characters(capsys, tmp_path):
    """A text that repeats itself is learnt, and written."""
    text = tmp_path / "text"
    text.write_text("how now, brown cow?\n" * 100)
    lines = run(capsys, load("characters"), str(text), "--updates", "90")
    assert form(lines[:3]) == form(promised("characters")[1][:3])
    assert last(lines, r"([\d.]+) bits") < 1  # by the frequency of letters alone it has 3.3
    assert "how now, brown cow?" in "\n".join(lines[3:])


def test_characters_of_no_text(tmp_path):
    """One sentence, for whatever is wrong."""
    main, empty, same = load("characters").main, tmp_path / "empty", tmp_path / "same"
    empty.touch()
    same.write_text("a" * 1000)
    with pytest.raises(SystemExit, match=r"missing cannot be read: No such file or directory\.$"):
        main([str(tmp_path / "missing")])
    with pytest.raises(SystemExit, match=r"cannot be read: Is a directory\.$"):
        main([str(tmp_path)])
    for path in (empty, same):
        with pytest.raises(SystemExit, match=f"{path.name} is too short: more than 256 characters are needed"):
            main([str(path)])


@pytest.mark.slow
def test_agent(capsys):
    lines = run(capsys, load("agent"), "--steps", "1914")
    assert form(lines) == form(promised("agent")[1])
    assert last(lines, r": ([\d.]+) of the turns") > 0.85


@pytest.mark.slow
def test_your_cell(capsys):
    """The trained module, called as Equinox calls it, recalls every bit."""
    library("equinox")
    lines = run(capsys, load("your_cell"), "--updates", "390")
    assert form(lines) == form(promised("your_cell")[1])
    assert last(lines, r"loss ([\d.]+)") < 0.1
    shown, recalled = lines[-2].split()[1], lines[-1].split()[1]
    assert recalled == shown[:-6]
