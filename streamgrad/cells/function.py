"""Any differentiable step as a cell."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from streamgrad._typing import Array, PyTree
from streamgrad.base import Cell, Cut, Worked, work_dtype
from streamgrad.cells.affine import input_shape, reads_vector
from streamgrad.cells.constants import check_constants
from streamgrad.cells.encoding import decode, encode, is_plain, natural, whole_state
from streamgrad.checks import check_cell, check_flag
from streamgrad.step.cuts import params_cut, state_cut
from streamgrad.step.find_weights import MatrixStep, find_weights
from streamgrad.step.weight_report import Place, places
from streamgrad.trees import check_same_state

Step = Callable[[PyTree, PyTree, PyTree], PyTree]


def from_function(
    step: Step,
    init_params: Callable[[Array], PyTree],
    init_state: Callable[[], PyTree],
    output: Callable[[PyTree], Array] | None = None,
    example_input: PyTree | None = None,
    products: bool = True,
) -> Cell:
    """Make a cell of any differentiable function over any pytrees: h_t = step(params, h_{t-1}, x_t).

    With an `example_input` the step is read as JAX sees it, and its weight products are found: z = W a + b, wherever
    they stand. Estimators work at these preactivations, and everything else has a cut of its own
    (`streamgrad.step.find_weights`); `streamgrad.cells.explain` says what was found. Without one, or with
    `products=False`, the cell has the cuts "state" and "params", and estimators their general forms.

    Parameters may be real or complex, of any precision. So may the state; leaves of it that have no derivatives
    (counters, masks, random keys) are carried along.

    Args:
      step: `step(params, state, x) -> state`; the new state has the structure and shapes of the old.
      init_params: `init_params(key) -> params`.
      init_state: `init_state() -> state`.
      output: `output(state) -> vector`; by default all of the state.
      example_input: one x, or its shape and dtype.
      products: whether to look for weight products.

    Returns:
      The cell.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> cell = sg.cells.from_function(
      ...     step=lambda params, h, x: params["leak"] * h + jnp.tanh(h @ params["w"] + x),
      ...     init_params=lambda key: {"leak": jnp.full(3, 0.5), "w": jax.random.normal(key, (3, 3))},
      ...     init_state=lambda: jnp.zeros(3),
      ...     example_input=jnp.zeros(3),
      ... )
      >>> sorted(cell.cuts)
      ['params', 'preactivation', 'state']
    """
    output = whole_state if output is None else output
    check_flag(products=products)
    params = check_cell(step, init_params, init_state, output)
    state = jax.eval_shape(init_state)
    example = input_shape(example_input)
    bare = Cell(init_params, init_state, step, output, {}, example)
    check_constants(bare)
    if products and example is not None:
        return _with_products(bare, params, state, example)
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(params)}
    if is_plain(state) and is_plain(params) and len(dtypes) == 1:
        return bare._replace(cuts={"state": state_cut(step), "params": params_cut(step)})
    return _encoded(bare, params, state)


def of_vectors(
    step: Step,
    init_params: Callable[[Array], PyTree],
    init_state: Callable[[], PyTree],
    output: Callable[[PyTree], Array],
    n_in: int,
) -> Cell:
    """A cell of this library by its step: it reads a vector of finite numbers.

    Values that the step computes from parameters alone, as the eigenvalues of a recurrence, are displaced in their
    place, so that derivatives at every step go no further back.
    """
    example = jax.ShapeDtypeStruct((n_in,), jnp.result_type(float))
    return reads_vector(from_function(step, init_params, init_state, output, example), n_in)


def _work_form(cell: Cell, state: PyTree, step: Step, weights: Callable[[PyTree], PyTree]) -> Cell:
    """A cell over other parameters and over the encoded state; `step` is over both."""

    def output(encoded: PyTree) -> Array:
        return cell.output(decode(encoded, state)).astype(jax.tree.leaves(encoded)[0].dtype)

    return Cell(
        init_params=lambda key: weights(cell.init_params(key)),
        init_state=lambda: encode(cell.init_state(), jnp.result_type(float)),
        step=step,
        output=output,
        cuts={"state": state_cut(step), "params": params_cut(step)},
        example_input=cell.example_input,
    )


def _real_step(cell: Cell, state: PyTree, dtype: Any) -> Step:
    """The step over the encoded state."""

    def step(params: PyTree, encoded: PyTree, x: PyTree) -> PyTree:
        before = decode(encoded, state)
        after = cell.step(params, before, x)
        check_same_state(before, after)
        return encode(after, dtype)

    return step


def _encoded(cell: Cell, params: PyTree, state: PyTree) -> Cell:
    """A cell with numbers of any kind, over real ones; without products."""

    def weights(params: PyTree) -> PyTree:
        return encode(params, work_dtype(params))

    def step(encoded_params: PyTree, encoded: PyTree, x: PyTree) -> PyTree:
        dtype = jax.tree.leaves(encoded)[0].dtype
        return _real_step(cell, state, dtype)(decode(encoded_params, params), encoded, x)

    form = _work_form(cell, state, step, weights)
    worked = Worked(form, weights, lambda encoded: decode(encoded, state), lambda: places(params, None))
    return cell._replace(cuts=form.cuts, worked=worked)


def _with_products(cell: Cell, params: PyTree, state: PyTree, example: PyTree) -> Cell:
    """A cell over the matrices that its parameters make."""

    @functools.cache
    def found(dtype: Any) -> MatrixStep:
        def natural_shapes(tree: PyTree) -> PyTree:
            return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, natural(leaf.dtype, dtype)), tree)

        step = _real_step(cell, state, dtype)
        encoded = jax.eval_shape(lambda: encode(cell.init_state(), dtype))
        return find_weights(step, natural_shapes(params), encoded, natural_shapes(example), dtype)

    def weights(values: PyTree) -> list[Array]:
        dtype = work_dtype(values)
        own = jax.tree.map(lambda was, leaf: jnp.asarray(leaf, natural(was.dtype, dtype)), params, values)
        return found(dtype).weights(own)

    def run(weights: list[Array], encoded: PyTree, x: PyTree, dz: list[Array] | None) -> tuple[PyTree, list, list]:
        dtype = weights[0].dtype

        def as_example(was: Any, leaf: Any) -> Array:
            known = jnp.issubdtype(was.dtype, jnp.number) or was.dtype == jnp.bool_
            return jnp.asarray(leaf, natural(was.dtype, dtype)) if known else leaf

        return found(dtype).run(weights, encoded, jax.tree.map(as_example, example, x), dz)

    def step(weights: list[Array], encoded: PyTree, x: PyTree) -> PyTree:
        return run(weights, encoded, x, None)[0]

    form = _work_form(cell, state, step, weights)
    preactivation = Cut(
        "preactivation",
        into=lambda weights, encoded, x: run(weights, encoded, x, None)[1],
        inject=lambda weights, encoded, x, dz: run(weights, encoded, x, dz)[0],
        features=lambda weights, encoded, x: run(weights, encoded, x, None)[2],
    )
    form = form._replace(cuts={**form.cuts, "preactivation": preactivation})

    def explained() -> list[Place]:
        return places(params, found(jnp.dtype(jnp.float32)).plan)

    return cell._replace(
        cuts=form.cuts, worked=Worked(form, weights, lambda encoded: decode(encoded, state), explained)
    )
