"""Recall: the bit of D steps ago, by chunks of K steps. Truncated BPTT must fail where D >= K; what does not?"""

import dataclasses
import functools
import itertools
import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from streamgrad import Chunk, heads
from streamgrad._typing import Array, Bool, Int, PyTree
from streamgrad_lab.experiments import plots
from streamgrad_lab.experiments.base import Claim, Section, Table
from streamgrad_lab.experiments.evidence import judge, mean_of
from streamgrad_lab.experiments.streams import cases
from streamgrad_lab.experiments.streams.lanes import all_lanes, parts_of, train_lanes
from streamgrad_lab.experiments.streams.methods import in_order
from streamgrad_lab.progress import Progress
from streamgrad_lab.tasks.base import Task

CHANCE = float(np.log(2))
SOLVED, FAILED = 0.03, 0.6  # nats per bit, of CHANCE = 0.693


@dataclasses.dataclass(frozen=True)
class Recall:
    """What is run.

    Attributes:
      delays: D.
      chunks: K.
      methods: by their names.
      cell: of the network.
      hidden: its units.
      streams: at once.
      steps: of every stream, whatever K is.
      rates: the grid of learning rates.
      seeds: how many.
      points: rows of each curve.
      name: of the part.
    """

    delays: tuple[int, ...]
    chunks: tuple[int, ...]
    methods: tuple[str, ...]
    cell: str
    hidden: int
    streams: int
    steps: int
    rates: tuple[float, ...]
    seeds: int
    points: int = 20
    name: str = "recall"


class Bits(NamedTuple):
    """Where the streams stand.

    Attributes:
      past: the last bits of each, the youngest last.
      delay: D.
    """

    past: Bool[Array, "B longest"]
    delay: Int[Array, ""]


def recall_task(longest: int, streams: int, length: int) -> Task:
    """The task `queue` with a delay that is a number in its state: all delays up to `longest` are one program."""

    def init(key: Array) -> Bits:
        del key
        return Bits(jnp.zeros((streams, longest), bool), jnp.zeros((), jnp.int32))

    def sample(data: tuple, state: Bits, key: Array) -> tuple[Chunk, Bits]:
        del data
        bits = jnp.concatenate([state.past, jax.random.bernoulli(key, 0.5, (streams, length))], axis=1)
        late = jax.lax.dynamic_slice_in_dim(bits, longest - state.delay, length, axis=1)
        inputs = bits[:, longest:, None].astype(float)
        return Chunk(inputs, late[:, :, None]), state._replace(past=bits[:, length:])

    return Task("recall", 1, heads.bernoulli(1), streams, length, False, (), init, sample)


