"""Cells whose parameters are weight matrices: the engine under vanilla, LSTM and GRU.

Such a cell is a function `step(affine, state, x) -> state`, in which `affine(name, a)` is W a for the weight matrix
`name` and the features `a`, in one vector or in parts. Running it with different `affine` gives the transition, the
features, and the transition with its preactivations displaced, so that a cell is written once, and its cut at the
preactivations comes for free.

Displacing, rather than replacing, the preactivations is what keeps every matrix's immediate Jacobian a single
I ⊗ a^T even where one preactivation feeds another, as in stacked layers.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from streamgrad._typing import Array, Float, PyTree
from streamgrad.base import Cell, Cut, Worked
from streamgrad.cells.constants import check_constants
from streamgrad.cells.encoding import whole_state
from streamgrad.checks import check_cell, check_size
from streamgrad.keys import check_key
from streamgrad.step.cuts import params_cut, state_cut
from streamgrad.step.matvec import matvec
from streamgrad.step.weight_report import Place
from streamgrad.trees import check_real

Affine = Callable[..., Array]


def affine(
    step: Callable[[Affine, PyTree, PyTree], PyTree],
    init_params: Callable[[Array], dict[str, Array]],
    init_state: Callable[[], PyTree],
    output: Callable[[PyTree], Array] | None = None,
    example_input: PyTree | None = None,
) -> Cell:
    """Make a cell of any weight matrices, with all three cuts.

    Parameters that are no matrices are arrays of their own: `affine(name)` is the array. In a tree of parameters a name
    is the way to a leaf, with dots: `affine("layers.0.w", a)`.

    Args:
      step: `step(affine, state, x) -> state`; it calls `affine(name, features)` exactly once for each matrix. The
        features may come in parts, as in `affine("w", state, x, 1)`, which spares those that never move some work.
      init_params: `init_params(key) -> {name: W[N, A]}`, or any tree of arrays.
      init_state: `init_state() -> state`.
      output: `output(state) -> vector`; by default all of the state.
      example_input: one x, or its shape and dtype, where known.

    Returns:
      The cell.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> def leaky(affine, state, x):
      ...     return 0.9 * state + 0.1 * jnp.tanh(affine("w", state, x, 1))
      >>> cell = sg.cells.affine(
      ...     leaky, lambda key: {"w": sg.cells.init_weights(key, 4, 4, 2)}, lambda: jnp.zeros(4)
      ... )
      >>> sorted(cell.cuts)
      ['params', 'preactivation', 'state']
    """
    output = whole_state if output is None else output
    shapes = check_cell(step, init_params, init_state, output, first="affine")
    check_real("params", shapes)
    check_real("state", jax.eval_shape(init_state))
    if not (isinstance(shapes, dict) and all(getattr(leaf, "ndim", 0) == 2 for leaf in shapes.values())):
        return _of_any_tree(step, init_params, init_state, output, example_input, shapes)

    def run(params: PyTree, state: PyTree, x: PyTree, dz: PyTree | None) -> tuple[PyTree, PyTree, PyTree]:
        """The new state, the preactivations and the features."""
        z: dict[str, Array] = {}
        a: dict[str, Array] = {}

        def record(name: str, *parts: Array | float | int) -> Array:
            if name not in list(params) or name in list(a):
                raise ValueError(
                    f"a cell's step must use each weight matrix once, but it asked for {name!r} "
                    f"{'again' if name in list(a) else 'and there are only ' + ', '.join(map(repr, params))}."
                )
            vectors = _as_vectors(name, params[name], parts)
            a[name] = vectors[0] if len(vectors) == 1 else jnp.concatenate(vectors)
            z[name] = matvec(params[name], *vectors) + (0 if dz is None else dz[name])
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
    cell = Cell(init_params, init_state, plain, output, cuts, input_shape(example_input))
    check_constants(cell)
    return cell


def _of_any_tree(
    step: Callable[[Affine, PyTree, PyTree], PyTree],
    init_params: Callable[[Array], PyTree],
    init_state: Callable[[], PyTree],
    output: Callable[[PyTree], Array],
    example_input: PyTree | None,
    shapes: PyTree,
) -> Cell:
    """A cell of any tree of arrays, by one of matrices: any other array is a column, whose feature is 1."""
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    named = {".".join(_word(entry) for entry in path) or "params": leaf for path, leaf in leaves}

    def weights(params: PyTree) -> dict[str, Array]:
        arrays = dict(zip(named, jax.tree.leaves(params), strict=True))
        return {name: array if array.ndim == 2 else array.reshape(-1, 1) for name, array in arrays.items()}

    def over_matrices(record: Affine, state: PyTree, x: PyTree) -> PyTree:
        def ask(name: str, *parts: Array | float | int) -> Array:
            leaf = named.get(name)
            if leaf is None or leaf.ndim == 2:
                return record(name, *parts)
            if parts:
                raise ValueError(
                    f"affine({name!r}) takes no features: its shape is {leaf.shape}, not that of a matrix."
                )
            return record(name, 1).reshape(leaf.shape)

        return step(ask, state, x)

    inner = affine(over_matrices, lambda key: weights(init_params(key)), init_state, output, example_input)
    worked = Worked(inner, weights, lambda state: state, lambda: [_place(path, leaf) for path, leaf in leaves])

    def plain(params: PyTree, state: PyTree, x: PyTree) -> PyTree:
        return inner.step(weights(params), state, x)

    return Cell(init_params, init_state, plain, output, inner.cuts, input_shape(example_input), worked=worked)


def _place(path: Any, leaf: Any) -> Place:
    """The use of an array: weights if it is a matrix, else a cut of its own."""
    name = jax.tree_util.keystr(path)
    if leaf.ndim == 2:
        return Place(name, leaf.shape, "product", (tuple(leaf.shape),), 0)
    return Place(name, leaf.shape, "own", (), leaf.size)


def _word(entry: Any) -> str:
    """One part of the path to a leaf."""
    return str(getattr(entry, "key", getattr(entry, "name", getattr(entry, "idx", entry))))


def _as_vectors(name: str, weights: Array, parts: tuple[Any, ...]) -> list[Array]:
    """The parts of the features, in the dtype of the weights; a number is a vector of one."""
    shapes = [jnp.shape(part) for part in parts]
    size = sum(shape[0] if shape else 1 for shape in shapes)
    if any(len(shape) > 1 for shape in shapes) or size != weights.shape[1]:
        listed = " and ".join(map(str, shapes)) or "nothing"
        raise ValueError(
            f"affine({name!r}, features) needs a vector of {weights.shape[1]} features, as the shape of "
            f"the matrix is {weights.shape}, but the shape of these is {listed}."
        )
    return [jnp.atleast_1d(jnp.asarray(part, weights.dtype)) for part in parts]


def input_shape(example: PyTree | None) -> PyTree | None:
    """Shapes and dtypes of one x, given as such or as an example."""

    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        try:
            return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"example_input must be one x, or its shape and dtype as a jax.ShapeDtypeStruct, not {leaf!r}."
            ) from error

    return jax.tree.map(shape, example)


def features(state: Float[Array, " H"], x: Array) -> Float[Array, " A"]:
    """a_t = (h_{t-1}, x_t, 1), in the state's dtype (Equation 1)."""
    if jnp.ndim(state) != 1 or jnp.ndim(x) != 1:
        raise ValueError(f"state and x must be vectors, but their shapes are {jnp.shape(state)} and {jnp.shape(x)}.")
    return jnp.concatenate([state, jnp.asarray(x, state.dtype), jnp.ones(1, state.dtype)])


