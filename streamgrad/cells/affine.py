"""Cells whose parameters are weight matrices: the engine under vanilla, LSTM and GRU.

Such a cell is a function `step(affine, state, x) -> state`, in which `affine(name, a)` is W a for the weight matrix
`name` and the features `a`. Running it with different `affine` gives the transition, the features, and the transition
with its preactivations displaced, so that a cell is written once, and its cut at the preactivations comes for free.

Displacing, rather than replacing, the preactivations is what keeps every matrix's immediate Jacobian a single
I ⊗ a^T even where one preactivation feeds another, as in stacked layers.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from streamgrad._typing import Array, Float, PyTree
from streamgrad.base import Cell, Cut
from streamgrad.cuts import params_cut, state_cut

Affine = Callable[[str, Array], Array]


def affine(
    step: Callable[[Affine, PyTree, PyTree], PyTree],
    init_params: Callable[[Array], dict[str, Array]],
    init_state: Callable[[], PyTree],
    output: Callable[[PyTree], Array] | None = None,
    example_input: PyTree | None = None,
) -> Cell:
    """Make a cell of any weight matrices, with all three cuts.

    Args:
      step: `step(affine, state, x) -> state`; it calls `affine(name, features)` exactly once for each matrix.
      init_params: `init_params(key) -> {name: W[N, A]}`.
      init_state: `init_state() -> state`.
      output: `output(state) -> vector`; by default all of the state.
      example_input: shape and dtype of one x, where known.

    Returns:
      The cell.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> def leaky(affine, state, x):
      ...     return 0.9 * state + 0.1 * jnp.tanh(affine("w", sg.cells.features(state, x)))
      >>> cell = sg.cells.affine(
      ...     leaky, lambda key: {"w": sg.cells.init_weights(key, 4, 4, 2)}, lambda: jnp.zeros(4)
      ... )
      >>> sorted(cell.cuts)
      ['params', 'preactivation', 'state']
    """

    def run(params: PyTree, state: PyTree, x: PyTree, dz: PyTree | None) -> tuple[PyTree, PyTree, PyTree]:
        """The new state, the preactivations and the features."""
        z: dict[str, Array] = {}
        a: dict[str, Array] = {}

        def record(name: str, vector: Array) -> Array:
            if name not in params or name in a:
                raise ValueError(
                    f"a cell's step must use each weight matrix once, but it asked for {name!r} "
                    f"{'again' if name in a else 'and there are only ' + ', '.join(map(repr, params))}."
                )
            a[name] = vector
            z[name] = params[name] @ vector + (0 if dz is None else dz[name])
            return z[name]

        new = step(record, state, x)
        if unused := sorted(set(params) - set(a)):
            raise ValueError(f"a cell's step must use each weight matrix once, but it never used {unused}.")
        return new, z, a

    def plain(params: PyTree, state: PyTree, x: PyTree) -> PyTree:
        return run(params, state, x, None)[0]

    preactivation = Cut(
        "preactivation",
        into=lambda params, state, x: run(params, state, x, None)[1],
        inject=lambda params, state, x, dz: run(params, state, x, dz)[0],
        features=lambda params, state, x: run(params, state, x, None)[2],
    )
    cuts = {"state": state_cut(plain), "params": params_cut(plain), "preactivation": preactivation}
    return Cell(init_params, init_state, plain, output or whole_state, cuts, example_input)


def whole_state(state: PyTree) -> Float[Array, " S"]:
    """All of a state as one vector."""
    return ravel_pytree(state)[0]


def features(state: Float[Array, " H"], x: Array) -> Float[Array, " A"]:
    """a_t = (h_{t-1}, x_t, 1), in the state's dtype (Equation 1)."""
    return jnp.concatenate([state, jnp.asarray(x, state.dtype), jnp.ones(1, state.dtype)])


def init_weights(key: Array, n_out: int, *fan_in: int) -> Float[Array, "N A"]:
    """Weights for features made of blocks of the sizes `fan_in` and a constant 1.

    Each block is normal with variance 1/size, so that every block gives preactivations of unit scale; the last
    column, the bias, is zero.
    """
    blocks = [
        jax.random.normal(k, (n_out, n)) / jnp.sqrt(n)
        for k, n in zip(jax.random.split(key, len(fan_in)), fan_in, strict=True)
    ]
    return jnp.concatenate([*blocks, jnp.zeros((n_out, 1))], axis=1)


def vector_input(n_in: int) -> jax.ShapeDtypeStruct:
    """The shape of one x of a cell that reads a vector; its dtype is the parameters' in the end."""
    return jax.ShapeDtypeStruct((n_in,), jnp.result_type(float))
