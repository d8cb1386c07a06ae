"""UORO across chunks: backpropagation inside, rank-one products for what lies before."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from streamgrad._typing import Array, Float, PyTree
from streamgrad.base import Chunk, EstimatorState, GradientEstimator, Model, Params, real_dtype, worked
from streamgrad.checks import check_at_most, check_size
from streamgrad.engine.across import finish, older_credit, with_older
from streamgrad.engine.chunk import go_back, go_forward
from streamgrad.engine.collectives import Devices
from streamgrad.engine.estimator import estimator
from streamgrad.engine.method import Method, Outcome
from streamgrad.noise.distributions import Noise, find_noise
from streamgrad.noise.rescale import Terms, find_rescaling
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


def uoro_across(
    model: Model,
    blocks: int = 1,
    shrink: float | int | str = 1,
    noise: str | Noise = "rademacher",
    rescale: Any = "gir",
) -> GradientEstimator:
    """Backpropagation inside the chunk, and rank-one products for the past before it: UORO across chunks.

        dL_chunk/dθ ≈ backpropagation inside the chunk + λ Σ_r (dL_chunk/dh_0 · h̃_r) w̃_r
        h̃_r ← γ_r Φ h̃_r + β_r ν_r,    w̃_r ← w̃_r / γ_r + ν_r^T (Σ_s G_s J_s) / β_r

    `uoro` estimates everything, even the gradient through the step just taken. Here only the past is estimated, and
    noise ν is on the state, once per chunk: ν_r is ν on the units of block r, and zero elsewhere. It is far less noisy
    than `uoro`, at much the same cost.

    Args:
      model: the model whose gradients are estimated.
      blocks: R: the state's units are dealt out to R blocks with a product h̃ w̃^T each. Variance falls about R-fold,
        memory and time grow with R.
      shrink: λ, the weight of the past. 1 is unbiased, 0 is `bptt`, "auto" estimates from the spread over
        streams the weight that minimises the squared error. Below 1 it is biased.
      noise: "rademacher", "gaussian", or "given" (the caller passes ν in place of the key).
      rescale: "gir", "none", or α as an array with an entry for each chunk of an episode, as in `uoro`.

    Returns:
      The estimator. Its diagnostics are `gamma` and `beta`, `[1, R]` for the whole chunk. Memory is R P.
      `batched(uoro_across(model), 16, watched=4)` takes the influence of 4 of 16 streams alone.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.gru(2, 4), sg.heads.softmax(3))
      >>> params = model.init(jax.random.key(0))
      >>> est = sg.uoro_across(model, blocks=2)
      >>> chunk = sg.Chunk(jnp.ones((5, 2)), jnp.zeros(5, int))
      >>> grads, state, info = est.update(params, est.init(params), chunk, jax.random.key(1))
      >>> state.memory.tangent.shape, info.diagnostics["gamma"].shape
      ((2, 4), (1, 2))

    References:
      Tallec and Ollivier, Unbiased online recurrent optimization, 2018.
    """
    model = worked(model)
    source = find_noise(noise)
    rescaling = find_rescaling(rescale)
    size = cuts.layout(model.cell, model.cell.cuts["state"]).state_size
    check_size(blocks=blocks)
    check_at_most("blocks", blocks, size, "the number of state units")
    check_shrink(shrink)
    if rescaling.uses_loss:
        raise ValueError("uoro_across estimates no losses that rescale='greedy' could look at: leave rescale as it is.")
    rescaling.shared(blocks, None)  # raises here where α does not fit
    member = block_of_unit(size, blocks) == np.arange(blocks)[:, None]

    def init(params: Params) -> EstimatorState:
        dtype = real_dtype(params.cell)
        nothing, remembered = jnp.zeros(blocks, dtype), rescaling.init(blocks, dtype)
        tangent, cotangent = jnp.zeros((blocks, size), dtype), zero_each(params.cell, blocks)
        known = Shrinkage(jnp.zeros((), dtype), jnp.zeros((), dtype)) if shrink == "auto" else None
        settings = NoiseSettings(alpha=rescaling.shared(blocks, dtype), shrinkage=known)
        memory = AcrossMemory(tangent, cotangent, nothing, remembered)
        return EstimatorState(model.init_state(params), memory, settings)

    def draw(shared: NoiseSettings, key: Any, length: int, dtype: Any) -> Float[Array, "R S"]:
        del shared, length
        return jnp.where(member, source.draw(key, (size,), dtype)[None], 0)

    def run(
        params: Params, state: EstimatorState, chunk: Chunk, noise: Float[Array, "b R S"], devices: Devices
    ) -> Outcome:
        forward = go_forward(model, params, state.cell, chunk, state.memory.tangent)
        back = go_back(forward, params.cell, noise)
        older = older_credit(_contract, state, back.dl_dstart, forward)
        older, shared = _weigh(shrink, state, back.dl_dstart[: len(noise)], older, devices)
        grads, before = with_older(back.inside, older, state, forward)
        assert forward.tangents is not None
        before = _restarted(before, forward.begun(len(noise)), rescaling.init(blocks, noise.dtype))
        terms = Terms(
            jnp.sum(forward.tangents**2, axis=2),
            before.square_norm,
            jnp.sum(noise**2, axis=2),
            square_norms_pulled(back.pulled),
        )
        rescaled = jax.vmap(rescaling.coefficients, in_axes=(None, 0, 0))
        past, present, remembered = rescaled(shared.alpha, before.rescaling, terms)
        tangent = past.tangent[:, :, None] * forward.tangents + present.tangent[:, :, None] * noise
        scaled = scale_each(before.cotangent, past.cotangent)
        cotangent = add_pulled(scaled, scale_pulled(back.pulled, present.cotangent))
        memory = AcrossMemory(tangent, cotangent, square_norms_each(cotangent), remembered)
        told = {"gamma": past.tangent[:, None], "beta": present.tangent[:, None]}
        return finish(model, params, forward, grads, memory, shared, told)

    return estimator(
        Method(
            name="uoro_across",
            options={"blocks": blocks, "shrink": shrink, "rescale": rescaling.name},
            model=model,
            init=init,
            run=run,
            draw=draw,
            check=lambda chunk, length, key: source.check(key),
            uses_loss=shrink == "auto",
            watchable=True,
        )
    )


def _contract(memory: AcrossMemory, dl_dstart: Float[Array, "b S"]) -> PyTree:
    """The mean over streams of Σ_r (dL_chunk/dh_0 · h̃_r) w̃_r."""
    seen = jnp.einsum("brs,bs->br", memory.tangent, dl_dstart)
    return sum_scaled(memory.cotangent, seen / len(seen))


def _weigh(
    shrink: float | int | str, state: EstimatorState, dl_dstart: Float[Array, "b S"], older: PyTree, devices: Devices
) -> tuple[PyTree, NoiseSettings]:
    """λ times the older credit, and what streams share afterwards."""
    shared, memory = state.shared, state.memory
    weight: Any = shrink
    if shared.shrinkage is not None:
        seen = jnp.einsum("brs,bs->br", memory.tangent, dl_dstart)
        found = _look_at_spread(shared.shrinkage, memory.cotangent, seen, older, devices)
        shared = shared._replace(shrinkage=found)
        known = found.square > 0
        weight = jnp.where(known, jnp.clip(found.signal / jnp.where(known, found.square, 1), 0, 1), 0)
    return jax.tree.map(lambda leaf: weight * leaf, older), shared


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
