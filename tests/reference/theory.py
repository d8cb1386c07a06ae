"""The variance theory as the paper writes it, everything stacked: slow, and the oracle of the fast one.

Equations are those of Sections 6.4 and 6.5 with the corrections of docs/errata.md.
"""

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jax.flatten_util import ravel_pytree

import streamgrad as sg


def losses(model: sg.Model, params, chunk: sg.Chunk, cut: str, dz=None, cell_params=None):
    """L_t, `[T]`, with z_s displaced by `dz[s]` and, if given, parameters of each step's own."""
    vertex = model.cell.cuts[cut]
    state, out = model.init_state(params), []
    reset = resets(chunk)
    for t in range(len(jax.tree.leaves(chunk.inputs)[0])):
        x, target = jax.tree.map(lambda leaf, t=t: leaf[t], (chunk.inputs, chunk.targets))
        if reset[t]:
            state = model.init_state(params)
        theta = params.cell if cell_params is None else jax.tree.map(lambda leaf, t=t: leaf[t], cell_params)
        z, unravel = ravel_pytree(vertex.into(theta, state, x))
        state = vertex.inject(theta, state, x, unravel(jnp.zeros_like(z) if dz is None else dz[t]))
        out.append(model.head.loss(params.head, model.cell.output(state), target))
    return jnp.stack(out)


def resets(chunk: sg.Chunk) -> np.ndarray:
    return np.zeros(len(chunk.targets), bool) if chunk.reset is None else np.asarray(chunk.reset)


def gradients(model, params, chunk, cut, length, size):
    """b[t, s] = dL_t/dz_s, `[T, T, N]`."""
    return jax.jit(jax.jacrev(lambda dz: losses(model, params, chunk, cut, dz)))(jnp.zeros((length, size)))


def jacobians(model, params, chunk, cut):
    """J_s = dz_s/dθ_s with the state before it fixed, `[T, N, P]`."""
    vertex, state, states = model.cell.cuts[cut], model.init_state(params), []
    flat, unravel = ravel_pytree(params.cell)
    step, reset = jax.jit(model.cell.step), resets(chunk)
    for t in range(len(jax.tree.leaves(chunk.inputs)[0])):
        x = jax.tree.map(lambda leaf, t=t: leaf[t], chunk.inputs)
        if reset[t]:
            state = model.init_state(params)
        states.append(state)
        state = step(params.cell, state, x)
    before = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)

    def one(state, x):
        return jax.jacrev(lambda p: ravel_pytree(vertex.into(unravel(p), state, x))[0])(flat)

    return jax.jit(jax.vmap(one))(before, chunk.inputs)


def stacked(b, jac, alpha, q0, episode):
    """b^(t), Q, J and S^(t) of Section 6.4, over all steps at once."""
    length, _, size = b.shape
    q = np.asarray(scipy.linalg.block_diag(*[a * np.asarray(q0) for a in np.asarray(alpha)]))
    j = np.asarray(jac).reshape(length * size, -1)
    s = [
        np.diag(np.repeat([float(r <= t and episode[r] == episode[t]) for r in range(length)], size))
        for t in range(length)
    ]
    return np.asarray(b).reshape(length, -1), q, j, s


def v(b, jac, alpha, q0, episode):
    """V(Q) = Σ_{s,t} tr(b^(s) b^(t)T Q Q^T) tr(S^(t) J J^T S^(s) (Q Q^T)^{-1}) (Equation 10)."""
    b, q, j, s = stacked(b, jac, alpha, q0, episode)
    qq, inverse, jj = q @ q.T, np.linalg.inv(q @ q.T), j @ j.T
    pairs = [(x, y) for x in range(len(b)) for y in range(len(b))]
    return sum(np.trace(np.outer(b[x], b[y]) @ qq) * np.trace(s[y] @ jj @ s[x] @ inverse) for x, y in pairs)


def covariance(b, jac, alpha, q0, episode, kurtosis):
    """Corollary 1, corrected, for Σ_t b^(t)T Q u u^T Q^{-1} S^(t) J."""
    b, q, j, s = stacked(b, jac, alpha, q0, episode)
    total = np.zeros((j.shape[1], j.shape[1]))
    x = [q.T @ row for row in b]
    y = [np.linalg.inv(q) @ one @ j for one in s]
    for i in range(len(b)):
        for k in range(len(b)):
            total += (x[i] @ x[k]) * y[i].T @ y[k]
            total += y[i].T @ np.outer(x[k], x[i]) @ y[k]
            total += kurtosis * y[i].T @ np.diag(x[i] * x[k]) @ y[k]
    return total


def moments(grads):
    """The mean and the covariance of gradients `[n, P]` that are all equally likely."""
    grads = np.asarray(grads)
    mean = grads.mean(axis=0)
    return mean, (grads - mean).T @ (grads - mean) / len(grads)


def flat_cell(grads):
    """The cell's gradients under every pattern, ravelled, `[n, P]`."""
    return jax.vmap(lambda g: ravel_pytree(g)[0])(grads.cell)
