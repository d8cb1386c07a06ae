"""Agents in T-mazes learn at every step, by an actor and a critic with eligibility traces, what they saw long ago.
"""

import argparse
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

import streamgrad as sg

AGENTS, LENGTH, PATIENCE = 32, 6, 20
DISCOUNT, TRACE = 0.95, 0.9
FORWARD = 2  # the other actions, 0 and 1, turn left and right


class Maze(NamedTuple):
    goal: jax.Array
    place: jax.Array
    time: jax.Array


def see(maze):
    """The goal at the start alone; then corridor or junction."""
    start, junction = maze.place == 0, maze.place == LENGTH
    goal = jax.nn.one_hot(maze.goal, 2) * (maze.time == 0)[:, None]
    return jnp.column_stack([goal, ~junction, junction]).astype(float)


def move(maze, action, key):
    junction = maze.place == LENGTH
    turned = action != FORWARD
    reward = jnp.where(junction & turned, jnp.where(action == maze.goal, 1.0, -1.0), jnp.where(junction==turned, -0.1, 0.0))
    done = (junction & turned) | (maze.time == PATIENCE)
    new = Maze(jax.random.bernoulli(key, 0.5, (AGENTS,)).astype(int), jnp.zeros(AGENTS, int), jnp.zeros(AGENTS, int))
    moved = Maze(maze.goal, jnp.where(turned | junction, maze.place, maze.place + 1), maze.time + 1)
    return reward, done, jax.tree.map(lambda a, b: jnp.where(done, a, b), new, moved)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20000)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--est", default="rtrl")
    options = parser.parse_args(arguments)

    head = sg.heads.from_function(
        init_params=lambda key, width: 0.1 * jax.random.normal(key, (4, width)), loss=lambda p, y, t: 0.0 * y.sum()
    )
    model = sg.Model(sg.cells.gru(n_in=4, n_hidden=16), head)
    est = sg.batched(getattr(sg, options.est)(model), AGENTS)
    opt = optax.adam(options.rate)

    def worth(head, output, action):
        """log π(a) + V, whose gradient both share as eligibility; and V."""
        policy, value = jnp.split(head @ output, [3])
        return jax.nn.log_softmax(policy)[action] + 0.5*value[0]
    scores = jax.vmap(jax.grad(worth, argnums=(0, 1)), in_axes=(None, 0, 0))

    def step(carry, key):
        params, state, opt_state, trace, maze, past = carry
        act_key, new_key, key = jax.random.split(key, 3)
        output, state = est.advance(params, state, see(maze)[:, None], key, reset=(maze.time == 0)[:, None])
        output = output[:, 0]
        policy, value = jnp.split(output @ params.head.T, [3], axis=1)
        action = jax.random.categorical(act_key, policy)
        value = value[:, 0]
        # the TD error of the step before
        reward, old, done = past
        error = reward + jnp.where(done, 0.0, DISCOUNT * value) - old
        grads = jax.tree.map(lambda e: -jnp.tensordot(error, e, axes=1) / AGENTS, trace)
        # credit
        dhead, doutput = scores(params.head, output, action)
        now = sg.Params(est.credit(params, state, doutput[:, None], per_stream=True), dhead)
        keep = jnp.where(done, 0.0, DISCOUNT * TRACE)
        trace = jax.tree.map(lambda e, g: jax.vmap(jnp.multiply)(keep, e) + g, trace, now)
        updates, opt_state = opt.update(grads, opt_state)
        params = optax.apply_updates(params, updates)
        reward, done, new = move(maze, action, new_key)
        atend = (maze.place == LENGTH) & (action!=FORWARD)
        return (params, state._replace(trace=None), opt_state, trace, new, (reward, value, done)), (atend & (action == maze.goal), done)

    params = model.init(jax.random.key(options.seed))
    trace = jax.tree.map(lambda leaf: jnp.zeros((AGENTS, *leaf.shape)), params)
    maze = Maze(jnp.zeros(AGENTS, int), jnp.zeros(AGENTS, int), jnp.zeros(AGENTS, int))
    carry = params, est.init(params), opt.init(params), trace, maze, (jnp.zeros(AGENTS), jnp.zeros(AGENTS), jnp.ones(AGENTS, bool))
    run = jax.jit(lambda carry, keys: jax.lax.scan(step, carry, keys))
    for keys in jnp.split(jax.random.split(jax.random.key(options.seed+100), options.steps), 10):
        carry, (won, done) = run(carry, keys)
        print(won.sum() / done.sum(), done.sum(), flush=True)


if __name__ == "__main__":
    main()
