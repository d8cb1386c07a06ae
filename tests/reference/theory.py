"""The variance theory as the paper writes it, everything stacked: slow, and the oracle of the fast one.

Equations are those of Sections 6.4 and 6.5 with the corrections of docs/errata.md.
"""

import jax
import numpy as np
import scipy.linalg
from jax.flatten_util import ravel_pytree

from tests.reference import unrolled


def gradients(model, params, chunk, cut):
    """b[t, s] = dL_t/dz_s, `[T, T, N]`."""
    return unrolled.gradients(unrolled.jacobians(model, params, chunk, cut))


def jacobians(model, params, chunk, cut):
    """J_s = dz_s/dθ_s with the state before it fixed, `[T, N, P]`."""
    return np.stack([step["pull"] for step in unrolled.jacobians(model, params, chunk, cut)])


def stacked(b, jac, alpha, q0, episode):
    """b^(t), Q, J and S^(t) of Section 6.4, over all steps at once."""
    length, _, size = b.shape
    q = np.asarray(scipy.linalg.block_diag(*[a * np.asarray(q0) for a in np.asarray(alpha)]))
    j = jac.reshape(length * size, -1)
    s = [
        np.diag(np.repeat([float(r <= t and episode[r] == episode[t]) for r in range(length)], size))
        for t in range(length)
    ]
    return b.reshape(length, -1), q, j, s


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
