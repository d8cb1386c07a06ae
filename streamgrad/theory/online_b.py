"""B estimated while the stream runs, with nothing of the future (Appendix F).

    ã_t = ã_{t-1} / γ_t + σ_t ‖a_t‖ / β_t
    h̃_t = η_t γ_t (dh_t/dh_{t-1}) h̃_{t-1} + ζ_t τ_t β_t (dh_t/dz_t) ν_t
    ν̃_t = ν̃_{t-1} / η_t + ν_t / ζ_t
    m̃_t = m̃_{t-1} + ã_t (dL_t/dh_t · h̃_t) ν̃_t

and ñ_t likewise, with the same σ and τ but a spatial noise μ of its own in place of ν. Then E[m̃_k ñ_k^T] = B^(k), which
is B of the first k steps. Each group has its own ã and h̃, and B its blocks.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from streamgrad._typing import Array, Float
from streamgrad.base import Chunk, Model, Params, fold_weight, real_dtype, widened
from streamgrad.checks import check_choice, check_chunk, check_own_matrices, find_cut
from streamgrad.noise.distributions import find_noise
from streamgrad.noise.groups import Groups, make_groups
from streamgrad.noise.rescale import balance
from streamgrad.step import cuts
from streamgrad.step.cuts import Step, linearise
from streamgrad.theory.spatial import make_alpha, matrix_of_group, same_group
from streamgrad.trees import restart


class BNoise(NamedTuple):
    """The four noises of Appendix F, one entry for each step.

    Attributes:
      sigma: σ, temporal, for ã; `[T]`.
      tau: τ, temporal, for both tangents; `[T]`.
      nu: ν, spatial, for m̃; `[T, N]`.
      mu: μ, spatial, for ñ; `[T, N]`.
    """

    sigma: Array
    tau: Array
    nu: Array
    mu: Array


class BHalf(NamedTuple):
    """One of the two replications.

    Attributes:
      tangent: h̃_t, one for each group.
      noise: ν̃_t.
      total: m̃_t.
    """

    tangent: Float[Array, "G S"]
    noise: Float[Array, " N"]
    total: Float[Array, " N"]


class BMemory(NamedTuple):
    """The memory of the recursions: ã_t of each group, the half with ν and the half with μ."""

    a: Float[Array, " G"]
    m: BHalf
    n: BHalf


class BEstimate(NamedTuple):
    """An estimate of B and its factors.

    Attributes:
      b: of B^(T), symmetric, zero between groups; positive semidefinite on average only.
      m: m̃_k for every k.
      n: ñ_k for every k.
    """

    b: Float[Array, "N N"]
    m: Float[Array, "T N"]
    n: Float[Array, "T N"]


def draw_b_noise(key: Any, length: int, size: int, dtype: Any = None, noise: str = "rademacher") -> BNoise:
    """Draw the four noises.

    Args:
      key: a PRNG key.
      length: T.
      size: N.
      dtype: of the noises.
      noise: "rademacher" or "gaussian".

    Returns:
      The noises.

    Example:
      >>> import jax, streamgrad as sg
      >>> sg.theory.draw_b_noise(jax.random.key(0), 5, 3).mu.shape
      (5, 3)
    """
    draw = find_noise(noise).draw
    dtype = jnp.result_type(float) if dtype is None else dtype
    shapes = ((length,), (length,), (length, size), (length, size))
    return BNoise(*(draw(k, shape, dtype) for k, shape in zip(jax.random.split(key, 4), shapes, strict=True)))


def init_b(partition: Groups, state_size: int, dtype: Any) -> BMemory:
    """The memory at the beginning of an episode: all zero."""
    zero = jnp.zeros(len(partition.index), dtype)
    half = BHalf(jnp.zeros((partition.count, state_size), dtype), zero, zero)
    return BMemory(jnp.zeros(partition.count, dtype), half, half)


def advance_b(
    partition: Groups,
    memory: BMemory,
    step: Step,
    dl_dstate: Float[Array, " S"],
    noise: BNoise,
    gamma: Float[Array, " G"],
    beta: Float[Array, " G"],
    rescale: str = "gir",
) -> BMemory:
    """One step of the recursions above; pure, for use in a scan beside the gradient's own.

    γ_t and β_t are those of the α that B is wanted for. With `rescale="gir"` η and ζ balance h̃ against ν̃, with "none"
    they are 1; the mean is the same.
    """
    if step.features is None:
        raise ValueError("B is estimated at preactivations: linearise at the cut 'preactivation'.")
    norms = jnp.stack([jnp.linalg.norm(a) for a in jax.tree.leaves(step.features)])
    a = memory.a / gamma + noise.sigma * norms[matrix_of_group(partition)] / beta

    def one_half(half: BHalf, spatial: Float[Array, " N"]) -> BHalf:
        propagated = gamma[:, None] * jax.vmap(step.propagate)(half.tangent)
        pushed = noise.tau * beta[:, None] * jax.vmap(step.push)(partition.split(spatial))
        eta, zeta = _scales(partition, propagated, half.noise, rescale), _scales(partition, pushed, spatial, rescale)
        tangent = eta[0][:, None] * propagated + zeta[0][:, None] * pushed
        tilde = eta[1][partition.index] * half.noise + zeta[1][partition.index] * spatial
        return BHalf(tangent, tilde, half.total + (a * (tangent @ dl_dstate))[partition.index] * tilde)

    return BMemory(a, one_half(memory.m, noise.nu), one_half(memory.n, noise.mu))


def estimate_b_online(
    model: Model,
    params: Params,
    chunk: Chunk,
    noise: BNoise,
    alpha: Any = None,
    groups: int = 1,
    rescale: str = "gir",
) -> BEstimate:
    """Estimate B online over one episode (Appendix F): unbiased, of rank two, and very noisy.

    Args:
      model: the model.
      params: its parameters.
      chunk: one stream, from the beginning of an episode on.
      noise: from `draw_b_noise`, or given.
      alpha: α that B is wanted for, `[T]`, `[T, G]`, or None for ones.
      groups: as in `uoro`.
      rescale: "gir" or "none", for η and ζ.

    Returns:
      The estimate; `m` and `n` up to k estimate B^(k). A reset adds the next episode's share to the sums.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.vanilla(2, 4), sg.heads.softmax(3))
      >>> params = model.init(jax.random.key(0))
      >>> chunk = sg.Chunk(jnp.ones((5, 2)), jnp.zeros(5, int))
      >>> noise = sg.theory.draw_b_noise(jax.random.key(1), 5, 4)
      >>> sg.theory.estimate_b_online(model, params, chunk, noise).b.shape
      (4, 4)
    """
    check_choice("rescale", rescale, ("gir", "none"))
    check_own_matrices(model)
    vertex = find_cut(model, "preactivation")
    length = check_chunk(model, chunk)
    chunk = fold_weight(chunk)
    layout = cuts.layout(model.cell, vertex)
    for name, want in (("sigma", ()), ("tau", ()), ("nu", (layout.size,)), ("mu", (layout.size,))):
        if np.shape(getattr(noise, name)) != (length, *want):
            got = np.shape(getattr(noise, name))
            raise ValueError(f"{name} must have the shape {(length, *want)}, not {got}.")
    partition = make_groups(layout, "preactivation", groups)
    params = widened(params)
    dtype = real_dtype(params.cell)
    alpha = make_alpha(alpha, length, dtype, partition)
    fresh, begin = model.init_state(params), init_b(partition, layout.state_size, dtype)

    def step(carry: tuple, now: tuple) -> tuple[tuple, tuple[Array, Array]]:
        state, memory = carry
        x, target, reset, noise, beta = now
        # The sums stay; the parts that carry the past on do not.
        clear = BMemory(begin.a, begin.m._replace(total=memory.m.total), begin.n._replace(total=memory.n.total))
        state, memory = restart(reset, (fresh, clear), (state, memory))
        at = linearise(vertex, params.cell, state, x)
        _, _, dl_dstate = model.read_out(params.head, at.state, target)
        memory = advance_b(partition, memory, at, dl_dstate, noise, jnp.ones_like(beta), beta, rescale)
        return (at.state, memory), (memory.m.total, memory.n.total)

    noise = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), noise)
    steps = (chunk.inputs, chunk.targets, chunk.reset, noise, alpha)
    _, (m, n) = jax.lax.scan(step, (fresh, begin), steps)
    product = jnp.outer(m[-1], n[-1])
    return BEstimate(jnp.where(same_group(partition), (product + product.T) / 2, 0), m, n)


def _scales(partition: Groups, tangent: Array, noise: Array, rescale: str) -> tuple[Array, Array]:
    """(η, 1/η) for each group, or (ζ, 1/ζ)."""
    if rescale == "none":
        one = jnp.ones(partition.count, tangent.dtype)
        return one, one
    squares = jnp.zeros(partition.count, noise.dtype).at[partition.index].add(noise**2)
    scales = balance(jnp.linalg.norm(tangent, axis=1), jnp.sqrt(squares))
    return scales.tangent, scales.cotangent
