"""`streamgrad compare`: the tables by which one picks an estimator."""

import contextlib
import dataclasses
import functools
import importlib.util
import json
import math
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import optax
import tyro

from streamgrad import Chunk, Model, Params, batched, bptt, worked
from streamgrad.checks import check_at_most, check_size
from streamgrad.deprecations import current_name
from streamgrad.estimators import REGISTRY
from streamgrad_lab import own
from streamgrad_lab.candidates import candidates_for
from streamgrad_lab.choice import frontier, ranks
from streamgrad_lab.cli.options import UsageError, choose, choose_own, from_options, task_options
from streamgrad_lab.cli.show import print_table
from streamgrad_lab.cli.train import CellName, Pairs, TaskName
from streamgrad_lab.comparison import LEAST, Comparison, compare
from streamgrad_lab.files import check_room, sweep
from streamgrad_lab.locks import locked_file
from streamgrad_lab.progress import COMPILING, showing
from streamgrad_lab.report.frontier import SUFFIXES, write_frontier
from streamgrad_lab.tables import write_rows
from streamgrad_lab.tasks import TASKS, Task, accepts_option, task_function
from streamgrad_lab.training import begin, run_one, training_step
from streamgrad_lab.training.build import CELLS, make_model, make_task


@dataclasses.dataclass(frozen=True)
class Options:
    """Squared error, time and memory of every estimator for a model, measured and predicted.

    The model is trained a little with exact gradients first, since the noise of an estimate depends on the parameters.
    Then every estimator takes one stream chunk by chunk, as in training, and the sum of its gradients is compared with
    the exact gradient of the whole stream.
    """

    estimators: Annotated[tuple[str, ...], tyro.conf.arg(metavar="[NAME ...]")] = ()
    """Only these, such as rtrl ok bptt; all by default, which takes some minutes."""
    cell: CellName = "lstm"
    hidden: int = 16
    """Its units."""
    task: TaskName = "queue"
    task_options: Pairs = ()
    """Options of the task, such as delay=8 for queue, read=pixels for digits, path=FILE for text."""
    length: int = 32
    """Steps of the stream, for tasks whose episodes have no length of their own."""
    chunk_length: int | None = None
    """Steps of a chunk; by default 16, or the whole stream where that is shorter."""
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
    figure: Path | None = None
    """Draw error against time and memory into this file, .svg or .png."""


def main(options: Options) -> None:
    """Measure, and print the tables with how to read them."""
    check(options)
    with contextlib.ExitStack() as locks:
        for path in filter(None, (options.csv, options.figure)):
            locks.enter_context(locked_file(path))
            sweep(path.absolute().parent, (path.name,), inside=False)
        measure(options)


def measure(options: Options) -> None:
    """As `main`, with the files that are to be written for this process alone."""
    task = task_of(options)
    if options.chunk_length is not None:
        with from_options():
            check_at_most("--chunk-length", options.chunk_length, task.length, "the steps of the stream")
    key = jax.random.key(options.seed)
    with showing() as progress:
        progress("training", 0, max(1, options.updates), COMPILING)
        with from_options():
            model, params, chunk = prepare(options, task, key)
        progress("training", max(1, options.updates), max(1, options.updates), "done")
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
            chunk_length=options.chunk_length,
        )
    plain = [{**_plain(row, rank), **best_for(row, rows)} for row, rank in by_rank(rows)]
    if options.json:
        print(json.dumps(plain, indent=2))
    else:
        print_rows(rows)
    if options.csv is not None:
        write_rows(options.csv, plain)
    if options.figure is not None:
        write_frontier(options.figure, rows)


def check(options: Options) -> None:
    """What can be known to be wrong before anything is trained."""
    for name in options.estimators:
        choose("--estimators", current_name(name, silent=True), tuple(REGISTRY))
    choose_own("--task", options.task, tuple(TASKS))
    choose_own("--cell", options.cell, CELLS)
    sizes = {f"--{name}": getattr(options, name) for name in ("hidden", "length", "streams")}
    with from_options():
        check_size(**sizes)
        if options.chunk_length is not None:
            check_size(**{"--chunk-length": options.chunk_length})
        check_size(least=0, **{"--updates": options.updates})
        if not options.seconds > 0:
            raise ValueError(f"--seconds must be above 0, not {options.seconds}.")
        check_size(least=LEAST * options.streams, **{"--samples": options.samples})
    for option, path in (("--csv", options.csv), ("--figure", options.figure)):
        if path is not None:
            folder = path.absolute().parent
            if not folder.is_dir() or path.is_dir():
                raise UsageError(f"{option} {path} must be a file in a folder that exists.")
            check_room(folder, 1 << 18)
    if options.figure is not None:
        if options.figure.suffix not in SUFFIXES:
            raise UsageError(f"--figure {options.figure} must end in {' or '.join(SUFFIXES)}.")
        if importlib.util.find_spec("matplotlib") is None:
            raise UsageError('--figure needs matplotlib: pip install "streamgrad[lab]".')


def task_of(options: Options, batch_size: int = 32) -> Task:
    """The task with its options; 32 streams to train on."""
    length = None if options.task in ("digits", "mnist") else options.length  # theirs is that of an image
    if own.is_own(options.task):
        takes = functools.partial(accepts_option, task_function(options.task))
        if not takes("batch_size"):
            raise UsageError(f"{options.task} must take batch_size, as compare calls it for any number of streams.")
        length = length if takes("length") else None
    return make_task(options.task, task_options(options.task, options.task_options), batch_size, length)


