"""NoBackTrack: UORO at the state, with the noise of each unit scaled at every step."""

from typing import Any

import jax
import jax.numpy as jnp

from streamgrad._typing import Array, Float
from streamgrad.base import GradientEstimator, Model, worked
from streamgrad.checks import find_cut
from streamgrad.engine.by_steps import by_steps
from streamgrad.engine.estimator import estimator
from streamgrad.engine.method import Method
from streamgrad.estimators.uoro import RankOne, UoroMemory, noise_check
from streamgrad.noise.distributions import Noise, find_noise
from streamgrad.noise.groups import make_groups
from streamgrad.noise.rescale import find_rescaling
from streamgrad.noise.settings import NoiseSettings
from streamgrad.noise.shaping import Shaped, diagonal_q0, shaping
from streamgrad.step import cuts
from streamgrad.step.cuts import Step


def nobacktrack(model: Model, noise: str | Noise = "rademacher", rescale: Any = "gir") -> GradientEstimator:
    """UORO at the state with a diagonal Q_t that balances the terms of each unit (Section 6.3).

        h̃_t = γ_t (dh_t/dh_{t-1}) h̃_{t-1} + β_t Q_t u_t
        w̃_t = w̃_{t-1} / γ_t              + (dh_t/dθ_t)^T Q_t^{-1} u_t / β_t
        Q_t = diag(q_t),    q_{t,i}² ∝ ‖dh_{t,i}/dθ_t‖

    Q_t depends on the data and not on the noise, so that the estimate is unbiased. It takes the whole immediate
    Jacobian to know its rows' norms: one reverse pass for each unit of the state.

    Args:
      model: the model whose gradients are estimated.
      noise: "rademacher", "gaussian", or "given" (the caller passes u in place of the key).
      rescale: "gir", "greedy", "none", or α as an array `[T]`; as in `uoro`. Q_t has a geometric mean of 1, so that
        the scale common to all units is left to β.

    Returns:
      The estimator. Its diagnostics are `gamma` and `beta`, `[T, 1]`, and `q`, `[T, S]`.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.gru(2, 4), sg.heads.softmax(3))
      >>> params = model.init(jax.random.key(0))
      >>> est = sg.nobacktrack(model)
      >>> chunk = sg.Chunk(jnp.ones((5, 2)), jnp.zeros(5, int))
      >>> grads, state, info = est.update(params, est.init(params), chunk, jax.random.key(1))
      >>> info.diagnostics["q"].shape
      (5, 4)

    References:
      Ollivier, Tallec and Charpiat, Training recurrent networks online without backtracking, 2015.
      Tallec and Ollivier, Unbiased online recurrent optimization, 2018.
    """
    model = worked(model)
    vertex = find_cut(model, "state")
    source = find_noise(noise)
    rescaling = find_rescaling(rescale)
    layout = cuts.layout(model.cell, vertex)
    rescaling.shared(1, None)  # raises here where α does not fit
    plain = RankOne(model, vertex, layout, source, rescaling, make_groups(layout, "state", 1))

    def advance(
        shared: NoiseSettings, memory: UoroMemory, step: Step, noise: Shaped, dl_dstate: Array
    ) -> tuple[UoroMemory, dict[str, Array]]:
        q = diagonal_q0(row_norms(step, layout.size, dl_dstate.dtype), jnp.ones(layout.size, dl_dstate.dtype))
        shaped = Shaped(noise.right * q, noise.left / q)
        memory, diagnostics = plain.advance(shared._replace(shaping=shaping(q)), memory, step, shaped, dl_dstate)
        return memory, diagnostics | {"q": q}

    return estimator(
        Method(
            name="nobacktrack",
            options={"rescale": rescaling.name},
            model=model,
            init=plain.init,
            run=by_steps(model, vertex, plain.init, advance, plain.contract),
            draw=plain.draw,
            check=noise_check(source, rescaling),
            uses_loss=rescaling.uses_loss,
        )
    )


def row_norms(step: Step, size: int, dtype: Any) -> Float[Array, " N"]:
    """‖dz_i/dθ‖ for every entry of z, by one reverse pass each."""
    jacobian = jax.vmap(step.pull)(jnp.eye(size, dtype=dtype))
    leaves = [leaf.reshape(size, -1) for leaf in jax.tree.leaves(jacobian)]
    return jnp.linalg.norm(jnp.concatenate(leaves, axis=1), axis=1)
