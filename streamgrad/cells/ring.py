"""Complex numbers inside the unit circle as real arrays: the eigenvalues of linear recurrent and trace units.

λ = exp(-exp(ν) + i exp(θ)) is inside the circle whatever ν and θ are.
"""

import math

import jax
import jax.numpy as jnp

from streamgrad._typing import Array, Float
from streamgrad.checks import check_number


def check_ring(r_min: float, r_max: float, max_phase: float) -> None:
    """The numbers say where λ may begin."""
    check_number(r_min=r_min, r_max=r_max, max_phase=max_phase)
    if not 0 <= r_min < r_max <= 1:
        raise ValueError(f"r_min and r_max must be such that 0 <= r_min < r_max <= 1, not {r_min!r} and {r_max!r}.")
    if not 0 < max_phase <= 2 * math.pi:
        raise ValueError(f"max_phase must be a number above 0 and at most 2 pi, not {max_phase!r}.")


def init_ring(
    key: Array, size: int, r_min: float, r_max: float, max_phase: float
) -> tuple[Float[Array, " H"], Float[Array, " H"]]:
    """ν and θ of λ drawn evenly from the ring r_min <= |λ| <= r_max, with angles from 0 to max_phase.

    Where λ = 0, |λ| = 1 or the angle is 0, ν or θ would be infinite: such λ are drawn a rounding error away.
    """
    for_radius, for_angle = jax.random.split(key)
    least = float(jnp.finfo(jnp.result_type(float)).eps)
    squared = jax.random.uniform(for_radius, (size,)) * (r_max**2 - r_min**2) + r_min**2
    angle = max_phase * jax.random.uniform(for_angle, (size,), minval=least)
    return jnp.log(-0.5 * jnp.log(jnp.clip(squared, least, 1 - least))), jnp.log(angle)


def eigenvalues(nu: Float[Array, " H"], theta: Float[Array, " H"]) -> tuple[Float[Array, " H"], Float[Array, " H"]]:
    """The real and the imaginary part of λ."""
    radius, angle = jnp.exp(-jnp.exp(nu)), jnp.exp(theta)
    return radius * jnp.cos(angle), radius * jnp.sin(angle)


def normaliser(nu: Float[Array, " H"]) -> Float[Array, " H"]:
    """γ = sqrt(1 - |λ|²), to all digits even where |λ| is close to 1."""
    return jnp.sqrt(-jnp.expm1(-2 * jnp.exp(nu)))


def turn(by: tuple[Float[Array, " H"], Float[Array, " H"]], pairs: Float[Array, " D"]) -> Float[Array, " D"]:
    """λ h, element by element, for vectors of real parts and then imaginary ones.

    Re(λ h) = Re λ Re h - Im λ Im h,    Im(λ h) = Re λ Im h + Im λ Re h
    """
    real, imag = jnp.split(pairs, 2)
    return jnp.concatenate([by[0] * real - by[1] * imag, by[0] * imag + by[1] * real])


def twice(vector: Float[Array, " H"]) -> Float[Array, " D"]:
    """A vector for real parts, and the same for imaginary ones."""
    return jnp.concatenate([vector, vector])


def init_parts(key: Array, n_out: int, *scaled: tuple[int, float]) -> Float[Array, "N A"]:
    """Normal weights without a bias, for features in parts, each with a size and a standard deviation."""
    keys = jax.random.split(key, len(scaled))
    parts = [scale * jax.random.normal(k, (n_out, size)) for k, (size, scale) in zip(keys, scaled, strict=True)]
    return jnp.concatenate(parts, axis=1)
