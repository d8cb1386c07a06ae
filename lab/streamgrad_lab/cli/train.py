"""`streamgrad train`: any cell, estimator, task and optimiser."""

import contextlib
import dataclasses
import functools
import json
import logging
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import numpy as np
import tyro
from jax.sharding import AxisType

from streamgrad import GradientEstimator, batched, carried, sharded
from streamgrad.checks import check_size
from streamgrad.estimators import REGISTRY
from streamgrad_lab import interrupts, own
from streamgrad_lab.cli.options import choose, choose_own, from_options, pairs, task_options
from streamgrad_lab.manifest import FILE
from streamgrad_lab.progress import showing
from streamgrad_lab.tasks import TASKS
from streamgrad_lab.training import Outcome, Plan, processes, read_metrics, train
from streamgrad_lab.training.build import CELLS, make_model, make_optimizer, make_task
from streamgrad_lab.training.checkpoint import steps
from streamgrad_lab.training.loop import HELD_OUT
from streamgrad_lab.training.session import CHECKPOINT

TaskName = Annotated[
    str,
    tyro.conf.arg(
        metavar=f"{{{','.join(TASKS)}}}|{own.FORM}",
        help="What to learn. A function of your own, such as mine:make for make of mine.py in this folder, takes "
        "batch_size and length if they are given, and the --task-options, and returns a streamgrad_lab.Task.",
    ),
]
CellName = Annotated[
    str,
    tyro.conf.arg(
        metavar=f"{{{','.join(CELLS)}}}|{own.FORM}",
        help="The recurrent network. A function of your own, such as mine:make, is called as make(n_in, n_hidden) and "
        "returns a cell, such as streamgrad.cells.from_function, from_flax, from_equinox or from_haiku makes.",
    ),
]

# Where a run is made does not define it: it goes on with any other number of devices and processes.
LAYOUT = {"devices", "distributed", "coordinator", "processes", "process"}

FAILED = re.compile("(UNKNOWN|UNAVAILABLE|ABORTED|INTERNAL|CANCELLED|DEADLINE_EXCEEDED|FAILED_PRECONDITION):")

Pairs = Annotated[tuple[str, ...], tyro.conf.arg(metavar="[NAME=VALUE ...]")]


@dataclasses.dataclass(frozen=True)
class Options:
    """Train any cell with any estimator on any task. By default a GRU learns to recall bits, by exact RTRL.

    The folder gets metrics.csv as rows come, run.json, and checkpoints. A run that was broken off
    goes on with the same command and --resume, and ends bit for bit as if it had never been.
    """

    folder: tyro.conf.Positional[Path]
    """Where the run is written; a folder of its own."""
    task: TaskName = "queue"
    task_options: Pairs = ()
    """Options of the task, such as delay=8 for queue, read=pixels for digits, path=FILE for text."""
    batch_size: int | None = None
    """Streams at once; the task's own number by default."""
    length: int | None = None
    """Steps of a chunk, after each of which the parameters are updated; the task's own number by default."""
    data: Path | None = None
    """The data folder, for mnist; by default that of the environment variable STREAMGRAD_DATA."""
    cell: CellName = "gru"
    hidden: int = 32
    """Units of each layer."""
    layers: int = 1
    """How many cells are stacked."""
    estimator: str = "rtrl"
    """Where the gradient comes from: rtrl is exact, ok nearly so for larger networks, bptt exact inside a chunk alone;
    `streamgrad estimators` lists them all."""
    estimator_options: Pairs = ()
    """Options of the estimator, such as rank=16 for ok, window=20 every=5 for windowed_bptt, or groups=10 for uoro."""
    carry: bool = False
    """Carry Q_0 and, for episodes, alpha over from past windows; for uoro and, on episodes, preuoro."""
    optimizer: Literal["adam", "rmsprop", "sgd"] = "adam"
    """From optax."""
    learning_rate: float = 1e-3
    """Its step size."""
    momentum: float = 0.9
    """Of the optimiser: Adam's first decay, or the momentum of the others."""
    clip: float | None = None
    """Scale gradients down whose norm is larger than that."""
    updates: int = 2000
    """Of the parameters, in all."""
    every: int = 10
    """Updates that are averaged in one row of the metrics."""
    checkpoint_every: int | None = None
    """Updates between two checkpoints, a multiple of --every; a kill loses no more. By default about 20 seconds."""
    checkpoints: Annotated[bool, tyro.conf.arg(help_behavior_hint="(default: they are written)")] = True
    """Write no checkpoints: the run needs no orbax, but cannot be resumed, and what it learns is not kept."""
    seeds: int = 1
    """Seeds trained at once."""
    seed: int = 0
    """The first of them."""
    devices: int | None = None
    """Over how many devices of this machine the streams are spread; of several processes, of each one's."""
    distributed: bool = False
    """This is one of several processes, started by SLURM, Open MPI, Kubernetes or with JAX_COORDINATOR_ADDRESS."""
    coordinator: str | None = None
    """Started by hand: address and port of the first process, such as 10.0.0.1:1234."""
    processes: int | None = None
    """How many processes there are."""
    process: int | None = None
    """The number of this one, from 0."""
    resume: bool = False
    """Go on from the folder's last checkpoint; with more --updates, a run that has ended goes on too."""
    json: bool = False
    """Print the outcome as JSON, for a program to read."""


