"""What is printed: no closed stream, full disk, encoding or locale ends a command in a traceback."""

import os
import subprocess
import sys

import pytest

from tests.tools import ROOT

# A locale of ASCII, and no help of Python's against it.
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
TRAIN = "--task queue --task-options delay=1 --batch-size 2 --length 2 --cell vanilla --hidden 2 --updates 4 --every 2"


def shell(words: str, cwd=ROOT, **environment: str) -> subprocess.CompletedProcess:
    """A line of the shell, in which `streamgrad` is this checkout's."""
    line = words.replace("streamgrad", f"{sys.executable} -m streamgrad_lab.command", 1)
    variables = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "80"} | environment
    return subprocess.run(["sh", "-c", line], cwd=cwd, env=variables, capture_output=True, timeout=120)


CLOSED = """
import os, sys, streamgrad_lab.command
streamgrad_lab.command.open_streams()
opened = [os.open("/dev/null", os.O_RDONLY)]
os.write(1, b"lost"), os.write(2, b"lost"), print("lost"), print("lost", file=sys.stderr), sys.stdin.read()
sys.stdout.isatty(), sys.stderr.isatty()
os._exit(7 if min(opened) > 2 else 1)  # a file with the number of stderr would get what is told past Python
"""


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_goes_nowhere(closed):
    done = subprocess.run(["sh", "-c", f"{sys.executable} -c '{CLOSED}' {closed}"], cwd=ROOT, capture_output=True)
    assert done.returncode == 7, done


@pytest.mark.slow
def test_a_command_with_closed_streams_ends_as_it_should(tmp_path):
    done = shell(f"streamgrad train run {TRAIN} >&-", tmp_path)
    assert done.returncode == 0 and b"4 of 4" in done.stderr and b"Traceback" not in done.stderr
    done = shell(f"streamgrad train run {TRAIN} --resume 2>&-", tmp_path)
    assert done.returncode == 0 and b"written to run" in done.stdout
    assert shell(f"streamgrad train run {TRAIN} --resume <&- >&- 2>&-", tmp_path).returncode == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="has no full device")
def test_output_that_is_lost_is_said():
    for buffered in ("", "1"):
        done = shell("streamgrad --help > /dev/full", PYTHONUNBUFFERED=buffered)
        assert done.returncode == 1
        assert done.stderr.decode() == "streamgrad: the output could not be written: No space left on device.\n"


def test_a_log_on_a_full_disk_ends_no_run(monkeypatch):
    from streamgrad_lab.progress import showing

    with open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", full)
        with showing() as progress:
            progress("updates", 1, 1, "loss 1.0")
        with pytest.raises(OSError):
            full.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # or it could not be closed


def test_letters_that_an_encoding_does_not_have_are_written_as_numbers():
    for environment in ({"PYTHONIOENCODING": "ascii"}, ASCII):
        done = shell("streamgrad estimators", **environment)
        assert done.returncode == 0 and rb"dh/d\u03b8" in done.stdout and not done.stderr


@pytest.mark.slow
def test_a_folder_whose_name_the_locale_cannot_read(tmp_path):
    """Without checkpoints it works; orbax's storage would look for another folder, which is said before all else."""
    done = shell(f"streamgrad train dé {TRAIN}", tmp_path, **ASCII)
    error = done.stderr.decode()
    assert done.returncode == 1 and len(error.splitlines()) == 1 and "Traceback" not in error
    assert "not of this locale's encoding, ascii: set PYTHONUTF8=1, or choose another name." in error
    assert list(tmp_path.iterdir()) == []
    for line in (f"train dé {TRAIN} --no-checkpoints", "report dé"):
        done = shell(f"streamgrad {line}", tmp_path, **ASCII)
        assert done.returncode == 0 and b"d\\udcc3\\udca9" in done.stdout, done
    assert {path.name for path in (tmp_path / "dé").iterdir()} >= {"metrics.csv", "run.json", "report.html"}
