"""Chaotic series: the next value, with an update at every step, in the protocol of a published table."""

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from streamgrad import Chunk, heads
from streamgrad._typing import Array, Int, PyTree
from streamgrad_lab.experiments import plots
from streamgrad_lab.experiments.base import Claim, Section, Table
from streamgrad_lab.experiments.evidence import judge, mean_of, show_ratio
from streamgrad_lab.experiments.records import show_interval
from streamgrad_lab.experiments.streams import cases
from streamgrad_lab.experiments.streams.lanes import all_lanes, parts_of, train_lanes
from streamgrad_lab.experiments.streams.methods import look
from streamgrad_lab.progress import Progress
from streamgrad_lab.tasks.base import Task
from streamgrad_lab.tasks.series import KINDS, generate, scaled

# Yi and Wang 2026, sketched RTRL, their Table 6: NMSE, mean over 10 seeds (TBPTT: 5) for Henon, Mackey-Glass, Lorenz.
PUBLISHED = {
    "exact RTRL": (0.0052, 0.0180, 0.0051),
    "SnAp-1": (0.0052, 0.0050, 0.0024),
    "sketch, rank 4": (0.0059, 0.0065, 0.0038),
    "KF-RTRL": (0.0384, 0.0286, 0.0126),
    "RFLO": (0.0704, 0.0572, 0.0442),
    "UORO": (0.6583, 0.0497, 0.0425),
    "TBPTT, window 25": (0.0311, 0.0080, 0.0054),
}
# Which of theirs has the same name. Two are not the same algorithm: their TBPTT makes one update at the end of every
# window, and their RFLO has traces that decay by 0.9, though the network has no leak, and no random weights.
THEIRS = {
    "rtrl": "exact RTRL",
    "snap(1)": "SnAp-1",
    "sketch(4)": "sketch, rank 4",
    "preuoro": "KF-RTRL",
    "rflo": "RFLO",
    "uoro": "UORO",
    "windowed_bptt(25)": "TBPTT, window 25",
}
# Rows of the registry that are another one here: with chunks of one step, and in a single layer.
SAME = {"bptt": "immediate", "local_rtrl": "rtrl"}
# Rows of the registry that are younger than the recorded runs.
YOUNGER = ("uoro_across", "kernl", "pes")
PROTOCOL_RATE = 1e-3
PROTOCOL_SIZE = (64, 8, 200, 15_000)  # units, streams, steps of an episode, and in all
TITLES = {"henon": "Henon", "mackey_glass": "Mackey-Glass", "lorenz": "Lorenz"}
DRAWN = ("rtrl", "ok(8)", "preuoro", "uoro", "snap(1)", "windowed_bptt(25)", "immediate")
THINNED = 4  # of the earlier records every fourth is kept
WINDOW, APART, RECORDS = 200, 250, 5  # the final NMSE: so many records, so far apart, each over so many steps


@dataclasses.dataclass(frozen=True)
class Series:
    """What is run.

    Attributes:
      kinds: which series.
      methods: by their names.
      cell: of the network.
      hidden: its units.
      streams: at once.
      steps: of every stream, with an update after each.
      episode: steps after which state and influence begin anew.
      rates: the grid of learning rates; the protocol has 1e-3.
      seeds: how many.
      name: of the part.
    """

    kinds: tuple[str, ...]
    methods: tuple[str, ...]
    cell: str
    hidden: int
    streams: int
    steps: int
    episode: int
    rates: tuple[float, ...]
    seeds: int
    name: str = "series"


class Place(NamedTuple):
    """Where the streams stand: which series, of which seed, and at which step."""

    kind: Int[Array, ""]
    seed: Int[Array, ""]
    step: Int[Array, ""]


def make_task(part: Series, first_seed: int) -> Task:
    """All series of all seeds as one task: which one is a number in its state."""
    seeds = _seeds(part, first_seed)
    lanes = [
        [scaled(generate(kind, part.streams, part.steps + 1, np.random.default_rng(seed))) for seed in seeds]
        for kind in part.kinds
    ]

    def init(key: Array) -> Place:
        del key
        return Place(*(jnp.zeros((), jnp.int32) for _ in range(3)))

    def sample(data: Array, state: Place, key: Array) -> tuple[Chunk, Place]:
        del key
        now, then = (data[state.kind, state.seed, :, state.step + i][:, None, None] for i in (0, 1))
        reset = jnp.full((part.streams, 1), state.step % part.episode == 0)
        return Chunk(now, then, reset), state._replace(step=state.step + 1)

    data = jnp.asarray(np.array(lanes), float)
    return Task("series", 1, heads.squared_error(1), part.streams, 1, False, data, init, sample)