def init_weights(key: Array, n_out: int, *fan_in: int) -> Float[Array, "N A"]:
    """Weights for features made of blocks of the sizes `fan_in` and a constant 1.

    Each block is normal with variance 1/size, so that every block gives preactivations of unit scale; the last
    column, the bias, is zero.
    """
    check_key(key)
    check_size(n_out=n_out)
    for size in fan_in:
        check_size(fan_in=size)
    blocks = [
        jax.random.normal(k, (n_out, n)) / jnp.sqrt(n)
        for k, n in zip(jax.random.split(key, len(fan_in)), fan_in, strict=True)
    ]
    return jnp.concatenate([*blocks, jnp.zeros((n_out, 1))], axis=1)


def reads_vector(cell: Cell, n_in: int) -> Cell:
    """The cell, known to read a vector of finite numbers; its dtype is the parameters' in the end."""
    vector = jax.ShapeDtypeStruct((n_in,), jnp.result_type(float))
    worked = cell.worked
    if worked is not None:
        worked = worked._replace(cell=reads_vector(worked.cell, n_in))
    return cell._replace(example_input=vector, check_values=_check_finite, worked=worked)


def _check_finite(inputs: np.ndarray) -> None:
    if jnp.issubdtype(inputs.dtype, jnp.floating) and not np.all(finite := np.isfinite(inputs)):
        raise ValueError(f"inputs must be finite, but one of them is {inputs[~finite][0]}: replace what is missing.")
