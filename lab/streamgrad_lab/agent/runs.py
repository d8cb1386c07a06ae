"""Many runs of an agent at once: every learning rate with every seed, and their curves."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from streamgrad import Cell, GradientEstimator, Model
from streamgrad._typing import Array, PyTree
from streamgrad.trees import all_finite
from streamgrad_lab.agent.learner import Agent, AgentConfig, AgentState, Totals, make_agent
from streamgrad_lab.environments import Environment


def windows(
    agent: Agent,
    config: AgentConfig,
    rates: Sequence[float],
    seeds: Sequence[int],
    state: AgentState | None = None,
    worlds: Sequence[Callable[[PyTree], PyTree]] = (lambda world: world,),
) -> Iterator[tuple[AgentState, list[dict[str, Any]]]]:
    """Train all learning rates and seeds at once, a window of steps at a time.

    Args:
      agent: from `make_agent`.
      config: the one it was made with.
      rates: learning rates.
      seeds: each rate is tried with all of them.
      state: where to go on, from an earlier call with the same arguments; None to begin.
      worlds: every rate and seed is run in each of them, all in one program. A world is a change of the environments'
        states before the first step, such as mazes' corridors; by default there is one, unchanged.

    Yields:
      The state, whose leaves have a leading axis for the runs, and a row for each run, as `train_agent` has them, with
      the number of its world as `setting`. The runs are in order of world, then rate, then seed. The state is handed on
      to the next window: copy what is to be kept (`jax.device_get`).
    """
    runs = [(setting, float(rate), int(seed)) for setting in range(len(worlds)) for rate in rates for seed in seeds]
    if not runs:
        raise ValueError("there must be at least one learning rate and one seed.")
    now = _begin(agent, runs, worlds) if state is None else state
    run = jax.jit(jax.vmap(agent.run), donate_argnums=0)
    for _ in range(int(now.step[0]), config.steps, config.window):
        now, totals = run(now)
        columns = jax.device_get((now.step, totals, jax.vmap(all_finite)(now.params)))
        yield now, [_row(*runs[i], jax.tree.map(lambda c, i=i: c[i], columns)) for i in range(len(runs))]


def _begin(
    agent: Agent, runs: Sequence[tuple[int, float, int]], worlds: Sequence[Callable[[PyTree], PyTree]]
) -> AgentState:
    """The states of all runs before their first step."""

    @jax.jit
    @jax.vmap
    def begin(setting: Array, rate: Array, seed: Array) -> AgentState:
        state = agent.init(seed, rate)
        return state._replace(world=jax.lax.switch(setting, worlds, state.world))

    return begin(*(jnp.array(column) for column in zip(*runs, strict=True)))


def train_agent(
    environment: Environment,
    make_cell: Callable[[int, int], Cell],
    make_estimator: Callable[[Model], GradientEstimator],
    config: AgentConfig,
    rates: Sequence[float],
    seeds: Sequence[int],
) -> list[dict[str, Any]]:
    """Train an agent with every learning rate and seed, all at once, and return the curves.

    Args:
      environment: as in `make_agent`, like the next three.
      make_cell: likewise.
      make_estimator: likewise.
      config: likewise.
      rates: learning rates.
      seeds: each rate is tried with all of them.

    Returns:
      A row for each window and run: `rate`, `seed`, `step`, and of the episodes that ended within the window their
      number `episodes`, the part `success` of them that succeeded and their `mean_return` (both NaN if there were
      none); `finite` says whether the parameters still are.

    Example:
      >>> import streamgrad as sg
      >>> from streamgrad_lab.environments import t_maze
      >>> config = AgentConfig(hidden=4, streams=2, steps=20, window=10)
      >>> rows = train_agent(t_maze(2), sg.cells.vanilla, sg.immediate, config, rates=[1e-3, 1e-2], seeds=[0])
      >>> [(row["rate"], row["step"], row["finite"]) for row in rows]
      [(0.001, 10, True), (0.01, 10, True), (0.001, 20, True), (0.01, 20, True)]
    """
    agent = make_agent(environment, make_cell, make_estimator, config)
    return [row for _, rows in windows(agent, config, rates, seeds) for row in rows]


def final_success(rows: Sequence[Mapping[str, Any]], part: float = 0.2) -> dict[tuple[float, int], float]:
    """The success of each run in the last part of its steps.

    Args:
      rows: of `train_agent`.
      part: which part of the windows counts; the last one in any case.

    Returns:
      By rate and seed, the part of the episodes that succeeded; 0 for a run whose parameters are no longer finite.

    Example:
      >>> row = {"rate": 0.1, "seed": 0, "episodes": 10, "success": 0.5, "finite": True}
      >>> final_success([row, row | {"success": 1.0, "episodes": 30}], part=1.0)
      {(0.1, 0): 0.875}
    """
    curves: dict[tuple[float, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        curves.setdefault((row["rate"], row["seed"]), []).append(row)
    return {run: _success(curve[-max(1, round(part * len(curve))) :]) for run, curve in curves.items()}


def _success(rows: Sequence[Mapping[str, Any]]) -> float:
    episodes = sum(row["episodes"] for row in rows)
    if not rows[-1]["finite"] or not episodes:
        return 0.0
    return sum(row["success"] * row["episodes"] for row in rows if row["episodes"]) / episodes


def _row(setting: int, rate: float, seed: int, columns: tuple[Any, Totals, Any]) -> dict[str, Any]:
    step, totals, finite = columns
    episodes = int(totals.episodes)
    success, mean_return = (float(x) / episodes if episodes else np.nan for x in (totals.successes, totals.returns))
    return {
        "setting": setting,
        "rate": rate,
        "seed": seed,
        "step": int(step),
        "episodes": episodes,
        "success": success,
        "mean_return": mean_return,
        "finite": bool(finite),
    }
