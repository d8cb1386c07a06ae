"""A task and a cell of one's own from the command line: compared, trained, resumed, loaded; or answered for."""

import json
import os
import subprocess
import sys

import jax
import jaxtyping
import numpy as np
import pytest

from streamgrad_lab import find_task, load_params, own, read_metrics
from streamgrad_lab.cli.compare import Options, task_of
from streamgrad_lab.cli.main import main
from tests.tools import ROOT, one_sentence

MINE = """
import jax, jax.numpy as jnp, streamgrad as sg
from streamgrad_lab import Task


def sine(batch_size=4, length=5, pace=0.3):
    def init(key):
        return jax.random.uniform(key, (batch_size,), maxval=6.28)

    def sample(data, phase, key):
        wave = jnp.sin(phase[:, None] + pace * jnp.arange(length + 1)[None, :])[..., None]
        return sg.Chunk(wave[:, :-1], wave[:, 1:]), phase + pace * length

    return Task("sine", 1, sg.heads.squared_error(1), batch_size, length, False, (), init, sample)


def leaky(n_in, n_hidden):
    return sg.cells.from_function(
        step=lambda params, h, x: 0.5 * h + jnp.tanh(params["w"] @ jnp.concatenate([h, x])),
        init_params=lambda key: {"w": jax.random.normal(key, (n_hidden, n_hidden + n_in)) / 3},
        init_state=lambda: jnp.zeros(n_hidden),
        example_input=jnp.zeros(n_in),
    )


def whole(batch_size):
    return sine(batch_size)


def one_size():
    return sine()


def breaks(batch_size=4, length=5):
    def sample(data, phase, key):
        return sg.Chunk(phase @ jnp.ones((batch_size + 1, 2)), phase), phase

    return sine(batch_size, length)._replace(sample=sample)


def divides(n_in, n_hidden):
    return n_in / 0


def three(*args, **options):
    return 3


def refused(n_in, n_hidden):
    return sg.cells.gru(n_in, -n_hidden)


number = 5
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder that is not on the path, with the user's module in it."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    jaxtyping.config.update("jaxtyping_disable", True)
    yield tmp_path
    jaxtyping.config.update("jaxtyping_disable", False)
    sys.modules.pop("mine", None)


OWN = ["--task", "mine:sine", "--task-options", "pace=0.5", "--cell", "mine:leaky", "--hidden", "3"]


def test_train_resume_and_load(folder, capsys):
    train = [
        "train",
        "run",
        *OWN,
        "--batch-size",
        "2",
        "--layers",
        "2",
        "--estimator",
        "rtrl",
        "--learning-rate",
        "0.02",
    ]
    assert main([*train, "--updates", "60"]) == 0
    assert main([*train, "--updates", "120", "--resume", "--json"]) == 0
    (seed,) = json.loads(capsys.readouterr().out.splitlines()[-1])["seeds"]
    columns = read_metrics("run")
    assert seed["loss"] == columns["loss"][-1] < 0.5 * columns["loss"][0] and len(columns["update"]) == 12
    params, model, task, update = load_params("run")
    assert (update, task.name, task.batch_size, task.length) == (120, "sine", 2, 5)
    assert [layer["w"].shape for layer in params.cell] == [(3, 4), (3, 6)]
    chunk, _ = task.sample(task.data, task.init(jax.random.key(1)), jax.random.key(0))
    outputs, _ = model.run(params, model.init_state(params), chunk.inputs[0])
    np.testing.assert_allclose(chunk.inputs[0, 1:, 0], chunk.targets[0, :-1, 0], rtol=1e-5)
    assert outputs.shape == (5, 3)
    (folder / "mine.py").unlink()
    sys.modules.pop("mine")
    with pytest.raises(ValueError, match="mine:sine cannot be found, as there is no module 'mine' in this folder"):
        load_params("run")


def test_compare(capsys):
    command = ["compare", "--estimators", "rtrl", "bptt", *OWN, "--updates", "2", "--samples", "32", "--length", "8"]
    assert main([*command, "--chunk-length", "4", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["rtrl"]["verdict"] == "exact" and rows["bptt"]["verdict"] == "biased"
    assert rows["rtrl"]["length"] == 8
    # A function without length keeps its own; one that cannot have B streams cannot be compared on.
    assert task_of(Options(task="mine:whole")).length == 5
    assert main([*command[:4], "--task", "mine:one_size"]) == 2
    assert "mine:one_size must take batch_size, as compare calls it for any number" in capsys.readouterr().err


WRONG = {
    "no module": ("--task yours:sine", "there is no module 'yours' in this folder or among those installed."),
    "a file": ("--task mine.py:sine", "among those installed: write mine:sine for the file mine.py."),
    "no function": ("--cell mine:leeky", "mine.py, has no 'leeky'."),
    "no name": ("--task mine:", "'mine:' must be MODULE:FUNCTION, such as mine:make for the function make of"),
    "no call": ("--task mine:number", "mine:number must be a function, not int."),
    "another task": ("--task mine:three", "mine:three must return a streamgrad_lab.Task, not int."),
    "another cell": ("--cell mine:three", "mine:three must return a Cell, such as streamgrad.cells.from_function"),
    "needs": ("--task mine:whole", "the task mine:whole needs the option batch_size."),
    "needs more": ("--task mine:divides", "the task mine:divides needs n_in: --task-options n_in=VALUE."),
    "arguments": (
        "--cell mine:one_size",
        "must be a function that is called as one_size(n_in, n_hidden)",
    ),
    "option": ("--task mine:sine --task-options peace=1", "--task-options has no 'peace'; choose from pace."),
    "raises": ("--cell mine:divides", "mine:divides raised ZeroDivisionError, division by zero (mine.py, line 42)."),
    "ours": ("--cell mine:refused", "mine:refused raised ValueError, n_hidden must be a whole number of at least 1"),
    "in sample": ("--task mine:breaks", "mine:breaks raised TypeError, dot_general requires contracting dimensions"),
    "no colon": ("--task mine", "--task must be one of digits, mnist, queue, copy, text, series, MODULE:FUNCTION"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_sentence(case, folder, capsys):
    options, words = WRONG[case]
    assert main(["train", "run", "--task", "queue", *options.split()]) in (1, 2)
    out, err = capsys.readouterr()
    assert not out and words in err and err.count("\n") == 1 and not (folder / "run").exists(), err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("import nowhere", "ModuleNotFoundError, No module named 'nowhere' (bad.py, line 1)."),
        ("x = 1\ny = x + z", "NameError, name 'z' is not defined (bad.py, line 2)."),
        ("def f(:", "SyntaxError, invalid syntax (bad.py, line 1)."),
    ],
)
def test_a_module_that_does_not_import(folder, content, words):
    (folder / "bad.py").write_text(content)
    with pytest.raises(ValueError) as caught:
        own.find_function("bad:f")
    assert one_sentence(caught) and str(caught.value) == f"the module bad cannot be imported: {words}"


def test_a_name_of_the_library_is_not_shadowed(folder):
    """The current folder comes last on the path, for everybody's sake."""
    (folder / "optax.py").write_text("def f(): pass")
    with pytest.raises(ValueError, match=r"the module optax, .*__init__\.py, has no 'f'"):
        find_task("optax:f")


@pytest.mark.slow
def test_the_command_itself_finds_the_folder(folder):
    """As a process of its own, as a user types it."""
    command = [
        sys.executable,
        "-m",
        "streamgrad_lab.command",
        "train",
        "run",
        *OWN,
        "--updates",
        "20",
        "--no-checkpoints",
    ]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PYTHONSAFEPATH": "1",
    }  # as a script, which has no "" on its path
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "written to run" in done.stdout, done.stderr
