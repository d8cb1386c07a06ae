"""RTRL with the spatial projection alone: the other half of UORO's noise."""

from typing import Any

import jax
import jax.numpy as jnp

from streamgrad._typing import Array, PyTree
from streamgrad.base import EstimatorState, GradientEstimator, Model, Params, real_dtype, worked
from streamgrad.checks import find_cut
from streamgrad.engine.by_steps import by_steps
from streamgrad.engine.estimator import estimator
from streamgrad.engine.method import Method
from streamgrad.estimators.rtrl import contract, propagate
from streamgrad.noise.distributions import Noise, find_noise
from streamgrad.noise.settings import NoiseSettings
from streamgrad.noise.shaping import Shaped, check_q0, shape_noise, shaping
from streamgrad.step import cuts
from streamgrad.step.cuts import Step
from streamgrad.step.weights import zero_each


def spatial_rtrl(
    model: Model, cut: str = "preactivation", noise: str | Noise = "rademacher", q0: Any = None
) -> GradientEstimator:
    """RTRL in which the immediate Jacobian is projected onto noise (Section 5.1; "spatial" in Figure 4).

        M_t = (dh_t/dh_{t-1}) M_{t-1} + (dh_t/dz_t) Q_0 ν_t ν_t^T Q_0^{-1} J_t

    It costs what RTRL costs; it is there to tell the noise of space from that of time.

    Args:
      model: the model whose gradients are estimated.
      cut: where noise is injected: "preactivation", "state" or "params".
      noise: as in `uoro`.
      q0: as in `uoro`.

    Returns:
      The estimator.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.vanilla(2, 4), sg.heads.softmax(3))
      >>> params = model.init(jax.random.key(0))
      >>> est = sg.spatial_rtrl(model, cut="state")
      >>> chunk = sg.Chunk(jnp.ones((5, 2)), jnp.zeros(5, int))
      >>> grads, state, info = est.update(params, est.init(params), chunk, jax.random.key(1))
      >>> state.memory["w"].shape
      (4, 4, 7)
    """
    model = worked(model)
    vertex = find_cut(model, cut)
    source = find_noise(noise)
    layout = cuts.layout(model.cell, vertex)
    check_q0(q0, layout.size)

    def init(params: Params) -> EstimatorState:
        memory, settings = (
            zero_each(params.cell, layout.state_size),
            NoiseSettings(shaping(q0, real_dtype(params.cell))),
        )
        return EstimatorState(model.init_state(params), memory, settings)

    def draw(shared: NoiseSettings, key: Any, length: int, dtype: Any) -> Shaped:
        return shape_noise(shared.shaping, source.draw(key, (length, layout.size), dtype))

    def advance(
        shared: NoiseSettings, memory: PyTree, step: Step, noise: Shaped, dl_dstate: Array
    ) -> tuple[PyTree, dict[str, Array]]:
        del shared, dl_dstate
        pushed = step.push(noise.right)

        def add(past: Array, pulled: Array) -> Array:
            # Written out, so that it is added on the fly: as a product of matrices it would be made first.
            return past + jnp.expand_dims(pushed, tuple(range(1, past.ndim))) * pulled[None]

        return jax.tree.map(add, propagate(step, memory, layout.state_size), step.pull(noise.left)), {}

    return estimator(
        Method(
            name="spatial_rtrl",
            options={"cut": cut, "q0": q0},
            model=model,
            init=init,
            run=by_steps(model, vertex, init, advance, contract),
            draw=draw,
            check=lambda chunk, length, key: source.check(key),
        )
    )