def train(part: Series, folder: Path, progress: Progress, resume: bool, seed: int, data: Path | None) -> None:
    """Train every method on all series with all rates and seeds at once, and write a file for each."""
    del data
    task = make_task(part, seed)

    def place(state: PyTree, setting: Array, its_seed: Array) -> Place:
        return state._replace(kind=setting.astype(jnp.int32), seed=(its_seed - seed).astype(jnp.int32))

    lanes = all_lanes(len(part.kinds), part.rates, _seeds(part, seed))
    for method in part.methods:
        path = folder / cases.file_of(method)
        if resume and path.exists():
            continue
        show = functools.partial(progress, f"series, {method}")
        # Rows of 50 steps, from which the records of the protocol are made.
        rows = train_lanes(
            *parts_of(method, part, task), lanes, part.steps, part.steps // 50, place, clip=None, show=show
        )
        about = cases.columns_of(part, method) | {"episode": part.episode}
        cases.write_case(path, records(rows), about, {"series": part.kinds})


def _seeds(part: Series, first: int) -> range:
    return range(first, first + part.seeds)


def records(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """NMSE over 200 steps, every 250 steps, as the protocol logs it: rows of 50 steps go in."""
    by_lane: dict[tuple, list[dict[str, Any]]] = {}
    for row in rows:
        by_lane.setdefault((row["setting"], row["rate"], row["seed"]), []).append(row)
    kept = []
    for curve in by_lane.values():
        each = curve[0]["update"]
        apart, window = max(1, APART // each), max(1, WINDOW // each)
        ends = range(len(curve), 0, -apart)
        for back, end in enumerate(ends):
            if back >= RECORDS and back % THINNED:  # a curve needs no more
                continue
            loss = float(np.mean([row["loss"] for row in curve[max(0, end - window) : end]]))
            last = {name: x for name, x in curve[end - 1].items() if name != "loss"}
            kept.append(last | {"nmse": 2 * loss})  # the loss is half the squared error, and the variance 1
    return sorted(kept, key=lambda row: (row["setting"], row["rate"], row["seed"], row["update"]))


def section(folder: Path) -> Section | None:
    """NMSE of every method on every series beside the published one, curves, and the claims."""
    rows = cases.read_cases(folder)
    if not rows:
        return None
    kinds = [kind for kind in KINDS if any(row["series"] == kind for row in rows)]
    methods = list(dict.fromkeys(row["method"] for row in rows))
    tuned, fixed = results(rows), results(rows, PROTOCOL_RATE)
    table = Table(["method", *(f"{TITLES[k]}, rate 1e-3" for k in kinds), *(f"{TITLES[k]}, best rate" for k in kinds),
                   "published", "µs per step"], [])  # fmt: skip
    order = sorted(methods, key=lambda m: np.mean([np.log(tuned[m, k].mean(math.inf)) for k in kinds]))
    for method in order:
        theirs = PUBLISHED.get(THEIRS.get(method, ""), ())
        published = " / ".join(f"{x:.4f}" for x in theirs)
        mine = [row for row in rows if row["method"] == method]
        cells_ = [_at_protocol(fixed[method, k], rows) for k in kinds]
        speed = max(row["seconds"] for row in mine) / max(row["steps"] for row in mine)
        table.rows.append([method, *cells_, *(str(tuned[method, k]) for k in kinds), published, f"{1e6 * speed:.0f}"])
    fig, axes = plots.figure(len(kinds), 1, height=2.8)
    for ax, kind in zip(axes.flat, kinds, strict=True):
        for method in (name for name in DRAWN if (name, kind) in tuned):
            curves = tuned[method, kind].rows
            if curves:
                values = np.array([[row["nmse"] for row in curve] for curve in curves])
                ax.plot([row["steps"] for row in curves[0]], np.exp(np.mean(np.log(values), axis=0)), **look(method))
        ax.set_yscale("log")
        ax.set_title(TITLES[kind], fontsize=10)
        ax.set_ylabel("NMSE")
    axes[-1, 0].set_xlabel("steps, an update after each")
    plots.legend_below(fig, axes[0, 0], 3)
    text = (
        "The next value of a chaotic series, of which one coordinate is seen, scaled to variance 1; an update at "
        f"every step by Adam, state and influence begin anew every {int(rows[0]['episode'])} steps. "
        f"{cases.about_sizes(rows)} NMSE: mean of the last five records, 250 steps apart, each over 200 steps; mean "
        "over seeds and 95% interval, with the protocol's learning rate and with the best. "
        f"{cases.about_rates(rows)} Published: Yi and Wang 2026, Table 6, Henon / Mackey-Glass / Lorenz, at "
        "1e-3, with 64 units, 8 streams and 15,000 steps; their TBPTT makes one update for every window, and their "
        f"RFLO has no random weights. {cases.about_times(rows)} The methods are in the order of their geometric mean."
    )
    files = cases.files_of(folder, "series")
    return Section("Chaotic series, an update at every step", fig, text, claims(rows), table, files)


def results(rows: list[dict[str, Any]], rate: float | None = None) -> dict[tuple[str, str], cases.Best]:
    """The best of every method on every series; with a rate, that of this rate alone."""
    # With another rate a method stands as one that diverged, and is not left out.
    tried = [row if rate in (None, row["rate"]) else row | {"nmse": math.nan} for row in rows]
    return cases.best_by(tried, lambda row: (row["method"], row["series"]), "nmse", RECORDS)


def claims(rows: list[dict[str, Any]]) -> list[Claim]:
    """Ours against the published ones, where the protocol is theirs, and which method is best where all are tuned."""
    tuned, fixed = results(rows), results(rows, PROTOCOL_RATE)
    kinds = [kind for kind in KINDS if ("rtrl", kind) in fixed]
    found = []
    size = (rows[0]["hidden"], rows[0]["streams"], rows[0]["episode"], max(row["steps"] for row in rows))
    pairs = (("rtrl", "exact RTRL"), ("preuoro", "KF-RTRL"), ("ok(8)", "KF-RTRL"))
    for method, others in pairs if size == PROTOCOL_SIZE else ():
        text = f"{method} is below the published {others} on all series, at the protocol's learning rate."
        mine = {k: fixed[method, k] for k in kinds if (method, k) in fixed and len(fixed[method, k].finals)}
        if list(mine) != list(KINDS):
            found.append(judge(text, None, ""))
            continue
        published = dict(zip(KINDS, PUBLISHED[others], strict=True))
        margins = [mean_of(best.finals).below(published[k]) for k, best in mine.items()]
        numbers = [f"{TITLES[k]} {show_interval(b.finals)} against {published[k]:.4f}" for k, b in mine.items()]
        found.append(judge(text, margins, f"{'; '.join(numbers)}."))
    return found + [claim for kind in kinds for claim in _winner(tuned, kind)]


def _winner(tuned: dict[tuple[str, str], cases.Best], kind: str) -> list[Claim]:
    """Which method has the lowest NMSE on a series, and which are not told apart from it, seed by seed."""
    logs = {
        m: best._replace(finals=np.log(best.finals)) for (m, k), best in tuned.items() if k == kind and len(best.rows)
    }
    if len(logs) < 2:
        return []
    first, *others = sorted(logs, key=lambda m: float(np.mean(logs[m].finals)))
    more = {m: found for m in others if (found := cases.paired(logs[m], logs[first])) is not None}
    near = [m for m in others if m not in more or more[m].value - more[m].half <= 0]
    detail = f"NMSE {tuned[first, kind]}, the rate in brackets. "
    if others[0] in more:
        detail += f"{others[0]} has {show_ratio(more[others[0]])} times as much. "
    detail += f"Not told apart from it: {', '.join(near)}." if near else "All others are told apart from it."
    return [judge(f"{TITLES[kind]}: {first} is the best of {len(logs)} methods.", more.values(), detail)]


def _at_protocol(best: cases.Best, rows: list[dict[str, Any]]) -> str:
    """The NMSE with the protocol's rate, if that was tried."""
    if not any(row["rate"] == PROTOCOL_RATE for row in rows):
        return ""
    return show_interval(best.finals) if len(best.finals) else "diverged"
