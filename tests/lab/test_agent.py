"""The agent: what it learns by against textbook versions of it, runs together and apart, and mazes that it learns."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import streamgrad as sg
from streamgrad_lab.agent import AgentConfig, actor_critic_head, final_success, make_agent, train_agent, windows
from streamgrad_lab.environments import t_maze
from tests.tools import few

CONFIG = AgentConfig(hidden=3, streams=2, steps=20, window=10, gamma=0.9, lam=0.7, entropy=0.05, critic=0.5)
STEPS = 14


def lived(agent, config, steps=STEPS, rate=0.0):
    """The first steps of a run: parameters at its beginning, and what was seen, time leading."""
    state = jax.jit(agent.init)(1, rate)
    # Away from zero, where a policy is even and values are all alike.
    head = jax.tree.map(lambda leaf: leaf + jax.random.normal(jax.random.key(5), leaf.shape), state.params.head)
    state = state._replace(params=state.params._replace(head=head))
    _, seen = jax.jit(lambda state: jax.lax.scan(lambda s, _: agent.step(s), state, None, steps))(state)
    assert seen.begins[1:].any()
    return state.params, seen


def read_again(model, params, immediate=False):
    """By a stream: log π(a_t), V_t and the entropy of its whole history, step by step, and their Jacobians."""
    vector, unravel = ravel_pytree(params)
    cell, fresh = model.cell, model.cell.init_state()

    def read(vector, history):
        params = unravel(vector)

        def step(state, now):
            observation, begins, action = now
            state = jax.lax.stop_gradient(state) if immediate else state
            state = jax.tree.map(lambda new, old: jnp.where(begins, new, old), fresh, state)
            state = cell.step(params.cell, state, observation)
            logits, value = model.head.predict(params.head, cell.output(state))
            p = jax.nn.softmax(logits)
            return state, jnp.stack([jnp.log(p[action]), value, -jnp.sum(p * jnp.log(p))])

        return jax.lax.scan(step, fresh, history)[1].T

    both = jax.jit(lambda history: (read(vector, history), jax.jacrev(read)(vector, history)))
    return lambda seen, stream: both(
        jax.tree.map(lambda leaf: leaf[:, stream], (seen.observation, seen.begins, seen.action))
    )


def textbook(model, params, seen, config, immediate=False):
    """Every step's gradient: each trace as the sum that it stands for, through the whole history."""
    total = np.zeros((STEPS, ravel_pytree(params)[0].size))
    read = read_again(model, params, immediate)
    for stream in range(config.streams):
        (_, values, _), (log_p, value, entropy) = jax.device_get(read(seen, stream))
        score, begins = log_p + config.critic * value, np.asarray(seen.begins[:, stream])
        for t in range(STEPS):
            total[t] -= config.entropy * entropy[t] / config.streams
            if t == 0:
                continue
            follows = 0 if begins[t] else config.gamma * values[t]
            delta = seen.reward[t - 1, stream] + follows - values[t - 1]
            np.testing.assert_allclose(seen.delta[t, stream], delta, rtol=1e-10)
            first = np.flatnonzero(begins[:t])[-1]  # of the episode that t - 1 is in
            trace = sum((config.gamma * config.lam) ** (t - 1 - k) * score[k] for k in range(first, t))
            total[t] -= delta * trace / config.streams
    return total


MAKE = {
    "rtrl": sg.rtrl,
    "windowed_bptt": functools.partial(sg.windowed_bptt, window=8),  # no episode is longer
    "immediate": sg.immediate,
    "windowed_bptt-3": functools.partial(sg.windowed_bptt, window=3),
    "ok": functools.partial(sg.ok, rank=2),
    "uoro": sg.uoro,
    "snap": sg.snap,
}


# Every cell with the exact one, and every estimator with some cell: each is a program to compile.
PAIRS = [("rtrl", cell) for cell in ("vanilla", "gru", "lru")] + [("windowed_bptt", "vanilla"), ("immediate", "gru")]


