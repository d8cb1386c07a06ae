"""The textbook versions of the methods that backpropagate through stretches of a stream: loss by loss, step by step."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from tests.reference.unrolled import jacobians, linearised, losses, resets


def windowed_bptt(model, params, chunk, window, every=1):
    """Σ_t Σ_{e(t)-window < s <= t} dL_t/dθ_s by its definition: one copy of the parameters for each step.

    e(t) is the last step of the block of `every` steps that t is in.
    """
    length = len(chunk.targets)
    copies = jax.tree.map(lambda leaf: jnp.repeat(leaf[None], length, axis=0), params.cell)
    each = jax.jacobian(lambda copies: losses(model, params, chunk, "state", cell_params=copies))(copies)  # [t, s, ...]
    t, s = np.arange(length)[:, None], np.arange(length)[None, :]
    end = t - t % every + every - 1
    near = jnp.asarray((s <= t) & (s > end - window), float)
    return jax.tree.map(lambda leaf: jnp.tensordot(near, leaf, axes=((0, 1), (0, 1))), each)


def windowed_bptt_stream(model, params, chunks, window, every=1, replay=False):
    """Williams and Peng's BPTT(window; every), step by step, with other parameters for each chunk.

    All of the stream is remembered. Credit passes through an old step as it is linearised at the state that it began
    with, by the parameters of the chunk whose losses it comes from. `replay` first computes the states of the last
    `window - every` steps again with those parameters, but for the one that the oldest of them began with.

    Returns:
      For each chunk the cell's gradient, ravelled, and the losses; and the last state.
    """
    at = linearised(model.cell.cuts["state"], model.cell.output, model.head.loss)
    before, inputs, begins, results = [], [], [], []  # of all steps so far
    state = None

    def step(params, state, x, target):
        here, new = at(params, state, x, target, np.zeros(ravel_pytree(state)[0].size))
        return jax.tree.map(np.asarray, here), new

    for theta, chunk in zip(params, chunks, strict=True):
        fresh = model.init_state(theta)
        if replay:
            for s in range(max(0, len(before) - (window - every)), len(before)):
                state = step(theta, before[s], inputs[s], chunk.targets[0])[1]
                if s + 1 < len(before):
                    before[s + 1] = fresh if begins[s + 1] else state
        first, dl_dh, values = len(before), [], []
        for t, reset in enumerate(resets(chunk)):
            x, target = jax.tree.map(lambda leaf, t=t: leaf[t], (chunk.inputs, chunk.targets))
            before.append(fresh if reset or state is None else state)
            inputs.append(x)
            begins.append(bool(reset) or len(before) == 1)
            here, state = step(theta, before[-1], x, target)
            dl_dh.append(here["dl_dh"])
            values.append(here["loss"])
        total = 0.0
        for t in range(first, len(before)):
            end = first + (t - first) // every * every + every - 1
            back = dl_dh[t - first]
            for s in range(t, max(-1, end - window), -1):
                here, _ = step(theta, before[s], inputs[s], chunk.targets[0])
                total = total + back @ here["pull"]
                if begins[s]:
                    break
                back = back @ here["propagate"]
        results.append((total, np.asarray(values)))
    return results, state


def artbp(model, params, chunks, uniform, mean_length, tail, longest):
    """Tallec and Ollivier 2017, Equation 11, loss by loss, with other parameters for each chunk.

    All of the stream is remembered with its truncations, `uniform` below √3 (2 c_t - 1); c_t is constant, or that of
    Equation 14. Credit passes through an old step as it is linearised at the state that it began with, by the
    parameters of the chunk whose losses it comes from, and through no more than `longest` steps before that chunk.

    Returns:
      For each chunk the cell's gradient, ravelled; how many older steps its losses have reached; and the flow, summed
      over the losses, that was cut though no truncation was drawn.
    """
    at = linearised(model.cell.cuts["state"], model.cell.output, model.head.loss)
    before, inputs, factors, results = [], [], [], []  # of all steps so far
    state, age = None, 0

    def step(params, state, x, target):
        here, new = at(params, state, x, target, np.zeros(ravel_pytree(state)[0].size))
        return jax.tree.map(np.asarray, here), new

    for theta, chunk, numbers in zip(params, chunks, uniform, strict=True):
        first, dl_dh = len(before), []
        for t, reset in enumerate(resets(chunk)):
            x, target = jax.tree.map(lambda leaf, t=t: leaf[t], (chunk.inputs, chunk.targets))
            before.append(model.init_state(theta) if reset or state is None else state)
            inputs.append(x)
            c = 1 / mean_length if tail is None else (tail - 1) / ((tail - 2) * mean_length + age)
            over = reset or age == 0 or numbers[t] < np.sqrt(3) * (2 * c - 1)
            factors.append(0.0 if over else 1 / (1 - c))
            age = 1 if over else age + 1
            here, state = step(theta, before[-1], x, target)
            dl_dh.append(here["dl_dh"])
        total, beyond, oldest = 0.0, np.zeros_like(dl_dh[0]), len(before)
        for t in range(first, len(before)):
            back = dl_dh[t - first]
            for s in range(t, first - longest - 1, -1):
                here, _ = step(theta, before[s], inputs[s], chunk.targets[0])
                total, oldest = total + back @ here["pull"], min(oldest, s)
                back = factors[s] * (back @ here["propagate"])
                if factors[s] == 0:
                    break
            beyond = beyond + back
        results.append((total, max(0, first - oldest), beyond))
    return results


def dni(model, params, chunk, sizes, learning_rate=0.1, discount=1.0):
    """Synthetic gradients for one stream: the cell's gradient, summed over chunks of these sizes."""
    grads, _ = dni_streams(model, params, [chunk], sizes, learning_rate, discount)
    return ravel_pytree(params.cell)[1](jnp.asarray(sum(grads)))


