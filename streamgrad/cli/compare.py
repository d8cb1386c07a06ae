"""`streamgrad compare`: the table by which one picks an estimator."""

import contextlib
import csv
import dataclasses
import importlib.util
import io
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from streamgrad.cli.options import UsageError, check_text, choose, from_options, pairs
from streamgrad.cli.show import print_table
from streamgrad.cli.train import Pairs, TaskName
from streamgrad.tasks import find_task, task_function

if TYPE_CHECKING:
    from streamgrad.base import Chunk, Model, Params
    from streamgrad.compare import Comparison
    from streamgrad.tasks.base import Task


@dataclasses.dataclass(frozen=True)
class Options:
    """Bias, variance, time and memory of every estimator for a model, measured and predicted.

    The model is trained a little with exact gradients first, since the noise of an estimate depends on the parameters.
    """

    estimators: Annotated[tuple[str, ...], tyro.conf.arg(metavar="[NAME ...]")] = ()
    """Only these; all by default."""
    cell: Literal["lstm", "gru", "vanilla"] = "lstm"
    """The recurrent network."""
    hidden: int = 16
    """Its units."""
    task: TaskName = "queue"
    """Where the stream comes from."""
    task_options: Pairs = ()
    """Options of the task, such as delay=8 for queue, read=pixels for digits, path=FILE for text."""
    length: int = 20
    """Steps of the chunk, for tasks whose episodes have no length of their own."""
    updates: int = 200
    """How long to train before, by BPTT and Adam."""
    samples: int = 2048
    """Estimates that each noisy estimator makes."""
    streams: int = 8
    """How many run at once; time and memory are given for one of them."""
    seed: int = 0
    """Of parameters, data and noise."""
    json: bool = False
    """Print JSON, for a program to read."""
    csv: Path | None = None
    """Write the table to this file as well."""


def main(options: Options) -> None:
    """Measure, and print the table with how to read it."""
    import jax

    from streamgrad.compare import candidates_for, compare
    from streamgrad.estimators.registry import REGISTRY
    from streamgrad.files import replace_text

    if options.csv is not None and not options.csv.absolute().parent.is_dir():
        raise UsageError(f"the folder of --csv {options.csv} does not exist.")
    for name in options.estimators:
        choose("--estimators", name, tuple(REGISTRY))
    task = make_task(options)
    key = jax.random.key(options.seed)
    with showing() as show:
        show("training")
        with from_options():
            model, params, chunk = prepare(options, task, key)
        candidates = candidates_for(model, params, chunk, options.estimators or None)
        rows = compare(
            model,
            params,
            chunk,
            key,
            options.samples,
            options.streams,
            candidates=candidates,
            progress=lambda name, done, of: show(name if of == 1 else f"measuring {name}, {done} of {of}"),
        )
    plain = [_plain(row) for row in rows]
    if options.csv is not None:
        text = io.StringIO()
        writer = csv.DictWriter(text, plain[0])
        writer.writeheader()
        writer.writerows(plain)
        replace_text(options.csv, text.getvalue())
    if options.json:
        print(json.dumps(plain, indent=2))
        return
    print_table(HEADER, [cells(row) for row in rows])
    print(READING)


@contextlib.contextmanager
def showing() -> Iterator[Callable[[str], None]]:
    """A function that says on stderr what is being done."""
    if sys.stderr.isatty() and importlib.util.find_spec("rich"):
        from rich.console import Console

        with Console(stderr=True).status("") as status:
            yield status.update
    else:
        yield lambda words: print(words, file=sys.stderr, flush=True)


def make_task(options: Options) -> "Task":
    """The task with its options, in a batch to train on."""
    function = task_function(options.task)
    given = pairs("--task-options", options.task_options, function, skip=["batch_size", "length"])
    check_text(options.task, given)
    length = {} if options.task in ("digits", "mnist") else {"length": options.length}  # theirs is that of an image
    return find_task(options.task, **given, batch_size=32, **length)


def prepare(options: Options, task: "Task", key: Any) -> "tuple[Model, Params, Chunk]":
    """The model, its parameters after a little training, and one stream from its beginning."""
    import jax
    import optax

    from streamgrad import cells
    from streamgrad.base import Chunk, Model
    from streamgrad.checks import check_size
    from streamgrad.estimators.bptt import bptt
    from streamgrad.online import batched
    from streamgrad.train.loop import begin, run, training_step

    check_size(hidden=options.hidden, length=options.length, streams=options.streams)
    check_size(least=0, updates=options.updates)
    model = Model(getattr(cells, options.cell)(task.n_in, options.hidden), task.head)
    optimizer, est = optax.adam(3e-3), batched(bptt(model), task.batch_size)
    ts = begin(model, task, est, optimizer, key)
    if options.updates:
        start = jax.tree.map(lambda leaf: leaf[None], ts)
        steps = run(training_step(task, est, optimizer), task.data, start, options.updates, options.updates)
        ts = jax.tree.map(lambda leaf: leaf[0], [ts for ts, _ in steps][-1])
    many, _ = task.sample(task.data, task.init(key), key)
    chunk = jax.tree.map(lambda leaf: leaf[0], many)
    # The chunk begins where the cell does, whether it says so or not.
    return model, ts.params, Chunk(chunk.inputs, chunk.targets, chunk.reset)


def _plain(row: "Comparison") -> dict[str, Any]:
    return {name: None if isinstance(x, float) and math.isnan(x) else x for name, x in row._asdict().items()}


HEADER = [
    "estimator",
    "bias",
    "its noise",
    "seen",
    "variance",
    "95%",
    "predicted",
    "µs/step",
    "state",
    "scratch",
]
READING = """
How to read it. g is the exact gradient of the chunk, by BPTT.
- bias: distance of the mean estimate from g, over the norm of g. Its noise is what that distance would be without any
  bias; seen is "none" where it is not beyond noise. Bias cannot be averaged away.
- variance: total variance over the squared norm of g; averaging over B streams divides it by B. Predicted is what the
  theory says of it; "<" because GIR's alpha depends on the noise, which makes the theory an over-estimate.
- µs/step: for one step of one stream. State is what a stream carries from chunk to chunk; scratch is needed during an
  update, and that of bptt grows with the chunk.
- The optimal alpha and Q_0 know the chunk's future: they show what there is to gain, not what one can have.
Pick the cheapest one without bias whose variance you can average away."""


def cells(row: "Comparison") -> list[str]:
    """A row of the printed table."""
    predicted = "" if row.predicted is None else f"{'<' if row.predicted_is_bound else ''}{number(row.predicted)}"
    return [
        row.name,
        number(row.bias),
        number(row.bias_noise),
        {"none seen": "none"}.get(row.verdict, row.verdict),
        number(row.variance),
        f"±{number(1.96 * row.variance_error)}",
        predicted,
        number(row.us_per_step),
        size(row.state_bytes),
        size(row.scratch_bytes),
    ]


def number(x: float) -> str:
    """Three digits.

    Example:
      >>> number(0.0), number(0.01234), number(1234.5), number(1.2e-7)
      ('0', '0.0123', '1230', '1.2e-07')
    """
    if x == 0 or 1e-3 <= abs(x) < 1e5:
        return f"{float(f'{x:.3g}'):g}"
    return f"{x:.2g}"


def size(count: int) -> str:
    """Bytes.

    Example:
      >>> size(12), size(12_345), size(1_234_567)
      ('12 B', '12.3 kB', '1.2 MB')
    """
    return f"{count} B" if count < 1000 else f"{count / 1e3:.1f} kB" if count < 1e6 else f"{count / 1e6:.1f} MB"