@pytest.mark.parametrize(("make", "cell"), few(PAIRS, ("rtrl", "vanilla")))
def test_the_gradient_is_the_textbooks(make, cell):
    agent = make_agent(t_maze(2), getattr(sg.cells, cell), MAKE[make], CONFIG)
    params, seen = lived(agent, CONFIG)
    grads = jax.vmap(lambda tree: ravel_pytree(tree)[0])(seen.grads)
    expected = textbook(agent.model, params, seen, CONFIG, immediate=make == "immediate")
    np.testing.assert_allclose(grads, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_traces_are_the_lambda_return_of_whole_episodes():
    """Σ_t δ_t e_t = Σ_t (G_t - V_t) d(log π + V)/dθ, where G_t = r_t + γ ((1 - λ) V_{t+1} + λ G_{t+1})."""
    config = AgentConfig(hidden=3, streams=1, steps=10, window=10, gamma=0.9, lam=0.7, entropy=0.0)
    agent = make_agent(t_maze(2), sg.cells.vanilla, sg.rtrl, config)
    params, seen = lived(agent, config)
    end = int(np.flatnonzero(seen.begins[:, 0])[-1])  # what comes after is no whole episode
    assert end >= 6
    (_, values, _), (log_p, value, _) = jax.device_get(read_again(agent.model, params)(seen, 0))
    expected, returned = np.zeros(log_p.shape[1]), 0.0
    for t in reversed(range(end)):
        follows = 0.0 if seen.done[t, 0] else (1 - config.lam) * values[t + 1] + config.lam * returned
        returned = seen.reward[t, 0] + config.gamma * follows
        expected += (returned - values[t]) * (log_p[t] + value[t])
    found = sum(ravel_pytree(jax.tree.map(lambda leaf, t=t: leaf[t], seen.grads))[0] for t in range(1, end + 1))
    np.testing.assert_allclose(-found, expected, rtol=1e-10)


ANY = [("ok", "vanilla"), ("windowed_bptt-3", "rtu"), ("uoro", "gru"), ("snap", "vanilla"), ("snap", "lru")]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "cell"), ANY)
def test_any_estimator_will_do(make, cell):
    rows = train_agent(t_maze(2), getattr(sg.cells, cell), MAKE[make], CONFIG, rates=[1e-2], seeds=[0])
    assert [row["step"] for row in rows] == [10, 20]
    assert all(row["finite"] and row["episodes"] >= 4 and 0 <= row["success"] <= 1 for row in rows)


def test_what_cannot_advance_is_said():
    with pytest.raises(ValueError, match="cannot advance"):
        train_agent(t_maze(2), sg.cells.gru, sg.dni, CONFIG, rates=[1e-2], seeds=[0])


def test_runs_together_are_the_runs_alone_and_can_be_taken_up_again():
    agent = make_agent(t_maze(2), sg.cells.vanilla, sg.uoro, CONFIG)
    rates, seeds = [0.0, 3e-2], [3, 4]
    states, rows = zip(*((jax.device_get(s), r) for s, r in windows(agent, CONFIG, rates, seeds)), strict=True)
    assert [(row["rate"], row["seed"]) for row in rows[0]] == [(0.0, 3), (0.0, 4), (3e-2, 3), (3e-2, 4)]
    alone, run = jax.jit(agent.init)(4, 3e-2), jax.jit(agent.run)
    for state, found in zip(states, rows, strict=True):
        alone, totals = run(alone)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x[3], y, rtol=1e-8, atol=1e-12), state, alone)
        np.testing.assert_allclose(found[3]["success"] * found[3]["episodes"], totals.successes)
        np.testing.assert_allclose(found[3]["mean_return"] * found[3]["episodes"], totals.returns)
    ((state, found),) = windows(agent, CONFIG, rates, seeds, states[0])
    assert found == rows[1]
    jax.tree.map(np.testing.assert_array_equal, state, states[1])
    first = jax.jit(jax.vmap(agent.init))(jnp.array([3, 4]), jnp.zeros(2))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x[:2], y, rtol=1e-12), states[1].params, first.params)
    assert not jnp.allclose(states[1].params.head["w"][2:], first.params.head["w"])


