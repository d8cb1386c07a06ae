"""Ctrl-C and SIGTERM: exit code 130 or 143 at any moment, no traceback, and a message that is true."""

import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from streamgrad_lab.training.checkpoint import steps
from tests.tools import ROOT

START = """
import sys, time
from streamgrad_lab import interrupts

def command():
    interrupts.on_stop(lambda: "kept.")
    print("ready", flush=True)
{}
    return 0

interrupts.run_process(command)
"""


def start(body: str) -> subprocess.Popen:
    """A command without jax, which takes a fraction of a second; returns when it is ready."""
    code = START.format(textwrap.indent(textwrap.dedent(body), "    "))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, text=True, **pipes)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


FROM_PYTHON = """
import sys, pathlib, optax, streamgrad as sg
from streamgrad_lab.training import Plan, train
from tests.lab.counting import counting, parts
train(pathlib.Path(sys.argv[1]), Plan(updates=10_000_000, every=10), *parts(counting()), resume="--resume" in sys.argv)
"""


@pytest.mark.slow
def test_sigterm_to_a_call_from_python(tmp_path):
    """What was made is saved, the lock is given back, and the process ends as SIGTERM would have ended it."""
    folder, made = tmp_path / "run", []
    for resume in ([], ["--resume"]):
        command = [sys.executable, "-c", FROM_PYTHON, str(folder), *resume]
        process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        rows, deadline = len(made) and made[-1], time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            if (csv := folder / "metrics.csv").exists() and csv.read_text().count("\n") > rows + 5:
                break
            time.sleep(0.1)
        process.terminate()
        said = process.communicate(timeout=60)[1]
        assert process.returncode == 143 and "stopped by SIGTERM; with resume=True" in said, said
        assert not (folder / ".lock").exists()
        made.append((folder / "metrics.csv").read_text().count("\n"))
        saved = max(int(path.name) for path in (folder / "checkpoint").iterdir() if path.name.isdigit())
        assert saved == int((folder / "metrics.csv").read_text().splitlines()[-1].split(",")[0])
    assert made[1] > made[0]


CASES = {
    "python": "while True: pass",
    "swallowed": """
        while True:
            try: time.sleep(60)
            except KeyboardInterrupt: pass
        """,
    "compiled": "import hashlib; hashlib.pbkdf2_hmac('sha256', b'', b'', 2_000_000_000)",  # minutes without Python
    "another error": """
        try: time.sleep(60)
        except KeyboardInterrupt: raise ValueError("what it became")
        """,
    "lost in a destructor": """
        class Lost:
            def __del__(self): time.sleep(60)
        Lost()
        time.sleep(60)
        """,
    "import": """
        import tempfile, pathlib
        folder = tempfile.mkdtemp()
        (pathlib.Path(folder) / "slow_module.py").write_text("import time; time.sleep(60)")
        sys.path.insert(0, folder)
        import slow_module
        """,
}


EXIT = {signal.SIGINT: 130, signal.SIGTERM: 143}


@pytest.mark.parametrize("number", EXIT)
@pytest.mark.parametrize("case", CASES)
def test_a_command_always_ends(case, number):
    process = start(CASES[case])
    time.sleep(0.1)
    process.send_signal(number)
    begun = time.monotonic()
    _, error = process.communicate(timeout=30)
    assert (process.returncode, error) == (EXIT[number], "kept.\n")
    assert time.monotonic() - begun < 10  # a second, on a machine that has nothing else to do


HELD = """
with interrupts.hold():
    until = time.monotonic() + {}
    while time.monotonic() < until: pass
    print("whole", flush=True)
print("after", flush=True)
"""


def test_a_first_ctrl_c_waits_for_what_must_be_whole():
    process = start(HELD.format(1.5))
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    found, error = process.communicate(timeout=30)
    assert process.returncode == 130 and found == "whole\n"
    assert error == "stopping after the running call; Ctrl-C again ends at once.\nkept.\n"


@pytest.mark.parametrize("first", EXIT)
def test_a_second_ctrl_c_does_not(first):
    process = start(HELD.format(60))
    for number in (first, signal.SIGINT):
        time.sleep(0.3)
        process.send_signal(number)
    found, error = process.communicate(timeout=30)
    assert process.returncode == EXIT[first] and not found and error.endswith("kept.\n")


def test_sigterm_waits_however_often_it_is_sent():
    """A scheduler may send it to the process and to its group."""
    process = start(HELD.format(1.5))
    for _ in range(3):
        time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
    found, error = process.communicate(timeout=30)
    assert process.returncode == 143 and found == "whole\n"
    assert error == "stopping after the running call; Ctrl-C ends at once.\nkept.\n"


def test_a_handler_that_a_library_has_set_is_replaced():
    """As JAX's for SIGTERM, which is set past Python: here by libc."""
    taken = """
        import ctypes, signal
        ctypes.CDLL(None).signal(signal.SIGTERM, ctypes.c_void_p(1))  # 1: is ignored
        interrupts.handle_again()
        signal.raise_signal(signal.SIGTERM)
        time.sleep(60)
        """
    process = start(taken)
    _, error = process.communicate(timeout=30)
    assert (process.returncode, error) == (143, "kept.\n")


def test_without_ctrl_c_the_code_is_the_commands():
    bodies = {
        "return 7": 7,
        "sys.exit(3)": 3,
        "raise TypeError('mine')": 1,
        "pass": 0,
        "sys.stdout = None; return 4": 4,
    }
    for body, code in bodies.items():
        process = start(body)
        _, error = process.communicate(timeout=30)
        assert process.returncode == code and ("TypeError: mine" in error) == (code == 1)


@pytest.mark.parametrize("moment, number", [(0.2, signal.SIGINT), (0.7, signal.SIGINT), (0.4, signal.SIGTERM)])
def test_a_command_that_is_still_being_imported_ends(moment, number):
    """Nothing has begun that could be lost, and jax is half imported; on a fast machine it may have got further."""
    code = "import streamgrad_lab.command as c, sys; print('ready', flush=True); sys.argv[1:] = ['compare']; c.main()"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, text=True, **pipes)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    time.sleep(moment)
    process.send_signal(number)
    _, error = process.communicate(timeout=30)
    assert process.returncode == EXIT[number] and error.endswith("stopped.\n") and "Traceback" not in error


COMMANDS = {
    "train": ["train", "X", "--task", "queue", "--cell", "gru", "--hidden", "8", "--updates", "1000000"],
    "reproduce": ["reproduce", "--preset", "laptop", "--out", "X"],
    "compare": ["compare", "--task", "queue"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_commands_end_at_random_moments(name, tmp_path):
    draw = random.Random(name)
    for moment in range(4):
        folder = tmp_path / str(moment)
        words = [str(folder) if word == "X" else word for word in COMMANDS[name]]
        argv = [sys.executable, "-m", "streamgrad_lab.command", *words]
        process = subprocess.Popen(argv, cwd=ROOT, env=os.environ, stderr=subprocess.PIPE, text=True)
        time.sleep(draw.uniform(0.3, 12))
        number = draw.choice(list(EXIT))
        process.send_signal(number)
        begun = time.monotonic()
        _, error = process.communicate(timeout=60)
        assert process.returncode == EXIT[number] and time.monotonic() - begun < 10, error
        assert "stopped" in error and not re.search("Traceback|Exception|Error", error), error
        if found := re.search(r"goes on from update (\d+)\.", error):
            assert int(found[1]) == steps(folder / "checkpoint")[-1]
        elif name == "train":
            assert not steps(folder / "checkpoint")
