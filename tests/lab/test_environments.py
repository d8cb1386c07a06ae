"""Environments keep their rules, step by step; gymnax is wrapped, whether or not it is there."""

import dataclasses
import sys
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from streamgrad_lab.environments import from_gymnax, t_maze
from tests.cells.libraries import have


class SlowMaze:
    """The rules of the T-maze in plain Python."""

    def __init__(self, corridor: int, goal: int):
        self.corridor, self.goal, self.position, self.time = corridor, goal, 0, 0

    def observe(self) -> int:
        return self.goal if self.position == 0 else 3 if self.position == self.corridor else 2

    def step(self, action: int) -> tuple[float, bool]:
        self.time += 1
        if self.position == self.corridor and action != 0:
            return (4.0 if action == 1 + self.goal else -0.4), True
        if action == 0 and self.position < self.corridor:
            self.position += 1
        return -0.1, self.time == 2 * self.corridor


@pytest.mark.parametrize("corridor", [1, 3])
def test_maze_follows_its_rules_step_by_step(corridor):
    maze, steps = t_maze(corridor), 400
    keys = jax.random.split(jax.random.key(0), steps)
    actions = jax.random.choice(jax.random.key(1), jnp.array([0, 0, 1, 2]), (steps,))  # forward is likelier
    first, observation = maze.init(jax.random.key(2))

    def step(state, now):
        state, observation, reward, done = maze.step(state, *now)
        return state, (state, observation, reward, done)

    _, (states, observations, rewards, dones) = jax.lax.scan(step, first, (actions, keys))
    slow, counts = SlowMaze(corridor, int(first.goal)), {4.0: 0, -0.4: 0, "late": 0}
    np.testing.assert_array_equal(observation, np.eye(4)[slow.observe()])
    for at in range(steps):
        reward, done = slow.step(int(actions[at]))
        np.testing.assert_allclose(rewards[at], reward, rtol=1e-6)
        assert bool(dones[at]) == done
        if done:
            counts[reward if reward != -0.1 else "late"] += 1
            slow = SlowMaze(corridor, int(states.goal[at]))
        np.testing.assert_array_equal(observations[at], np.eye(4)[slow.observe()])
    assert min(counts.values()) > 5, counts


def test_goals_are_even_and_drawn_anew_for_each_episode():
    maze = t_maze(1)
    goals = jax.vmap(lambda key: maze.init(key)[0].goal)(jax.random.split(jax.random.key(0), 400))
    assert 150 < int(goals.sum()) < 250  # 5 standard deviations
    state, _ = maze.init(jax.random.key(0))
    after = jax.vmap(lambda key: maze.step(state._replace(position=jnp.int32(1)), jnp.array(1), key)[0])
    assert 150 < int(after(jax.random.split(jax.random.key(1), 400)).goal.sum()) < 250


def test_a_maze_without_corridor_is_refused():
    with pytest.raises(ValueError, match="corridor must be a whole number of at least 1, not 0"):
        t_maze(0)


class CounterState(NamedTuple):
    time: object
    total: object


@dataclasses.dataclass(frozen=True)
class CounterParams:
    length: int = 3


class Counter:
    """Stands for an environment of gymnax: it counts, and ends an episode of its own accord, in a new dtype."""

    def __init__(self, values: int, actions: object):
        self.values, self.actions = values, actions

    def reset(self, key, params):
        return jnp.zeros((2, 2), jnp.int32), CounterState(0, jnp.float32(0))

    def step(self, key, state, action, params):
        time = state.time + 1
        done, cut_off = time >= params.length, action == 1
        over = done | cut_off
        new = CounterState(jnp.where(over, 0, time), jnp.asarray(state.total + action, jnp.float16))
        seen, reward = jnp.full((2, 2), new.time), 1 * done
        ends = (done, cut_off) if self.values == 6 else (over,)
        return seen, new, reward, *ends, {}

    def action_space(self, params):
        return self.actions


def fake_gymnax(values: int = 6, actions: object = types.SimpleNamespace(n=2)):
    return types.SimpleNamespace(
        registered_envs=["Counter"], make=lambda name: (Counter(values, actions), CounterParams())
    )


@pytest.mark.parametrize("values", [5, 6])  # what a step returns before gymnax 1, and since
def test_gymnax_is_wrapped(monkeypatch, values):
    monkeypatch.setitem(sys.modules, "gymnax", fake_gymnax(values))
    environment = from_gymnax("Counter", success=0.5, length=2)
    assert (environment.name, environment.n_observations, environment.n_actions) == ("Counter", 4, 2)
    assert environment.success == 0.5
    state, observation = environment.init(jax.random.key(0))
    np.testing.assert_array_equal(observation, np.zeros(4))

    def step(state, action):
        state, *seen = environment.step(state, action, jax.random.key(1))
        return state, seen

    # A loop, so that dtypes must stay. The second step ends the episode, the third, by its action, cuts off the next.
    _, (observations, rewards, dones) = jax.lax.scan(step, state, jnp.array([0, 0, 1, 0]))
    np.testing.assert_array_equal(observations, np.repeat([[1], [0], [0], [1]], 4, axis=1))
    np.testing.assert_array_equal(rewards, [0, 1, 0, 0])
    np.testing.assert_array_equal(dones, [False, True, True, False])
    assert jnp.issubdtype(observations.dtype, jnp.floating)


def test_what_gymnax_does_not_have_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnax", fake_gymnax())
    with pytest.raises(ValueError, match="gymnax has no environment 'Countess'; it has Counter"):
        from_gymnax("Countess")
    with pytest.raises(ValueError, match="Counter of gymnax has no setting 'height'"):
        from_gymnax("Counter", height=2)
    monkeypatch.setitem(sys.modules, "gymnax", fake_gymnax(actions=object()))
    with pytest.raises(ValueError, match="the actions of Counter are not finitely many"):
        from_gymnax("Counter")
    monkeypatch.setitem(sys.modules, "gymnax", None)
    with pytest.raises(ValueError, match=r"from_gymnax\('Counter'\) needs gymnax: pip install gymnax"):
        from_gymnax("Counter")


@pytest.mark.skipif(not have("gymnax"), reason="gymnax cannot be imported here")
def test_memory_chain_rewards_the_action_of_its_first_observation():
    chain = from_gymnax("MemoryChain-bsuite", memory_length=4)
    assert (chain.n_observations, chain.n_actions) == (3, 2)
    for seed in range(4):
        state, observation = chain.init(jax.random.key(seed))
        shown, step = int(observation[2] > 0), jax.jit(chain.step)
        for right in (True, False):
            now, rewards, done = state, [], False
            while not done:
                now, _, reward, done = step(now, jnp.array(shown if right else 1 - shown), jax.random.key(1))
                rewards.append(float(reward))
            assert rewards == [0, 0, 0, 0, 1 if right else -1]
