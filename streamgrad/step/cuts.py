"""The three cut vertices: where in the transition noise is injected (Section 5.1 of the paper).

| cut | z_t | J_t = dz_t/dθ_t | N |
|---|---|---|---|
| state | h_t | dh_t/dθ_t, by reverse mode | size of the whole state |
| params | θ_t | the identity | number of the cell's parameters |
| preactivation | W a_t of every weight matrix W | I ⊗ a_t^T | number of all preactivations (LSTM: 4H) |
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from streamgrad._typing import Array, Float, PyTree
from streamgrad.base import Cell, Cut
from streamgrad.checks import check_same_state
from streamgrad.keys import drawn_shapes
from streamgrad.step.weights import outer, rows_of


def state_cut(step: Callable[[PyTree, PyTree, PyTree], PyTree]) -> Cut:
    """Noise is added to the new state: z_t = h_t, as in the original UORO."""

    def inject(params: PyTree, state: PyTree, x: PyTree, dz: PyTree) -> PyTree:
        return jax.tree.map(jnp.add, step(params, state, x), dz)

    return Cut("state", step, inject)


def params_cut(step: Callable[[PyTree, PyTree, PyTree], PyTree]) -> Cut:
    """Noise is added to the parameters of this step: z_t = θ_t."""

    def into(params: PyTree, state: PyTree, x: PyTree) -> PyTree:
        del state, x
        return params

    def inject(params: PyTree, state: PyTree, x: PyTree, dz: PyTree) -> PyTree:
        return step(jax.tree.map(jnp.add, params, dz), state, x)

    return Cut("params", into, inject)


class Layout(NamedTuple):
    """The sizes that a cell has at a cut.

    Attributes:
      size: N, the size of the ravelled z.
      state_size: S, the size of the ravelled state.
      rows: at preactivations the number of preactivations of each weight matrix, in the order in which they stand in
        the ravelled z; elsewhere the single entry (N,).
    """

    size: int
    state_size: int
    rows: tuple[int, ...]


def layout(cell: Cell, cut: Cut) -> Layout:
    """The sizes of `cell` at `cut`, found without computing anything.

    Example:
      >>> import streamgrad as sg
      >>> cell = sg.cells.gru(3, 5)
      >>> sg.cuts.layout(cell, cell.cuts["preactivation"])
      Layout(size=20, state_size=5, rows=(5, 5, 10))
    """
    params = drawn_shapes(cell.init_params)
    state_size = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(cell.init_state)))
    if cut.name == "state":
        rows = (state_size,)
    elif cut.name == "params":
        rows = (sum(leaf.size for leaf in jax.tree.leaves(params)),)
    else:  # a row of a weight matrix makes a preactivation
        rows = rows_of(params)
    return Layout(sum(rows), state_size, rows)


def preactivation_rows(cell: Cell) -> tuple[int, ...]:
    """The number of preactivations of each weight matrix of a cell, in order."""
    return layout(cell, cell.cuts["preactivation"]).rows


class Step(NamedTuple):
    """One transition h_{t-1} -> h_t with its derivatives as linear maps, over ravelled vectors.

    Attributes:
      state: h_t.
      propagate: `propagate(tangent[S]) -> [S]`, (dh_t/dh_{t-1}) tangent, by forward mode.
      push: `push(dz[N]) -> [S]`, (dh_t/dz_t) dz, by forward mode.
      push_back: `push_back(dl_dstate[S]) -> [N]`, (dL/dh_t) (dh_t/dz_t), by reverse mode.
      pull: `pull(v[N]) -> like params`, v^T J_t: by reverse mode, or at preactivations as outer products v a^T.
      backprop: `backprop(dl_dstate[S]) -> like params`, (dL/dh_t) (dh_t/dθ_t), by reverse mode.
      features: at preactivations a_t, one vector for each weight matrix; None elsewhere.
      unravel: `unravel(z[N])`, z in the shape that `Cut.into` gives it.
    """

    state: PyTree
    propagate: Callable[[Float[Array, " S"]], Float[Array, " S"]]
    push: Callable[[Float[Array, " N"]], Float[Array, " S"]]
    push_back: Callable[[Float[Array, " S"]], Float[Array, " N"]]
    pull: Callable[[Float[Array, " N"]], PyTree]
    backprop: Callable[[Float[Array, " S"]], PyTree]
    features: PyTree | None
    unravel: Callable[[Float[Array, " N"]], PyTree]


def over_vectors(cut: Cut, state: PyTree, z: PyTree) -> Callable[[PyTree, Array, Array, PyTree], Float[Array, " S"]]:
    """`transition(params, state[S], dz[N], x) -> [S]`, over ravelled vectors, with z_t displaced by `dz`.

    `state` and `z` give their structures.
    """
    unravel_state, unravel_z = ravel_pytree(state)[1], ravel_pytree(z)[1]

    def transition(params: PyTree, vector: Array, dz: Array, x: PyTree) -> Float[Array, " S"]:
        new = cut.inject(params, unravel_state(vector), x, unravel_z(dz))
        check_same_state(state, new)
        return ravel_pytree(new)[0].astype(vector.dtype)

    return transition


def linearise(cut: Cut, params: PyTree, state: PyTree, x: PyTree) -> Step:
    """Take one step of the network and linearise it at `cut`.

    The compiler removes the maps that an estimator does not use, and computes their common forward passes once.

    Args:
      cut: one of the cell's.
      params: the cell's parameters.
      state: h_{t-1}.
      x: x_t.

    Returns:
      The step, h_t and the maps around it.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> cell = sg.cells.vanilla(2, 3)
      >>> params = cell.init_params(jax.random.key(0))
      >>> step = sg.cuts.linearise(cell.cuts["preactivation"], params, cell.init_state(), jnp.ones(2))
      >>> step.pull(jnp.ones(3))["w"].shape
      (3, 6)
    """
    vector, unravel_state = ravel_pytree(state)
    z, unravel_z = ravel_pytree(cut.into(params, state, x))
    no_dz, transition = jnp.zeros_like(z), over_vectors(cut, state, unravel_z(z))
    new, propagate = jax.linearize(lambda vector: transition(params, vector, no_dz, x), vector)
    _, push = jax.linearize(lambda dz: transition(params, vector, dz, x), no_dz)

    def push_back(dl_dstate: Float[Array, " S"]) -> Float[Array, " N"]:
        return jax.vjp(lambda dz: transition(params, vector, dz, x), no_dz)[1](dl_dstate)[0]

    def backprop(dl_dstate: Float[Array, " S"]) -> PyTree:
        _, vjp = jax.vjp(lambda params: transition(params, vector, no_dz, x), params)
        return vjp(dl_dstate)[0]

    features = None if cut.features is None else cut.features(params, state, x)

    def pull(v: Float[Array, " N"]) -> PyTree:
        if features is not None:
            return outer(unravel_z(v), features)
        _, vjp = jax.vjp(lambda params: ravel_pytree(cut.into(params, state, x))[0].astype(v.dtype), params)
        return vjp(v)[0]

    return Step(unravel_state(new), propagate, push, push_back, pull, backprop, features, unravel_z)
