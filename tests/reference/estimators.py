"""The textbook versions of the estimators: dense Jacobians, Python loops, one equation of the paper per line.

Slow and obvious; the library is proved equal to these, noise pattern by noise pattern.
"""

import jax
import numpy as np
from jax.flatten_util import ravel_pytree

from tests.reference import kernl as kernels
from tests.reference import local, truncated
from tests.reference.unrolled import gradients, jacobians

eprop, immediate, local_rtrl, rflo, snap = local.eprop, local.immediate, local.local_rtrl, local.rflo, local.snap
dni, windowed_bptt = truncated.dni, truncated.windowed_bptt


def kernl(model, params, chunk, cut, noise, sizes):
    """KeRNL of one stream from its beginning, with default options: see `tests.reference.kernl`."""
    size = ravel_pytree(model.init_state(params))[0].size
    n = noise[0].shape[1]
    beta = np.eye(size) if cut == "state" else np.zeros((size, n))
    psi, kappa = np.concatenate(noise)[None], np.full(n, np.exp(-1 / 10))
    found = kernels.kernl(model, params, [chunk], sizes, psi, beta, kappa, cut=cut, restart=100)
    return ravel_pytree(params.cell)[1](sum(cell for cell, *_ in found))


def rtrl(model, params, chunk, cut):
    """Equation 4: M_t = (dh_t/dh_{t-1}) M_{t-1} + dh_t/dθ_t; dL/dθ = Σ_t (dL_t/dh_t) M_t."""
    total = M = 0.0
    for s in jacobians(model, params, chunk, cut):
        past = 0.0 if s["reset"] or np.isscalar(M) else s["propagate"] @ M
        M = past + s["push"] @ s["pull"]
        total = total + s["dl_dh"] @ M
    return total


def sketch(model, params, chunk, rank=None, append=None):
    """Yi and Wang 2026: Σ_t (dL_t/dh_t) (S_t + D_t), in the structure of the cell's parameters."""
    steps = jacobians(model, params, chunk, "preactivation")
    found = sketched(steps, rank, append)
    return ravel_pytree(params.cell)[1](sum(s["dl_dh"] @ (S + D) for s, (S, D, *_) in zip(steps, found, strict=True)))


def sketched(steps, rank=None, append=None):
    """For each step S_t, D_t, the certificate e_t, its η_t, and M_t as RTRL has it; D_t is not kept in factors.

    S_t = (A_t S_{t-1} where dh_t/dθ_t can be non-zero) + dh_t/dθ_t; D_t = A_t D_{t-1} + (A_t S_{t-1} elsewhere), of
    which the `rank` largest singular values stay; e_t = ‖A_t‖ e_{t-1} + η_t. What is new is not cut down to `append`
    where none of it stays, or all.
    """
    size = len(steps[0]["dl_dh"])
    rank = min(8, size) if rank is None else rank
    append = None if rank in (0, size) else append
    reached, rows = (sum(np.abs(s[name]) for s in steps) > 0 for name in ("push", "pull"))
    near = reached.astype(int) @ rows.astype(int) > 0
    results = []
    for s in steps:
        if s["reset"] or not results:
            S, D, e, M = np.zeros(near.shape), np.zeros(near.shape), 0.0, np.zeros(near.shape)
        A, immediate = s["propagate"], s["push"] @ s["pull"]
        new, lost_of_new = best(np.where(near, 0, A @ S), append)
        D, lost = best(A @ D + new, rank)
        S = np.where(near, A @ S, 0) + immediate
        M = A @ M + immediate
        e = np.linalg.norm(A, 2) * e + lost_of_new + lost
        results.append((S, D, e, lost_of_new + lost, M))
    return results


def best(matrix, rank):
    """The matrix of that rank that is nearest (Eckart and Young), and how far it is; None for any rank."""
    if rank is None:
        return matrix, 0.0
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    return left[:, :rank] * values[:rank] @ right[:rank], np.linalg.norm(values[rank:])


def spatial_rtrl(model, params, chunk, cut, nu, q0):
    """Section 5.1: as above with (dh_t/dz_t) Q_0 ν ν^T Q_0^{-1} J_t in place of dh_t/dθ_t."""
    inverse = np.linalg.inv(q0)
    total = M = 0.0
    for s, v in zip(jacobians(model, params, chunk, cut), nu, strict=True):
        past = 0.0 if s["reset"] or np.isscalar(M) else s["propagate"] @ M
        M = past + np.outer(s["push"] @ q0 @ v, v @ inverse @ s["pull"])
        total = total + s["dl_dh"] @ M
    return total


