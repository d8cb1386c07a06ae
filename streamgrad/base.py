"""The records that everything else is made of: small tuples of pure functions, in the manner of optax.

Two levels. A training loop knows only `GradientEstimator(init, update)`, from `streamgrad.contract`. Under it, the
forward-mode estimators are an `Influence(init, advance, contract)`: a representation of dh_t/dθ that one step of the
network advances and that the gradient of a loss contracts. `streamgrad.online` turns the second into the first.

All of it is written for one stream; `streamgrad.batched` adds the batch axis from outside.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from streamgrad._typing import Array, Bool, Float, PyTree
from streamgrad.contract import Chunk as Chunk
from streamgrad.contract import EstimatorState as EstimatorState
from streamgrad.contract import GradientEstimator as GradientEstimator
from streamgrad.contract import Info as Info
from streamgrad.contract import Params as Params
from streamgrad.contract import fold_weight as fold_weight
from streamgrad.keys import check_key
from streamgrad.targets import step_loss
from streamgrad.trees import (
    check_inputs,
    check_like,
    check_numbers,
    check_real,
    kind_of,
    on_host,
    once_per_shape,
    restart,
    same_dtype,
)

CUT_NAMES = ("state", "params", "preactivation")


class Cut(NamedTuple):
    """A cut vertex z of the transition, on every path from θ_t to h_t: where noise is injected (Section 5.1).

    The transition with z displaced is `inject`; the Jacobian of z with respect to the parameters *of this step*, z's
    other arguments fixed, is J_s, the immediate Jacobian. Hence dh_t/dθ_t = (dh_t/dz_t) J_t.

    Attributes:
      name: "state", "params" or "preactivation".
      into: `into(params, state, x) -> z`.
      inject: `inject(params, state, x, dz) -> state`, the transition with `dz` added to z.
      features: at preactivations `features(params, state, x) -> a`, what each weight matrix multiplies, in the
        structure of the parameters. There J = I ⊗ a^T, which is never worth building. None elsewhere.
    """

    name: str
    into: Callable[[PyTree, PyTree, PyTree], PyTree]
    inject: Callable[[PyTree, PyTree, PyTree, PyTree], PyTree]
    features: Callable[[PyTree, PyTree, PyTree], PyTree] | None = None


class Cell(NamedTuple):
    """A recurrent transition h_t = F(h_{t-1}, x_t; θ) and the ways to cut it.

    Attributes:
      init_params: `init_params(key) -> params`.
      init_state: `init_state() -> state`, where every episode begins.
      step: `step(params, state, x) -> state`.
      output: `output(state) -> vector`, what the head reads.
      cuts: the cut vertices that this cell has, by name.
      example_input: shape and dtype of one x, where they are known (`jax.ShapeDtypeStruct`, or a pytree of them).
      check_values: `check_values(inputs)`, raises ValueError where the cell cannot take the numbers in the
        inputs of a chunk. It is called with numpy arrays, and only where they can be read at no cost.
      worked: the same transition as the estimators see it, for a cell whose parameters or state are of another kind
        than theirs. Its cuts are then over that form.
      layers: of a stack the cells it is made of, from the bottom to the top, each of which reads the output of the one
        below at the same step; else empty.
    """

    init_params: Callable[[Array], PyTree]
    init_state: Callable[[], PyTree]
    step: Callable[[PyTree, PyTree, PyTree], PyTree]
    output: Callable[[PyTree], Array]
    cuts: Mapping[str, Cut]
    example_input: PyTree | None = None
    check_values: Callable[[PyTree], None] = lambda inputs: None
    worked: "Worked | None" = None
    layers: "tuple[Cell, ...]" = ()


class Worked(NamedTuple):
    """A cell of any parameters and any state, as the estimators see it: over matrices and real numbers.

    Attributes:
      cell: the transition in that form.
      weights: `weights(params) -> params of cell`, differentiable: gradients go back through it.
      state: `state(encoded) -> state`, the cell's own state, from that of `cell`.
      explained: what became of each parameter, for `streamgrad.cells.explain`.
    """

    cell: Cell
    weights: Callable[[PyTree], PyTree]
    state: Callable[[PyTree], PyTree]
    explained: Callable[[], list[Any]]


def _no_prediction(params: PyTree, output: Array) -> PyTree:
    raise ValueError("this head has no predict: give one to heads.from_function(init_params, loss, predict).")


class Head(NamedTuple):
    """A read-out with its loss. Its own gradient is exact, by backpropagation.

    Attributes:
      init_params: `init_params(key, width) -> params`, where `width` is that of the cell's output.
      loss: `loss(params, output, target) -> scalar`, for one step.
      check_target: `check_target(target)`, raises ValueError where the shape or dtype of one target is wrong.
      check_values: `check_values(targets)`, the same for the numbers of a chunk's targets, as `Cell.check_values`.
      predict: `predict(params, output)`, what the head makes of one output, such as probabilities.
    """

    init_params: Callable[[Array, int], PyTree]
    loss: Callable[[PyTree, Array, PyTree], Array]
    check_target: Callable[[PyTree], None] = lambda target: None
    check_values: Callable[[PyTree], None] = lambda targets: None
    predict: Callable[[PyTree, Array], PyTree] = _no_prediction


@dataclasses.dataclass(frozen=True)
class Model:
    """A cell and a head.

    Args:
      cell: from `streamgrad.cells`. The field `cell` is it as the estimators see it (`Cell.worked`), which for the
        cells of this library is the same; `given` is what was given, whose parameters are `params.cell`.
      head: from `streamgrad.heads`.

    Example:
      >>> import jax, streamgrad as sg
      >>> model = sg.Model(sg.cells.lstm(3, 8), sg.heads.softmax(2))
      >>> params = model.init(jax.random.key(0))
      >>> params.cell["w"].shape, params.head["w"].shape
      ((32, 12), (2, 8))
    """

    cell: Cell
    head: Head
    given: Cell = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.cell, Cell):
            got = type(self.cell).__name__
            raise ValueError(f"cell must be a Cell, such as streamgrad.cells.lstm(3, 8) returns, not of type {got}.")
        if not isinstance(self.head, Head):
            got = type(self.head).__name__
            raise ValueError(f"head must be a Head, such as streamgrad.heads.softmax(2) returns, not of type {got}.")
        object.__setattr__(self, "given", self.cell)
        if self.cell.worked is not None:
            object.__setattr__(self, "cell", self.cell.worked.cell)

    def init(self, key: Array) -> Params:
        """Draw parameters, with fields `.cell` and `.head`."""
        check_key(key)
        cell_key, head_key = jax.random.split(key)
        return Params(self.given.init_params(cell_key), self.head.init_params(head_key, self.width))

    @functools.cached_property
    def inner(self) -> "Model":
        """The model as the estimators see it, with parameters to match: `enter(params)`."""
        return Model(self.cell, self.head) if self.given.worked else self

    def enter(self, params: Params) -> Params:
        """The parameters of `inner`."""
        return params if self.given.worked is None else params._replace(cell=self.given.worked.weights(params.cell))

    @property
    def width(self) -> int:
        """The size of the cell's output, which the head reads."""
        return jax.eval_shape(lambda: self.cell.output(self.cell.init_state())).shape[0]

    def init_state(self, params: Params) -> PyTree:
        """The state at the beginning of an episode, in the dtype that its parameters are worked in."""
        return in_dtype(self.cell.init_state(), work_dtype(params.cell))

    @functools.cached_property
    def numbers(self) -> Bool[np.ndarray, " S"]:
        """Which entries of the ravelled state are numbers; the others are digits of counters, masks and keys."""
        worked, encoded = self.given.worked, jax.eval_shape(self.cell.init_state)
        own = encoded if worked is None else jax.eval_shape(worked.state, encoded)
        leaves = zip(jax.tree.leaves(encoded), jax.tree.leaves(own), strict=True)
        return np.concatenate([np.full(leaf.size, jnp.issubdtype(was.dtype, jnp.inexact)) for leaf, was in leaves])

    def run(
        self, params: Params, state: PyTree, inputs: PyTree, reset: Bool[Array, " T"] | None = None
    ) -> tuple[Float[Array, "T width"], PyTree]:
        """Run the network without gradients: h_t = F(h_{t-1}, x_t; θ), y_t = output(h_t).

        Args:
          params: the parameters.
          state: h_0, such as `init_state(params)`, or the field `cell` of an estimator's state, to go on from there.
          inputs: x_t, a pytree of `[T, ...]`.
          reset: as in `Chunk`.

        Returns:
          y_t, which `head.predict` makes predictions of, and h_T. For one stream; `jax.vmap` it for many.

        Example:
          >>> import jax, jax.numpy as jnp, streamgrad as sg
          >>> model = sg.Model(sg.cells.gru(2, 4), sg.heads.softmax(3))
          >>> params = model.init(jax.random.key(0))
          >>> outputs, state = model.run(params, model.init_state(params), jnp.ones((5, 2)))
          >>> jax.vmap(model.head.predict, in_axes=(None, 0))(params.head, outputs).shape
          (5, 3)
        """
        self._check_run(params, state, inputs, reset)
        values = on_host(inputs)
        if values is not None:
            self.cell.check_values(values)
        return self._run(params, state, inputs, reset)

    @functools.cached_property
    def _check_run(self) -> Callable[..., None]:
        def check(params: Any, state: PyTree, inputs: PyTree, reset: Any) -> None:
            if not isinstance(params, Params):
                raise ValueError(f"params must be what model.init(key) returns, not {kind_of(params)}.")
            check_numbers("params.cell", params.cell)
            expected = jax.eval_shape(self.init, jax.eval_shape(lambda: jax.random.key(0)))
            check_like("params.cell", expected.cell, params.cell, "the model's own")
            check_like("state", jax.eval_shape(self.cell.init_state), state, "the cell's own, model.init_state(params)")
            check_real("state", state)
            check_inputs(self.cell.example_input, inputs, reset)

        return once_per_shape(check)

    @functools.cached_property
    def _run(self) -> Callable[..., tuple[Array, PyTree]]:
        """`run`, compiled once for each shape."""

        def run(params: Params, state: PyTree, inputs: PyTree, reset: Array | None) -> tuple[Array, PyTree]:
            params = widened(self.enter(params))
            fresh = self.init_state(params)

            def step(state: PyTree, now: tuple) -> tuple[PyTree, Array]:
                x, reset = now
                state = restart(reset, fresh, state)
                state = same_dtype(self.cell.step(params.cell, state, x), state)
                return state, self.cell.output(state)

            state = in_dtype(state, real_dtype(params.cell))
            state, outputs = jax.lax.scan(step, state, (inputs, reset))
            return outputs, state

        return jax.jit(run)

    def loss(self, head_params: PyTree, output: Float[Array, " width"], target: PyTree) -> Array:
        """The loss at one step, whatever its target carries; everything in the library asks this one.

            w_t L_t = w_t loss(head_params, y_t, target_t)

        Args:
          head_params: the head's parameters.
          output: y_t, the cell's output.
          target: what the head compares with; out of a chunk with weights, together with its weight.

        Returns:
          One number.

        Example:
          >>> import jax, jax.numpy as jnp, streamgrad as sg
          >>> model = sg.Model(sg.cells.vanilla(2, 3), sg.heads.squared_error(1))
          >>> head = {"w": jnp.zeros((1, 3)), "b": jnp.zeros(1)}
          >>> float(model.loss(head, jnp.ones(3), jnp.array([2.0])))
          2.0
        """
        # A head may have wider numbers than the cell: it reads the output in them.
        output = jnp.asarray(output, work_dtype((head_params, output)))
        return step_loss(self.head.loss, head_params, output, target)

    def read_out(
        self, head_params: PyTree, state: PyTree, target: PyTree
    ) -> tuple[Float[Array, ""], PyTree, Float[Array, " S"]]:
        """The loss at one step with its exact gradients.

        Args:
          head_params: the head's parameters.
          state: h_t.
          target: what the head compares with.

        Returns:
          L_t, dL_t/d(head parameters), and dL_t/dh_t as a vector over the ravelled state.
        """
        vector, unravel = ravel_pytree(state)

        def loss(head_params: PyTree, vector: Array) -> Array:
            value = self.loss(head_params, self.cell.output(unravel(vector)), target)
            return jnp.asarray(value, vector.dtype)

        value, (head_grads, dl_dstate) = jax.value_and_grad(loss, argnums=(0, 1))(head_params, vector)
        return value, head_grads, dl_dstate

    def read_out_chunk(
        self, head_params: PyTree, states: PyTree, targets: PyTree
    ) -> tuple[Float[Array, " T"], PyTree, Float[Array, "T S"]]:
        """`read_out` for many steps at once, with the head's gradient summed over them."""
        unravel = ravel_pytree(jax.tree.map(lambda leaf: leaf[0], states))[1]
        vectors = jax.vmap(lambda state: ravel_pytree(state)[0])(states)

        def total(head_params: PyTree, vectors: Array) -> tuple[Array, Array]:
            def loss(vector: Array, target: PyTree) -> Array:
                return self.loss(head_params, self.cell.output(unravel(vector)), target)

            losses = jax.vmap(loss)(vectors, targets).astype(vectors.dtype)
            return jnp.sum(losses), losses

        (head_grads, dl_dstate), losses = jax.grad(total, argnums=(0, 1), has_aux=True)(head_params, vectors)
        return losses, head_grads, dl_dstate


