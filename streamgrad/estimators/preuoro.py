"""PreUORO, also known as KF-RTRL: the temporal projection without the spatial one."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from streamgrad._typing import Array, Float, PyTree
from streamgrad.base import Cut, EstimatorState, GradientEstimator, Model, Params, real_dtype, worked
from streamgrad.checks import check_choice, find_cut
from streamgrad.engine.by_steps import by_steps
from streamgrad.engine.estimator import estimator
from streamgrad.engine.method import Method, Noisy
from streamgrad.estimators.uoro import noise_check
from streamgrad.noise.distributions import Noise, find_noise
from streamgrad.noise.groups import Groups
from streamgrad.noise.rescale import Rescaling, Terms, find_rescaling
from streamgrad.noise.settings import NoiseSettings
from streamgrad.step import cuts
from streamgrad.step.cuts import Step
from streamgrad.step.weights import Outer, sum_outer, zero_features


class PreUoroMemory(NamedTuple):
    """The estimate dh_t/dW ≈ H̃_t ⊗ w̃_t, one for each weight matrix W.

    Attributes:
      tangent: H̃_t transposed, one row for each preactivation of every matrix.
      cotangent: w̃_t, a vector over the features of each matrix; in the structure of the parameters.
      rescaling: what the rescaling remembers.
    """

    tangent: Float[Array, "N S"]
    cotangent: PyTree
    rescaling: PyTree


def preuoro(
    model: Model,
    noise: str | Noise = "rademacher",
    rescale: Any = "gir",
    immediate: str = "estimated",
) -> GradientEstimator:
    """UORO that projects in time alone, because dh_t/dW_t = (dh_t/dz_t) ⊗ a_t^T is of rank one already (Section 8).

        H̃_t = γ_t (dh_t/dh_{t-1}) H̃_{t-1} + β_t τ_t dh_t/dz_t
        w̃_t = w̃_{t-1} / γ_t              + τ_t a_t / β_t
        dL_t/dW ≈ (H̃_t^T dL_t/dh_t) w̃_t^T

    Under the same noise and the same α it equals `uoro(groups=N)`. Its variance is about N times smaller than that of
    `uoro`, its cost N times larger. With several weight matrices each has its own γ and β.

    Args:
      model: the model whose gradients are estimated; its cell must have the cut "preactivation".
      noise: "rademacher", "gaussian", or "given" (the caller passes τ in place of the key).
      rescale: "gir", "greedy", "none", or α as an array `[T]`, or `[T, M]` for M weight matrices.
      immediate: "estimated", or "exact", which backpropagates the current step and estimates the past alone.

    Returns:
      The estimator. Its diagnostics are `gamma` and `beta`, `[T, M]`.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.gru(2, 4), sg.heads.softmax(3))
      >>> params = model.init(jax.random.key(0))
      >>> est = sg.preuoro(model)
      >>> chunk = sg.Chunk(jnp.ones((5, 2)), jnp.zeros(5, int))
      >>> grads, state, info = est.update(params, est.init(params), chunk, jax.random.key(1))
      >>> info.diagnostics["gamma"].shape  # three weight matrices
      (5, 3)

    References:
      Mujika, Meier and Steger, Approximating real-time recurrent learning with random Kronecker factors, 2018.
    """
    model = worked(model)
    vertex = find_cut(model, "preactivation")
    source = find_noise(noise)
    rescaling = find_rescaling(rescale)
    check_choice("immediate", immediate, ("estimated", "exact"))
    layout = cuts.layout(model.cell, vertex)
    count = len(layout.rows)
    matrices = Groups(count, np.repeat(np.arange(count), layout.rows), layout.rows)
    rescaling.shared(count, None)  # raises here where α does not fit

    def method(rescaling: Rescaling) -> Method:
        return kronecker(model, vertex, source, rescaling, matrices, immediate)

    noisy = Noisy(matrices, False, method) if rescaling.name == "gir" else None
    return estimator(dataclasses.replace(method(rescaling), noisy=noisy))


def kronecker(model: Model, cut: Cut, source: Noise, rescaling: Rescaling, matrices: Groups, immediate: str) -> Method:
    """The recursion dh_t/dW ≈ H̃_t ⊗ w̃_t of `preuoro`, out of its parts; `matrices` has a group for each W."""
    layout = cuts.layout(model.cell, cut)
    count, matrix_of_row = matrices.count, matrices.index

    def squares(rows: Float[Array, "N S"]) -> Float[Array, " M"]:
        return jnp.zeros(count, rows.dtype).at[matrix_of_row].add(jnp.sum(rows**2, axis=1))

    def square_lengths(vectors: PyTree) -> Float[Array, " M"]:
        return jnp.stack([leaf @ leaf for leaf in jax.tree.leaves(vectors)])

    def scale(vectors: PyTree, by: Float[Array, " M"]) -> PyTree:
        leaves, structure = jax.tree.flatten(vectors)
        return jax.tree.unflatten(structure, [by[i] * leaf for i, leaf in enumerate(leaves)])

    def init(params: Params) -> EstimatorState:
        dtype = real_dtype(params.cell)
        tangent = jnp.zeros((layout.size, layout.state_size), dtype)
        memory = PreUoroMemory(tangent, zero_features(params.cell), rescaling.init(count, dtype))
        return EstimatorState(model.init_state(params), memory, NoiseSettings(alpha=rescaling.shared(count, dtype)))

    def draw(shared: NoiseSettings, key: Any, length: int, dtype: Any) -> Float[Array, " T"]:
        del shared
        return source.draw(key, (length,), dtype)

    def advance(
        shared: NoiseSettings, memory: PreUoroMemory, step: Step, noise: Float[Array, ""], dl_dstate: Array
    ) -> tuple[PreUoroMemory, dict[str, Array]]:
        propagated = jax.vmap(step.propagate)(memory.tangent)
        pushed = noise * jax.vmap(step.push)(jnp.eye(layout.size, dtype=propagated.dtype))
        pulled = jax.tree.map(lambda a: noise * a, step.features)
        terms = Terms(squares(propagated), square_lengths(memory.cotangent), squares(pushed), square_lengths(pulled))
        if rescaling.uses_loss:
            terms = terms._replace(
                seen_propagated=squares((propagated @ dl_dstate)[:, None]),
                seen_pushed=squares(step.push_back(dl_dstate)[:, None]),
            )
        past, present, remembered = rescaling.coefficients(shared.alpha, memory.rescaling, terms)
        tangent = past.tangent[matrix_of_row][:, None] * propagated + present.tangent[matrix_of_row][:, None] * pushed
        cotangent = jax.tree.map(jnp.add, scale(memory.cotangent, past.cotangent), scale(pulled, present.cotangent))
        return PreUoroMemory(tangent, cotangent, remembered), {"gamma": past.tangent, "beta": present.tangent}

    def contract(before: PreUoroMemory, after: PreUoroMemory, step: Step, dl_dstate: Array) -> list[Outer]:
        """The factors of outer products; `total` multiplies them for all steps and streams at once."""
        if immediate == "estimated":
            return [Outer(step.unravel(after.tangent @ dl_dstate), after.cotangent)]
        past = jax.vmap(step.propagate)(before.tangent) @ dl_dstate
        now = step.push_back(dl_dstate)
        return [Outer(step.unravel(past), before.cotangent), Outer(step.unravel(now), step.features)]

    def total(contributions: list[Outer]) -> PyTree:
        return jax.tree.map(lambda *terms: sum(terms), *map(sum_outer, contributions))

    return Method(
        name="preuoro",
        options={"rescale": rescaling.name, "immediate": immediate},
        model=model,
        init=init,
        run=by_steps(model, cut, init, advance, contract, total),
        draw=draw,
        check=noise_check(source, rescaling),
        uses_loss=rescaling.uses_loss,
    )