def balanced(tangent, cotangent):
    """Section 5.2: γ with γ² = ‖w̃‖ / ‖h̃‖, applied to the pair; a pair with a zero factor is dropped."""
    n = np.linalg.norm
    if n(tangent) * n(cotangent) == 0:
        return 0 * tangent, 0 * cotangent
    gamma = np.sqrt(n(cotangent) / n(tangent))
    return gamma * tangent, cotangent / gamma


def uoro(model, params, chunk, cut, u, q0, alpha=None, gir=False, immediate="estimated", groups=None):
    """Equations 6 and 7 with Q_0, group by group; α as β = α with γ = 1, or the GIR coefficients of Section 5.2.

    `groups` lists for each group the indices of its entries of z.
    """
    inverse = np.linalg.inv(q0)
    steps = jacobians(model, params, chunk, cut)
    groups = [range(len(q0))] if groups is None else groups
    total = np.zeros(steps[0]["pull"].shape[1])
    for number, group in enumerate(groups):
        inside = np.isin(np.arange(len(q0)), list(group)).astype(float)
        # The group's own part of the noise and of the parameters.
        h, w, position = 0.0, 0.0, 0
        for s, noise in zip(steps, u, strict=True):
            if s["reset"]:
                h, w, position = 0.0, 0.0, 0
            right = s["push"] @ (inside * (q0 @ noise))
            left = (inside * (inverse.T @ noise)) @ s["pull"]
            forwarded = s["propagate"] @ (h * np.ones(len(s["propagate"])))
            w = w * np.ones(total.shape)
            if immediate == "exact":
                total = total + (s["dl_dh"] @ forwarded) * w
            if alpha is not None:
                beta = alpha[position] if np.ndim(alpha) == 1 else alpha[position, number]
                right, left = beta * right, left / beta
            if gir:
                forwarded, w = balanced(forwarded, w)
                right, left = balanced(right, left)
            h, w = forwarded + right, w + left
            if immediate == "estimated":
                total = total + (s["dl_dh"] @ h) * w
            position += 1
    if immediate == "exact":
        total = total + sum(s["dl_dh"] @ s["push"] @ s["pull"] for s in steps)
    return total


