"""`streamgrad compare`: the tables by which one picks an estimator."""

import dataclasses
import json
import math
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import optax
import tyro

from streamgrad.base import Chunk, Model, Params
from streamgrad.checks import check_size
from streamgrad.engine.streams import batched
from streamgrad.estimators.bptt import bptt
from streamgrad.estimators.registry import REGISTRY
from streamgrad.lab.candidates import candidates_for
from streamgrad.lab.cli.options import UsageError, choose, from_options, task_options
from streamgrad.lab.cli.show import print_table
from streamgrad.lab.cli.train import Pairs, TaskName
from streamgrad.lab.comparison import LEAST, Comparison, compare, ranks, same_error
from streamgrad.lab.files import check_room
from streamgrad.lab.progress import COMPILING, showing
from streamgrad.lab.tables import write_rows
from streamgrad.lab.tasks import Task
from streamgrad.lab.training import begin, run_one, training_step
from streamgrad.lab.training.build import make_model, make_task


@dataclasses.dataclass(frozen=True)
class Options:
    """Squared error, time and memory of every estimator for a model, measured and predicted.

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
    """Estimates that each noisy estimator makes; at least 4 for each stream."""
    streams: int = 8
    """B, the streams that a gradient is averaged over; time and memory are given for one of them."""
    seconds: float = 10.0
    """Most time for the samples of one estimator; a slow one gets fewer of them, and its interval grows."""
    seed: int = 0
    """Of parameters, data and noise."""
    json: bool = False
    """Print JSON, for a program to read."""
    csv: Path | None = None
    """Write the numbers to this file as well."""


def main(options: Options) -> None:
    """Measure, and print the tables with how to read them."""
    check(options)
    task = task_of(options)
    key = jax.random.key(options.seed)
    with showing() as progress:
        progress("training", 0, max(1, options.updates), COMPILING)
        with from_options():
            model, params, chunk = prepare(options, task, key)
        rows = compare(
            model,
            params,
            chunk,
            key,
            options.samples,
            options.streams,
            candidates=candidates_for(model, params, chunk, options.estimators or None),
            progress=progress,
            past=past_of(task_of(options, options.streams), key),
            seconds=options.seconds,
        )
    plain = [_plain(row, rank) for row, rank in by_rank(rows)]
    if options.json:
        print(json.dumps(plain, indent=2))
    else:
        print_rows(rows)
    if options.csv is not None:
        write_rows(options.csv, plain)


def check(options: Options) -> None:
    """What can be known to be wrong before anything is trained."""
    for name in options.estimators:
        choose("--estimators", name, tuple(REGISTRY))
    sizes = {f"--{name}": getattr(options, name) for name in ("hidden", "length", "streams")}
    with from_options():
        check_size(**sizes)
        check_size(least=0, **{"--updates": options.updates})
        if not options.seconds > 0:
            raise ValueError(f"--seconds must be above 0, not {options.seconds}.")
        check_size(least=LEAST * options.streams, **{"--samples": options.samples})
    if options.csv is not None:
        folder = options.csv.absolute().parent
        if not folder.is_dir() or options.csv.is_dir():
            raise UsageError(f"--csv {options.csv} must be a file in a folder that exists.")
        check_room(folder, 1 << 16)


def task_of(options: Options, batch_size: int = 32) -> Task:
    """The task with its options; 32 streams to train on."""
    length = None if options.task in ("digits", "mnist") else options.length  # theirs is that of an image
    return make_task(options.task, task_options(options.task, options.task_options), batch_size, length)


def prepare(options: Options, task: Task, key: Any) -> tuple[Model, Params, Chunk]:
    """The model, its parameters after a little training, and one stream from its beginning."""
    model = make_model(options.cell, options.hidden, 1, task)
    optimizer, est = optax.adam(3e-3), batched(bptt(model), task.batch_size)
    ts = begin(model, task, est, optimizer, key)
    ts = run_one(training_step(task, est, optimizer), task.data, ts, options.updates)
    many, _ = task.sample(task.data, task.init(key), key)
    return model, ts.params, jax.tree.map(lambda leaf: leaf[0], many)


def past_of(task: Task, key: Any) -> Callable[[int], Chunk]:
    """Chunks that estimators learn from before they are measured; all see the same ones."""
    key = jax.random.fold_in(key, 1)
    sample, seen, state = jax.jit(task.sample), [], task.init(key)

    def past(index: int) -> Chunk:
        nonlocal state
        while len(seen) <= index:
            chunk, state = sample(task.data, state, jax.random.fold_in(key, len(seen)))
            seen.append(chunk)
        return seen[index]

    return past


def _plain(row: Comparison, rank: int | None) -> dict[str, Any]:
    named = {"rank": rank, **row._asdict()}
    return {name: None if isinstance(x, float) and math.isnan(x) else x for name, x in named.items()}


def by_rank(rows: Sequence[Comparison]) -> list[tuple[Comparison, int | None]]:
    """Rows with their ranks, the best first; those of hindsight at the end."""
    return sorted(zip(rows, ranks(rows), strict=True), key=lambda pair: (pair[1] is None, pair[0].squared_error))


def print_rows(rows: Sequence[Comparison]) -> None:
    """The ranking, what it is made of, and how to read both."""
    ranked = by_rank(rows)
    places = [rank for _, rank in ranked]
    streams = rows[0].streams
    header = ["rank", "estimator", f"error, B={streams}", "±95%", "µs/step", "state", "scratch"]
    lines = []
    for row, rank in ranked:
        place = "-" if rank is None else f"{rank}{'=' if places.count(rank) > 1 else ''}"
        error, noise = ("0", "") if row.verdict == "exact" else (number(row.squared_error), row.squared_error_noise)
        memory = [size(row.state_bytes), size(row.scratch_bytes)]
        lines.append([place, row.name, error, within(noise), number(row.us_per_step), *memory])
    print_table(header, lines)
    print()
    print_table(DETAILS, [details(row) for row, _ in ranked])
    print(READING.format(streams=streams))
    print(advice(ranked))


DETAILS = ["estimator", "bias²", "±95%", "seen", "variance", "±95%", "theory"]
GLUE = "\N{NO-BREAK SPACE}"  # keeps a name in one line
READING = """
How to read it. g is the exact gradient of the chunk, by BPTT; errors are
relative to its squared norm.
- error: the expected squared distance from g of the mean over {streams} streams,
  bias² + variance / {streams}. Rows of the same rank, marked "=", differ by no more
  than the noise of this measurement; more --samples tell them apart.
