"""KeRNL by its definition: dense Jacobians, a twin of every stream, and loops over chunks, streams, steps and units.

Roth, Kanitscheider and Fiete, Kernel RNN Learning (KeRNL), ICLR 2019; names as in Algorithm 1, its pseudocode.
"""

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jax.flatten_util import ravel_pytree

from tests.reference.unrolled import linearised, resets

LONGEST = 0.999


def kernl(
    model,
    params,
    streams,
    sizes,
    psi,
    beta,
    kappa,
    learning_rate=0.1,
    sigma=0.01,
    cut="state",
    immediate="estimated",
    restart=None,
):
    """The ansatz dh_t^i/dz_s^j ≈ β_ij K_j(t - s), K_j(τ) = exp(-γ_j τ), z at the cut; both are learnt chunk by chunk.

    Of each step, with κ_j = K_j(1), which stands for γ_j:

        e_j(t) = κ_j e_j(t-1) + dz_j(t)/dθ                 the eligibility trace
        Ω_j(t) = κ_j Ω_j(t-1) + ψ_j(t)                     the filtered perturbation
        Γ_j(t) = dΩ_j(t)/dκ_j = κ_j Γ_j(t-1) + Ω_j(t-1)
        dL_t/dθ ≈ Σ_ij (dL_t/dh_i) β_ij e_j(t)

    and C = Σ_i (Σ_j β_ij Ω_j(t) - (ĥ_i(t) - h_i(t)) / σ)² / 2 is lowered, for a twin ĥ whose z has σ ψ added to it.
    Here each step of descent, of β_:j and of κ_j, is divided by n and by the mean square of what it multiplies: Ω_j,
    and |β_:j| Γ_j. Those of Ω_j and Γ_j are taken to be 1 at least, as that of ψ_j is; and to |β_:j|² comes that of
    a β with columns of one size which explains the twin's distance.

    `immediate="exact"` knows lag 0, dh_t/dz_t, and learns the others alone: dh_t/dz_s ≈ β K(t - s - 1), s < t. Then
    e(t-1), Ω(t-1) and Γ(t-1) take the place of those of t, and the twin's distance is read before ψ(t) is added.

    Args:
      model: the network.
      params: its parameters.
      streams: a chunk for each stream, all of one length.
      sizes: of the chunks that they are read in, after each of which β and κ change.
      psi: ψ, `[streams, T, n]`.
      beta: β at the beginning, `[S, n]`.
      kappa: κ at the beginning, `[n]`.
      learning_rate: of β and κ.
      sigma: σ.
      cut: "state" or "preactivation".
      immediate: "estimated" or "exact".
      restart: after so many steps a twin begins again where the network is; None for never.

    Returns:
      For each chunk the mean gradients of the cell, ravelled, and of the head; and β and κ after it.
    """
    vertex = model.cell.cuts[cut]
    at = linearised(vertex, model.cell.output, model.head.loss)
    fresh, count = model.init_state(params), len(streams)
    size, n, P = ravel_pytree(fresh)[0].size, len(kappa), ravel_pytree(params.cell)[0].size
    beta, kappa = np.array(beta), np.array(kappa)

    def beginning():
        return {"h": fresh, "twin": fresh, "e": np.zeros((n, P)), "Omega": np.zeros(n), "Gamma": np.zeros(n), "age": 0}

    def kicked(state, x, kick):
        unravel = ravel_pytree(vertex.into(params.cell, state, x))[1]
        return vertex.inject(params.cell, state, x, unravel(jnp.asarray(kick)))

    def direct(state, x, pull):
        """dz_t/dθ_t, in which z of one layer does not count as a part of z of the next: I ⊗ a^T for each matrix."""
        if cut == "state":
            return pull
        z, a = (jax.tree.leaves(part(params.cell, state, x)) for part in (vertex.into, vertex.features))
        return scipy.linalg.block_diag(*(np.kron(np.eye(len(rows)), of) for rows, of in zip(z, a, strict=True)))

    def vector(state):
        return np.asarray(ravel_pytree(state)[0])

    every, found, first = [beginning() for _ in streams], [], 0
    for length in sizes:
        cell, heads = np.zeros(P), []
        up_beta, up_kappa, samples = np.zeros((size, n)), np.zeros(n), []
        for b, stream in enumerate(streams):
            for t in range(first, first + length):
                if resets(stream)[t]:
                    every[b] = beginning()
                now = every[b]
                if now["age"] == restart:
                    now |= {"twin": now["h"], "Omega": np.zeros(n), "Gamma": np.zeros(n), "age": 0}
                x, target = jax.tree.map(lambda leaf, t=t: leaf[t], (stream.inputs, stream.targets))
                weight = 1.0 if stream.weight is None else float(stream.weight[t])
                if weight == 0:
                    target = jax.tree.map(jnp.zeros_like, target)
                here, h = at(params, now["h"], x, target, np.zeros(size))
                here = jax.tree.map(np.asarray, here)
                pull = direct(now["h"], x, here["pull"])
                unkicked = vector(kicked(now["twin"], x, np.zeros(n)))
                twin = kicked(now["twin"], x, sigma * psi[b, t])
                before = {name: now[name].copy() for name in ("e", "Omega", "Gamma")}
                for j in range(n):
                    now["e"][j] = kappa[j] * before["e"][j] + pull[j]
                    now["Omega"][j] = kappa[j] * before["Omega"][j] + psi[b, t, j]
                    now["Gamma"][j] = kappa[j] * before["Gamma"][j] + before["Omega"][j]
                dl_dh = weight * here["dl_dh"]
                if immediate == "exact":
                    cell = cell + dl_dh @ (here["push"] @ pull + beta @ before["e"])
                    Omega, Gamma, seen = before["Omega"], before["Gamma"], (unkicked - vector(h)) / sigma
                else:
                    cell = cell + dl_dh @ beta @ now["e"]
                    Omega, Gamma, seen = now["Omega"], now["Gamma"], (vector(twin) - vector(h)) / sigma
                heads.append(jax.tree.map(lambda leaf, w=weight: w * leaf, here["dl_dhead"]))
                missed = beta @ Omega - seen
                samples.append((Omega**2, Gamma**2, seen @ seen))
                for j in range(n):
                    up_beta[:, j] += missed * Omega[j]
                    up_kappa[j] += missed @ beta[:, j] * Gamma[j]
                now |= {"h": h, "twin": twin, "age": now["age"] + 1}
        Omega2, Gamma2, distance2 = (np.mean(of_all, axis=0) for of_all in zip(*samples, strict=True))
        Omega2, Gamma2 = np.maximum(Omega2, 1), np.maximum(Gamma2, 1)
        rate, old = learning_rate / n / len(samples), beta
        beta, kappa = beta.copy(), kappa.copy()
        for j in range(n):
            size2 = old[:, j] @ old[:, j] + distance2 / np.sum(Omega2)
            beta[:, j] -= rate * up_beta[:, j] / Omega2[j]
            kappa[j] = np.clip(kappa[j] - rate * up_kappa[j] / (size2 * Gamma2[j]), 0, LONGEST)
        head = jax.tree.map(lambda *leaves: sum(leaves) / count, *heads)
        found.append((cell / count, head, beta, kappa))
        first += length
    return found