def prepare(options: Options, task: Task, key: Any) -> tuple[Model, Params, Chunk]:
    """The model, its parameters after a little training, and one stream from its beginning."""
    model = make_model(options.cell, options.hidden, 1, task)
    optimizer, est = optax.adam(3e-3), batched(bptt(model), task.batch_size)
    ts = begin(model, task, est, optimizer, key)
    ts = run_one(training_step(task, est, optimizer), task.data, ts, options.updates)
    many, _ = task.sample(task.data, task.init(key), key)
    # Over matrices, as the theory is: arrays that are none are columns, of the same numbers.
    return worked(model), model.enter(ts.params), jax.tree.map(lambda leaf: leaf[0], many)


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


def best_for(row: Comparison, rows: Sequence[Comparison]) -> dict[str, bool]:
    """Whether no other row beats this one, in error and time, and in error and memory."""
    return {"best_for_time": row in frontier(rows), "best_for_memory": row in frontier(rows, "memory_bytes")}


def _plain(row: Comparison, rank: int | None) -> dict[str, Any]:
    named = {"rank": rank, **row._asdict()}
    return {name: None if isinstance(x, float) and math.isnan(x) else x for name, x in named.items()}


def by_rank(rows: Sequence[Comparison]) -> list[tuple[Comparison, int | None]]:
    """Rows with their ranks, the best first; those of hindsight at the end."""
    return sorted(zip(rows, ranks(rows), strict=True), key=lambda pair: (pair[1] is None, pair[0].squared_error))


def print_rows(rows: Sequence[Comparison]) -> None:
    """What was measured, the ranking, what it is made of, and how to read both."""
    ranked = by_rank(rows)
    places = [rank for _, rank in ranked]
    streams = rows[0].streams
    header = ["rank", "estimator", "error", "±95%", "µs/step", "memory", "best"]
    lines = []
    for row, rank in ranked:
        place = "-" if rank is None else f"{rank}{'=' if places.count(rank) > 1 else ''}"
        error, noise = ("0", "") if row.verdict == "exact" else (number(row.squared_error), row.squared_error_noise)
        best = best_for(row, rows)
        sign = BEST[best["best_for_time"], best["best_for_memory"]]
        costs = [number(row.us_per_step), size(row.memory_bytes)]
        lines.append([place, row.name, error, within(noise), *costs, sign])
    print(heading(rows[0]))
    print()
    print_table(header, lines)
    print()
    print_table(DETAILS, [details(row) for row, _ in ranked])
    print(READING.format(streams=streams))
    print(advice(rows))


def heading(row: Comparison) -> str:
    """How the stream was cut."""
    count, rest = divmod(row.length, row.chunk_length)
    if row.length == row.chunk_length:
        cut = "one chunk"
    else:
        cut = f"{count} {'chunk' if count == 1 else 'chunks'} of {row.chunk_length}"
        cut += f" and one of {rest}" if rest else ""
    return f"A stream of {row.length} steps in {cut}; B = {row.streams} streams."


BEST = {(True, True): "both", (True, False): "time", (False, True): "mem.", (False, False): ""}
DETAILS = ["estimator", "bias²", "±95%", "seen", "variance", "±95%", "theory"]
GLUE = "\N{NO-BREAK SPACE}"  # keeps a name in one line
READING = """
How to read it. g is the exact gradient of the whole stream, by BPTT; errors are
relative to its squared norm. Estimators get the stream chunk by chunk.
- error: the expected squared distance from g of the mean over {streams} streams,
  bias² + variance / {streams}. Rows of the same rank, marked "=", differ by no more
  than the noise of this measurement; more --samples tell them apart.
- best: no other row has as small an error, within noise, in less time, or in
  less memory, or both.
- bptt looks back to the beginning of the chunk, so that it is truncated BPTT;
  rtrl, ok (8 terms, if no rank is said) and uoro_across add to it
  what lies before.
- bias² does not fall with the number of streams; seen is "none" where it is
  not beyond noise. variance is that of one stream's estimate.
- theory: the predicted variance; "<" where that is a bound, because GIR's
  alpha depends on the noise.
- µs/step and memory are for one stream, at this chunk length and number of
  streams. Memory is what is kept from chunk to chunk, and what an update needs
  beside it; --csv has the two apart.
- "carried", and shrink=auto, have learnt from earlier streams of the same task;
  the stream that they are measured on begins afresh, as for all.
- Rank "-": optimal alpha and Q_0 were fitted to this very stream. They show
  what there is to gain.
"""


def advice(rows: Sequence[Comparison]) -> str:
    """Which rows are worth a look: those that no other beats."""
    unbiased = [row for row in rows if row.promise == "exact" or row.promise.startswith("unbiased")]
    lines = []
    for some, which in ((rows, ""), (unbiased, ", without bias")):
        for cost, what in (("us_per_step", "time"), ("memory_bytes", "memory")):
            if best := frontier(some, cost):
                names = "; ".join(row.name.replace(" ", GLUE) for row in best)
                lines.append(f"Least error for its {what}{which}: {names}.")
    if rows[0].length == rows[0].chunk_length:
        lines.append(
            "The stream is one chunk, inside which backpropagation is exact: a shorter --chunk-length shows what it "
            "costs to know what lies before a chunk."
        )
    lines.append("A small error is not yet fast learning: noise averages out over updates, bias adds up.")
    filled = [textwrap.fill(line, 80, subsequent_indent="  ", break_on_hyphens=False) for line in lines]
    return "\n".join(filled).replace(GLUE, " ")


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
