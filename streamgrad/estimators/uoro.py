"""Unbiased online recurrent optimisation, generalised: any cut, noise, rescaling, Q_0 and number of groups."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from streamgrad._typing import Array, Float, PyTree
from streamgrad.base import Chunk, Cut, GradientEstimator, Influence, Model, real_dtype
from streamgrad.checks import check_choice, check_model, find_cut
from streamgrad.contract import label_of
from streamgrad.engine.by_steps import stepwise
from streamgrad.engine.estimator import Algorithm, Noisy, estimator
from streamgrad.estimators.uoro_across import uoro_across
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
    form: str = "auto",
    inside: str = "estimated",
    blocks: int = 1,
    shrink: float | int | str = 1,
) -> GradientEstimator:
    """Unbiased online recurrent optimisation: dh_t/dθ as a rank-one product of two vectors (Section 5).

        h̃_t = γ_t (dh_t/dh_{t-1}) h̃_{t-1} + β_t (dh_t/dz_t) Q_0 u_t
        w̃_t = w̃_{t-1} / γ_t              + J_t^T Q_0^{-T} u_t / β_t
        dL_t/dθ ≈ (dL_t/dh_t · h̃_t) w̃_t

    With `inside="backprop"` only what lies before the chunk is estimated (`streamgrad.estimators.uoro_across`): inside
    it backpropagation is exact, and noise is on the state, once per chunk. It is far less noisy, at much the same cost.

    Args:
      model: the model whose gradients are estimated.
      cut: where noise is injected: "preactivation", "state" or "params".
      noise: "rademacher", "gaussian", or "given" (the caller passes u in place of the key).
      rescale: "gir" (greedy iterative rescaling), "greedy" (for the variance of the total gradient; needs the loss at
        every step and so the plain form; see `streamgrad.noise.greedy`), "none", or α as an array `[T]` or
        `[T, G]` over the positions of an episode; `streamgrad.noise.given` chooses how α is split.
      groups: G, how many blocks the preactivations are split into; each is a UORO of its own for its rows of the
        weights. Variance falls about G-fold, time grows with G. With several weight matrices each is at least a group.
      q0: Q_0, an invertible matrix `[N, N]` or diagonal `[N]`; None is the identity.
      immediate: "estimated", or "exact": the variant of Tallec and Ollivier, which backpropagates the current step and
        estimates the past alone.
      form: how it is computed, not what: "auto" touches the cotangent once per chunk where it can (at preactivations,
        with groups of the same size in each weight matrix), "plain" at every step, as the equations stand.
      inside: what of the chunk itself is estimated: "estimated", all, as in the paper, or "backprop", nothing. With
        "backprop" the noise is on the state: `cut`, `groups`, `q0`, `immediate` and `form` keep their defaults, and an
        α given as `rescale` has an entry for each chunk of an episode.
      blocks: R, with `inside="backprop"`: the state's units are dealt out to R blocks with a product h̃ w̃^T each.
        Variance falls about R-fold, memory and time grow with R.
      shrink: λ, with `inside="backprop"`: the weight of what lies before the chunk. 1 is unbiased, 0 is truncated BPTT,
        "auto" estimates from the spread over streams what minimises the squared error. Below 1 it is biased.

    Returns:
      The estimator. Its diagnostics are `gamma` and `beta`, `[T, G]`, or `[1, R]` for the whole chunk.
      `streamgrad.with_noise` changes q0 and α in its state, and `streamgrad.carried` chooses them from what past
      windows have shown.

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
    check_model(model)
    source = find_noise(noise)
    rescaling = find_rescaling(rescale)
    check_choice("inside", inside, ("estimated", "backprop"))
    if inside == "backprop":
        _check_across(rescaling, cut=cut, groups=groups, q0=q0, immediate=immediate, form=form)
        algorithm = uoro_across(model, source, rescaling, blocks, shrink)
        check = noise_check(source, rescaling, chunks=True)
        label = label_of("uoro", inside=inside, blocks=blocks, shrink=shrink)
        return estimator(model, algorithm._replace(check=check, uses_loss=shrink == "auto"), label=label)
    if blocks != 1 or shrink != 1:
        raise ValueError("blocks and shrink are for what lies before the chunk: they need inside='backprop'.")
    vertex = find_cut(model, cut)
    check_choice("immediate", immediate, ("estimated", "exact"))
    check_choice("form", form, ("auto", "plain"))
    layout = cuts.layout(model.cell, vertex)
    check_q0(q0, layout.size)
    partition = make_groups(layout, cut, groups, q0)
    rescaling.shared(partition.count, None)  # says so now where α does not fit the groups

    def rescaled(rescaling: Rescaling) -> Algorithm:
        influence = rank_one(layout, vertex, source, rescaling, partition, q0, immediate)
        algorithm = stepwise(model, influence)
        if form == "auto" and cut == "preactivation" and not rescaling.uses_loss and partition.even:
            parts = (model, vertex, partition, rescaling, influence.draw, algorithm.init, immediate)
            algorithm = Factored(*parts).algorithm()
        return algorithm._replace(check=noise_check(source, rescaling))

    free = cut == "preactivation" and q0 is None and rescaling.name == "gir"
    label = label_of("uoro", cut=cut, rescale=rescaling.name, groups=groups, q0=q0, immediate=immediate)
    return estimator(model, rescaled(rescaling), Noisy(partition, True, rescaled) if free else None, label=label)


