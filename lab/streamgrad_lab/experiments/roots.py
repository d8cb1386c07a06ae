"""The inverse fourth root of a matrix, by which B becomes Q_0: by eigenvectors, or by matrix products alone."""

from typing import Any

import jax
import jax.numpy as jnp

from streamgrad._typing import Array, Float
from streamgrad.checks import check_choice
from streamgrad.noise import Shaping

ROOTS = ("eigh", "newton")

# Small eigenvalues of M grow by (5/4)^4 = 2.4 at each step: enough for a damping of 1e-5 and 200 units.
_STEPS = 26


def damped_q0(b: Float[Array, "N N"], damping: Any, root: str = "eigh") -> Shaping:
    """The damped optimal Q_0 and its inverse, but for Q_0's scale, on which nothing depends (Section 7.2).

        Q_0 = (B / m + damping I)^{-1/4},    m = tr(B) / N

    Like `streamgrad.theory.optimal_q0`, but `damping` may be a traced number, for a sweep in one program, and
    the work may be left to matrix products.

    Args:
      b: B, symmetric and positive semidefinite; zero gives a multiple of the identity.
      damping: positive.
      root: "eigh", or "newton": a coupled Newton iteration, for a GPU, where an eigendecomposition is slow. In float32
        it finds Q_0 to about 1e-5.

    Returns:
      Q_0 and its inverse.

    Example:
      >>> import jax.numpy as jnp
      >>> q0, inverse = damped_q0(jnp.diag(jnp.array([3.0, 1.0])), 0.5)
      >>> (q0 @ inverse).round(3).tolist()
      [[1.0, 0.0], [0.0, 1.0]]

    References:
      Guo and Higham, A Schur-Newton method for the matrix pth root and its inverse, 2006.
    """
    check_choice("root", root, ROOTS)
    size = b.shape[0]
    mean = jnp.trace(b) / size
    one = jnp.eye(size, dtype=b.dtype)
    a = (b + b.T) / 2 / jnp.where(mean > 0, mean, 1) + damping * one
    if root == "eigh":
        values, vectors = jnp.linalg.eigh(a)
        values = jnp.maximum(values, damping / 2)[None]  # rounding may take from the small ones, but not all
        return Shaping((vectors * values**-0.25) @ vectors.T, (vectors * values**0.25) @ vectors.T)
    return _newton(a, one)


def _newton(a: Float[Array, "N N"], one: Float[Array, "N N"]) -> Shaping:
    """X ← X T, M ← T^4 M with T = (5 I - M)/4: M tends to I while M = X^4 A, so that X tends to A^{-1/4}."""

    def product(x: Array, y: Array) -> Array:
        return jnp.matmul(x, y, precision="highest")  # TF32 would not get beyond three digits

    scale = 2.5 / jnp.linalg.norm(a)

    def step(_: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        x, m = carry
        t = (5 * one - m) / 4
        square = product(t, t)
        return product(x, t), product(product(square, square), m)

    x, _ = jax.lax.fori_loop(0, _STEPS, step, (scale**0.25 * one, scale * a))
    x = (x + x.T) / 2
    inverse = product(product(x, x), product(x, a))
    # What rounding has left between the two, one Newton step for the inverse mends: the estimate must stay unbiased.
    inverse = product(inverse, 2 * one - product(x, inverse))
    return Shaping(x, inverse)