def preuoro(model, params, chunk, tau, matrices, alpha=None, gir=False):
    """Equation 11, matrix by matrix: H̃_t = γ (dh_t/dh_{t-1}) H̃_{t-1} + β τ dh_t/dz_t, w̃_t = w̃_{t-1}/γ + τ a_t/β.

    `matrices` lists for each weight matrix (rows of z, columns of θ); a_t is read off J_t = I ⊗ a_t^T.
    """
    steps = jacobians(model, params, chunk, "preactivation")
    total = np.zeros(steps[0]["pull"].shape[1])
    for rows, columns in matrices:
        H, w, position = 0.0, 0.0, 0
        for s, noise in zip(steps, tau, strict=True):
            if s["reset"]:
                H, w, position = 0.0, 0.0, 0
            J = s["pull"][np.ix_(rows, columns)]
            a = J[0, : len(columns) // len(rows)]
            np.testing.assert_allclose(J, np.kron(np.eye(len(rows)), a), atol=1e-14)
            beta = 1.0 if alpha is None else alpha[position]
            right, left = beta * noise * s["push"][:, rows], noise * a / beta
            forwarded, w = s["propagate"] @ (H * np.ones(right.shape)), w * np.ones(a.shape)
            if gir:
                forwarded, w = balanced(forwarded, w)
                right, left = balanced(right, left)
            H, w = forwarded + right, w + left
            total[columns] += np.outer(s["dl_dh"] @ H, w).ravel()
            position += 1
    return total


def reinforce(model, params, chunk, u, sigma, q0, baseline, decay=0.99, positions=None):
    """Section 9: h̄_t = F(h̄_{t-1}) + σ Q u_t, w̄_t = w̄_{t-1} + u_t^T Q^{-1} (dh_t/dθ_t) / σ, (L_t - b_t) w̄_t.

    Returns the gradients of the cell (ravelled) and of the head. "average": every step's own term of w̄_t has the
    average of the losses before that step as its b; or with `positions`, all of them that of the losses at this
    position in earlier episodes.
    """
    inverse, losses_at = np.linalg.inv(q0), [[] for _ in u]  # by position in the episode
    noisy = jacobians(model, params, chunk, "state", kicks=sigma * u @ q0.T)
    clean = jacobians(model, params, chunk, "state")

    def average(losses):
        ages = decay ** np.arange(len(losses))[::-1]
        return ages @ losses / ages.sum() if losses else 0.0

    terms, averages, past, total = [], [], [], 0.0  # terms and averages of the episode, losses of all steps
    for s, without, noise in zip(noisy, clean, u, strict=True):
        if s["reset"]:
            terms, averages = [], []
        loss = s["loss"]
        terms.append(noise @ inverse @ s["pull"] / sigma)
        averages.append(average(past))
        past.append(loss)
        position = len(terms) - 1
        if positions is not None:
            averages = [average(losses_at[position]) if position < positions else 0.0] * len(terms)
            losses_at[position].append(loss)
        b = {"none": 0 * loss, "average": averages, "noise_free": without["loss"]}[baseline]
        total = total + sum(
            (loss - b_s) * term for b_s, term in zip(np.broadcast_to(b, len(terms)), terms, strict=True)
        )
    return total, jax.tree.map(lambda *leaves: sum(leaves), *(s["dl_dhead"] for s in noisy))


def greedy(model, params, chunk, cut, u, q0, decay):
    """UORO with the coefficients of Appendix D; returns the gradient, β and γ.

    What the loss sees of a tangent is its squared norm times the average fraction seen, over the steps of the episode
    that had one, the present one last.
    """
    inverse, total, betas, gammas = np.linalg.inv(q0), 0.0, [], []

    def average(fractions):
        return np.average(fractions, weights=decay ** np.arange(len(fractions))[::-1])

    for s, noise in zip(jacobians(model, params, chunk, cut), u, strict=True):
        first = s["reset"] or not betas
        if first:
            h, w, of_past, of_present = np.zeros(len(s["dl_dh"])), np.zeros(s["pull"].shape[1]), [], []
        right, left = s["push"] @ q0 @ noise, noise @ inverse @ s["pull"]
        forwarded = s["propagate"] @ h
        of_present.append(np.sum((s["dl_dh"] @ s["push"] @ q0) ** 2) / (right @ right))
        beta = (left @ left / (right @ right * average(of_present))) ** 0.25
        gamma = 0.0
        if not first:
            of_past.append((s["dl_dh"] @ forwarded) ** 2 / (forwarded @ forwarded))
            gamma = (w @ w / (forwarded @ forwarded * average(of_past))) ** 0.25
            h, w = gamma * forwarded, w / gamma
        h, w = h + beta * right, w + left / beta
        total = total + (s["dl_dh"] @ h) * w
        betas.append(beta)
        gammas.append(gamma)
    return total, betas, gammas


def nobacktrack(model, params, chunk, u):
    """Section 6.3: q_i² ∝ ‖dh_i/dθ‖ at every step, with a geometric mean of 1, and GIR for the two sums."""
    steps = jacobians(model, params, chunk, "state")
    total = np.zeros(steps[0]["pull"].shape[1])
    h, w = np.zeros(len(u[0])), np.zeros(total.shape)
    for s, noise in zip(steps, u, strict=True):
        if s["reset"]:
            h, w = 0 * h, 0 * w
        norms = np.linalg.norm(s["pull"], axis=1)
        q = np.sqrt(norms / np.exp(np.mean(np.log(norms))))
        forwarded, w = balanced(s["propagate"] @ h, w)
        right, left = balanced(q * noise, (noise / q) @ s["pull"])
        h, w = forwarded + right, w + left
        total = total + (s["dl_dh"] @ h) * w
    return total


def total_gradient_estimate(model, params, chunk, cut, u, q0, alpha):
    """Equation 8: Σ_t b^(t)T Q u u^T Q^{-1} S^(t) J, from the unrolled network, without h̃ and w̃."""
    steps = jacobians(model, params, chunk, cut)
    length, b = len(steps), gradients(steps)
    inverse = np.linalg.inv(q0)
    total = 0.0
    for t in range(length):
        left = sum(b[t, s] @ (alpha[s] * q0) @ u[s] for s in range(length))
        right = sum(u[s] @ (inverse / alpha[s]) @ steps[s]["pull"] for s in range(t + 1))
        total = total + left * right
    return total
