"""Rescaling: the coefficients γ_t and β_t by which the two factors of the estimate are balanced (Section 5.2).

    h̃_t = γ_t (dh_t/dh_{t-1}) h̃_{t-1} + β_t (dh_t/dz_t) Q_0 u_t
    w̃_t = w̃_{t-1} / γ_t              + J_t^T Q_0^{-T} u_t / β_t

What a contribution of step s carries at step t is α_s = β_s γ_{s+1} … γ_t; it cancels in the mean.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from streamgrad._typing import Array, Float, PyTree
from streamgrad.checks import check_choice, check_decay, is_traced


class Terms(NamedTuple):
    """The squared norms of the four terms of the recursion, one for each group.

    Attributes:
      propagated: ‖(dh_t/dh_{t-1}) h̃_{t-1}‖².
      cotangent: ‖w̃_{t-1}‖².
      pushed: ‖(dh_t/dz_t) Q_0 u_t‖².
      pulled: ‖J_t^T Q_0^{-T} u_t‖².
      seen_propagated: (dL_t/dh_t (dh_t/dh_{t-1}) h̃_{t-1})², what the loss sees of the past; None unless asked for.
      seen_pushed: E(dL_t/dh_t (dh_t/dz_t) Q_0 u_t)² = ‖dL_t/dz_t Q_0‖², likewise; the noise averages out exactly.
    """

    propagated: Float[Array, " G"]
    cotangent: Float[Array, " G"]
    pushed: Float[Array, " G"]
    pulled: Float[Array, " G"]
    seen_propagated: Float[Array, " G"] | None = None
    seen_pushed: Float[Array, " G"] | None = None


class Scales(NamedTuple):
    """The factors of a pair of terms: (γ, 1/γ) for the past, (β, 1/β) for the present.

    (0, 0) drops the pair, which changes nothing but noise where one of its factors is zero.
    """

    tangent: Float[Array, " G"]
    cotangent: Float[Array, " G"]


class Rescaling(NamedTuple):
    """A choice of γ and β.

    Attributes:
      name: its name.
      shared: `shared(groups, dtype)`, the part that all streams have in common (α), or None.
      init: `init(groups, dtype)`, a stream's memory (its position in the episode), or None; a reset forgets it.
      coefficients: `coefficients(shared, memory, terms) -> (past, present, memory)`.
      length: number of steps it knows of, or None for any.
      uses_norms: whether `coefficients` looks at `terms`; if not, they are not computed.
      uses_loss: whether it looks at what the loss sees of them, which only a step-by-step recursion can tell it.
    """

    name: str
    shared: Callable[[int, Any], PyTree]
    init: Callable[[int, Any], PyTree]
    coefficients: Callable[[PyTree, PyTree, Terms], tuple[Scales, Scales, PyTree]]
    length: int | None = None
    uses_norms: bool = False
    uses_loss: bool = False


def _nothing(groups: int, dtype: Any) -> None:
    del groups, dtype


def _none(shared: PyTree, memory: PyTree, terms: Terms) -> tuple[Scales, Scales, PyTree]:
    del shared
    one = jnp.ones_like(terms.propagated)
    return Scales(one, one), Scales(one, one), memory


def balance(tangent: Float[Array, "*G"], cotangent: Float[Array, "*G"], otherwise: float = 0.0) -> Scales:
    """Scales that make two norms equal, given their squares: γ⁴ = ‖cotangent‖² / ‖tangent‖², the GIR choice.

    Where either norm is zero the scales are `otherwise`. 0 drops the pair, whose product is zero too: no division by
    zero, the same mean, and no noise from a cotangent that has no tangent. Squares that can be zero where the terms
    are not need 1, which keeps the pair as it is.

    Example:
      >>> import jax.numpy as jnp
      >>> scales = balance(jnp.array([1.0, 0.0]), jnp.array([16.0, 16.0]))
      >>> scales.tangent.tolist(), scales.cotangent.tolist()
      ([2.0, 0.0], [0.5, 0.0])
    """
    alive = (tangent > 0) & (cotangent > 0)
    # Roots first: their ratio stays inside the range of float32 where that of the squares would not.
    fourth = jnp.sqrt(jnp.where(alive, cotangent, 1)) / jnp.sqrt(jnp.where(alive, tangent, 1))
    gamma = jnp.sqrt(fourth)
    return Scales(jnp.where(alive, gamma, otherwise), jnp.where(alive, 1 / gamma, otherwise))


def _gir(shared: PyTree, memory: PyTree, terms: Terms) -> tuple[Scales, Scales, PyTree]:
    del shared
    return balance(terms.propagated, terms.cotangent), balance(terms.pushed, terms.pulled), memory


class Fraction(NamedTuple):
    """A running average of the fraction of a term that the loss sees.

    Attributes:
      total: the weighted sum of the fractions.
      weight: the sum of the weights.
    """

    total: Float[Array, " G"]
    weight: Float[Array, " G"]


def greedy(decay: float = 0.9) -> Rescaling:
    """The greedy online coefficients, which look at what the loss sees (Appendix D).

        β_s⁴ = E‖u_s^T Q_0^{-1} J_s‖² / E(dL_s/dh_s (dh_s/dz_s) Q_0 u_s)²
        γ_s⁴ = E‖w̃_{s-1}‖²           / E(dL_s/dh_s (dh_s/dh_{s-1}) h̃_{s-1})²

    A stream has one noise, not an expectation. Norms hardly differ from their mean and are taken as they are, as in
    GIR. What the loss sees is the square of a single number, often close to zero; of it the *fraction*, that square
    over the squared norm of the tangent, is averaged over the steps of the episode; k steps back counts decay^k:

        E(dL_s/dh_s · x_s)² ≈ ‖x_s‖² avg_{r<=s} (dL_r/dh_r · x_r)² / ‖x_r‖²

    Fractions do not change when γ rescales h̃, so that the average does not lag behind. The estimate is unbiased, since
    the coefficients of a step depend on its own noise through squares alone. As long as the loss has seen nothing they
    are those of GIR. A reset starts the averages again.

    Args:
      decay: in [0, 1); 0 takes each step's squares as they are.

    Returns:
      The rescaling; `rescale="greedy"` is the one with the default decay.

    Example:
      >>> import streamgrad as sg
      >>> model = sg.Model(sg.cells.vanilla(2, 3), sg.heads.softmax(2))
      >>> est = sg.uoro(model, rescale=sg.noise.greedy(decay=0.99))
    """
    check_decay(decay)

    def init(groups: int, dtype: Any) -> tuple[Fraction, Fraction]:
        zero = jnp.zeros(groups, dtype)
        return Fraction(zero, zero), Fraction(zero, zero)

    def expect(before: Fraction, square: Array, seen: Array | None) -> tuple[Array, Fraction]:
        """The mean square that the loss sees, from the squared norm of now and the average fraction."""
        assert seen is not None, "the estimator must compute what the loss sees"
        limits = jnp.finfo(square.dtype)
        alive = square > 0  # a term that is zero says nothing about what would be seen of it
        now = jnp.where(alive, seen / jnp.where(alive, square, 1), 0)
        # Weights that add up to 1 keep an average below the largest number; an infinity would never leave.
        total = jnp.minimum(decay * before.total + (1 - decay) * now, limits.max)
        weight = decay * before.weight + (1 - decay) * alive.astype(square.dtype)
        average = jnp.where(total > 0, total / jnp.where(weight > 0, weight, 1), 1)
        # Neither end of the float range may turn into a pair that is dropped though it is not zero.
        return jnp.where(alive, jnp.clip(average * square, limits.tiny, limits.max), 0), Fraction(total, weight)

    def coefficients(
        shared: PyTree, memory: tuple[Fraction, Fraction], terms: Terms
    ) -> tuple[Scales, Scales, tuple[Fraction, Fraction]]:
        del shared
        propagated, past = expect(memory[0], terms.propagated, terms.seen_propagated)
        pushed, present = expect(memory[1], terms.pushed, terms.seen_pushed)
        return balance(propagated, terms.cotangent), balance(pushed, terms.pulled), (past, present)

    return Rescaling("greedy", _nothing, init, coefficients, uses_norms=True, uses_loss=True)


def check_alpha(alpha: Any) -> tuple[int, ...]:
    """α is positive, for each step and perhaps group; returns its shape."""
    try:
        shape = np.shape(alpha)
    except ValueError as error:
        raise ValueError("alpha must be an array, but its rows have different lengths.") from error
    if len(shape) not in (1, 2) or 0 in shape:
        raise ValueError(f"alpha must have the shape [T], or [T, G] with one for each group, not {shape}.")
    if not is_traced(alpha):
        values = np.asarray(alpha)
        real = np.issubdtype(values.dtype, np.floating) or np.issubdtype(values.dtype, np.integer)
        if not real or not np.all(np.isfinite(values)) or not np.all(values > 0):
            raise ValueError("alpha must be real, finite and positive.")
    return shape


def given(alpha: Any, gamma: str = "geometric") -> Rescaling:
    """Rescaling by a given α, one for each position in the episode.

    The total scaling α_s is all that the estimate depends on, so the two ways of splitting it into γ and β give the
    same one: γ = 1 with β = α, or, as in the paper's experiments (Section 7.2) and better for small floats, γ equal
    to the geometric mean of the ratios of consecutive α, α_s / α_{s+1}, with β_s = α_s / γ^(T-s).

    Args:
      alpha: `[T]`, or `[T, G]` for one α per group; positive. An episode longer than T keeps the last entry.
      gamma: "geometric" or "one".

    Returns:
      The rescaling.

    Example:
      >>> import jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.vanilla(2, 3), sg.heads.softmax(2))
      >>> est = sg.uoro(model, rescale=sg.noise.given(jnp.array([4.0, 2.0, 1.0]), gamma="one"))
    """
    check_choice("gamma", gamma, ("geometric", "one"))
    shape = check_alpha(alpha)
    last = shape[0] - 1

    def shared(groups: int, dtype: Any) -> Float[Array, "T G"]:
        if len(shape) == 2 and shape[1] not in (1, groups):
            raise ValueError(f"alpha has {shape[1]} columns, but there are {groups} groups.")
        values = jnp.asarray(alpha, dtype)
        return jnp.broadcast_to(values[:, None] if values.ndim == 1 else values, (last + 1, groups))

    def coefficients(alpha: Float[Array, "T G"], position: Array, terms: Terms) -> tuple[Scales, Scales, Array]:
        del terms
        log_alpha = jnp.log(alpha)
        s = jnp.minimum(position, last)
        # Per step; γ = 1 past the end, where α no longer changes.
        slope = (log_alpha[0] - log_alpha[-1]) / max(last, 1) if gamma == "geometric" else 0 * log_alpha[0]
        past = jnp.where(position > last, 0, slope)
        present = log_alpha[s] - (last - s).astype(slope.dtype) * slope
        past, present = (Scales(jnp.exp(log), jnp.exp(-log)) for log in (past, present))
        return past, present, position + 1

    return Rescaling("given", shared, lambda groups, dtype: jnp.zeros((), jnp.int32), coefficients, last + 1)


def total_log_alpha(gamma: Float[Array, "T G"], beta: Float[Array, "T G"]) -> Float[Array, "T G"]:
    """log of α_s = β_s γ_{s+1} … γ_T, from the coefficients of a chunk.

    A scale of zero drops a term that is zero, so that any other would do: it counts as 1.

    Example:
      >>> import jax.numpy as jnp
      >>> gamma, beta = jnp.array([[0.0], [2.0], [3.0]]), jnp.array([[1.0], [5.0], [7.0]])
      >>> jnp.exp(total_log_alpha(gamma, beta)).round(3).T.tolist()
      [[6.0, 15.0, 7.0]]
    """

    def log(scale: Array) -> Array:
        return jnp.log(jnp.where(scale > 0, scale, 1))

    following = jnp.cumsum(log(gamma[:0:-1]), axis=0)[::-1]
    return log(beta) + jnp.concatenate([following, jnp.zeros_like(gamma[:1])])


_RESCALINGS = {
    "none": Rescaling("none", _nothing, _nothing, _none),
    "gir": Rescaling("gir", _nothing, _nothing, _gir, uses_norms=True),
    "greedy": greedy(),
}


def find_rescaling(rescale: Any) -> Rescaling:
    """A rescaling by its name, or from an array of α; a `Rescaling` is passed on as it is."""
    if isinstance(rescale, Rescaling):
        return rescale
    if hasattr(rescale, "shape") or isinstance(rescale, list | tuple):
        return given(rescale)
    check_choice("rescale (or an array of alpha)", rescale, tuple(_RESCALINGS))
    return _RESCALINGS[rescale]
