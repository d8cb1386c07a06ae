"""`streamgrad train` on several devices and in several processes: the run of one device, whatever happens."""

import functools
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import streamgrad as sg
from streamgrad_lab.cli.main import main
from streamgrad_lab.tasks import find_task
from streamgrad_lab.training import read_metrics
from streamgrad_lab.training.checkpoint import steps
from streamgrad_lab.training.loop import begin, training_step
from streamgrad_lab.training.processes import shardings_of
from tests.devices.test_sharded import collectives_in, mesh_of
from tests.flags import FLAGS
from tests.tools import ROOT

OURS, THEIRS = "another process of the run has ended", "another task died"
LATER = 30  # seconds within which a run ends whose other process is gone
TASK = ("--task", "queue", "--cell", "vanilla", "--hidden", "4", "--batch-size", "4")
OPTIONS = (*TASK, "--estimator", "rtrl", "--every", "10", "--seeds", "2")


def start(folder: Path, *options: str) -> subprocess.Popen:
    """`streamgrad train` as a process of its own, with the test's quick compiler."""
    command = [sys.executable, "-m", "streamgrad_lab.command", "train", str(folder), *OPTIONS, *options]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS, "JAX_NUM_CPU_DEVICES": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def start_two(folder: Path, *options: str) -> list[subprocess.Popen]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    joined = ("--coordinator", address, "--processes", "2", "--process")
    return [start(folder, *options, *joined, str(rank)) for rank in (0, 1)]


def finish(*processes: subprocess.Popen) -> None:
    for process in processes:
        printed = process.communicate(timeout=200)
        assert process.returncode == 0, printed


def same(folder: Path, other: Path) -> bool:
    """Whether two runs have the same rows, to the rounding of float32."""
    found, expected = read_metrics(folder), read_metrics(other)
    return all(np.allclose(found[name], expected[name], rtol=1e-3, atol=1e-5) for name in expected)


def test_two_devices_and_on_with_one(tmp_path, monkeypatch):
    """Two in a process of its own, which has them by its option; the rest here, and so all in float64."""
    alone, spread = tmp_path / "alone", tmp_path / "spread"
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    finish(start(spread, "--updates", "20", "--devices", "2"))
    for folder, more in ((alone, ()), (spread, ("--resume",))):
        assert main(["train", str(folder), *OPTIONS, "--updates", "40", *more]) == 0
    assert same(spread, alone)


@pytest.mark.slow
def test_two_processes_and_on_with_any_number(tmp_path):
    alone, spread = tmp_path / "alone", tmp_path / "spread"
    finish(start(alone, "--updates", "120"))
    finish(*start_two(spread, "--updates", "40", "--devices", "2"))
    finish(start(spread, "--updates", "80", "--resume", "--devices", "4"))
    finish(*start_two(spread, "--updates", "120", "--resume"))
    assert same(spread, alone)


@pytest.mark.slow
@pytest.mark.parametrize("dead", [0, 1])
def test_a_process_that_is_killed_ends_the_run_which_goes_on(tmp_path, dead):
    alone, broken = tmp_path / "alone", tmp_path / "broken"
    options = ("--updates", "3000", "--checkpoint-every", "100")
    finish(start(alone, *options))
    both = start_two(broken, *options)
    while not (steps(broken / "checkpoint") or [0])[-1]:
        assert both[0].poll() is None, both[0].communicate()
        time.sleep(0.05)
    time.sleep(random.uniform(0, 2))
    begun = time.monotonic()
    both[dead].send_signal(signal.SIGKILL)
    _, words = both[1 - dead].communicate(timeout=LATER)
    both[dead].communicate()
    assert time.monotonic() - begun < LATER
    assert both[1 - dead].returncode not in (0, -signal.SIGKILL)
    # If it was the first, JAX may notice before the sum of gradients fails, and ends the process with words of its own.
    assert OURS in words or (dead == 0 and THEIRS in words), words
    assert "--resume goes on from update" in words or OURS not in words
    assert steps(broken / "checkpoint")[-1] < 3000
    finish(*start_two(broken, *options, "--resume"))
    assert same(broken, alone)


@pytest.mark.slow
@pytest.mark.parametrize("asked", [0, 1])
def test_sigterm_to_one_process_stops_both_at_a_checkpoint(tmp_path, asked):
    """And while they run, two others on the same folder end at once."""
    alone, broken = tmp_path / "alone", tmp_path / "broken"
    options = ("--updates", "1000000")
    both = start_two(broken, *options)
    try:
        while not (broken / "metrics.csv").exists() or not (broken / "metrics.csv").stat().st_size:
            assert both[0].poll() is None, both[0].communicate()
            time.sleep(0.05)
        others = start_two(broken, *options, "--resume")
        first, second = (process.communicate(timeout=60)[1] for process in others)
        assert [process.returncode for process in others] == [1, 1]
        assert f"is being written by process {both[0].pid} on" in first and "could not have" in second
        both[asked].send_signal(signal.SIGTERM)
        said = [process.communicate(timeout=60)[1].splitlines()[-1] for process in both]
        assert [process.returncode for process in both] == [143, 143], said
    finally:
        for process in both:
            process.kill()
    at = steps(broken / "checkpoint")[-1]
    assert said == [f"stopped; the same command with --resume goes on from update {at}."] * 2
    finish(start(alone, "--updates", str(at)))
    assert same(broken, alone)


@pytest.mark.slow
def test_errors_are_one_sentence(tmp_path):
    for options, words in (
        (("--devices", "3"), "4 streams cannot be spread evenly over the 3 devices"),
        (("--devices", "0"), "--devices must be a whole number of at least 1"),
        (("--processes", "two"), "two"),
        (("--process", "0"), "could not be joined"),
        (("--coordinator", "10.0.0.1", "--processes", "2", "--process", "0"), "an address and a port"),
    ):
        process = start(tmp_path / "none", "--updates", "10", *options)
        _, found = process.communicate(timeout=60)
        assert process.returncode in (1, 2) and words in found and "Traceback" not in found
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_what_devices_have_learnt_stays_on_as_many(tmp_path):
    carry = ("--estimator", "uoro", "--carry")
    finish(start(tmp_path, "--updates", "20", "--devices", "2", *carry))
    other = start(tmp_path, "--updates", "40", "--devices", "4", "--resume", *carry)
    printed = other.communicate(timeout=200)[1]
    assert other.returncode == 1
    assert "holds what 2 devices have learnt" in printed and "not on 4" in printed


@pytest.mark.parametrize("name", ["queue", "digits"])
def test_traffic_of_training_is_the_gradient_and_the_loss(name):
    """Each device makes the chunks of its own streams: nothing of the task's state travels."""
    task = find_task(name, batch_size=8)
    model, optimizer = sg.Model(sg.cells.vanilla(task.n_in, 3), task.head), optax.adam(1e-3)
    est = sg.sharded(sg.rtrl(model), 8, mesh_of(4))
    start = jax.vmap(functools.partial(begin, model, task, est, optimizer))
    keys = jax.random.split(jax.random.key(0), 2)
    shardings = shardings_of(est, jax.eval_shape(start, keys))
    ts = jax.jit(start, out_shardings=shardings)(keys)
    step = jax.vmap(training_step(task, est, optimizer), in_axes=(None, 0))
    compiled = jax.jit(step, out_shardings=(shardings, None)).lower(task.data, ts).compile()
    (found,) = collectives_in(compiled.as_text())
    size = sum(leaf.size for leaf in jax.tree.leaves(ts.params)) // 2
    assert "all-reduce" in found and f"[2,{size}]" in found