@pytest.mark.slow
def test_worlds_together_are_the_worlds_alone():
    """Mazes of several corridors, made of one, are each what a maze of that length is by itself, episode by episode."""
    corridors, seeds = (3, 1), [0, 1]
    places = [lambda mazes, n=n: mazes._replace(corridor=jnp.full_like(mazes.corridor, n)) for n in corridors]
    make = functools.partial(make_agent, make_cell=sg.cells.vanilla, make_estimator=sg.immediate, config=CONFIG)
    together = [row for _, rows in windows(make(t_maze(5)), CONFIG, [1e-2], seeds, worlds=places) for row in rows]
    for setting, corridor in enumerate(corridors):
        alone = [row for _, rows in windows(make(t_maze(corridor)), CONFIG, [1e-2], seeds) for row in rows]
        mine = [row | {"setting": 0} for row in together if row["setting"] == setting]
        assert [row["episodes"] for row in mine] == [row["episodes"] for row in alone]
        assert [row["success"] for row in mine] == [row["success"] for row in alone]
        np.testing.assert_allclose([row["mean_return"] for row in mine], [row["mean_return"] for row in alone])


def test_totals_count_the_episodes_that_ended():
    agent = make_agent(t_maze(2), sg.cells.vanilla, sg.immediate, CONFIG)
    state = jax.jit(agent.init)(0, 1e-2)
    _, totals = jax.jit(agent.run)(state)
    _, seen = jax.jit(lambda state: jax.lax.scan(lambda s, _: agent.step(s), state, None, CONFIG.window))(state)
    episodes, successes, returns = 0, 0, 0.0
    for stream in range(CONFIG.streams):
        gained = 0.0
        for reward, done in zip(seen.reward[:, stream], seen.done[:, stream], strict=True):
            gained += float(reward)
            if done:
                episodes, successes, returns, gained = episodes + 1, successes + (reward == 4), returns + gained, 0.0
    assert (int(totals.episodes), int(totals.successes)) == (episodes, int(successes))
    np.testing.assert_allclose(totals.returns, returns, rtol=1e-10)


def test_parameters_that_are_no_longer_finite_are_reported():
    rows = train_agent(t_maze(2), sg.cells.vanilla, sg.immediate, CONFIG, rates=[1e-3, np.inf], seeds=[0])
    assert [row["finite"] for row in rows] == [True, False, True, False]
    assert final_success(rows)[np.inf, 0] == 0


def test_the_heads_loss_is_that_of_a_known_return():
    head, output = actor_critic_head(2), jnp.array([1.0, -2.0])
    params = {"w": jnp.array([[0.0, 0.5], [1.0, 0.0], [2.0, 1.0]]), "b": jnp.array([0.0, 0.0, 0.5])}
    # Logits (-1, 1), V = 0.5, and a return of 3.5 after action 1.
    expected = -3 * np.log(1 / (1 + np.exp(-2))) + 4.5
    np.testing.assert_allclose(head.loss(params, output, (jnp.array(1), jnp.array(3.5))), expected)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"hidden": 0}, "hidden must be a whole number of at least 1, not 0"),
        ({"lam": 1.5}, "lam must be a number from 0 to 1, not 1.5"),
        ({"steps": 50, "window": 20}, "window must divide steps=50, but it is 20"),
        ({"entropy": float("nan")}, "entropy must be a finite number"),
    ],
)
def test_a_wrong_config_is_said(wrong, message):
    with pytest.raises(ValueError, match=message):
        AgentConfig(**wrong)


def test_no_runs_are_none():
    with pytest.raises(ValueError, match="at least one learning rate and one seed"):
        train_agent(t_maze(2), sg.cells.gru, sg.rtrl, CONFIG, rates=[], seeds=[0])


@pytest.mark.slow
def test_a_short_maze_is_learnt_in_float32():
    config = AgentConfig(hidden=16, streams=8, steps=4000, window=1000)
    with jax.enable_x64(False):
        rows = train_agent(t_maze(2), sg.cells.gru, sg.rtrl, config, rates=[3e-3], seeds=[0])
    assert rows[0]["success"] < 0.9  # it could not do so from the beginning
    assert final_success(rows)[3e-3, 0] > 0.98
