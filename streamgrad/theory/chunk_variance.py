"""The exact variance of UORO across chunks: the paper's theory, with chunks for steps and the state for the cut.

Inside chunks nothing is estimated. What is, Σ_i (dL_i/dh_i) h̃_i w̃_i^T over the chunks' ends h_i, with L_i the loss of
the chunk *after* it, is UORO at the state for a network whose step is a chunk: dh_i/dh_{i-1} = Φ_i and J_i = dh_i/dθ
through chunk i alone. Blocks of the state have independent noise, and their variances add.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from streamgrad._typing import Array, Float, PyTree
from streamgrad.base import Chunk, Model, Params, fold_weight, transition, widened
from streamgrad.checks import check_at_most, check_chunk, check_own_matrices, check_params, check_size
from streamgrad.estimators.uoro_across import block_of_unit
from streamgrad.keys import drawn_shapes
from streamgrad.noise.groups import Groups
from streamgrad.theory.episode import Episode
from streamgrad.theory.objective import total_variance
from streamgrad.theory.spatial import make_alpha
from streamgrad.trees import restart


def collect_chunks(model: Model, params: Params, chunk: Chunk, length: int) -> Episode:
    """What the variance of `uoro_across` depends on, for a stream in chunks of `length` steps.

        b[t, s] = (dL_{t+1}/dh_t) Φ_t … Φ_{s+1},    J_s = dh_s/dθ through chunk s
        gradient = that inside all chunks + Σ_{t,s} b[t, s] J_s

    Args:
      model: the model; small, as J_s is `[S, P]`.
      params: its parameters.
      chunk: the whole stream, of one stream, from the cell's initial state.
      length: K; the last chunk may be shorter.

    Returns:
      An episode at the cut "state" with one step for every chunk but the last.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.lstm(2, 4), sg.heads.softmax(3))
      >>> params = model.init(jax.random.key(0))
      >>> chunk = sg.Chunk(jnp.ones((8, 2)), jnp.zeros(8, int))
      >>> ep = sg.theory.collect_chunks(model, params, chunk, length=2)
      >>> ep.b.shape, ep.jacobian.shape
      ((3, 3, 8), (3, 8, 112))
    """
    check_own_matrices(model)
    check_params(drawn_shapes(model.init), params)
    check_size(length=length)
    steps = check_chunk(model, chunk)
    params, chunk = widened(params), fold_weight(chunk)
    if steps <= length:
        raise ValueError(f"a stream of {steps} steps is one chunk of {length}: there is nothing before it.")
    fresh, unravel = ravel_pytree(model.init_state(params))
    flat, unravel_params = ravel_pytree(params.cell)

    def walk(cell: Array, head: PyTree, start: Array, part: Chunk) -> tuple[Array, Array]:
        """The state at the end and the summed loss."""
        now = Params(unravel_params(cell), head)

        def step(state: PyTree, at: tuple) -> tuple[PyTree, PyTree]:
            x, reset = at
            state = transition(model, now, restart(reset, unravel(fresh), state), x)
            return state, state

        end, states = jax.lax.scan(step, unravel(start), (part.inputs, part.reset))
        return ravel_pytree(end)[0], jnp.sum(model.read_out_chunk(head, states, part.targets)[0])

    @jax.jit  # compiled once for all chunks of the same length
    def look(start: Array, part: Chunk) -> tuple[Array, tuple]:
        """The state at the end of a chunk, and its loss, Jacobians, reset and gradients."""
        end, loss = walk(flat, params.head, start, part)
        jacobian, phi = jax.jacrev(lambda w, h: walk(w, params.head, h, part)[0], argnums=(0, 1))(flat, start)
        inside = jax.grad(lambda w, out, h: walk(w, out, h, part)[1], argnums=(0, 1, 2))(flat, params.head, start)
        begins = jnp.zeros((), bool) if part.reset is None else jnp.any(part.reset)
        return end, (loss, jacobian, phi, begins, *inside)

    start, found = fresh, []
    for at in range(0, steps, length):
        start, part = look(start, jax.tree.map(lambda leaf, at=at: leaf[at : at + length], chunk))
        found.append(part)
    return _episode(found, unravel_params)


def _episode(found: list[tuple], unravel_params: Any) -> Episode:
    """The episode of a network whose steps are chunks, from the results of `look` for each."""
    losses, jacobians, phis, begins, cells, heads, credits = (list(part) for part in zip(*found, strict=True))
    count, size = len(found) - 1, len(credits[0])
    b = np.zeros((count, count, size))
    for t in range(count):
        cotangent = credits[t + 1]
        for s in range(t, -1, -1):
            b[t, s] = cotangent
            cotangent = cotangent @ phis[s]
    b = jnp.asarray(b, credits[0].dtype)
    jacobian = jnp.stack(jacobians[:-1])
    older = jnp.einsum("tsi,sip->p", b, jacobian)
    head = jax.tree.map(lambda *leaves: jnp.sum(jnp.stack(leaves), axis=0), *heads)
    return Episode(
        loss=jnp.stack(losses[1:]),
        gradient=Params(unravel_params(jnp.sum(jnp.stack(cells), axis=0) + older), head),
        episode=jnp.cumsum(jnp.stack(begins[:-1]).at[0].set(True)),
        features=None,
        jacobian=jacobian,
        diagonal=jnp.sum(b, axis=0),
        b=b,
        tape=None,
        cut="state",
        rows=(size,),
    )


def across_variance(ep: Episode, alpha: Any = None, blocks: int = 1, kurtosis: float = 0.0) -> Float[Array, ""]:
    """The trace of the covariance of the total gradient of `uoro_across`, exact.

    Args:
      ep: from `collect_chunks`.
      alpha: of each chunk but the last, `[C]` or `[C, R]`; None for ones.
      blocks: R, as in `uoro`.
      kurtosis: κ, excess kurtosis of the noise: 0 for Gaussian, -2 for Rademacher.

    Returns:
      The total variance. α must not depend on the noise: this does not hold for GIR.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.lstm(2, 4), sg.heads.softmax(3))
      >>> chunk = sg.Chunk(jnp.ones((8, 2)), jnp.zeros(8, int))
      >>> ep = sg.theory.collect_chunks(model, model.init(jax.random.key(0)), chunk, length=2)
      >>> one, eight = (sg.theory.across_variance(ep, blocks=n, kurtosis=-2.0) for n in (1, 8))
      >>> bool(eight < one)
      True
    """
    if ep.cut != "state":
        raise ValueError("this is for noise on the state, once per chunk: collect the episode with collect_chunks.")
    check_size(blocks=blocks)
    check_at_most("blocks", blocks, ep.size, "the number of state units")
    block = block_of_unit(ep.size, blocks)
    scales = make_alpha(alpha, ep.length, ep.dtype, Groups(blocks, block, ep.rows))
    scales = jnp.broadcast_to(scales, (ep.length, blocks))
    total = jnp.zeros((), ep.dtype)
    for r in range(blocks):
        units = np.flatnonzero(block == r)
        part = dataclasses.replace(
            ep,
            jacobian=ep.jacobian[:, units],
            diagonal=ep.diagonal[:, units],
            b=ep.kept[:, :, units],
            rows=(len(units),),
        )
        total += total_variance(part, scales[:, r], kurtosis=kurtosis)
    return total
