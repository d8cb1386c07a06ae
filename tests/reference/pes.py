"""Persistent and plain evolution strategies by their definition: loops over chunks, particles and steps.

Vicol, Metz and Sohl-Dickstein, Unbiased gradient estimation in unrolled computation graphs with persistent evolution
strategies, ICML 2021: the two algorithms that stand side by side there, truncated ES and PES.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from tests.reference.unrolled import resets


def pes(model, params, chunks, noise, sigmas, accumulate=True):
    """g = 1/N Σ_i Σ_t ξ_i(t) L_t(particle i), ξ_i(t) = Σ_τ ε_i(τ) / σ_τ² over the chunks of the episode until t's.

    A particle has a state of its own, and in the chunk τ the parameters θ + ε_i(τ); the second half of the particles
    has -ε of the first. With the same σ throughout ξ is the paper's over σ². Plain ES (`accumulate=False`) begins each
    chunk with the state of the network at θ, and knows the ε of this chunk alone.

    Args:
      model: the network.
      params: its parameters.
      chunks: of one stream, one after another.
      noise: for each chunk ε / σ of the first half of the particles, `[N/2, P]`.
      sigmas: σ of each chunk.
      accumulate: False for plain ES.

    Returns:
      For each chunk the gradients of the cell, ravelled, and of the head, which is exact and the mean over the
      particles; and the losses of the network at θ.
    """
    theta, unravel = ravel_pytree(params.cell)
    theta, fresh, N = np.asarray(theta), model.init_state(params), 2 * len(noise[0])
    states, clean, found = [fresh] * N, fresh, []
    scores = [np.zeros(len(theta)) for _ in range(N)]
    step = jax.jit(model.cell.step)
    value_and_grad = jax.jit(
        jax.value_and_grad(lambda head, h, target: model.head.loss(head, model.cell.output(h), target))
    )

    def loss_at(chunk, t, state):
        """L_t and its gradient with respect to the head."""
        target = jax.tree.map(lambda leaf: leaf[t], chunk.targets)
        weight = 1.0 if chunk.weight is None else float(chunk.weight[t])
        if weight == 0:
            target = jax.tree.map(jnp.zeros_like, target)
        value, grads = value_and_grad(params.head, state, target)
        return weight * float(value), jax.tree.map(lambda leaf: weight * leaf, grads)

    for chunk, half, sigma in zip(chunks, noise, sigmas, strict=True):
        cell, head, losses = np.zeros(len(theta)), [], []
        for i in range(N):
            epsilon = sigma * (half[i] if i < N // 2 else -half[i - N // 2])
            if not accumulate:
                states[i], scores[i] = clean, np.zeros(len(theta))
            scores[i] = scores[i] + epsilon / sigma**2
            for t, reset in enumerate(resets(chunk)):
                if reset:
                    states[i], scores[i] = fresh, epsilon / sigma**2
                x = jax.tree.map(lambda leaf, t=t: leaf[t], chunk.inputs)
                states[i] = step(unravel(jnp.asarray(theta + epsilon)), states[i], x)
                loss, dl_dhead = loss_at(chunk, t, states[i])
                cell = cell + scores[i] * loss / N
                head.append(jax.tree.map(lambda leaf: leaf / N, dl_dhead))
        for t, reset in enumerate(resets(chunk)):
            x = jax.tree.map(lambda leaf, t=t: leaf[t], chunk.inputs)
            clean = step(params.cell, fresh if reset else clean, x)
            losses.append(loss_at(chunk, t, clean)[0])
        found.append((cell, jax.tree.map(lambda *leaves: sum(leaves), *head), np.array(losses)))
    return found
