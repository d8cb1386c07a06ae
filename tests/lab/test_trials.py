"""Two processes at once, SIGTERM and kill -9 at random moments: nothing is lost, and the end is the unbroken run's.

Each trial takes some seconds, nearly all of which go into starting Python and JAX. `STREAMGRAD_TRIALS=20` runs twenty
of each; what was seen in each is printed, with `pytest -s`.
"""

import json
import os
import platform
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from streamgrad_lab.locks import LOCK
from streamgrad_lab.training.checkpoint import Checkpoints, steps
from tests.tools import ROOT

TRIALS = int(os.environ.get("STREAMGRAD_TRIALS", "2"))
QUEUE = ["--task", "queue", "--task-options", "delay=1", "--batch-size", "2", "--length", "2", "--cell", "vanilla"]
TRAIN = ["train", "X", *QUEUE, "--hidden", "2", "--updates", "160", "--every", "2", "--checkpoint-every", "2"]
REPRODUCE = ["reproduce", "NAME", "--preset", "smoke", "--out", "X"]
pytestmark = pytest.mark.slow


class Command:
    """A command in processes of its own, which share what they have compiled.

    Args:
      words: of the command; X stands for its folder.
      folder: where the unbroken run is made, which fills the cache.
    """

    def __init__(self, words: list[str], folder: Path):
        self.words, self.cache, self.whole = words, folder / "compiled", folder / "whole"
        for _ in range(2):  # the first time it compiles
            begun = time.monotonic()
            self.end(self.start(self.whole, "--resume"))
            self.seconds = time.monotonic() - begun
            if not (folder / "first").exists():
                self.whole.rename(folder / "first")
        assert self.same(folder / "first")

    def start(self, folder: Path, *more: str) -> subprocess.Popen:
        cache = {"JAX_COMPILATION_CACHE_DIR": str(self.cache), "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
        cache |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        words = [str(folder) if word == "X" else word for word in self.words]
        argv = [sys.executable, "-m", "streamgrad_lab.command", *words, *more]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(argv, cwd=ROOT, env=os.environ | cache, text=True, **pipes)

    def end(self, process: subprocess.Popen, *codes: int) -> tuple[int, str]:
        """The exit code, which is one of these, or 0, and what was said on stderr."""
        _, said = process.communicate(timeout=300)
        assert process.returncode in (codes or (0,)) and not re.search("Traceback|Exception", said), said
        return process.returncode, said

    def same(self, folder: Path) -> bool:
        """Whether a folder holds the unbroken run, to the last bit, but for clocks."""
        found, wanted = contents(folder), contents(self.whole)
        assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
        assert [name for name in found if found[name] != wanted[name]] == []
        left = [path.name for path in folder.rglob("*") if path.name == LOCK or re.search("tmp|part$", path.name)]
        assert left == []
        return True


def contents(folder: Path) -> dict[str, bytes]:
    """What a run has come to: its tables, its manifest without clocks, and the leaves of its newest checkpoints."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.csv")}
    for path in folder.rglob("run.json"):
        manifest = json.loads(path.read_text())
        for entry in manifest["experiments"].values():
            entry.pop("seconds")
        manifest["notes"] = None
        found[str(path.relative_to(folder))] = json.dumps(manifest).encode()
    for path in folder.rglob("checkpoint"):
        leaves = Checkpoints(path).read(steps(path)[-1])
        found |= {f"{path.relative_to(folder)} {name}": leaf.tobytes() for name, leaf in leaves.items()}
    return found


def wait_for_lock(folder: Path, processes: list[subprocess.Popen]) -> int:
    """The number of that one of the processes which has the lock."""
    numbers = [process.pid for process in processes]
    while True:
        assert any(process.poll() is None for process in processes), [process.communicate() for process in processes]
        try:
            pid = json.loads((folder / LOCK).read_text())["pid"]
            if pid in numbers:
                return numbers.index(pid)
        except (FileNotFoundError, ValueError):
            pass
        time.sleep(0.01)


def wait(draw: random.Random, trial: int, command: Command, folder: Path, process: subprocess.Popen) -> str:
    """A while, drawn at random: every second time once the process has the lock, since before it does little."""
    # Python itself takes a moment until it can answer.
    begun, moment = time.monotonic(), draw.uniform(0.3, command.seconds)
    if trial % 2:
        wait_for_lock(folder, [process])
        moment = draw.uniform(0, command.seconds - time.monotonic() + begun)
    time.sleep(max(0.0, moment))
    return f"after {time.monotonic() - begun:.1f} s of {command.seconds:.1f}"


def refused(command: Command, process: subprocess.Popen, by: subprocess.Popen) -> None:
    """The process has been refused, and names the one that has the run."""
    code, said = command.end(process, 1)
    who = f"is being written by process {by.pid} on {platform.node()} since "
    assert code == 1 and who in said and len(said.splitlines()) == 1, said


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    return Command(TRAIN, tmp_path_factory.mktemp("train"))


def test_two_processes_on_one_folder(train, tmp_path):
    """At once, where there is no run; and, when the one that has it was killed, two that find its lock."""
    draw = random.Random(1)
    for trial in range(TRIALS):
        folder = tmp_path / str(trial)
        both = [train.start(folder, "--resume") for _ in range(2)]
        has = wait_for_lock(folder, both)
        refused(train, both[1 - has], by=both[has])
        time.sleep(draw.uniform(0, 0.5 * train.seconds))
        both[has].kill()
        both[has].communicate()
        at = (steps(folder / "checkpoint") or [None])[-1]
        assert both[has].returncode in (0, -signal.SIGKILL)
        again = [train.start(folder, "--resume") for _ in range(2)]
        now = wait_for_lock(folder, again)
        refused(train, again[1 - now], by=again[now])
        train.end(again[now])
        assert train.same(folder)
        print(f"two at once, {trial + 1}: one of each two was refused; killed at checkpoint {at}")


def test_sigterm_at_random_moments(train, tmp_path):
    draw = random.Random(2)
    for trial in range(TRIALS):
        folder = tmp_path / str(trial)
        process = train.start(folder)
        when = wait(draw, trial, train, folder, process)
        process.send_signal(signal.SIGTERM)
        code, said = train.end(process, 143, 0)
        saved = steps(folder / "checkpoint")
        if code == 0:
            assert saved[-1] == 160, said
        elif found := re.search(r"goes on from update (\d+)\.$", said):
            assert int(found[1]) == saved[-1], said
        else:
            assert not saved and said.splitlines()[-1].startswith("stopped"), said
        train.end(train.start(folder, "--resume"))
        assert train.same(folder)
        print(f"SIGTERM, {trial + 1}: {when}, exit code {code}, {said.splitlines()[-1]}")


@pytest.mark.parametrize("name", ["variance", "tune"])
def test_kill_9_during_reproduce(name, tmp_path):
    draw = random.Random(name)
    command = Command([name if word == "NAME" else word for word in REPRODUCE], tmp_path / "command")
    for trial in range(TRIALS):
        folder = tmp_path / str(trial)
        kills, code = [], None
        while code != 0 and len(kills) < 2:  # and what was resumed is killed as well
            process = command.start(folder, "--resume")
            kills.append(wait(draw, trial, command, folder, process))
            process.kill()
            process.communicate()
            code = process.returncode
            assert code in (0, -signal.SIGKILL)
        command.end(command.start(folder, "--resume"))
        assert command.same(folder)
        print(f"kill -9 of reproduce {name}, {trial + 1}: {' and '.join(kills)}")