def rank_one(
    layout: cuts.Layout,
    cut: Cut,
    source: Noise,
    rescaling: Rescaling,
    groups: Groups,
    q0: Any = None,
    immediate: str = "estimated",
) -> Influence:
    """The influence dh_t/dθ ≈ h̃_t w̃_t^T of `uoro`, out of its parts.

    Args:
      layout: the sizes at the cut.
      cut: where noise is injected.
      source: the noise.
      rescaling: how γ and β are chosen.
      groups: the blocks of z that are each an estimate of their own.
      q0: Q_0, or None.
      immediate: "estimated" or "exact".

    Returns:
      The influence. Its `advance` takes the noise as `Shaped`, and Q_0 from what is shared.
    """

    def init(params: PyTree, state: PyTree) -> UoroMemory:
        del state
        tangent = jnp.zeros((groups.count, layout.state_size), real_dtype(params))
        zero = jax.tree.map(jnp.zeros_like, params)
        remembered = rescaling.init(groups.count, tangent.dtype)
        return UoroMemory(tangent, zero, jnp.zeros(groups.count, tangent.dtype), remembered)

    def shared(params: PyTree) -> NoiseSettings:
        dtype = real_dtype(params)
        return NoiseSettings(shaping(q0, dtype), rescaling.shared(groups.count, dtype))

    def draw(shared: NoiseSettings, key: Any, length: int, dtype: Any) -> Shaped:
        return shape_noise(shared.shaping, source.draw(key, (length, layout.size), dtype))

    def advance(
        shared: NoiseSettings, memory: UoroMemory, step: Step, noise: Shaped, dl_dstate: Array
    ) -> tuple[UoroMemory, dict[str, Array]]:
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

    def contract(before: UoroMemory, after: UoroMemory, step: Step, dl_dstate: Array) -> PyTree:
        if immediate == "estimated":
            return groups.scale(after.cotangent, after.tangent @ dl_dstate)
        past = jax.vmap(step.propagate)(before.tangent) @ dl_dstate
        return jax.tree.map(jnp.add, groups.scale(before.cotangent, past), step.backprop(dl_dstate))

    return Influence(cut, init, advance, contract, draw, shared, uses_loss=rescaling.uses_loss)


def _check_across(rescaling: Rescaling, **options: Any) -> None:
    """What `inside="backprop"` has no use for has its default."""
    usual = inspect.signature(uoro).parameters
    for name, value in options.items():
        if value is not usual[name].default and not (isinstance(value, str | int) and value == usual[name].default):
            raise ValueError(f"with inside='backprop' noise is on the state, once per chunk: leave {name} as it is.")
    if rescaling.uses_loss:
        raise ValueError("with inside='backprop' the losses are never estimated: rescale='greedy' cannot look at them.")


def noise_check(source: Noise, rescaling: Rescaling, chunks: bool = False) -> Callable[[Chunk, int, Any], None]:
    """The check of an algorithm: the key is one for this noise, and a given α reaches to the end of an episode.

    With `chunks`, α has an entry for each chunk, of which there may be any number.
    """

    def check(chunk: Chunk, length: int, key: Any) -> None:
        source.check(key)
        if chunks:
            return
        if rescaling.length is not None and chunk.reset is None and length > rescaling.length:
            raise ValueError(f"alpha has {rescaling.length} entries, but the chunk has {length} steps and no reset.")

    return check
