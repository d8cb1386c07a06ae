"""One process at a time: who has a lock is named, what a dead process left is taken over, and never by two at once."""

import errno
import json
import os
import platform
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from streamgrad_lab import locks
from streamgrad_lab.cli.main import main
from streamgrad_lab.experiments import MODULES
from streamgrad_lab.locks import LOCK, Busy, locked, locked_file, locked_folder
from tests.tools import ROOT, one_sentence

# Nothing here imports jax: a process takes a twentieth of a second.
ALONE = """
import os, sys, time
from pathlib import Path
from streamgrad_lab import interrupts, locks
folder = Path(sys.argv[1])
"""
HOLD = "with locks.locked_folder(folder):\n    print('held', flush=True)\n    time.sleep(60)\n"


def start(folder: Path, body: str) -> subprocess.Popen:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    code = ALONE + textwrap.dedent(body)
    return subprocess.Popen([sys.executable, "-c", code, str(folder)], cwd=ROOT, text=True, **pipes)


def holding(folder: Path, body: str = HOLD) -> subprocess.Popen:
    """A process that has the lock."""
    process = start(folder, body)
    assert process.stdout is not None and process.stdout.readline() == "held\n", process.communicate()
    return process


def ended(process: subprocess.Popen, number: int = signal.SIGKILL) -> None:
    process.send_signal(number)
    process.communicate(timeout=30)


def holder_of(folder: Path) -> dict:
    return json.loads((folder / LOCK).read_text())