class Influence(NamedTuple):
    """A representation of dh_t/dθ, as exact or as noisy as it likes.

    `step` below is a `streamgrad.step.cuts.Step`: the transition at this moment, with its derivatives as linear maps.

    Attributes:
      cut: the cut at which the transition is linearised.
      init: `init(params, state) -> memory`, for the cell's parameters and the state that an episode begins with.
      advance: `advance(shared, memory, step, noise, dl_dstate) -> (memory, diagnostics)`, from t-1 to t.
      contract: `contract(before, after, step, dl_dstate) -> contribution`, dL_t/dθ as this influence knows it, from
        the memories before and after the step.
      draw: `draw(shared, key, length, dtype) -> noise`, all of a chunk's noise at once, time leading.
      shared: `shared(params) -> shared`, what all streams have in common.
      total: None if contributions are gradients, which are added as they come. Else `total(contributions) -> grads`
        sums what stands for them, such as the factors of outer products, over its leading axes, streams and time.
      uses_loss: whether `advance` looks at `dl_dstate`; if so, the estimator cannot move on before the loss is known.
    """

    cut: Cut
    init: Callable[[PyTree, PyTree], PyTree]
    advance: Callable[..., tuple[PyTree, dict[str, Array]]]
    contract: Callable[..., PyTree]
    draw: Callable[..., PyTree] = lambda shared, key, length, dtype: None
    shared: Callable[[PyTree], PyTree] = lambda params: ()
    total: Callable[[PyTree], PyTree] | None = None
    uses_loss: bool = False


