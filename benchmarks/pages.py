"""A page for each estimator, `docs/estimators/`: what its docstring says, and its error and cost on one small task.

    python -m benchmarks.pages                 # measures every row of the registry, and writes the pages: 4 minutes
    python -m benchmarks.pages --only rtrl     # measures some of them, and keeps what is known of the others
    python -m benchmarks.pages --write-only    # writes the pages again from what was measured

The task is recall: give back the bit of 10 steps ago. Networks of 16 units have partly learnt it, by 300 updates of
BPTT (Adam, 3e-3, 16 streams). 8 streams of 64 steps are taken in chunks of 4, with fixed parameters, and the sum ĝ of
an estimator's gradients is compared with g, BPTT's gradient of the whole streams. `pages.csv` has, for the default
options of each row, and on the first network for its variants:

- squared_error: E‖ĝ - g‖² / ‖g‖² over the cell's parameters, a mean over draws of the noise, with its standard error;
- squared_bias: ‖E ĝ - g‖² / ‖g‖², less what noise explains of it, and whether there is one beyond noise;
- cosine: the mean of ĝ·g / ‖ĝ‖‖g‖;
- times_bptt: time per step in multiples of `bptt` on the same chunks, medians of turns in one run;
- state_bytes: what is kept of one stream from chunk to chunk.
"""

import argparse
import functools
import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.flatten_util import ravel_pytree

import streamgrad as sg
from benchmarks.error import DELAY, LENGTH, trained
from benchmarks.page_text import FOLDER, REFUSED, Page, write_pages
from benchmarks.problems import LEAST_SECONDS, make_cell
from streamgrad.estimators.registry import REGISTRY, Row, find_estimator
from streamgrad_lab.candidates import Candidate
from streamgrad_lab.comparison import LIMIT
from streamgrad_lab.programs import Compiled, compile_all
from streamgrad_lab.progress import silent
from streamgrad_lab.tables import read_columns, write_rows
from streamgrad_lab.tasks import find_task
from streamgrad_lab.timing import take_turns

CELLS, HIDDEN, UPDATES, STREAMS, CHUNK = ("vanilla", "lstm"), 16, 300, 8, 4
MOST, LEAST, SECONDS = 256, 16, 1.0  # draws of the noise; the seconds that more than the least of them may take
RESULTS = Path(__file__).parent / "results" / "pages.csv"


class Try(NamedTuple):
    """A row of the registry with some options.

    Attributes:
      row: the row.
      options: in words, such as "rank=1"; empty for the default ones.
      est: the estimator, or why this network cannot have it.
    """

    row: Row
    options: str
    est: sg.GradientEstimator | str
    every: int = 1


def tries(model: sg.Model, only: list[str] | None, variants: bool) -> Iterator[Try]:
    """Every row with its default options, and its variants; `bptt`, the measure of time, among them in any case."""
    for row in REGISTRY.values():
        if only and row.name not in [*only, "bptt"]:
            continue
        for changed in ({}, *(row.variants if variants else ())):
            named = {**row.options, **changed}
            words = " ".join(f"{option}={value}" for option, value in changed.items())
            try:
                est = row.make(model, **named)
            except ValueError as error:
                yield Try(row, words, str(error))
            else:
                yield Try(row, words, est, named.get("every", 1))


def samples_of(program: Compiled, key: Any) -> np.ndarray:
    """Gradients under independent noise, `[samples, parameters]`; one where noise changes nothing."""

    def draw(index: int) -> np.ndarray:
        return np.asarray(program.run(jax.random.fold_in(key, index))[0], np.float64)

    found = [draw(0), draw(1)]
    if np.array_equal(found[0], found[1]):
        return found[0][None]
    each = take_turns({"": functools.partial(program.run, key)}, 1)[""]
    count = max(LEAST, min(MOST, int(SECONDS / each)))
    return np.stack([*found, *(draw(index) for index in range(2, count))])


def quality_of(samples: np.ndarray, g: np.ndarray) -> dict[str, Any]:
    """Error, bias and cosine of gradients."""
    square, count = float(g @ g), len(samples)
    distances = np.sum((samples - g) ** 2, axis=1) / square
    mean = samples.mean(axis=0)
    spread = float(np.sum((samples - mean) ** 2)) / max(1, count - 1) / square
    away = float(np.sum((mean - g) ** 2)) / square
    lengths = np.linalg.norm(samples, axis=1) * math.sqrt(square)
    return {
        "squared_error": float(distances.mean()),
        "squared_error_noise": float(distances.std() / math.sqrt(max(1, count - 1))),
        "squared_bias": max(0.0, away - spread / count),
        "bias_seen": "yes" if away > LIMIT**2 * spread / count else "none",
        "cosine": float(np.mean(samples @ g / np.where(lengths > 0, lengths, 1.0))),
        "samples": count,
    }


