"""Environments for agents: small records of pure functions, for one agent. `jax.vmap` makes many of one.

An episode that ends begins again at once: the observation that comes with `done` is the first of the next episode.
"""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from streamgrad._typing import Array, Bool, Float, Int, PyTree
from streamgrad.checks import check_size
from streamgrad.trees import restart

FORWARD, LEFT, RIGHT = 0, 1, 2
CUE_LEFT, CUE_RIGHT, CORRIDOR, JUNCTION = 0, 1, 2, 3


class Environment(NamedTuple):
    """An environment that never ends.

    Attributes:
      name: how it is called in tables.
      n_observations: size of an observation, a vector.
      n_actions: actions are whole numbers from 0 to n_actions - 1.
      init: `init(key) -> (state, observation)`, the beginning of an episode.
      step: `step(state, action, key) -> (state, observation, reward, done)`. Where an episode is done, state and
        observation are those of the beginning of the next one.
      success: an episode has succeeded if its last reward is above this.
    """

    name: str
    n_observations: int
    n_actions: int
    init: Callable[[Any], tuple[PyTree, Array]]
    step: Callable[[PyTree, Array, Any], tuple[PyTree, Array, Array, Array]]
    success: float = 0.0


class Maze(NamedTuple):
    """Where an agent is in the T-maze.

    Attributes:
      position: cells from the start, up to the length of the corridor, where the junction is.
      goal: 0 if the left turn is right, 1 if the right one is.
      time: steps of this episode so far.
      corridor: N, which all episodes have: mazes of several lengths are one program.
    """

    position: Int[Array, ""]
    goal: Int[Array, ""]
    time: Int[Array, ""]
    corridor: Int[Array, ""]


def t_maze(corridor: int) -> Environment:
    """The T-maze: a cue at the start says which way to turn at the end of the corridor.

    Observations are one-hot vectors of 4: cue for left, cue for right (both in the first cell alone), corridor,
    junction. Actions are 0 forward, 1 left, 2 right. A turn in the corridor and a step forward at the junction run into
    the wall: nothing moves. The right turn at the junction gives +4, the wrong one -0.4, and both end the episode; any
    other step gives -0.1. After `2 * corridor` steps the episode is over in any case.

    Args:
      corridor: N, steps from the start to the junction.

    Returns:
      The environment. An episode succeeds by the right turn, for which the cue must be kept for at least N steps. The
      best return is 4 - 0.1 N; turning at random at the junction succeeds half of the time.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> maze = t_maze(corridor=2)
      >>> state, observation = maze.init(jax.random.key(0))
      >>> turn = 1 + int(observation.argmax())
      >>> for action in (0, 0, turn):
      ...     state, observation, reward, done = maze.step(state, jnp.array(action), jax.random.key(1))
      >>> float(reward), bool(done), int(observation.argmax()) < 2
      (4.0, True, True)

    References:
      Bakker, Reinforcement learning with long short-term memory, 2001: the task, with other rewards.
    """
    check_size(corridor=corridor)

    def observe(state: Maze) -> Float[Array, "4"]:
        seen = jnp.where(state.position == 0, state.goal, CORRIDOR)
        return jax.nn.one_hot(jnp.where(state.position == state.corridor, JUNCTION, seen), 4)

    def init(key: Any) -> tuple[Maze, Float[Array, "4"]]:
        zero = jnp.zeros((), jnp.int32)
        state = Maze(zero, jax.random.randint(key, (), 0, 2, jnp.int32), zero, jnp.asarray(corridor, jnp.int32))
        return state, observe(state)

    def step(
        state: Maze, action: Int[Array, ""], key: Any
    ) -> tuple[Maze, Float[Array, "4"], Float[Array, ""], Bool[Array, ""]]:
        at_junction, forward = state.position == state.corridor, action == FORWARD
        turned = at_junction & ~forward
        right = turned & (action - LEFT == state.goal)
        reward = jnp.where(right, 4.0, jnp.where(turned, -0.4, -0.1))
        moved = state._replace(position=state.position + (forward & ~at_junction), time=state.time + 1)
        done = turned | (moved.time >= 2 * state.corridor)
        state = restart(done, init(key)[0]._replace(corridor=state.corridor), moved)
        return state, observe(state), reward, done

    return Environment(f"t-maze {corridor}", 4, 3, init, step)


def from_gymnax(name: str, success: float = 0.0, **settings: Any) -> Environment:
    """An environment of gymnax, by its name there, such as "MemoryChain-bsuite".

    Args:
      name: as gymnax calls it. Its actions must be finitely many.
      success: an episode has succeeded if its last reward is above this.
      settings: to be replaced among the environment's parameters in gymnax, such as `memory_length=20`.

    Returns:
      The environment. An observation of any shape becomes one vector. An episode that gymnax cuts off at its limit of
      time is done like any other.
    """
    try:
        gymnax = importlib.import_module("gymnax")
    except ImportError as error:
        raise ValueError(f"from_gymnax({name!r}) needs gymnax: pip install gymnax ({error}).") from error
    known = getattr(gymnax, "registered_envs", None)
    if known is not None and name not in known:
        raise ValueError(f"gymnax has no environment {name!r}; it has {', '.join(known)}.")
    env, params = gymnax.make(name)
    unknown = [key for key in settings if not hasattr(params, key)]
    if unknown:
        raise ValueError(f"{name} of gymnax has no setting {unknown[0]!r}.")
    params = dataclasses.replace(params, **settings) if settings else params
    n_actions = getattr(env.action_space(params), "n", None)
    if n_actions is None:
        raise ValueError(f"the actions of {name} are not finitely many, as from_gymnax needs them.")

    def vector(observation: PyTree) -> Float[Array, " n"]:
        return jnp.concatenate([jnp.ravel(leaf).astype(float) for leaf in jax.tree.leaves(observation)])

    def init(key: Any) -> tuple[PyTree, Float[Array, " n"]]:
        observation, state = env.reset(key, params)
        return jax.tree.map(jnp.asarray, state), vector(observation)

    def step(
        state: PyTree, action: Int[Array, ""], key: Any
    ) -> tuple[PyTree, Float[Array, " n"], Float[Array, ""], Bool[Array, ""]]:
        # Since its version 1 gymnax says apart whether an episode has ended and whether it was cut off.
        observation, new, reward, *ends, _ = env.step(key, state, action, params)
        # Some of its environments return other dtypes than they were given; a loop must not.
        new = jax.tree.map(lambda leaf, old: jnp.asarray(leaf, old.dtype), new, state)
        done = jnp.any(jnp.stack([jnp.asarray(end, bool) for end in ends]))
        return new, vector(observation), jnp.asarray(reward, float), done

    size = jax.eval_shape(init, jax.random.key(0))[1].shape[0]
    return Environment(name, size, int(n_actions), init, step, success)