def train(part: Recall, folder: Path, progress: Progress, resume: bool, seed: int, data: Path | None) -> None:
    """Train every method at every K, all delays, rates and seeds at once, and write a file for each."""
    del data
    delays = jnp.asarray(part.delays)

    def place(state: PyTree, setting: Array, seed: Array) -> Bits:
        del seed
        return state._replace(delay=delays[setting].astype(jnp.int32))

    lanes = all_lanes(len(part.delays), part.rates, range(seed, seed + part.seeds))
    for length, method in itertools.product(part.chunks, part.methods):
        path = folder / cases.file_of(method, length)
        if resume and path.exists():
            continue
        task = recall_task(max(part.delays), part.streams, length)
        show = functools.partial(progress, f"recall, {method}, chunks of {length}")
        rows = train_lanes(*parts_of(method, part, task), lanes, part.steps // length, part.points, place, show=show)
        cases.write_case(path, rows, cases.columns_of(part, method, chunk=length), {"delay": part.delays})


def section(folder: Path) -> Section | None:
    """Heat maps over D and K of the final loss, a table of them, and the claims."""
    rows, found = cases.read_cases(folder), results(folder)
    if not found:
        return None
    methods = in_order(method for method, _, _ in found)
    chunks, delays = sorted({length for _, length, _ in found}), sorted({delay for _, _, delay in found})
    text = (
        "A network gives back the bit of D steps ago, and learns after every chunk of K steps; all methods see the "
        f"same number of bits. {cases.about_sizes(rows)} Adam, after clipping at norm 1. Shown is the loss over the "
        f"last tenth, in nats, mean over seeds and 95% interval; guessing costs {CHANCE:.3f}. "
        f"{cases.about_rates(rows)} Above the white line, and where there is none, D >= K: credit can only come from "
        "before the chunk. What a method without any such credit has below guessing, it reads out of a memory "
        f"that it did not learn. {cases.about_times(rows)}"
    )
    header = ["method", "K", *(f"D = {delay}" for delay in delays), "seconds"]
    table = Table(header, [])
    for method in methods:
        for length in chunks:
            if not any((method, length, d) in found for d in delays):
                continue
            cells_ = [str(found[method, length, d]) if (method, length, d) in found else "" for d in delays]
            seconds = max(row["seconds"] for row in rows if row["method"] == method and row["chunk"] == length)
            table.rows.append([method, str(length), *cells_, f"{seconds:.1f}"])
    files = cases.files_of(folder, "recall")
    figure = _heat_maps(found, methods, chunks, delays)
    return Section("Recall: the bit of D steps ago, by chunks of K", figure, text, claims(folder), table, files)


def results(folder: Path) -> dict[tuple[str, int, int], cases.Best]:
    """The best of every method, K and D."""
    return cases.best_by(cases.read_cases(folder), lambda row: (row["method"], int(row["chunk"]), int(row["delay"])))


def claims(folder: Path) -> list[Claim]:
    """What solves the hardest case with D = 3 K or more, and what does not."""
    found = results(folder)
    hard = [(length, delay) for _, length, delay in found if delay >= 3 * length and length > 1]
    if not hard:
        return []
    length, delay = max(hard, key=lambda case: (case[1] == 12, case[1], case[0]))  # the aims are set for 12 and 4

    def claim(text: str, method: str, solved: bool) -> Claim:
        best = found.get((method, length, delay))
        if best is None or not len(best.finals):
            return judge(text, None, "")
        estimate = mean_of(best.finals)
        margin = estimate.below(SOLVED) if solved else estimate.above(FAILED)
        return judge(text, [margin], f"Loss {best}, the rate in brackets; chance {CHANCE:.3f}.")

    where = f"recall over {delay} steps by chunks of {length}"
    return [
        *(claim(f"{m} solves {where}: loss below {SOLVED}.", m, True) for m in ("rtrl", "ok(8)")),
        *(claim(f"{m} does not learn {where}: loss above {FAILED}.", m, False) for m in ("bptt", "immediate")),
    ]


def _heat_maps(found: dict[tuple[str, int, int], cases.Best], methods: list[str], chunks: list, delays: list) -> Any:
    """One map for each method, in the same colours."""
    nothing = cases.Best(math.nan, np.zeros(0), [])
    columns = 2
    rows = -(-len(methods) // columns)
    fig, axes = plots.figure(rows, columns, height=2.2)
    image = None
    for ax, method in zip(axes.flat, methods, strict=False):
        values = np.array([[found.get((method, k, d), nothing).mean(math.nan) for k in chunks] for d in delays])
        image = ax.imshow(values, origin="lower", aspect="auto", vmin=0, vmax=CHANCE, cmap="viridis")
        for (i, j), value in np.ndenumerate(values):
            if np.isfinite(value):
                bright = value > 0.6 * CHANCE
                ax.text(
                    j, i, f"{value:.2f}", ha="center", va="center", fontsize=8, color="black" if bright else "white"
                )
        for j, k in enumerate(chunks):  # the border between D < K and D >= K
            edge = sum(d < k for d in delays) - 0.5
            if 0 < edge < len(delays) - 1:
                ax.plot([j - 0.5, j + 0.5], [edge, edge], color="white", linewidth=1.6)
        ax.grid(visible=False)
        ax.set_title(method, fontsize=10)
        ax.set_xticks(range(len(chunks)), [str(k) for k in chunks])
        ax.set_yticks(range(len(delays)), [str(d) for d in delays])
    for ax in axes.flat[len(methods) :]:
        ax.set_visible(False)
    for ax in axes[-1]:
        ax.set_xlabel("K, steps of a chunk")
    for ax in axes[:, 0]:
        ax.set_ylabel("D")
    fig.colorbar(image, ax=axes, label="loss, nats", shrink=0.6)
    return fig
