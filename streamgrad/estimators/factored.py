"""UORO at the preactivations with the cotangent kept in factors: the same estimate at the price of BPTT.

Each step adds an outer product v_s a_s^T (v_s = Q_0^{-T} u_s) to w̃, which is as large as the weights *for each stream*;
touching it at every step is what makes the plain recursion slow. Inside a chunk it is kept as

    w̃_t = σ_t w̃_0 + Σ_s c_{s,t} v_s a_s^T,

where σ and c are divided by γ_t at each step and c_{t,t} = 1/β_t. With k_t = dL_t/dh_t · h̃_t the chunk's gradient is

    (Σ_t k_t σ_t) w̃_0 + Σ_s (Σ_{t>=s} k_t c_{s,t}) v_s a_s^T,

one weighted sum and one matrix product, and w̃ is written once per chunk. GIR's ‖w̃‖ follows by

    ‖w̃_t‖² = ‖w̃_{t-1}‖²/γ² + 2/(γβ) v_t^T w̃_{t-1} a_t + ‖v_t‖²‖a_t‖²/β²,

whose middle term needs w̃_0 only through v_t^T w̃_0, one product per chunk since the noise is known ahead.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from streamgrad._typing import Array, Float, PyTree
from streamgrad.base import Chunk, Cut, EstimatorState, Info, Model, Params, real_dtype
from streamgrad.checks import leading_length
from streamgrad.cuts import linearise
from streamgrad.estimators.groups import Groups
from streamgrad.estimators.outer import Outer, sum_outer
from streamgrad.estimators.rescale import Rescaling, Terms
from streamgrad.estimators.shaping import Shaped
from streamgrad.online import Parts, restart


class Factors(NamedTuple):
    """The gradient of one stream before it is summed: weight_g w̃_0 by rows, and outer products over time.

    Attributes:
      weights: Σ_t k_t σ_t, one for each group.
      cotangent: w̃_0.
      outer: leaves `[T, rows]` and `[T, A]`.
    """

    weights: Float[Array, " G"]
    cotangent: PyTree
    outer: Outer


class Coefficients(NamedTuple):
    """w̃ in terms of what the chunk began with and of its steps.

    Attributes:
      sigma: of w̃_0.
      c: of v_s a_s^T, zero for steps yet to come.
      square_norm: ‖w̃‖², of each group's rows.
    """

    sigma: Float[Array, " G"]
    c: Float[Array, "T G"]
    square_norm: Float[Array, " G"]


def factored_parts(
    model: Model,
    cut: Cut,
    groups: Groups,
    rescaling: Rescaling,
    draw: Callable[..., Shaped],
    init: Callable[[Params], EstimatorState],
    immediate: str,
) -> Parts:
    """UORO's `parts` as `streamgrad.online.estimator` takes them, for whole chunks; `sum_factors` is their total.

    Args:
      model: the model whose gradients are estimated.
      cut: its cut at the preactivations.
      groups: must be `even`.
      rescaling: how γ and β are chosen.
      draw: UORO's noise.
      init: UORO's state.
      immediate: "estimated" or "exact".

    Returns:
      The function.
    """

    def parts(params: Params, state: EstimatorState, chunk: Chunk, key: Any) -> tuple[PyTree, EstimatorState, Info]:
        fresh = init(params)
        memory = state.memory
        length = leading_length(chunk, "time")
        noise = draw(state.shared, key, length, real_dtype(params.cell))
        known = _known_ahead(groups, noise.left, memory.cotangent) if rescaling.uses_norms else None
        clear = Coefficients(*(jnp.zeros_like(leaf) for leaf in _begin(memory.square_norm, length)))

        def step(carry: tuple, now: tuple) -> tuple[tuple, tuple]:
            cell_state, tangent, remembered, before, history = carry
            t, x, reset, right, known = now
            cell_state = restart(reset, fresh.cell, cell_state)
            tangent = restart(reset, fresh.memory.tangent, tangent)
            remembered = restart(reset, fresh.memory.rescaling, remembered)
            before = restart(reset, clear, before)

            at = linearise(cut, params.cell, cell_state, x)
            propagated = jax.vmap(at.propagate)(tangent)
            pushed = jax.vmap(at.push)(groups.split(right))
            a = jax.tree.leaves(at.features)
            if known is None:  # γ and β do not look at norms
                nothing = jnp.zeros_like(before.sigma)
                cross, pulled, terms = nothing, nothing, Terms(nothing, nothing, nothing, nothing)
            else:
                cross, pulled = _cross_and_pulled(groups, before, known, history, a)
                terms = Terms(
                    jnp.linalg.norm(propagated, axis=1),
                    jnp.sqrt(before.square_norm),
                    jnp.linalg.norm(pushed, axis=1),
                    jnp.sqrt(pulled),
                )
            past, present, remembered = rescaling.coefficients(state.shared.rescaling, remembered, terms)
            after = _advance(before, t, past.cotangent, present.cotangent, cross, pulled)
            tangent = past.tangent[:, None] * propagated + present.tangent[:, None] * pushed
            history = [jax.lax.dynamic_update_index_in_dim(old, new, t, 0) for old, new in zip(history, a, strict=True)]

            seen = (tangent, after) if immediate == "estimated" else (propagated, before)
            kept = (at.state, seen[0], seen[1].sigma, seen[1].c, None if immediate == "estimated" else cell_state)
            diagnostics = {"gamma": past.tangent, "beta": present.tangent}
            return (at.state, tangent, remembered, after, history), (kept, diagnostics)

        weights = jax.tree.leaves(params.cell)
        history = [jnp.zeros((length, w.shape[1]), w.dtype) for w in weights]
        carry = (state.cell, memory.tangent, memory.rescaling, _begin(memory.square_norm, length), history)
        steps = (jnp.arange(length), chunk.inputs, chunk.reset, noise.right, known)
        carry, (kept, diagnostics) = jax.lax.scan(step, carry, steps)
        cell_state, tangent, remembered, end, history = carry
        states, tangents, sigmas, cs, befores = kept

        loss, head_grads, dl_dstate = model.read_out_chunk(params.head, states, chunk.targets)
        k = jnp.einsum("tgs,ts->tg", tangents, dl_dstate)
        # [T, G] per step to [T, N] per step and preactivation.
        left = noise.left * jnp.einsum("tg,tsg->sg", k, cs)[:, groups.index]
        if immediate == "exact":
            left = left + _immediate(cut, params.cell, befores, chunk.inputs, dl_dstate)
        structure = jax.tree.structure(params.cell)
        right = jax.tree.unflatten(structure, history)
        outer = Outer(jax.tree.unflatten(structure, groups.by_matrix(left)), right)
        factors = Factors(jnp.sum(k * sigmas, axis=0), memory.cotangent, outer)

        new = [
            jnp.einsum("tn,ta->na", v, a) + sigma[:, None] * w
            for v, a, sigma, w in zip(
                groups.by_matrix(noise.left * end.c[:, groups.index]),
                history,
                groups.by_matrix(end.sigma[groups.index]),
                jax.tree.leaves(memory.cotangent),
                strict=True,
            )
        ]
        cotangent = jax.tree.unflatten(structure, new)
        # The norm is taken anew from what is written, so that its rounding errors do not outlive the chunk.
        memory = type(memory)(tangent, cotangent, groups.square_norms(cotangent), remembered)
        info = Info(loss, diagnostics)
        return (factors, head_grads), EstimatorState(cell_state, memory, state.shared), info

    return parts


def sum_factors(groups: Groups, factors: Factors) -> PyTree:
    """The cell's gradient, summed over streams, the leading axis."""
    rows = groups.by_matrix(factors.weights[:, groups.index])
    leaves, structure = jax.tree.flatten(factors.cotangent)
    past = [jnp.einsum("bn,bna->na", weight, leaf) for weight, leaf in zip(rows, leaves, strict=True)]
    return jax.tree.map(jnp.add, jax.tree.unflatten(structure, past), sum_outer(factors.outer))