def dni_streams(model, params, streams, sizes, learning_rate=0.1, discount=1.0, features=lambda h: h):
    """Czarnecki et al. 2017 for the state at the end of each chunk, which streams of one network learn together.

    Chunk by chunk, loss by loss: to the credit for losses of the chunk comes that for s = λ A φ(h_K), held constant.
    Then A φ(h_0) moves towards dL_chunk/dh_0 + s dh_K/dh_0.

    Returns:
      For each chunk the mean gradient of the cell, ravelled; and A after each.
    """
    every = [jacobians(model, params, stream, "state") for stream in streams]
    states = []
    for stream in streams:  # h_0, h_1, …, before any reset
        at, state = linearised(model.cell.cuts["state"], model.cell.output, model.head.loss), model.init_state(params)
        states.append([ravel_pytree(state)[0]])
        for t, reset in enumerate(resets(stream)):
            x, target = jax.tree.map(lambda leaf, t=t: leaf[t], (stream.inputs, stream.targets))
            begin = model.init_state(params) if reset else state
            state = at(params, begin, x, target, np.zeros(ravel_pytree(state)[0].size))[1]
            states[-1].append(ravel_pytree(state)[0])

    def described(h):
        return np.append(np.asarray(features(h)), 1.0)

    size = len(states[0][0])
    A = np.zeros((size, len(described(states[0][0]))))
    grads, learnt, first = [], [], 0
    for length in sizes:
        end, total, step, norm = first + length, 0.0, np.zeros_like(A), 0.0
        for steps, h in zip(every, states, strict=True):
            target = np.zeros(size)
            flows = [(t, steps[t]["dl_dh"]) for t in range(first, end)]
            flows.append((end - 1, discount * A @ described(h[end])))
            for last, back in flows:
                for s in range(last, first - 1, -1):
                    total = total + back @ steps[s]["pull"]
                    back = 0 * back if steps[s]["reset"] else back @ steps[s]["propagate"]
                target = target + back
            known = described(h[first])
            step, norm = step + np.outer(A @ known - target, known), norm + known @ known
        A = A - learning_rate * step / norm
        grads.append(total / len(streams))
        learnt.append(A)
        first = end
    return grads, learnt
