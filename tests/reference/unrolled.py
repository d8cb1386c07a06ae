"""The network step by step: its dense Jacobians, and its losses with z or the parameters of single steps displaced."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

import streamgrad as sg


def resets(chunk: sg.Chunk) -> np.ndarray:
    return np.zeros(len(chunk.targets), bool) if chunk.reset is None else np.asarray(chunk.reset)


@functools.cache
def linearised(vertex: sg.Cut, output, loss):
    """One step's Jacobians, compiled once for each cell, cut and head."""

    @jax.jit
    def at(params, state, x, target, kick):
        theta, unravel_params = ravel_pytree(params.cell)
        h, unravel = ravel_pytree(state)
        z, unravel_z = ravel_pytree(vertex.into(params.cell, state, x))
        still = jnp.zeros_like(z)

        def step(h, dz):
            return ravel_pytree(vertex.inject(params.cell, unravel(h), x, unravel_z(dz)))[0]

        def into(theta):
            return ravel_pytree(vertex.into(unravel_params(theta), state, x))[0]

        def loss_of(head, h):
            return loss(head, output(unravel(h)), target)

        new = step(h, still) + kick
        value, (dl_dhead, dl_dh) = jax.value_and_grad(loss_of, (0, 1))(params.head, new)
        here = {
            "propagate": jax.jacobian(step, 0)(h, still),
            "push": jax.jacobian(step, 1)(h, still),
            "pull": jax.jacobian(into)(theta),
            "dl_dh": dl_dh,
            "loss": value,
            "dl_dhead": dl_dhead,
        }
        return here, unravel(new)

    return at


def jacobians(model: sg.Model, params: sg.Params, chunk: sg.Chunk, cut: str, kicks=None) -> list[dict]:
    """Each step of the network from its initial state on, linearised.

    Args:
      model: the network.
      params: its parameters.
      chunk: its inputs, targets and resets.
      cut: the vertex z.
      kicks: what is added to the state after each step, `[T, S]`; nothing if None.

    Returns:
      For each step dh_t/dh_{t-1} `[S, S]` ("propagate"), dh_t/dz_t `[S, N]` ("push"), J_t = dz_t/dθ_t `[N, P]`
      ("pull"), L_t and its gradients ("loss", "dl_dh", "dl_dhead"), and whether an episode begins ("reset").
    """
    at = linearised(model.cell.cuts[cut], model.cell.output, model.head.loss)
    state = initial = model.init_state(params)
    size = ravel_pytree(initial)[0].size
    kicks = np.zeros((len(chunk.targets), size)) if kicks is None else kicks
    steps = []
    for t, reset in enumerate(resets(chunk)):
        x, target = jax.tree.map(lambda leaf, t=t: leaf[t], (chunk.inputs, chunk.targets))
        here, state = at(params, initial if reset else state, x, target, kicks[t])
        steps.append(jax.tree.map(np.asarray, here) | {"reset": bool(reset)})
    return steps


def gradients(steps: list[dict]) -> np.ndarray:
    """b[t, s] = dL_t/dz_s = (dL_t/dh_t) (dh_t/dh_{t-1}) … (dh_{s+1}/dh_s) (dh_s/dz_s), `[T, T, N]`; 0 across resets."""
    b = np.zeros((len(steps), len(steps), steps[0]["push"].shape[1]))
    for t, last in enumerate(steps):
        back = last["dl_dh"]
        for s in range(t, -1, -1):
            b[t, s] = back @ steps[s]["push"]
            if steps[s]["reset"]:
                break
            back = back @ steps[s]["propagate"]
    return b


def losses(model: sg.Model, params, chunk: sg.Chunk, cut: str, dz=None, cell_params=None):
    """L_t, `[T]`, with z_s displaced by `dz[s]` and, if given, parameters of each step's own."""
    vertex = model.cell.cuts[cut]
    state, out = model.init_state(params), []
    for t, reset in enumerate(resets(chunk)):
        x, target = jax.tree.map(lambda leaf, t=t: leaf[t], (chunk.inputs, chunk.targets))
        if reset:
            state = model.init_state(params)
        theta = params.cell if cell_params is None else jax.tree.map(lambda leaf, t=t: leaf[t], cell_params)
        z, unravel = ravel_pytree(vertex.into(theta, state, x))
        state = vertex.inject(theta, state, x, unravel(jnp.zeros_like(z) if dz is None else dz[t]))
        out.append(model.head.loss(params.head, model.cell.output(state), target))
    return jnp.stack(out)