class _Known(NamedTuple):
    """What GIR needs and the noise alone decides, one entry for each weight matrix; time leading.

    Attributes:
      v_v: v_t · v_s inside each group, `[T, T, g]`.
      v_w: v_t^T w̃_0 for each group's rows, `[T, g, A]`.
      square: ‖v_t‖² inside each group, `[T, g]`.
    """

    v_v: list[Array]
    v_w: list[Array]
    square: list[Array]


def _known_ahead(groups: Groups, left: Float[Array, "T N"], cotangent: PyTree) -> _Known:
    known = _Known([], [], [])
    matrices = zip(groups.by_matrix(left), jax.tree.leaves(cotangent), groups.of_matrix(), strict=True)
    for v, w, members in matrices:
        v = v.reshape(len(v), len(members), -1)
        w = w.reshape(len(members), -1, w.shape[1])
        known.v_v.append(jnp.einsum("tgn,sgn->tsg", v, v))
        known.v_w.append(jnp.einsum("tgn,gna->tga", v, w))
        known.square.append(jnp.sum(v**2, axis=2))
    return known


def _cross_and_pulled(
    groups: Groups, before: Coefficients, known: _Known, history: list[Array], features: list[Array]
) -> tuple[Float[Array, " G"], Float[Array, " G"]]:
    """v_t^T w̃_{t-1} a_t and ‖v_t‖² ‖a_t‖², for each group."""
    cross = pulled = jnp.zeros_like(before.sigma)
    matrices = zip(groups.of_matrix(), known.v_v, known.v_w, known.square, history, features, strict=True)
    for members, v_v, v_w, square, past, a in matrices:
        here = before.sigma[members] * (v_w @ a) + (past @ a) @ (before.c[:, members] * v_v)
        if groups.count == len(members):
            cross, pulled = cross + here, pulled + square * (a @ a)
        else:
            cross, pulled = cross.at[members].add(here), pulled.at[members].add(square * (a @ a))
    return cross, pulled


