"""UORO across chunks: backpropagation inside, rank-one products for what lies before."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from streamgrad._typing import Array, Float, PyTree
from streamgrad.base import Model, real_dtype
from streamgrad.checks import check_at_most, check_size
from streamgrad.engine.chunk import Across, Crossing, chunkwise
from streamgrad.engine.collectives import Devices
from streamgrad.engine.estimator import Algorithm
from streamgrad.noise.distributions import Noise
from streamgrad.noise.rescale import Rescaling, Terms
from streamgrad.noise.settings import NoiseSettings, Shrinkage
from streamgrad.step import cuts
from streamgrad.step.weights import (
    add_pulled,
    scale_each,
    scale_pulled,
    square_norms_each,
    square_norms_pulled,
    sum_scaled,
    zero_each,
)
from streamgrad.trees import all_finite, cleared


class AcrossMemory(NamedTuple):
    """The estimate dh/dθ ≈ Σ_r h̃_r w̃_r^T, one product for each block of the state.

    Attributes:
      tangent: h̃_r.
      cotangent: w̃_r, like the cell's parameters with blocks leading.
      square_norm: ‖w̃_r‖².
      rescaling: what the rescaling remembers.
    """

    tangent: Float[Array, "R S"]
    cotangent: PyTree
    square_norm: Float[Array, " R"]
    rescaling: PyTree


DECAY = 0.99  # of the averages behind `shrink="auto"`, for each update


def block_of_unit(state_size: int, blocks: int) -> np.ndarray:
    """To which block each unit of the state belongs: in turns, so that each has units of every kind and layer."""
    return np.arange(state_size) % blocks


def check_shrink(shrink: Any) -> None:
    """`shrink` is "auto", or a number from 0 to 1."""
    number = isinstance(shrink, int | float) and not isinstance(shrink, bool)
    if shrink != "auto" and not (number and 0 <= shrink <= 1):
        raise ValueError(f"shrink must be 'auto' or a number from 0 to 1, not {shrink!r}.")


def uoro_across(model: Model, source: Noise, rescaling: Rescaling, blocks: int, shrink: float | int | str) -> Algorithm:
    """The algorithm behind `uoro(inside="backprop")`.

        dL_chunk/dθ ≈ backpropagation inside the chunk + λ Σ_r (dL_chunk/dh_0 · h̃_r) w̃_r
        h̃_r ← γ_r Φ h̃_r + β_r ν_r,    w̃_r ← w̃_r / γ_r + ν_r^T (Σ_s G_s J_s) / β_r

    The noise ν is on the state, once per chunk: ν_r is ν on the units of block r, and zero elsewhere.

    Args:
      model: the model whose gradients are estimated.
      source: the noise.
      rescaling: how γ and β are chosen.
      blocks: R.
      shrink: λ, or "auto".

    Returns:
      The algorithm.
    """
    size = cuts.layout(model.cell, model.cell.cuts["state"]).state_size
    check_size(blocks=blocks)
    check_at_most("blocks", blocks, size, "the number of state units")
    check_shrink(shrink)
    member = block_of_unit(size, blocks) == np.arange(blocks)[:, None]

    def init(params: PyTree, state: PyTree) -> AcrossMemory:
        del state
        dtype = real_dtype(params)
        nothing = jnp.zeros(blocks, dtype)
        remembered = rescaling.init(blocks, dtype)
        return AcrossMemory(jnp.zeros((blocks, size), dtype), zero_each(params, blocks), nothing, remembered)

    def shared(params: PyTree) -> NoiseSettings:
        dtype = real_dtype(params)
        zero = jnp.zeros((), dtype)
        known = Shrinkage(zero, zero) if shrink == "auto" else None
        return NoiseSettings(alpha=rescaling.shared(blocks, dtype), shrinkage=known)

    def draw(key: Any, length: int, dtype: Any) -> Float[Array, "R S"]:
        del length
        return jnp.where(member, source.draw(key, (size,), dtype)[None], 0)

    def asks(memory: AcrossMemory, noise: Array) -> Float[Array, "R S"]:
        del memory
        return noise

    def advance(
        shared: NoiseSettings, memory: AcrossMemory, noise: Float[Array, "b R S"], crossing: Crossing
    ) -> tuple[AcrossMemory, dict[str, Array]]:
        assert crossing.tangents is not None
        memory = _restarted(memory, crossing.reset, rescaling.init(blocks, noise.dtype))
        terms = Terms(
            jnp.sum(crossing.tangents**2, axis=2),
            memory.square_norm,
            jnp.sum(noise**2, axis=2),
            square_norms_pulled(crossing.pulled),
        )
        rescaled = jax.vmap(rescaling.coefficients, in_axes=(None, 0, 0))
        past, present, remembered = rescaled(shared.alpha, memory.rescaling, terms)
        tangent = past.tangent[:, :, None] * crossing.tangents + present.tangent[:, :, None] * noise
        kept = scale_each(memory.cotangent, past.cotangent)
        cotangent = add_pulled(kept, scale_pulled(crossing.pulled, present.cotangent))
        memory = AcrossMemory(tangent, cotangent, square_norms_each(cotangent), remembered)
        return memory, {"gamma": past.tangent[:, None], "beta": present.tangent[:, None]}

    def older(memory: AcrossMemory, dl_dstart: Float[Array, "b S"]) -> PyTree:
        seen = jnp.einsum("brs,bs->br", memory.tangent, dl_dstart)
        return sum_scaled(memory.cotangent, seen / len(seen))

    def weigh(
        shared: NoiseSettings, memory: AcrossMemory, dl_dstart: Float[Array, "b S"], mean: PyTree, devices: Devices
    ) -> tuple[PyTree, NoiseSettings]:
        weight = shrink
        if shared.shrinkage is not None:
            seen = jnp.einsum("brs,bs->br", memory.tangent, dl_dstart)
            found = _look_at_spread(shared.shrinkage, memory.cotangent, seen, mean, devices)
            shared = shared._replace(shrinkage=found)
            known = found.square > 0
            weight = jnp.where(known, jnp.clip(found.signal / jnp.where(known, found.square, 1), 0, 1), 0)
        return jax.tree.map(lambda leaf: weight * leaf, mean), shared

    def tangents(memory: AcrossMemory) -> Float[Array, "R S"]:
        return memory.tangent

    return chunkwise(model, Across(init, asks, advance, older, tangents, draw, shared, weigh=weigh))


def _restarted(memory: AcrossMemory, reset: Array | None, first: PyTree) -> AcrossMemory:
    """The memory of streams whose episode has begun inside the chunk, begun again; their tangents are zero already."""
    if reset is None:
        return memory

    def again(new: Array, old: Array) -> Array:
        return jnp.where(reset.reshape(-1, *(1,) * (old.ndim - 1)), new, old)

    cotangent, square_norm = cleared(reset, (memory.cotangent, memory.square_norm))
    return memory._replace(
        cotangent=cotangent, square_norm=square_norm, rescaling=jax.tree.map(again, first, memory.rescaling)
    )


def _look_at_spread(
    known: Shrinkage, cotangent: PyTree, seen: Float[Array, "b R"], mean: PyTree, devices: Devices
) -> Shrinkage:
    """The running averages after another chunk, from the corrections Σ_r (dL_chunk/dh_0 · h̃_r) w̃_r of the streams."""
    own, streams = len(seen), len(seen) * devices.count
    if streams < 2:
        raise ValueError("shrink='auto' looks at the spread over streams: use it under batched, with 2 or more.")
    each = jax.vmap(lambda cotangent, seen: jax.tree.map(lambda leaf: jnp.tensordot(seen, leaf, axes=1), cotangent))
    squares = [jnp.sum(leaf.reshape(own, -1) ** 2, axis=1) for leaf in jax.tree.leaves(each(cotangent, seen))]
    squares = jnp.sum(jnp.stack(squares), axis=0)
    # Of a stream that has gone to NaN nothing is known; where its episode begins it is nothing.
    squares = jnp.where(jnp.isfinite(squares), squares, 0)
    spread, mean = devices.mean((jnp.sum(squares) / own, mean))
    square = jnp.sum(jnp.stack([jnp.sum(leaf**2) for leaf in jax.tree.leaves(mean)]))
    new = Shrinkage(square - (spread - square) / (streams - 1), square)
    sound = all_finite(new)  # an average would never recover
    return jax.tree.map(lambda old, new: jnp.where(sound, DECAY * old + (1 - DECAY) * new, old), known, new)
