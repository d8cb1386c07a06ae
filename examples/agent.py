"""Agents in a T-maze learn at every step, by an actor and a critic with eligibility traces, to recall a sign.

At the start a sign says which way to turn at the junction, ten steps on; the signs on the way mean nothing.
It takes 17 seconds of CPU time. With `sg.immediate` for `sg.rtrl`, without credit for the past, 0.51 are correct.

    $ python examples/agent.py
    step 1100: 0.56 of the turns are correct, chance 0.50
    step 2200: 0.99 of the turns are correct, chance 0.50
    step 3300: 1.00 of the turns are correct, chance 0.50
"""

import argparse

import jax
import jax.numpy as jnp
import optax

import streamgrad as sg

AGENTS, LENGTH, DISCOUNT, DECAY = 16, 10, 0.95, 0.9


def loss(head, output, action):
    """The gradient of it, times the TD error, is the actor's and the critic's: one eligibility serves both."""
    return -jax.nn.log_softmax(head[:2] @ output)[action] - 0.5 * head[2] @ output


head = sg.heads.from_function(lambda key, width: 0.1 * jax.random.normal(key, (3, width)), loss)
model = sg.Model(sg.cells.gru(n_in=3, n_hidden=16), head)
est = sg.batched(sg.rtrl(model), AGENTS)
opt = optax.adam(3e-3, eps=1e-3)  # with a small eps Adam takes large steps even where almost nothing is left to learn


def step(carry, now):
    """See, learn from the step before, act."""
    params, state, opt_state, eligibility, goal, reward, past_value = carry
    place, (sign_key, act_key, noise) = now[0] % (LENGTH + 1), jax.random.split(now[1], 3)
    start, junction = place == 0, place == LENGTH
    sign = jax.random.randint(sign_key, (AGENTS,), 0, 2)
    goal = jnp.where(start, sign, goal)
    seen = jnp.stack([2.0 * sign - 1, jnp.full(AGENTS, 1.0 * start), jnp.full(AGENTS, 1.0 * junction)], axis=1)
    output, state, trace = est.advance(params, state, seen[:, None], noise, reset=jnp.full((AGENTS, 1), start))
    read = output[:, 0] @ params.head.T  # [agents, 3]: the actor's logits of left and right, the critic's value
    action, value = jax.random.categorical(act_key, read[:, :2]), read[:, 2]

    # Only now it is known how good the last step was. The eligibility says what led to it, and to the steps before.
    td_error = reward + jnp.where(start, 0, DISCOUNT * value) - past_value
    grads = jax.tree.map(lambda e: jnp.tensordot(td_error, e, axes=1) / AGENTS, eligibility)
    updates, opt_state = opt.update(grads, opt_state)
    # What led to this action, by all that was seen; credit takes the parameters of advance.
    dl_dhead, dl_doutput = jax.vmap(jax.grad(loss, (0, 1)), (None, 0, 0))(params.head, output[:, 0], action)
    dl_dcell = est.credit(params, trace, dl_doutput[:, None], per_stream=True)
    decay = jnp.where(start, 0, DISCOUNT * DECAY)
    eligibility = jax.tree.map(lambda e, g: decay * e + g, eligibility, sg.Params(dl_dcell, dl_dhead))
    reward = jnp.where(junction, jnp.where(action == goal, 1.0, -1.0), 0)
    params = optax.apply_updates(params, updates)
    return (params, state, opt_state, eligibility, goal, reward, value), action == goal


def main(arguments=None):
    """Walk, and say how many turns were correct."""
    parser = argparse.ArgumentParser(description="Agents in a T-maze.")
    parser.add_argument("--steps", type=int, default=3300, help="at least 33")
    options = parser.parse_args(arguments)
    if options.steps < 33:
        parser.error("--steps must be at least 33: a way in each of three parts.")
    params = model.init(jax.random.key(0))
    eligibility = jax.tree.map(lambda leaf: jnp.zeros((AGENTS, *leaf.shape)), params)
    carry = params, est.init(params), opt.init(params), eligibility, jnp.zeros(AGENTS, int), *jnp.zeros((2, AGENTS))
    many_steps = jax.jit(lambda carry, now: jax.lax.scan(step, carry, now))
    keys = jax.random.split(jax.random.key(1), options.steps)
    for numbers in jnp.array_split(jnp.arange(options.steps), 3):
        carry, correct = many_steps(carry, (numbers, keys[numbers]))
        correct = correct[numbers % (LENGTH + 1) == LENGTH]
        print(f"step {numbers[-1] + 1}: {correct.mean():.2f} of the turns are correct, chance 0.50", flush=True)


if __name__ == "__main__":
    main()
