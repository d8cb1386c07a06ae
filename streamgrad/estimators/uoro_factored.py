"""UORO at the preactivations with the cotangent kept in factors: the same estimate at the price of BPTT.

Each step adds an outer product v_s a_s^T (v_s = Q_0^{-T} u_s) to w̃, which is as large as the weights *for each stream*;
touching it at every step is what makes the plain recursion slow. Inside a chunk it is kept as

    w̃_t = σ_t w̃_0 + Σ_s c_{s,t} v_s a_s^T,

where σ and c are divided by γ_t at each step and c_{t,t} = 1/β_t. With k_t = dL_t/dh_t · h̃_t the chunk's gradient is

    (Σ_t k_t σ_t) w̃_0 + Σ_s (Σ_{t>=s} k_t c_{s,t}) v_s a_s^T,

one weighted sum and one matrix product, and w̃ is written once per chunk. GIR's ‖w̃‖ follows by

    ‖w̃_t‖² = ‖w̃_{t-1}‖²/γ² + 2/(γβ) v_t^T w̃_{t-1} a_t + ‖v_t‖²‖a_t‖²/β²,

whose middle term comes from the projections v_s^T w̃_{t-1} of all the steps s that are still ahead. The noise is known.
They begin as one product, v_s^T w̃_0, and each step adds (v_s · v_t) a_t / β_t to them: at once for the few steps that
follow, and as a matrix product every few steps for the rest.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from streamgrad._typing import Array, Float, PyTree
from streamgrad.base import Chunk, Cut, EstimatorState, Info, Model, Params
from streamgrad.checks import leading_length
from streamgrad.engine.chunk import episode_over, in_stretches
from streamgrad.engine.method import Outcome, Seen, per_stream, sum_over_streams
from streamgrad.noise.groups import Groups
from streamgrad.noise.rescale import Rescaling, Terms
from streamgrad.noise.shaping import Shaped
from streamgrad.step.cuts import linearise
from streamgrad.step.platform import unroll
from streamgrad.step.weights import (
    Outer,
    add_outer,
    by_matrix,
    like_params,
    project_row_groups,
    sum_outer,
    sum_row_groups,
)
from streamgrad.trees import cleared, restart


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


# Steps after which GIR's projections of all later steps are brought up to date.
STEPS_AHEAD = 8


def block_length(length: int, size: int) -> int:
    """How many steps GIR takes between two writes of w̃: so few that the projections cost little beside N A."""
    return min(length, max(2 * STEPS_AHEAD, min(256, size // 4)))


@dataclasses.dataclass(frozen=True)
class Factored:
    """UORO for whole chunks, out of its parts.

    Attributes:
      model: the model whose gradients are estimated.
      cut: its cut at the preactivations.
      groups: must be even.
      rescaling: how γ and β are chosen.
      init: UORO's state.
      immediate: "estimated" or "exact".
    """

    model: Model
    cut: Cut
    groups: Groups
    rescaling: Rescaling
    init: Callable[[Params], EstimatorState]
    immediate: str

    @property
    def run(self) -> Callable[..., Outcome]:
        """`Method.run`."""
        return per_stream(self.one, self.total)

    def one(self, params: Params, state: EstimatorState, chunk: Chunk, noise: Shaped) -> Outcome:
        """A chunk of one stream."""
        length = leading_length(chunk, "time")
        (cell_state, memory), kept = in_stretches(
            lambda carry, steps: self._block(params, state.shared.alpha, carry, steps),
            (state.cell, state.memory),
            (chunk.inputs, chunk.reset, noise),
            block_length(length, noise.left.shape[1]) if self.rescaling.uses_norms else length,
        )
        loss, head_grads, dl_dstate = self.model.read_out_chunk(params.head, kept["state"], chunk.targets)
        k = jnp.einsum("tgs,ts->tg", kept["tangent"], dl_dstate)
        past, present = _cotangent_scales(kept["scales"], chunk.reset)
        weight, sums = _reach_back(k, past, self.immediate)
        left = noise.left * (present * sums)[:, self.groups.index]
        if self.immediate == "exact":
            left = left + _immediate(self.cut, params.cell, kept["before"], chunk.inputs, dl_dstate)
        features = jax.tree.unflatten(jax.tree.structure(params.cell), kept["features"])
        begins = None if chunk.reset is None else chunk.reset[0]
        cotangent = cleared(begins, state.memory.cotangent)  # its weight is zero, but it may have gone to NaN
        factors = Factors(weight, cotangent, Outer(like_params(params.cell, left), features))
        outputs = jax.vmap(self.model.cell.output)(kept["state"])
        info = Info(loss, {"gamma": kept["scales"][:, 0], "beta": kept["scales"][:, 1]}, outputs)
        seen = Seen(jax.vmap(lambda state: ravel_pytree(state)[0])(kept["state"]), dl_dstate)
        return Outcome(Params(factors, head_grads), EstimatorState(cell_state, memory, state.shared), info, seen)

    def total(self, summands: Params) -> Params:
        """The gradient, summed over streams."""
        factors, head_grads = summands
        past = sum_row_groups(factors.cotangent, [factors.weights[:, members] for members in self.groups.of_matrix()])
        cell = jax.tree.map(jnp.add, past, sum_outer(factors.outer))
        return Params(cell, sum_over_streams(head_grads))

    def _block(self, params: Params, alpha: PyTree, carry: tuple, steps: tuple) -> tuple[tuple, dict[str, PyTree]]:
        """Take state, tangent and cotangent through a block."""
        cell_state, memory = carry
        inputs, reset, noise = steps
        ahead, known, few = None, None, len(noise.left)
        if self.rescaling.uses_norms:
            ahead, known = _known_ahead(self.groups, noise.left, memory.cotangent)
            few = min(few, STEPS_AHEAD)
        begin = (cell_state, memory.tangent, memory.rescaling, memory.square_norm, ahead, jnp.zeros((), jnp.int32))
        end, kept = in_stretches(
            lambda carry, steps: self._few(params, alpha, carry, steps), begin, (inputs, reset, noise.right, known), few
        )
        cell_state, tangent, remembered = end[:3]
        sigma, c = _left_at_the_end(*_cotangent_scales(kept["scales"], reset))
        features = cleared(episode_over(reset), kept["features"])
        before = cleared(None if reset is None else jnp.any(reset), memory.cotangent)
        cotangent = _write(self.groups, before, sigma, c, noise.left, features)
        # The norm is that of what is written: its rounding errors do not outlive the block.
        square_norm = self.groups.square_norms(cotangent)
        new = memory._replace(tangent=tangent, cotangent=cotangent, square_norm=square_norm, rescaling=remembered)
        return (cell_state, new), kept

    def _few(self, params: Params, alpha: PyTree, carry: tuple, steps: tuple) -> tuple[tuple, dict[str, PyTree]]:
        """Take state and tangent through a few steps; returns what the gradient needs of each of them."""
        *begin, ahead, offset = carry
        inputs, reset, right, known = steps
        count, here = len(right), None
        if known is not None:  # the projections of these steps alone, and their products among themselves
            here = [jax.lax.dynamic_slice_in_dim(leaf, offset, count, axis=1) for leaf in ahead]
            inside = [jax.lax.dynamic_slice_in_dim(leaf, offset, count, axis=2) for leaf in known.v_v]
            steps = (inputs, reset, right, _Known(inside, known.square))
        step = functools.partial(self._step, params, self.init(params), alpha)
        end, kept = jax.lax.scan(step, (*begin, here), (jnp.arange(count), steps), unroll=unroll(on_cpu=2))
        if known is not None:
            sigma, c = _left_at_the_end(*_cotangent_scales(kept["scales"], reset))
            features = cleared(episode_over(reset), kept["features"])
            ahead = cleared(None if reset is None else jnp.any(reset), ahead)
            ahead = _look_further_ahead(self.groups, ahead, known.v_v, features, sigma, c)
        return (*end[:4], ahead, offset + count), kept

    def _step(
        self, params: Params, fresh: EstimatorState, alpha: PyTree, carry: tuple, now: tuple
    ) -> tuple[tuple, dict[str, PyTree]]:
        """One step: the recursion of h̃, with ‖w̃‖ followed in place of w̃."""
        cell_state, tangent, remembered, square_norm, here = carry
        t, (x, reset, right, known) = now
        cell_state = restart(reset, fresh.cell, cell_state)
        tangent = restart(reset, fresh.memory.tangent, tangent)
        remembered = restart(reset, fresh.memory.rescaling, remembered)
        square_norm = restart(reset, fresh.memory.square_norm, square_norm)
        here = restart(reset, jax.tree.map(jnp.zeros_like, here), here)

        at = linearise(self.cut, params.cell, cell_state, x)
        propagated = jax.vmap(at.propagate)(tangent)
        pushed = jax.vmap(at.push)(self.groups.split(right))
        a = jax.tree.leaves(at.features)
        cross, terms = square_norm, Terms(square_norm, square_norm, square_norm, square_norm)
        if known is not None:  # else the rescaling does not look at them
            cross, pulled = _cross_and_pulled(self.groups, here, t, known, a)
            terms = Terms(jnp.sum(propagated**2, axis=1), square_norm, jnp.sum(pushed**2, axis=1), pulled)
        past, present, remembered = self.rescaling.coefficients(alpha, remembered, terms)
        tangent = past.tangent[:, None] * propagated + present.tangent[:, None] * pushed
        kept = {
            "state": at.state,
            "tangent": tangent if self.immediate == "estimated" else propagated,
            "features": a,
            # As one array, since everything that is kept costs a write of its own at every step.
            "scales": jnp.stack([past.tangent, present.tangent]),
        }
        if known is not None:
            here = _look_ahead(self.groups, here, known.v_v, a, past.cotangent, present.cotangent)
            square_norm = next_square_norm(terms, past.cotangent, present.cotangent, cross)
        if self.immediate == "exact":
            kept["before"] = cell_state
        return (at.state, tangent, remembered, square_norm, here), kept


class _Known(NamedTuple):
    """What GIR needs and the noise alone decides, one entry for each weight matrix; time leading.

    Attributes:
      v_v: v_t · v_s inside each group, `[T, g, s]`.
      square: ‖v_t‖² inside each group, `[T, g]`.
    """

    v_v: list[Array]
    square: list[Array]


def _known_ahead(groups: Groups, left: Float[Array, "T N"], cotangent: PyTree) -> tuple[list[Array], _Known]:
    """The projections v_s^T w̃_0 of all steps s, `[g, s, A]` for each weight matrix, and what they will be added.

    Groups lead, so that the products are plain ones of matrices as they lie in memory.
    """
    known, blocks = _Known([], []), []
    for v, members in zip(by_matrix(left, groups.rows), groups.of_matrix(), strict=True):
        v = jnp.swapaxes(v.reshape(len(left), len(members), -1), 0, 1)
        blocks.append(v)
        products = v @ jnp.swapaxes(v, 1, 2)
        known.v_v.append(jnp.swapaxes(products, 0, 1))
        known.square.append(jnp.diagonal(products, axis1=1, axis2=2).T)
    return project_row_groups(blocks, cotangent), known


def _cross_and_pulled(
    groups: Groups, ahead: list[Array], t: Array, known: _Known, features: list[Array]
) -> tuple[Float[Array, " G"], Float[Array, " G"]]:
    """v_t^T w̃_{t-1} a_t and ‖v_t‖² ‖a_t‖², for each group."""
    cross = jnp.zeros(groups.count, features[0].dtype)
    pulled = cross
    for members, projections, square, a in zip(groups.of_matrix(), ahead, known.square, features, strict=True):
        # As sums: a product of two vectors for each stream is a call of its own, which costs more than its arithmetic.
        here = jnp.sum(jax.lax.dynamic_index_in_dim(projections, t, 1, keepdims=False) * a[None], axis=1)
        square = square * jnp.sum(a**2)
        if groups.count == len(members):
            cross, pulled = cross + here, pulled + square
        else:
            cross, pulled = cross.at[members].add(here), pulled.at[members].add(square)
    return cross, pulled


def _look_ahead(
    groups: Groups, here: list[Array], v_v: list[Array], features: list[Array], past: Array, present: Array
) -> list[Array]:
    """The projections of the few next steps after one: divided by γ (`past` is 1/γ), (v_s · v_t) a_t / β added.

    Those of steps that have passed are carried along: a buffer that is updated all over is updated in place.
    """
    new = []
    for members, projections, products, a in zip(groups.of_matrix(), here, v_v, features, strict=True):
        added = (present[members][:, None] * products)[:, :, None] * a[None, None]
        new.append(past[members][:, None, None] * projections + added)
    return new


def _look_further_ahead(
    groups: Groups, ahead: list[Array], v_v: list[Array], features: list[Array], sigma: Array, c: Array
) -> list[Array]:
    """The projections of all steps of the block after a few: the same, with those few as one matrix product."""
    new = []
    for members, projections, products, a in zip(groups.of_matrix(), ahead, v_v, features, strict=True):
        weighted = jnp.moveaxis(c[:, members][:, :, None] * products, 0, 2)
        new.append(sigma[members][:, None, None] * projections + weighted @ a)
    return new


def next_square_norm(terms: Terms, past: Array, present: Array, cross: Array) -> Float[Array, " G"]:
    """‖w̃_t‖² from ‖w̃_{t-1}‖², ‖ν_t J_t‖² and their product, `past` and `present` being 1/γ and 1/β."""
    kept, added = past**2 * terms.cotangent, present**2 * terms.pulled
    # Where all but cancels, rounding must not make a square negative, nor zero, which would drop the cotangent.
    floor = jnp.finfo(kept.dtype).eps * (kept + added)
    return jnp.maximum(kept + 2 * past * present * cross + added, floor)


def _cotangent_scales(scales: Float[Array, "T 2 G"], reset: Array | None) -> tuple[Array, Array]:
    """1/γ and 1/β from γ and β, `[T, G]` each; zero stays zero, and nothing passes a reset."""
    inverse = jnp.where(scales > 0, 1 / jnp.where(scales > 0, scales, 1), 0)
    past, present = inverse[:, 0], inverse[:, 1]
    return cleared(reset, past), present


def _left_at_the_end(past: Float[Array, "T G"], present: Float[Array, "T G"]) -> tuple[Array, Array]:
    """What is left of w̃_0, `[G]`, and of each outer product, `[T, G]`: 1/γ over all steps that follow, times 1/β."""
    following = jax.lax.associative_scan(jnp.multiply, past, reverse=True)
    return following[0], present * jnp.concatenate([following[1:], jnp.ones_like(following[:1])])


def _reach_back(k: Float[Array, "T G"], past: Float[Array, "T G"], immediate: str) -> tuple[Array, Array]:
    """Σ_t k_t σ_t, `[G]`, and Σ_{t>=s} k_t c_{s,t} but for the factor 1/β_s, `[T, G]`.

    The sums obey r_s = k_s + r_{s+1}/γ_{s+1}. With the current step exact, k_t belongs to w̃_{t-1}, one step earlier.
    """
    first = jnp.zeros_like(k[0])
    if immediate == "exact":
        first, k = k[0], jnp.concatenate([k[1:], jnp.zeros_like(k[:1])])
    ratio = jnp.concatenate([past[1:], jnp.ones_like(past[:1])])

    def join(later: tuple[Array, Array], earlier: tuple[Array, Array]) -> tuple[Array, Array]:
        return later[0] * earlier[0], earlier[1] + earlier[0] * later[1]

    _, sums = jax.lax.associative_scan(join, (ratio, k), reverse=True)
    return first + past[0] * sums[0], sums


def _write(
    groups: Groups, cotangent: PyTree, sigma: Array, c: Array, left: Float[Array, "T N"], features: list[Array]
) -> PyTree:
    """σ w̃_0 + Σ_s c_s v_s a_s^T, row by row with the coefficients of its group."""
    scaled = by_matrix(left * c[:, groups.index], groups.rows)
    return add_outer(groups.scale(cotangent, sigma), scaled, features)


def _immediate(
    cut: Cut, params: PyTree, states: PyTree, inputs: PyTree, dl_dstate: Float[Array, "T S"]
) -> Float[Array, "T N"]:
    """dL_t/dz_t through the current step alone, for all steps at once."""

    def one(state: PyTree, x: PyTree, dl_dstate: Array) -> Array:
        return linearise(cut, params, state, x).push_back(dl_dstate)

    return jax.vmap(one)(states, inputs, dl_dstate)