- bias² does not fall with the number of streams; seen is "none" where it is
  not beyond noise. variance is that of one stream's estimate.
- theory: the predicted variance; "<" where that is a bound, because GIR's
  alpha depends on the noise.
- µs/step and memory are for one stream. state is kept from chunk to chunk;
  scratch is needed during an update, and that of bptt grows with the chunk.
- "carried" has learnt from earlier chunks of the same task; the stream that
  it is measured on begins with the chunk, as for all.
- Rank "-": optimal alpha and Q_0 were fitted to this very chunk. They show
  what there is to gain.
"""


def advice(ranked: Sequence[tuple[Comparison, int | None]]) -> str:
    """Which rows are worth a look: those that no other online row beats in error without taking longer."""
    online = [row for row, rank in ranked if rank is not None and row.promise != "exact in the chunk"]
    unbiased = [row for row in online if row.promise == "exact" or row.promise.startswith("unbiased")]
    lines = []
    for rows, which in ((online, "of those that work online"), (unbiased, "of those without bias")):
        if rows:
            names = "; ".join(row.name.replace(" ", GLUE) for row in unbeaten(rows))
            lines.append(f"Smallest error for its time, {which}: {names}.")
    lines.append("A small error is not yet fast learning: noise averages out over updates, bias adds up.")
    filled = [textwrap.fill(line, 80, subsequent_indent="  ", break_on_hyphens=False) for line in lines]
    return "\n".join(filled).replace(GLUE, " ")


def unbeaten(rows: Sequence[Comparison]) -> list[Comparison]:
    """Those of which no other has a smaller error, beyond noise, in no more time."""

    def beats(other: Comparison, row: Comparison) -> bool:
        smaller = other.squared_error < row.squared_error and not same_error(other, row)
        return smaller and other.us_per_step <= row.us_per_step

    return [row for row in rows if not any(beats(other, row) for other in rows)]


def details(row: Comparison) -> list[str]:
    """A row of the second table."""
    bound = "<" if row.predicted_is_bound else ""
    exact = row.verdict == "exact"
    return [
        row.name,
        "0" if exact else number(row.squared_bias),
        within("" if exact else row.squared_bias_noise),
        {"none seen": "none"}.get(row.verdict, row.verdict),
        number(row.variance),
        within("" if exact else row.variance_error),
        "" if row.predicted is None else f"{bound}{number(row.predicted)}",
    ]


def within(error: float | str) -> str:
    """Half of the 95% interval from a standard error, or nothing."""
    return error if isinstance(error, str) else f"±{number(1.96 * error)}"


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
