"""An agent in a T-maze: a cue at the start says which way to turn at the end of the corridor. Does it remember?"""

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from streamgrad import cells
from streamgrad._typing import PyTree
from streamgrad_lab.agent import AgentConfig, make_agent, windows
from streamgrad_lab.environments import Environment, from_gymnax, t_maze
from streamgrad_lab.experiments import plots
from streamgrad_lab.experiments.base import Claim, Section, Table
from streamgrad_lab.experiments.evidence import judge, mean_of
from streamgrad_lab.experiments.streams import cases
from streamgrad_lab.experiments.streams.methods import in_order, look, make_estimator
from streamgrad_lab.progress import COMPILING, Progress

# Yi and Wang 2026, sketched RTRL, their Table 9: success of an online actor-critic of 64 units, over 3 seeds,
# by corridor, at a rate of 3e-4 and without traces. Their TBPTT makes one update for every 2 N steps.
PUBLISHED = {
    10: {"RTRL": 0.998, "RTU": 0.993, "LRU": 0.877, "TBPTT": 0.614, "SnAp-1": 0.587},
    20: {"RTRL": 0.70, "RTU": 0.84},
}
AIMS = {10: 0.98, 20: 0.84}  # success of `rtrl`
LAST = 0.2  # the share of the windows whose success counts


@dataclasses.dataclass(frozen=True)
class Agent:
    """What is run.

    Attributes:
      corridors: N of the T-mazes.
      cells: of the networks.
      methods: by their names.
      hidden: units.
      streams: environments that one agent acts in.
      steps: of each, an update after each of them.
      rates: the grid of learning rates.
      seeds: how many.
      lam: how long traces last.
      entropy: weight of the policy's entropy.
      points: rows of each curve.
      gymnax: environments of gymnax, such as "MemoryChain-bsuite"; it must be installed.
      name: of the part.
    """

    corridors: tuple[int, ...]
    cells: tuple[str, ...]
    methods: tuple[str, ...]
    hidden: int
    streams: int
    steps: int
    rates: tuple[float, ...]
    seeds: int
    lam: float = 0.9
    entropy: float = 0.01
    points: int = 20
    gymnax: tuple[str, ...] = ()
    name: str = "agent"


def check(part: Agent, data: Path | None) -> None:
    """All environments are there, which must be known before hours are spent on other parts."""
    del data
    _worlds(part)


class World(NamedTuple):
    """Environments that are one program.

    Attributes:
      name: in the names of files.
      environment: the program.
      titles: of each environment.
      places: of each, what makes its states from those of the program's own.
    """

    name: str
    environment: Environment
    titles: list[str]
    places: list[Callable[[PyTree], PyTree]]


def _worlds(part: Agent) -> list[World]:
    """The mazes, whose corridors are numbers in their states, and each environment of gymnax."""
    titles = [f"T-maze {corridor}" for corridor in part.corridors]
    mazes = World("t-maze", t_maze(max(part.corridors, default=1)), titles, list(map(_corridor, part.corridors)))
    others = [World(name, from_gymnax(name), [name], [lambda state: state]) for name in part.gymnax]
    return [mazes, *others] if titles else others


def _corridor(length: int) -> Callable[[PyTree], PyTree]:
    """Mazes at the beginning of an episode, with a corridor of that length."""
    return lambda mazes: mazes._replace(corridor=jnp.full_like(mazes.corridor, length))


def train(part: Agent, folder: Path, progress: Progress, resume: bool, seed: int, data: Path | None) -> None:
    """Train every method with every cell, all corridors, rates and seeds at once; a file for each."""
    del data
    for world, cell, method in itertools.product(_worlds(part), part.cells, part.methods):
        path = folder / cases.file_of(world.name, cell, method)
        if not (resume and path.exists()):
            show = functools.partial(progress, f"{world.name}, {cell}, {method}")
            rows = list(_curves(part, world, cell, method, range(seed, seed + part.seeds), show))
            about = {"cell": cell, "method": method, "hidden": part.hidden, "streams": part.streams}
            cases.write_case(path, rows, about, {"world": world.titles})


