"""Unbiased online recurrent optimisation, generalised: any cut, noise, rescaling, Q_0 and number of groups."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from streamgrad._typing import Array, Float, PyTree
from streamgrad.base import Chunk, Cut, EstimatorState, GradientEstimator, Model, Params, real_dtype, worked
from streamgrad.checks import check_choice, find_cut
from streamgrad.engine.by_steps import by_steps
from streamgrad.engine.estimator import estimator
from streamgrad.engine.method import Method, Noisy
from streamgrad.estimators.uoro_factored import Factored
from streamgrad.noise.distributions import Noise, find_noise
from streamgrad.noise.groups import Groups, make_groups
from streamgrad.noise.rescale import Rescaling, Terms, find_rescaling
from streamgrad.noise.settings import NoiseSettings
from streamgrad.noise.shaping import Shaped, check_q0, shape_gradient, shape_noise, shaping
from streamgrad.step import cuts
from streamgrad.step.cuts import Step


class UoroMemory(NamedTuple):
    """The rank-one estimate dh_t/dθ ≈ h̃_t w̃_t^T, one for each group.

    Attributes:
      tangent: h̃_t.
      cotangent: w̃_t, like the cell's parameters; a group's is its rows.
      square_norm: ‖w̃_t‖², so that GIR need not read the cotangent to scale it.
      rescaling: what the rescaling remembers.
    """

    tangent: Float[Array, "G S"]
    cotangent: PyTree
    square_norm: Float[Array, " G"]
    rescaling: PyTree


def uoro(
    model: Model,
    cut: str = "preactivation",
    noise: str | Noise = "rademacher",
    rescale: Any = "gir",
    groups: int = 1,
    q0: Any = None,
    immediate: str = "estimated",
) -> GradientEstimator:
    """Unbiased online recurrent optimisation: dh_t/dθ as a rank-one product of two vectors (Section 5).

        h̃_t = γ_t (dh_t/dh_{t-1}) h̃_{t-1} + β_t (dh_t/dz_t) Q_0 u_t
        w̃_t = w̃_{t-1} / γ_t              + J_t^T Q_0^{-T} u_t / β_t
        dL_t/dθ ≈ (dL_t/dh_t · h̃_t) w̃_t

    At preactivations the cotangent w̃ is touched once per chunk (`streamgrad.estimators.uoro_factored`), elsewhere at
    every step, as the equations stand. `uoro_across` estimates only the past before the chunk, and is far less noisy.

    Args:
      model: the model whose gradients are estimated.
      cut: where noise is injected: "preactivation", "state" or "params".
      noise: "rademacher", "gaussian", or "given" (the caller passes u in place of the key).
      rescale: "gir" (greedy iterative rescaling), "greedy" (for the variance of the total gradient; needs the loss at
        every step; see `streamgrad.noise.greedy`), "none", or α as an array `[T]` or
        `[T, G]` over the positions of an episode; `streamgrad.noise.given` chooses how α is split.
      groups: G, how many blocks the preactivations are split into; each is a UORO of its own for its rows of the
        weights. Variance falls about G-fold, time grows with G. With several weight matrices each is at least a group.
      q0: Q_0, an invertible matrix `[N, N]` or diagonal `[N]`; None is the identity.
      immediate: "estimated", or "exact": the variant of Tallec and Ollivier, which backpropagates the current step and
        estimates the past alone.

    Returns:
      The estimator. Its diagnostics are `gamma` and `beta`, `[T, G]`. `streamgrad.with_noise` changes q0 and α in its
      state, and `streamgrad.carried` chooses them from what past windows have shown.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.lstm(2, 4), sg.heads.softmax(3))
      >>> params = model.init(jax.random.key(0))
      >>> est = sg.uoro(model, groups=4)
      >>> chunk = sg.Chunk(jnp.ones((5, 2)), jnp.zeros(5, int))
      >>> grads, state, info = est.update(params, est.init(params), chunk, jax.random.key(1))
      >>> grads.cell["w"].shape, info.diagnostics["gamma"].shape
      ((16, 7), (5, 4))

    References:
      Tallec and Ollivier, Unbiased online recurrent optimization, 2018.
      Cooijmans and Martens, On the variance of unbiased online recurrent optimization, 2019.
    """
    return _uoro(model, cut, noise, rescale, groups, q0, immediate, factored=True)


def uoro_plain(
    model: Model,
    cut: str = "preactivation",
    noise: str | Noise = "rademacher",
    rescale: Any = "gir",
    groups: int = 1,
    q0: Any = None,
    immediate: str = "estimated",
) -> GradientEstimator:
    """`uoro` with the recursion as the equations stand, which touches w̃ at every step; the same estimate."""
    return _uoro(model, cut, noise, rescale, groups, q0, immediate, factored=False)


def _uoro(
    model: Model, cut: str, noise: str | Noise, rescale: Any, groups: int, q0: Any, immediate: str, factored: bool
) -> GradientEstimator:
    model = worked(model)
    source = find_noise(noise)
    rescaling = find_rescaling(rescale)
    vertex = find_cut(model, cut)
    check_choice("immediate", immediate, ("estimated", "exact"))
    layout = cuts.layout(model.cell, vertex)
    check_q0(q0, layout.size)
    partition = make_groups(layout, cut, groups, q0)
    rescaling.shared(partition.count, None)  # raises here where α does not fit the groups

    def method(rescaling: Rescaling) -> Method:
        parts = RankOne(model, vertex, layout, source, rescaling, partition, q0, immediate)
        if factored and cut == "preactivation" and not rescaling.uses_loss and partition.even:
            run = Factored(model, vertex, partition, rescaling, parts.init, immediate).run
        else:
            run = by_steps(model, vertex, parts.init, parts.advance, parts.contract)
        return Method(
            name="uoro",
            options={"cut": cut, "rescale": rescaling.name, "groups": groups, "q0": q0, "immediate": immediate},
            model=model,
            init=parts.init,
            run=run,
            draw=parts.draw,
            check=noise_check(source, rescaling),
            uses_loss=rescaling.uses_loss,
        )

    free = cut == "preactivation" and q0 is None and rescaling.name == "gir"
    noisy = Noisy(partition, True, method) if free else None
    return estimator(dataclasses.replace(method(rescaling), noisy=noisy))


@dataclasses.dataclass(frozen=True)
class RankOne:
    """The recursion dh_t/dθ ≈ h̃_t w̃_t^T by steps, out of its parts.

    Attributes:
      model: the model whose gradients are estimated.
      cut: where noise is injected.
      layout: the sizes at the cut.
      source: the noise.
      rescaling: how γ and β are chosen.
      groups: the blocks of z that are each an estimate of their own.
      q0: Q_0, or None.
      immediate: "estimated" or "exact".
    """

    model: Model
    cut: Cut
    layout: cuts.Layout
    source: Noise
    rescaling: Rescaling
    groups: Groups
    q0: Any = None
    immediate: str = "estimated"

    def init(self, params: Params) -> EstimatorState:
        """No influence yet."""
        dtype, count = real_dtype(params.cell), self.groups.count
        tangent = jnp.zeros((count, self.layout.state_size), dtype)
        zero = jax.tree.map(jnp.zeros_like, params.cell)
        memory = UoroMemory(tangent, zero, jnp.zeros(count, dtype), self.rescaling.init(count, dtype))
        settings = NoiseSettings(shaping(self.q0, dtype), self.rescaling.shared(count, dtype))
        return EstimatorState(self.model.init_state(params), memory, settings)

    def draw(self, shared: NoiseSettings, key: Any, length: int, dtype: Any) -> Shaped:
        """Q_0 u_t and Q_0^{-T} u_t of a chunk."""
        return shape_noise(shared.shaping, self.source.draw(key, (length, self.layout.size), dtype))

    def advance(
        self, shared: NoiseSettings, memory: UoroMemory, step: Step, noise: Shaped, dl_dstate: Array
    ) -> tuple[UoroMemory, dict[str, Array]]:
        """h̃_t and w̃_t from h̃_{t-1} and w̃_{t-1}."""
        groups, rescaling = self.groups, self.rescaling
        propagated = jax.vmap(step.propagate)(memory.tangent)
        pushed = jax.vmap(step.push)(groups.split(noise.right))
        pulled = step.pull(noise.left)
        terms = Terms(
            jnp.sum(propagated**2, axis=1),
            memory.square_norm,
            jnp.sum(pushed**2, axis=1),
            groups.square_norms(pulled),
        )
        if rescaling.uses_loss:
            dl_dz = shape_gradient(shared.shaping, step.push_back(dl_dstate))
            seen_pushed = jnp.sum(groups.split(dl_dz) ** 2, axis=1)
            terms = terms._replace(seen_propagated=(propagated @ dl_dstate) ** 2, seen_pushed=seen_pushed)
        past, present, remembered = rescaling.coefficients(shared.alpha, memory.rescaling, terms)
        tangent = past.tangent[:, None] * propagated + present.tangent[:, None] * pushed
        cotangent = jax.tree.map(
            jnp.add,
            groups.scale(memory.cotangent, past.cotangent),
            groups.scale(pulled, present.cotangent),
        )
        new = UoroMemory(tangent, cotangent, groups.square_norms(cotangent), remembered)
        return new, {"gamma": past.tangent, "beta": present.tangent}

    def contract(self, before: UoroMemory, after: UoroMemory, step: Step, dl_dstate: Array) -> PyTree:
        """(dL_t/dh_t · h̃_t) w̃_t; or of the past alone, and the current step exact."""
        if self.immediate == "estimated":
            return self.groups.scale(after.cotangent, after.tangent @ dl_dstate)
        past = jax.vmap(step.propagate)(before.tangent) @ dl_dstate
        return jax.tree.map(jnp.add, self.groups.scale(before.cotangent, past), step.backprop(dl_dstate))


def noise_check(source: Noise, rescaling: Rescaling) -> Callable[[Chunk, int, Any], None]:
    """`Method.check`: the key is one for this noise, and a given α reaches to the end of an episode."""

    def check(chunk: Chunk, length: int, key: Any) -> None:
        source.check(key)
        if rescaling.length is not None and chunk.reset is None and length > rescaling.length:
            raise ValueError(f"alpha has {rescaling.length} entries, but the chunk has {length} steps and no reset.")

    return check