def real_dtype(tree: PyTree) -> Any:
    """The dtype that the leaves of a tree promote to."""
    return jnp.result_type(*jax.tree.leaves(tree))


def work_dtype(tree: PyTree) -> Any:
    """The real dtype to work in for numbers of any kind: as wide as the widest of them, and float32 at least."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    # By bits, not by JAX's promotion, of which there is none where it is set to "strict".
    wide = any(jnp.finfo(leaf.dtype).bits > 32 for leaf in leaves)
    return jnp.result_type(jnp.float64 if wide else jnp.float32)


def in_dtype(tree: PyTree, dtype: Any) -> PyTree:
    """Every leaf in that dtype."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), tree)


def widened(params: Params) -> Params:
    """Real parameters of any precisions in the ones that are worked in.

    The cell's are all as wide as the widest of them, and float32 at least: sums over steps, and an influence that is
    added to for ever, cannot be kept in less. The head's are at least as wide as these.

    Example:
      >>> import jax.numpy as jnp
      >>> params = widened(Params(cell=[jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.float16)], head=()))
      >>> [leaf.dtype.name for leaf in params.cell]
      ['float32', 'float32']
    """
    return Params(in_dtype(params.cell, work_dtype(params.cell)), in_dtype(params.head, work_dtype(params)))


def narrowed(grads: PyTree, params: PyTree) -> PyTree:
    """A gradient in the precisions of the parameters, leaf by leaf."""
    return jax.tree.map(lambda grad, leaf: grad.astype(leaf.dtype), grads, params)