def _begin(square_norm: Float[Array, " G"], length: int) -> Coefficients:
    one = jnp.ones_like(square_norm)
    return Coefficients(one, jnp.zeros((length, len(one)), one.dtype), square_norm)


def _advance(before: Coefficients, t: Array, past: Array, present: Array, cross: Array, pulled: Array) -> Coefficients:
    """One step: divide by γ (`past` is 1/γ, `present` 1/β), and add the step's own outer product."""
    c = jax.lax.dynamic_update_index_in_dim(past[None] * before.c, present, t, 0)
    kept, added = past**2 * before.square_norm, present**2 * pulled
    # Where all but cancels, rounding must not make a square negative, nor zero, which would drop the cotangent.
    floor = jnp.finfo(kept.dtype).eps * (kept + added)
    square_norm = jnp.maximum(kept + 2 * past * present * cross + added, floor)
    return Coefficients(past * before.sigma, c, square_norm)


def _immediate(
    cut: Cut, params: PyTree, states: PyTree, inputs: PyTree, dl_dstate: Float[Array, "T S"]
) -> Float[Array, "T N"]:
    """dL_t/dz_t through the current step alone, for all steps at once."""

    def one(state: PyTree, x: PyTree, dl_dstate: Array) -> Array:
        return linearise(cut, params, state, x).push_back(dl_dstate)

    return jax.vmap(one)(states, inputs, dl_dstate)


def is_even(groups: Groups) -> bool:
    """Whether the groups inside each weight matrix have the same size, which the products here need."""
    return all(
        rows % len(members) == 0 and np.array_equal(index, np.repeat(members, rows // len(members)))
        for rows, members, index in zip(groups.rows, groups.of_matrix(), groups.by_matrix(groups.index), strict=True)
    )