def measure(cell: str, only: list[str] | None, repeats: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """The rows of one network."""
    model = sg.Model(make_cell(cell, 1, HIDDEN), sg.heads.bernoulli(1))
    params, key = trained(model, UPDATES), jax.random.key(6)
    task = find_task("queue", delay=DELAY, batch_size=STREAMS, length=LENGTH)

    def batch(index: int) -> sg.Chunk:
        return task.sample(task.data, task.init(key), jax.random.fold_in(key, index))[0]

    many, exact = batch(0), sg.batched(sg.bptt(model), STREAMS)
    g = np.asarray(ravel_pytree(exact.update(params, exact.init(params), many, None)[0].cell)[0], np.float64)
    wanted = list(tries(model, only, variants=cell == CELLS[0]))
    waiting: dict[int, Future[Compiled]] = {}
    for index, one in enumerate(wanted):
        if isinstance(one.est, str):
            continue
        candidate = Candidate(one.row.name, one.row.promise, one.est, every=one.every)
        wait([future for future in waiting.values() if not future.done()][:-1])  # two compile at a time
        try:
            # What an estimator learns from earlier streams, if anything, it has learnt from others of the same task.
            found = list(compile_all([candidate], params, many, CHUNK, key, lambda at: batch(at + 1), silent))
        except ValueError as error:  # one that sees only now that this network is not for it
            wanted[index] = one._replace(est=str(error))
        else:
            waiting.update((index, future) for _, future in found)
    programs = {index: future.result() for index, future in waiting.items()}
    calls = {index: functools.partial(program.run, key) for index, program in programs.items()}
    seconds = take_turns(calls, repeats, LEAST_SECONDS)
    bptt = seconds[next(index for index, one in enumerate(wanted) if one.row.name == "bptt")]
    rows = []
    for index, one in enumerate(wanted):
        row: dict[str, Any] = {"cell": cell, "hidden": HIDDEN, "estimator": one.row.name, "options": one.options}
        if index in programs:
            row |= {"refused": ""} | quality_of(samples_of(programs[index], key), g)
            row |= {"times_bptt": seconds[index] / bptt, "us_per_step": 1e6 * seconds[index] / LENGTH / STREAMS}
            row |= {"state_bytes": programs[index].state_bytes}
        else:
            row |= {"refused": one.est if isinstance(one.est, str) else REFUSED.format(chunk=CHUNK)}
        rows.append(row)
        say("  ".join(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    return rows


def joined(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """New rows in place of old ones of the same estimators, in the registry's order; who is gone from it goes."""
    names = list(REGISTRY)
    fresh = {row["estimator"] for row in new}
    kept = [row for row in old if row["estimator"] in names and row["estimator"] not in fresh]
    order = {(row["cell"], row["estimator"]): None for row in new + kept}
    place = {pair: (CELLS.index(pair[0]), names.index(pair[1])) for pair in order}
    return sorted(new + kept, key=lambda row: place[row["cell"], row["estimator"]])


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of the CSV as text."""
    columns = read_columns(path)
    return [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]


def page() -> Page:
    """What the pages say of the task."""
    return Page(
        f"give back the bit of {DELAY} steps ago, with networks of {HIDDEN} units that have partly learnt it "
        f"({UPDATES} updates of BPTT); {STREAMS} streams of {LENGTH} steps, taken in chunks of {CHUNK} steps",
        CELLS,
        CHUNK,
        STREAMS,
    )


def main() -> None:
    """Measure, unless told not to, and write the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="names of estimators; what is known of the others is kept")
    parser.add_argument("--write-only", action="store_true", help="measure nothing")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--csv", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=FOLDER)
    arguments = parser.parse_args()
    for name in arguments.only or ():
        find_estimator(name)
    if not arguments.write_only:
        jax.config.update("jax_platforms", "cpu")
        new = [row for cell in CELLS for row in measure(cell, arguments.only, arguments.repeats, print)]
        if arguments.only and "bptt" not in arguments.only:
            new = [row for row in new if row["estimator"] != "bptt"]  # it was there to be divided by
        old = read(arguments.csv) if arguments.only and arguments.csv.exists() else []
        rows = joined(old, new)
        first = max(rows, key=len)
        write_rows(arguments.csv, [{name: row.get(name, "") for name in first} for row in rows], digits=4)
    write_pages(arguments.out, read(arguments.csv), page())
    print(f"written: {arguments.csv} and {arguments.out}")


if __name__ == "__main__":
    main()
