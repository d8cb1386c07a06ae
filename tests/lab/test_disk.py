"""A full disk, planted links, and what a killed process left: nothing is lost, and the file is named."""

import dataclasses
import errno
import os
import re
from pathlib import Path

import pytest

from streamgrad_lab.cli.main import main
from streamgrad_lab.experiments import MODULES
from streamgrad_lab.files import Unwritten, check_room, replace_text, sweep
from streamgrad_lab.training import metrics, train
from streamgrad_lab.training.checkpoint import Checkpoints, steps
from tests.lab.counting import PLAN, counting, parts, same, summarise

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
DENIED = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
LONG = RuntimeError("What it was.\nAnd a long story.")
# As orbax's storage says it.
STORAGE = ValueError(
    'UNKNOWN: Error writing "a" in local file "b": No space left on device [OS error 28: ENOSPC No space]\nmore'
)


def go(folder: Path, **more):
    return train(folder, PLAN, *parts(counting()), summarise=summarise, describe={"rate": 0.05}, **more)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    return go(tmp_path_factory.mktemp("runs") / "unbroken")


def full_at(patch: pytest.MonkeyPatch, what: str, time: int) -> None:
    """No room from the given time on that something of this name is written."""
    really, seen = os.fsync, []

    def fsync(fd):
        path = os.readlink(f"/proc/self/fd/{fd}")
        seen.extend([path] if what in path else [])
        if len(seen) >= time:
            raise FULL
        really(fd)

    patch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize(
    "what, time, file, then",
    [
        pytest.param("metrics.csv", 1, "metrics.csv", "which goes on from update 0", marks=pytest.mark.slow),
        ("metrics.csv", 3, "metrics.csv", r"which goes on from update \d+"),
        ("run.json", 1, "run.json", "which begins anew"),
    ],
)
def test_a_disk_that_is_full_in_mid_run(what, time, file, then, unbroken, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(OSError) as error:
        full_at(patch, what, time)
        go(folder)
    why = r"No space left on device; nothing is lost: once there is room, resume the run, "
    assert re.fullmatch(rf"cannot write {folder / file}: {why}{then}\.", str(error.value)), error.value
    assert same(go(folder, resume=True).state, unbroken.state)
    for name in (metrics.CSV, "run.json"):
        assert (folder / name).read_bytes() == (unbroken.folder / name).read_bytes()
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint", "metrics.csv", "run.json"]


@pytest.mark.parametrize(
    "error, why, once",
    [
        (FULL, "No space left on device", "there is room"),
        (STORAGE, "No space left on device", "there is room"),
        pytest.param(DENIED, "Permission denied", "it can be written", marks=pytest.mark.slow),
        pytest.param(LONG, "What it was", "it can be written", marks=pytest.mark.slow),
    ],
    ids=["full", "full, as storage says it", "forbidden", "something else"],
)
def test_a_checkpoint_that_cannot_be_written(error, why, once, unbroken, tmp_path, monkeypatch):
    folder = tmp_path / "run"

    def save(self, path, *rest, **options):
        if path.name == "8":
            (path.parent / "8.orbax-checkpoint-tmp").mkdir()
            raise error
        return really(self, path, *rest, **options)

    kind = type(Checkpoints(tmp_path)._orbax)
    really = kind.save
    with monkeypatch.context() as patch, pytest.raises(OSError) as found:
        patch.setattr(kind, "save", save)
        go(folder)
    words = f"{why}; nothing is lost: once {once}, resume the run, which goes on from update 4."
    assert str(found.value) == f"cannot write {folder / 'checkpoint' / '8'}: {words}"
    assert steps(folder / "checkpoint") == [0, 4]
    assert same(go(folder, resume=True).state, unbroken.state)
    assert (folder / metrics.CSV).read_bytes() == (unbroken.folder / metrics.CSV).read_bytes()
    assert sorted(path.name for path in (folder / "checkpoint").iterdir()) == ["12", "8"], "what was left is swept"


def test_without_checkpoints_it_is_said_that_all_is_lost(tmp_path, monkeypatch):
    full_at(monkeypatch, "metrics.csv", 2)
    plan = dataclasses.replace(PLAN, checkpoints=False)
    with pytest.raises(OSError, match="No space left on device; without checkpoints the run cannot go on"):
        train(tmp_path, plan, *parts(counting()))


def test_reproduce_on_a_full_disk(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(MODULES, "fake", "tests.lab.fake_experiment")
    command = ["reproduce", "fake", "--preset", "smoke", "--out", str(tmp_path / "run")]
    monkeypatch.setenv("FAKE_STOPS_AT", "2")
    with monkeypatch.context() as patch:
        full_at(patch, "run.json", 2)  # nor can it be noted how long it took: the first error says more
        assert main(command) == 1
    file = tmp_path / "run" / "fake" / "curve.csv"
    words = "No space left on device; nothing is lost: once there is room, resume the run."
    assert capsys.readouterr().err.splitlines()[-1] == f"streamgrad reproduce: cannot write {file}: {words}"
    monkeypatch.delenv("FAKE_STOPS_AT")
    with monkeypatch.context() as patch:
        full_at(patch, "run.json", 1)
        assert main([*command, "--resume"]) == 1
    assert f"cannot write {tmp_path / 'run' / 'run.json'}: {words}" in capsys.readouterr().err
    assert main([*command, "--resume"]) == 0


def test_a_report_on_a_full_disk_names_the_file(tmp_path, monkeypatch):
    full_at(monkeypatch, "report.html", 1)
    with pytest.raises(Unwritten, match=r"^cannot write .*report\.html: No space left on device\.$"):
        replace_text(tmp_path / "report.html", "page")
    assert list(tmp_path.iterdir()) == []


def test_links_that_somebody_has_planted_are_not_followed(tmp_path):
    """In a folder that others may write to they could, with names that can be foreseen, choose what is overwritten."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = tmp_path / "run"
    folder.mkdir()
    for name in (".probe", "run.json.part", "metrics.csv.part", "run.json"):
        (folder / name).symlink_to(victim)
    check_room(folder, 100)
    replace_text(folder / "run.json", "{}")
    replace_text(folder / "metrics.csv", "update\n")
    assert victim.read_text() == "precious"
    assert not (folder / "run.json").is_symlink() and (folder / "run.json").read_text() == "{}"
    for name in ("run.json", "metrics.csv"):
        (folder / name).unlink()
    go(folder)
    assert victim.read_text() == "precious" and (folder / ".probe").is_symlink()


def test_a_new_file_may_be_read_by_whom_the_user_lets(tmp_path):
    before = os.umask(0o027)
    try:
        replace_text(tmp_path / "file", "")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


def test_what_a_killed_process_left_is_swept(tmp_path, monkeypatch):
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", stopped)
    with pytest.raises(KeyboardInterrupt):
        replace_text(tmp_path / "run.json", "{}")
    assert list(tmp_path.iterdir()) == []  # Ctrl-C leaves nothing
    (tmp_path / "variance").mkdir()
    left = [".run.json.0123456789abcdef.part", "variance/.points.csv.fedcba9876543210.part"]
    mine = ["run.json", ".run.json.part", ".notes.part", "metrics.csv.part", ".report.html.0123456789abcdef.part"]
    for name in left + mine:
        (tmp_path / name).write_text("")
    sweep(tmp_path)
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert found == set(mine)