def test_a_second_process_ends_at_once_and_names_the_first(tmp_path):
    process = holding(tmp_path)
    begun = time.monotonic()
    with pytest.raises(Busy) as error, locked_folder(tmp_path):
        pytest.fail("two processes have the lock")
    assert time.monotonic() - begun < 1 and one_sentence(error)
    since = holder_of(tmp_path)["since"]
    who = f"process {process.pid} on {platform.node()} since {since}: wait for its end"
    assert str(error.value).startswith(f"the run in {tmp_path} is being written by {who}") and since[:2] == "20"
    assert process.poll() is None
    ended(process)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_what_a_dead_process_left_is_taken_over(tmp_path, number):
    process = holding(tmp_path)
    ended(process, number)
    assert holder_of(tmp_path)["pid"] == process.pid
    with locked_folder(tmp_path):
        assert holder_of(tmp_path)["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


RACE = """
if "no flock" in sys.argv: locks._flock = lambda fd: None
print("ready", flush=True)
sys.stdin.readline()
try:
    with locks.locked_folder(folder):
        print("got it", flush=True)
        sys.stdin.readline()
except locks.Busy as error:
    print(error, flush=True)
"""


@pytest.mark.parametrize("flock", ["flock", "no flock"])
def test_of_many_that_take_over_at_once_one_has_it(tmp_path, flock):
    """All find the lock of a dead process; without flock a turn may be missed by all, but not be had by two."""
    dead = holding(tmp_path)
    ended(dead)
    for _ in range(3):
        many = [start(tmp_path, RACE.replace("sys.argv", repr([flock]), 1)) for _ in range(6)]
        for process in many:
            assert process.stdout.readline() == "ready\n", process.communicate()
        for process in many:
            process.stdin.write("\n")
            process.stdin.flush()
        said = [process.stdout.readline() for process in many]
        won = [process for process, words in zip(many, said, strict=True) if words == "got it\n"]
        assert len(won) == 1 or (flock == "no flock" and not won), said
        assert all("is being written by" in words or "about to write" in words for words in said if "got" not in words)
        for process in many:
            ended(process)


def test_a_file_that_goes_between_opening_and_locking_is_no_lock(tmp_path, monkeypatch):
    """As when its holder gives it back in that moment: a third process would then make a file of its own."""
    really, gone = locks._flock, []

    def flock(fd):
        if not gone:
            (tmp_path / LOCK).unlink()
            gone.append(fd)
        return really(fd)

    monkeypatch.setattr(locks, "_flock", flock)
    with locked_folder(tmp_path):
        assert gone and holder_of(tmp_path)["pid"] == os.getpid()


def write_lock(folder: Path, **changes) -> None:
    (folder / LOCK).write_text(json.dumps(vars(locks._me()) | changes))


@pytest.fixture
def no_flock(monkeypatch):
    """As on a file system that has none."""
    monkeypatch.setattr(locks, "_flock", lambda fd: None)


def test_without_flock_a_live_process_is_known_by_its_number_and_start(tmp_path, no_flock):
    process = holding(tmp_path)
    with pytest.raises(Busy, match=f"is being written by process {process.pid} on"), locked_folder(tmp_path):
        pass
    found = holder_of(tmp_path)
    ended(process)
    for left in (
        {},  # its number is free
        {"pid": os.getpid()},  # its number is used again, by a process with another start
        {"pid": os.getpid(), "start": locks._start(os.getpid()), "boot": "before the machine was started again"},
    ):
        write_lock(tmp_path, **(found | left))
        with locked_folder(tmp_path):
            assert holder_of(tmp_path)["pid"] == os.getpid()
        assert list(tmp_path.iterdir()) == []


def test_of_another_host_it_is_said_what_to_do(tmp_path, monkeypatch):
    write_lock(tmp_path, pid=7, host="elsewhere", boot="theirs", since="2026-01-02T03:04:05+00:00")
    for flock in (locks._flock, lambda fd: None):
        monkeypatch.setattr(locks, "_flock", flock)
        with pytest.raises(Busy) as error, locked_folder(tmp_path):
            pass
        words = "process 7 on the host elsewhere since 2026-01-02T03:04:05+00:00"
        assert words in str(error.value) and f"remove {tmp_path / LOCK} and start again" in str(error.value)
        assert one_sentence(error)
    (tmp_path / LOCK).unlink()
    with locked_folder(tmp_path):
        pass


def test_of_another_container_on_this_machine_flock_decides(tmp_path, monkeypatch):
    write_lock(tmp_path, host="another-container")
    with locked_folder(tmp_path):
        assert holder_of(tmp_path)["host"] == platform.node()
    write_lock(tmp_path, host="another-container")
    monkeypatch.setattr(locks, "_flock", lambda fd: None)
    with pytest.raises(Busy, match="on the host another-container"), locked_folder(tmp_path):
        pass


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_flock_is_known_by_its_error(tmp_path, monkeypatch, number):
    def flock(fd, how):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(locks.fcntl, "flock", flock)
    with locked_folder(tmp_path), pytest.raises(Busy, match=f"by process {os.getpid()} on"), locked_folder(tmp_path):
        pass


@pytest.mark.parametrize("content", ["", "{", "[" * 5000, "[1]", '{"pid": "x"}', "null"])
def test_a_lock_that_names_nobody_is_free(tmp_path, content):
    (tmp_path / LOCK).write_text(content)
    with locked_folder(tmp_path):
        assert holder_of(tmp_path)["pid"] == os.getpid()


def test_an_error_gives_it_back_and_leaves_no_new_folder(tmp_path):
    folder = tmp_path / "a" / "b"
    with pytest.raises(RuntimeError), locked_folder(folder):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with locked_folder(folder):
        (folder / "file").write_text("")
    assert [path.name for path in folder.iterdir()] == ["file"]
    with locked_file(folder / "x.csv"), pytest.raises(Busy, match=r"x\.csv is being written"):
        with locked_file(folder / "y.csv"):
            pass
        with locked_file(folder / "x.csv"):
            pass


def test_a_fork_neither_keeps_nor_frees_it(tmp_path):
    """A child that outlives a killed parent does not hold the lock; one that leaves the block does not take it away."""
    lives_on = (
        "with locks.locked_folder(folder):\n    if not os.fork(): print('held', flush=True)\n    time.sleep(60)\n"
    )
    process = holding(tmp_path, lives_on)
    child = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
    process.kill()
    process.wait()
    with locked_folder(tmp_path):
        assert holder_of(tmp_path)["pid"] == os.getpid()
    os.kill(child, signal.SIGKILL)
    process.communicate()
    leaves = """
        with locks.locked_folder(folder):
            if not (child := os.fork()): sys.exit()
            os.waitpid(child, 0)
            print('held', flush=True)
            time.sleep(60)
        """
    process = holding(tmp_path, leaves)
    with pytest.raises(Busy, match=f"by process {process.pid} on"), locked_folder(tmp_path):
        pass
    ended(process)


def test_a_link_in_its_place_is_not_followed(tmp_path):
    (tmp_path / "victim").write_text("precious")
    (tmp_path / LOCK).symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="cannot write into the folder"), locked_folder(tmp_path):
        pass
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_process_that_ends_in_the_middle_takes_its_name_out(tmp_path):
    """Else another host, which cannot ask, would have to believe that it runs."""
    twice = """
        def command():
            with locks.locked_folder(folder), interrupts.hold():
                print("held", flush=True)
                while True:
                    try: time.sleep(60)
                    except KeyboardInterrupt: pass
        interrupts.run_process(command)
        """
    process = holding(tmp_path, twice)
    for _ in range(2):
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130 and (tmp_path / LOCK).read_text() == ""


def test_a_lock_that_cannot_be_written_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    words = r"cannot write into the folder .*: No space left on device\.$"
    with pytest.raises(OSError, match=words), locked(tmp_path / "new" / LOCK, "it"):
        pass
    assert list(tmp_path.iterdir()) == []


QUEUE = ["--task", "queue", "--hidden", "2", "--updates", "2"]
COMMANDS = {
    "train": ["train", "X", *QUEUE, "--every", "2", "--resume"],
    "reproduce": ["reproduce", "fake", "--preset", "smoke", "--out", "X", "--resume"],
    "compare": ["compare", *QUEUE, "--csv", "X/table.csv"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_that_writes_asks_for_the_lock(name, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(MODULES, "fake", "tests.lab.fake_experiment")
    argv = [word.replace("X", str(tmp_path)) for word in COMMANDS[name]]
    with locked_file(tmp_path / "table.csv") if name == "compare" else locked_folder(tmp_path):
        before = sorted(tmp_path.iterdir())
        assert main(argv) == 1
        assert sorted(tmp_path.iterdir()) == before
    error = capsys.readouterr().err
    assert f"is being written by process {os.getpid()} on {platform.node()} since" in error
    assert len(error.splitlines()) == 1