def _curves(part: Agent, world: World, cell: str, method: str, seeds: range, show: Any) -> Any:
    """Rows of all corridors, rates and seeds, a window of steps at a time."""
    window = max(1, part.steps // part.points)
    config = AgentConfig(part.hidden, part.streams, window * part.points, window, lam=part.lam, entropy=part.entropy)
    make = functools.partial(make_estimator, method)
    agent = make_agent(world.environment, getattr(cells, cell), make, config)
    show(0, config.steps, COMPILING)
    begun = None
    for _, rows in windows(agent, config, part.rates, seeds, worlds=world.places):
        now = time.monotonic()
        begun = now if begun is None else begun  # the first window has the compilation in it, and is not counted
        for row in rows:
            # Where no episode has ended none has succeeded.
            numbers = {"success": row["success"] if row["episodes"] else 0.0, "mean_return": row["mean_return"]}
            kept = {name: row[name] for name in ("setting", "rate", "seed")} | {"update": row["step"]}
            good = {name: float(x) if row["finite"] else float("nan") for name, x in numbers.items()}
            yield kept | {"steps": row["step"], "seconds": now - begun} | good
        best = max(row["success"] if row["episodes"] else 0.0 for row in rows)
        show(rows[0]["step"], config.steps, f"success {best:.2f}")


def section(folder: Path) -> Section | None:
    """Success of every method, curves of every cell, and the claims."""
    found = results(folder)
    if not found:
        return None
    worlds = list(dict.fromkeys(world for world, _, _ in found))
    used = list(dict.fromkeys(cell for _, cell, _ in found))
    methods = in_order(method for _, _, method in found)
    rows = cases.read_cases(folder)
    table = Table(["environment", "cell", "method", "success", "µs per step", "published, 64 units"], [])
    for world, cell, method in itertools.product(worlds, used, methods):
        if (world, cell, method) in found:
            mine = [row for row in rows if (row["world"], row["cell"], row["method"]) == (world, cell, method)]
            steps = sorted({row["steps"] for row in mine})
            timed = max(steps[-1] - steps[0], 1)  # the first window is not counted
            spent = max(row["seconds"] for row in mine) / timed
            first = _published(world) if (cell, method) == (used[0], methods[0]) else ""
            table.rows.append([world, cell, method, str(found[world, cell, method]), f"{1e6 * spent:.0f}", first])
    fig, axes = plots.figure(len(worlds), len(used), height=2.6 if len(used) == 1 else 2.0, sharey="row")
    for ax, (world, cell) in zip(axes.flat, itertools.product(worlds, used), strict=True):
        for method in methods:
            best = found.get((world, cell, method))
            if best is not None and best.rows:
                mean = np.mean([[row["success"] for row in curve] for curve in best.rows], axis=0)
                ax.plot([row["steps"] / 1000 for row in best.rows[0]], mean, **look(method))
        ax.set_title(f"{world}, {cell}", fontsize=10)
        ax.set_ylim(0, 1.02)
    for ax in axes[:, 0]:
        ax.set_ylabel("success")
    axes[-1, 0].set_xlabel("thousands of steps")
    plots.legend_below(fig, axes[0, 0], 3)
    text = (
        "An agent sees a cue, walks down a corridor and turns; only the cue says which way. Online actor-critic with "
        f"eligibility traces, an update at every step of all environments by Adam. {cases.about_sizes(rows)} Success "
        f"over the last fifth, mean over seeds and 95% interval; turning at random gives 0.5. "
        f"{cases.about_rates(rows)} windowed_bptt(5) reaches back 5 steps, which is less than a corridor, "
        f"windowed_bptt(25) further than the shorter ones. {cases.about_times(rows)}"
    )
    files = cases.files_of(folder, "agent")
    return Section("An agent that remembers", fig, text, claims(folder), table, files)


def results(folder: Path) -> dict[tuple[str, str, str], cases.Best]:
    """The best of every environment, cell and method."""
    rows = cases.read_cases(folder)
    return cases.best_by(rows, lambda row: (row["world"], row["cell"], row["method"]), "success", LAST, highest=True)


def claims(folder: Path) -> list[Claim]:
    """`rtrl` solves the mazes that others have published numbers of, with its best cell."""
    found, made = results(folder), []
    for corridor, aim in AIMS.items():
        mine = {cell: best for (world, cell, method), best in found.items()
                if world == f"T-maze {corridor}" and method == "rtrl" and len(best.finals)}  # fmt: skip
        if not mine:
            continue
        cell = max(mine, key=lambda name: float(np.mean(mine[name].finals)))
        text = (
            f"rtrl finds the way in a T-maze of corridor {corridor}: success above {aim}, with the best of its cells."
        )
        numbers = "; ".join(f"{name}: {best}" for name, best in mine.items())
        detail = f"{numbers}; the rate in brackets. Published: {_published(f'T-maze {corridor}')}."
        made.append(judge(text, [mean_of(mine[cell].finals).above(aim)], detail))
    return made


def _published(world: str) -> str:
    corridor = int(world.rpartition(" ")[2]) if world.startswith("T-maze") else 0
    return ", ".join(f"{name} {value:.3g}" for name, value in PUBLISHED.get(corridor, {}).items())