def main(options: Options) -> int:
    """Train, and say what came of it; a run that has learnt nothing in any seed has failed."""
    join(options)
    choose_own("--task", options.task, tuple(TASKS))
    choose_own("--cell", options.cell, CELLS)
    choose("--estimator", options.estimator, tuple(REGISTRY))
    row = REGISTRY[options.estimator]
    given = {
        "task_options": task_options(options.task, options.task_options),
        "estimator_options": pairs("--estimator-options", options.estimator_options, row.make, skip=["model"]),
    }
    names = {field.name: f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(Options)}
    names["n_hidden"] = "--hidden"
    with from_options(**names):
        sizes = {"batch_size": options.batch_size, "length": options.length}
        check_size(**{name: size for name, size in sizes.items() if size is not None})
        plan = Plan(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Plan)})
        optimizer = make_optimizer(options.optimizer, options.learning_rate, options.momentum, options.clip)
    task = make_task(options.task, given["task_options"], data=options.data, **sizes)
    # An estimator may have an option of the same name, as windowed_bptt has `every`.
    names |= {name: f"--estimator-options {name}" for name in given["estimator_options"]}
    with from_options(**names):
        model = make_model(options.cell, options.hidden, options.layers, task)
        one = row.make(model, **{**row.options, **given["estimator_options"]})
        one = carried(one, episode=task.length if task.episodic else None) if options.carry else one
        estimator = spread(one, task.batch_size, options.devices)
    # Where files lie, what is printed, and what the plan says already do not define the run.
    apart = {"folder", "data", "resume", "json", *LAYOUT, *(field.name for field in dataclasses.fields(Plan))}
    described = {name: value for name, value in dataclasses.asdict(options).items() if name not in apart} | given
    interrupts.on_stop(lambda: what_is_kept(options))
    with showing() if processes.first() else contextlib.nullcontext() as progress:
        show = functools.partial(progress, "updates") if progress else None
        settings = {"progress": show, "resume": options.resume, "describe": described}
        with naming_the_dead(options):
            outcome = train(options.folder, plan, model, task, estimator, optimizer, **settings)
    if processes.first():
        print_outcome(options, outcome)
    return 1 if all(found or at is not None for found, at in zip(outcome.risen, outcome.stopped, strict=True)) else 0


def join(options: Options) -> None:
    """Become one of several processes, and have so many devices, before anything else is done with JAX."""
    given = (options.coordinator, options.processes, options.process)
    if options.devices is not None:
        with from_options(devices="--devices"):
            check_size(devices=options.devices)
        with contextlib.suppress(RuntimeError):  # JAX is in use already, and has the devices that it has
            jax.config.update("jax_num_cpu_devices", options.devices)
    if options.distributed or any(value is not None for value in given):
        processes.start(*given)


def spread(one: GradientEstimator, batch_size: int, devices: int | None) -> GradientEstimator:
    """The estimator for all streams, on so many devices of each process; None for one, or for all of several."""
    if devices is None and not processes.several():
        return batched(one, batch_size)
    here = jax.local_device_count()
    if devices is not None and devices > here:
        raise ValueError(f"--devices is {devices}, but this machine has {here}.")
    own = [device for k in range(jax.process_count()) for device in jax.local_devices(k)[:devices]]
    # Auto: the compiler spreads also what comes before and after the estimator, such as the task's chunks.
    return sharded(one, batch_size, jax.make_mesh((len(own),), ("streams",), (AxisType.Auto,), devices=own))


@contextlib.contextmanager
def naming_the_dead(options: Options) -> Iterator[None]:
    """Where another process has gone, whose sums cannot be had any more: end with a sentence."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # a failed sum may come as either
        if not processes.several() or not FAILED.match(str(error)):
            raise
        words = f"another process of the run has ended, or cannot be reached; {what_is_kept(options)}"
        print(f"streamgrad train: {words}", file=sys.stderr, flush=True)
        logging.getLogger("streamgrad").debug("%s", error)
        os._exit(1)  # JAX would wait for the others at the end of this process


def what_is_kept(options: Options) -> str:
    """What a run that was stopped has left, and how it goes on."""
    saved = steps(options.folder / CHECKPOINT)
    if saved:
        return f"stopped; the same command with --resume goes on from update {saved[-1]}."
    if not (options.folder / FILE).exists():
        return "stopped before the run began."
    if options.checkpoints:
        return "stopped before the first update; the same command with --resume begins the run."
    return "stopped; without checkpoints the run cannot go on."


def print_outcome(options: Options, outcome: Outcome) -> None:
    """The last loss of each seed, and where the files are."""
    columns = read_metrics(outcome.folder)
    seeds: list[dict[str, Any]] = []
    for index, stopped in enumerate(outcome.stopped):
        own_rows = columns["seed"] == options.seed + index
        last = {name: _last(columns[name][own_rows]) for name in ("loss", HELD_OUT) if name in columns}
        found = {"stopped": stopped, "rose": outcome.risen[index] is not None}
        seeds.append({"seed": options.seed + index, **found, **last})
    if options.json:
        print(json.dumps({"folder": str(outcome.folder), "updates": options.updates, "seeds": seeds}))
        return
    for seed in seeds:
        end = "" if seed["stopped"] is None else f" (stopped after {seed['stopped']} updates)"
        loss = "no loss" if seed["loss"] is None else f"loss {seed['loss']:.4g}"
        held_out = "" if seed.get(HELD_OUT) is None else f", held-out loss {seed[HELD_OUT]:.4g}"
        print(f"seed {seed['seed']}: {loss}{held_out}{end}")
    print(f"written to {outcome.folder}")


def _last(values: np.ndarray) -> float | None:
    """The last of those that were measured."""
    found = values[np.isfinite(values)]
    return float(found[-1]) if len(found) else None
