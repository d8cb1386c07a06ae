"""The command line: it answers at once, names what is wrong, and trains; and a killed run can be resumed, for real."""

import json
import os
import pydoc
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jaxtyping
import numpy as np
import pytest

import streamgrad as sg
from streamgrad_lab.cli.main import COMMANDS, main
from streamgrad_lab.training import read_metrics
from tests.tools import ROOT

TRAIN = ["--task", "queue", "--task-options", "delay=1", "--batch-size", "2", "--length", "2", "--cell", "vanilla"]
TRAIN += ["--hidden", "2", "--updates", "160", "--every", "2", "--checkpoint-every", "2", "--seeds", "2"]
TRAIN += ["--estimator", "uoro"]  # with noise: a resumed run must draw the same


@pytest.fixture(autouse=True)
def as_a_user():
    """Without the run-time check of annotations, which users do not have and which would answer first."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def test_help_loads_nothing_heavy():
    """In a fresh interpreter; modules are counted, since seconds depend on the machine."""
    code = (
        "import sys; from streamgrad_lab.cli.main import main; import streamgrad_lab as lab\n"
        "assert all(getattr(lab, name) is not None for name in lab.__all__)\n"
        "assert main(['--help']) == 0 and main([]) == 0 and main(['--version']) == 0\n"
        "assert 'tyro' not in sys.modules, 'for the list of commands'\n"
        "assert main(['train', '--help']) == 0 and main(['reproduce', '--help']) == 0\n"
        "heavy = {'orbax', 'sklearn', 'matplotlib', 'jinja2', 'rich'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in COMMANDS) and "--estimator" in done.stdout


@pytest.mark.slow
def test_experiments_run_with_jax_numpy_and_optax_alone(tmp_path):
    """In a fresh interpreter that has none of the other packages; what needs them says so."""
    extras = ["tyro", "rich", "orbax", "matplotlib", "jinja2", "markupsafe", "sklearn", "jaxtyping", "beartype"]
    options = ["--preset", "smoke", "--settings", "both", "--no-checkpoints", "--out", str(tmp_path / "run")]
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({extras}))\n"
        "import importlib.util; found = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda name: None if name in {extras} else found(name)\n"
        "from streamgrad_lab.cli.main import main\n"
        f"assert main(['reproduce', 'ablation', *{options}]) == 0\n"
        "assert main(['train', 'x']) == 1"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "`streamgrad report" in done.stdout and "streamgrad train needs tyro: pip install" in done.stderr
    assert main(["report", str(tmp_path / "run")]) == 0 and (tmp_path / "run" / "report.html").exists()


UORO = ["--estimator", "uoro", "--estimator-options"]
WRONG = {
    "command": (["trian"], 2, "there is no command 'trian'; choose from train, "),
    "choice": (["train", "X", "--cell", "lsmt"], 2, "--cell must be one of lstm, gru, .*, MODULE:FUNCTION, not 'lsmt'"),
    "task": (["train", "X", "--task", "qeue"], 2, "--task must be one of digits, mnist, queue, .*FUNCTION, not 'qeue'"),
    "option": (["train", "X", "--hiden", "5"], 2, "Unrecognized options: --hiden.*--hidden INT"),
    "number": (["train", "X", "--hidden", "many"], 2, "Error parsing --hidden: invalid literal for int"),
    "no folder": (["train"], 2, "Missing from streamgrad train"),
    "estimator": (
        ["train", "X", "--estimator", "uro"],
        2,
        "--estimator must be one of bptt, windowed_bptt, .*not 'uro'",
    ),
    "pair": (["train", "X", "--task-options", "delay"], 2, "--task-options takes pairs NAME=VALUE, not 'delay'"),
    "name": (
        ["train", "X", *UORO, "group=2"],
        2,
        "has no 'group'; choose from cut, noise,",
    ),
    "value": (
        ["train", "X", *UORO, "noise=pink"],
        2,
        "noise must be one of 'gaussian'",
    ),
    "same name": (
        ["train", "X", "--estimator", "windowed_bptt", "--estimator-options", "every=0"],
        2,
        "--estimator-options every must be a whole number of at least 1, not 0",
    ),
    "size": (["train", "X", "--hidden", "0"], 2, "--hidden must be a whole number of at least 1, not 0"),
    "rate": (["train", "X", "--learning-rate", "nan"], 2, "--learning-rate must be a number above 0"),
    "plan": (["train", "X", "--every", "3"], 2, "--updates must be a multiple of --every, 3"),
    "interval": (
        ["train", "X", "--checkpoint-every", "15"],
        2,
        "--checkpoint-every must be a multiple of --every, 10, not 15",
    ),
    "streams": (["train", "X", "--batch-size", "0"], 2, "--batch-size must be a whole number of at least 1, not 0"),
    "text": (["train", "X", "--task", "text"], 2, "needs a file: --task-options path=FILE"),
    "file": (["train", "X", "--task", "text", "--task-options", "path=/none"], 1, "/none cannot be read"),
    "mnist": (
        ["train", "X", "--task", "mnist", "--data", "/none"],
        1,
        "/none has no file train-images.*streamgrad data",
    ),
    "data": (["data", "imagenet"], 2, "invalid choice 'imagenet'.*'mnist', 'check'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_values_are_answered_by_name(case, capsys, tmp_path, monkeypatch):
    argv, code, words = WRONG[case]
    monkeypatch.setenv("COLUMNS", "400")
    folder = tmp_path / "run"
    assert main([str(folder) if word == "X" else word for word in argv]) == code
    found, error = capsys.readouterr()
    words = words.split(".*")
    flat = " ".join(error.replace("│", " ").split())
    assert not found and all(word in flat for word in words), error
    assert not folder.exists()


def test_estimators(capsys):
    from streamgrad.estimators import REGISTRY

    assert main(["estimators", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == list(REGISTRY) and rows[0]["promise"] == "exact in the chunk"
    assert main(["estimators"]) == 0
    assert "UORO without the spatial projection" in capsys.readouterr().out


def start(folder: Path, *more: str) -> subprocess.Popen:
    # As in this process, for the same bits and so that it is compiled once.
    cache = {"JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir}
    cache |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2"}
    environment = os.environ | cache | {"JAX_ENABLE_X64": "1"}
    command = [sys.executable, "-m", "streamgrad_lab.command", "train", str(folder), *TRAIN, *more]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


def wait_for_checkpoint(process: subprocess.Popen, folder: Path, least: int) -> None:
    give_up = time.monotonic() + 120
    while not any(path.name.isdigit() and int(path.name) >= least for path in folder.glob("checkpoint/*")):
        assert process.poll() is None and time.monotonic() < give_up, process.communicate()
        time.sleep(0.01)


@pytest.mark.slow
def test_ctrl_c_and_kill_9_lose_at_most_one_interval_and_change_nothing(tmp_path, capsys):
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    process = start(broken)
    wait_for_checkpoint(process, broken, 4)
    process.send_signal(signal.SIGINT)
    assert "with --resume" in process.communicate(timeout=60)[1] and process.returncode == 130
    at_ctrl_c = saved_and_shown(broken)

    process = start(broken, "--resume")
    wait_for_checkpoint(process, broken, at_ctrl_c + 10)
    process.kill()
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert at_ctrl_c < saved_and_shown(broken) < 160

    assert main(["train", str(broken), *TRAIN, "--resume", "--json"]) == 0
    ended = json.loads(capsys.readouterr().out)
    assert main(["train", str(whole), *TRAIN, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == ended | {"folder": str(whole)}
    for name in ("metrics.csv", "run.json"):
        assert (broken / name).read_bytes() == (whole / name).read_bytes()
    one, other = (load(folder / "checkpoint" / "160") for folder in (broken, whole))
    assert one.keys() == other.keys() and any("params" in name for name in one)
    assert all(one[name].tobytes() == other[name].tobytes() for name in one)


def saved_and_shown(folder: Path) -> int:
    """The update of the last checkpoint; rows are there up to it, and at most one interval more."""
    saved = max(int(path.name) for path in folder.glob("checkpoint/*") if path.name.isdigit())
    lines = (folder / "metrics.csv").read_text().splitlines(keepends=True)
    shown = max(int(line.split(",")[0]) for line in lines[1:] if line.endswith("\n"))
    assert saved <= shown <= saved + 2
    return saved


def load(folder: Path) -> dict[str, np.ndarray]:
    import orbax.checkpoint as orbax

    return orbax.PyTreeCheckpointer().restore(folder)


def test_a_run_that_diverges_says_so(tmp_path, capsys):
    more = ["--optimizer", "sgd", "--learning-rate", "1e308", "--momentum", "0", "--seed", "5", "--no-checkpoints"]
    assert main(["train", str(tmp_path), *TRAIN, *more]) == 1
    assert "every seed has stopped: seed 5 stopped at update" in capsys.readouterr().err
    assert np.isfinite(read_metrics(tmp_path)["loss"]).all()


def test_help_says_what_an_option_is_for(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    assert main(["train", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "--no-checkpoints Write no checkpoints: the run needs no orbax, but cannot be resumed" in text
    assert "(default: queue)" in text and "(default: gru)" in text and "(default: rtrl)" in text


def test_help_leads_with_rtrl(capsys):
    """Of all estimators it is the first that is named."""
    from streamgrad.estimators import REGISTRY

    texts = [pydoc.plain(pydoc.render_doc(sg)).partition("PACKAGE CONTENTS")[0]]
    for command in ("train", "compare"):
        assert main([command, "--help"]) == 0
        texts.append(capsys.readouterr().out)
    for text in texts:
        assert next(word for word in re.findall(r"\w+", text.lower()) if word in REGISTRY) == "rtrl", text
