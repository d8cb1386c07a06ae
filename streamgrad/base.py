"""The model: a cell and a head, run and read out; and the precision that its numbers are worked in."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

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
from streamgrad.contract import Trace as Trace
from streamgrad.contract import fold_weight as fold_weight
from streamgrad.keys import check_key
from streamgrad.parts import Cell as Cell
from streamgrad.parts import Cut as Cut
from streamgrad.parts import Head as Head
from streamgrad.parts import Worked as Worked
from streamgrad.step_loss import step_loss
from streamgrad.trees import (
    check_inputs,
    check_like,
    check_numbers,
    check_real,
    common_length,
    kind_of,
    on_host,
    once_per_shape,
    one_step,
    restart,
    same_dtype,
)

CUT_NAMES = ("state", "params", "preactivation")


@dataclasses.dataclass(frozen=True)
class Model:
    """A cell and a head.

    Args:
      cell: from `streamgrad.cells`.
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
    # Of a model that `worked` has made, the model that it was made of.
    _given: "Model | None" = dataclasses.field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.cell, Cell):
            raise ValueError(
                "cell must be a Cell, such as streamgrad.cells.lstm(3, 8) returns, not of type "
                f"{type(self.cell).__name__}{_way_in(self.cell)}."
            )
        if not isinstance(self.head, Head):
            got = type(self.head).__name__
            raise ValueError(f"head must be a Head, such as streamgrad.heads.softmax(2) returns, not of type {got}.")

    def init(self, key: Array) -> Params:
        """Draw parameters, with fields `.cell` and `.head`."""
        check_key(key)
        cell_key, head_key = jax.random.split(key)
        return Params(self.cell.init_params(cell_key), self.head.init_params(head_key, self.width))

    @functools.cached_property
    def _worked(self) -> "Model":
        """The model over matrices and real numbers, which estimators work on; the same where the cell is over these."""
        if self.cell.worked is None:
            return self
        inner = Model(self.cell.worked.cell, self.head)
        object.__setattr__(inner, "_given", self)
        return inner

    @functools.cached_property
    def _alone(self) -> "Model":
        """This model by itself: it forgets the user's model that it was derived from."""
        return Model(self.cell, self.head)

    def enter(self, params: Params) -> Params:
        """The parameters of `worked(model)`, which are matrices."""
        return params if self.cell.worked is None else params._replace(cell=self.cell.worked.weights(params.cell))

    @property
    def width(self) -> int:
        """The size of the cell's output, which the head reads."""
        cell = self._worked.cell
        return jax.eval_shape(lambda: cell.output(cell.init_state())).shape[0]

    def init_state(self, params: Params) -> PyTree:
        """The state at the beginning of an episode, in the dtype that its parameters are worked in."""
        return in_dtype(self._worked.cell.init_state(), work_dtype(params.cell))

    @functools.cached_property
    def numbers(self) -> Bool[np.ndarray, " S"]:
        """Which entries of the ravelled state are numbers; the others are digits of counters, masks and keys."""
        cell = (self._given or self).cell
        encoded = jax.eval_shape(self._worked.cell.init_state)
        own = encoded if cell.worked is None else jax.eval_shape(cell.worked.state, encoded)
        leaves = zip(jax.tree.leaves(encoded), jax.tree.leaves(own), strict=True)
        return np.concatenate([np.full(leaf.size, jnp.issubdtype(was.dtype, jnp.inexact)) for leaf, was in leaves])

    def run(
        self, params: Params, state: PyTree, inputs: PyTree, reset: Bool[Array, "*B T"] | None = None
    ) -> tuple[Float[Array, "*B T width"], PyTree]:
        """Run the network without gradients: h_t = F(h_{t-1}, x_t; θ), y_t = output(h_t).

        Args:
          params: the parameters.
          state: h_0, such as `init_state(params)`, or the field `cell` of an estimator's state, to go on from there;
            of one stream, or of B of them.
          inputs: x_t, a pytree of `[T, ...]`, or `[B, T, ...]` for as many streams as the state has.
          reset: as in `Chunk`.

        Returns:
          y_t, which `predict` makes predictions of, `[T, width]` or `[B, T, width]`, and h_T.

        Example:
          >>> import jax, jax.numpy as jnp, streamgrad as sg
          >>> model = sg.Model(sg.cells.gru(2, 4), sg.heads.softmax(3))
          >>> params = model.init(jax.random.key(0))
          >>> state = sg.batched(sg.rtrl(model), 16).init(params)
          >>> outputs, states = model.run(params, state.cell, jnp.ones((16, 5, 2)))
          >>> model.predict(params, outputs).shape
          (16, 5, 3)
        """
        many = self._is_of_many(state)
        if many:
            streams = len(jax.tree.leaves(state)[0])
            count = common_length({"inputs": inputs, "reset": reset}, "the batch")
            if streams != count:
                raise ValueError(
                    f"state is that of {streams} streams, but inputs, [B, T, ...], have {count} along their first "
                    "axis: pass the inputs of as many streams, or the state of one."
                )
            self._check_run(params, *one_step((state, inputs, reset)))
        elif self._have_streams(inputs):
            raise ValueError(
                "inputs have an axis for streams, [B, T, ...], but state is that of one stream: pass the state of as "
                "many, such as the field cell of the state of a batched estimator."
            )
        else:
            self._check_run(params, state, inputs, reset)
        values = on_host(inputs)
        if values is not None:
            self.cell.check_values(values)
        return (self._run_many if many else self._run)(params, state, inputs, reset)

    def predict(self, params: Params, outputs: Float[Array, "*any width"]) -> PyTree:
        """What the head makes of outputs, such as probabilities: of one or of many, whatever axes lead.

        Args:
          params: the parameters.
          outputs: y_t, from `run`, `Info.outputs` or an estimator's `advance`: `[T, width]`, `[B, T, width]`, ….

        Returns:
          `head.predict` of each.

        Example:
          >>> import jax, jax.numpy as jnp, streamgrad as sg
          >>> model = sg.Model(sg.cells.gru(2, 4), sg.heads.softmax(3))
          >>> params, est = model.init(jax.random.key(0)), sg.rtrl(model)
          >>> chunk = sg.Chunk(jnp.ones((5, 2)), jnp.zeros(5, int))
          >>> grads, state, info = est.update(params, est.init(params), chunk)
          >>> model.predict(params, info.outputs).shape
          (5, 3)
        """
        if not isinstance(params, Params):
            raise ValueError(f"params must be what model.init(key) returns, not {kind_of(params)}.")
        if not hasattr(outputs, "shape") or outputs.shape[-1:] != (self.width,):
            raise ValueError(
                f"outputs must be those of the cell, [..., {self.width}], from model.run or info.outputs, not "
                f"{kind_of(outputs)}."
            )
        return self._predict(params.head, outputs)

    @functools.cached_property
    def _predict(self) -> Callable[..., PyTree]:
        """`predict`, compiled once for each shape."""

        def predict(head: PyTree, outputs: Array) -> PyTree:
            flat = jax.vmap(self.head.predict, in_axes=(None, 0))(head, outputs.reshape(-1, outputs.shape[-1]))
            return jax.tree.map(lambda leaf: leaf.reshape(*outputs.shape[:-1], *leaf.shape[1:]), flat)

        return jax.jit(predict)

    @functools.cached_property
    def _state_shapes(self) -> list[tuple[int, ...]]:
        return [leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(self._worked.cell.init_state))]

    def _have_streams(self, inputs: PyTree) -> bool:
        """Whether inputs have an axis more than time before those of one x."""
        one = [leaf.shape for leaf in jax.tree.leaves(self.cell.example_input)]
        shapes = [np.shape(leaf) for leaf in jax.tree.leaves(inputs)]
        return bool(one) and [shape[2:] for shape in shapes] == one and all(len(shape) > 1 for shape in shapes)

    def _is_of_many(self, state: PyTree) -> bool:
        """Whether a state has an axis for streams before those of the cell's own."""
        shapes = [np.shape(leaf) for leaf in jax.tree.leaves(state)]
        return all(shapes) and [shape[1:] for shape in shapes] == self._state_shapes

    @functools.cached_property
    def _check_run(self) -> Callable[..., None]:
        def check(params: Any, state: PyTree, inputs: PyTree, reset: Any) -> None:
            if not isinstance(params, Params):
                raise ValueError(f"params must be what model.init(key) returns, not {kind_of(params)}.")
            check_numbers("params.cell", params.cell)
            expected = jax.eval_shape(self.init, jax.eval_shape(lambda: jax.random.key(0)))
            check_like("params.cell", expected.cell, params.cell, "the model's own")
            check_like(
                "state", jax.eval_shape(self._worked.cell.init_state), state, "the cell's own, model.init_state(params)"
            )
            check_real("state", state)
            check_inputs(self.cell.example_input, inputs, reset)

        return once_per_shape(check)

    @functools.cached_property
    def _run(self) -> Callable[..., tuple[Array, PyTree]]:
        """`run`, compiled once for each shape."""

        def run(params: Params, state: PyTree, inputs: PyTree, reset: Array | None) -> tuple[Array, PyTree]:
            params, cell = widened(self.enter(params)), self._worked.cell
            fresh = self.init_state(params)

            def step(state: PyTree, now: tuple) -> tuple[PyTree, Array]:
                x, reset = now
                state = restart(reset, fresh, state)
                state = same_dtype(cell.step(params.cell, state, x), state)
                return state, cell.output(state)

            state = in_dtype(state, real_dtype(params.cell))
            state, outputs = jax.lax.scan(step, state, (inputs, reset))
            return outputs, state

        return jax.jit(run)

    @functools.cached_property
    def _run_many(self) -> Callable[..., tuple[Array, PyTree]]:
        """The same for a batch of streams."""
        return jax.jit(jax.vmap(self._run, in_axes=(None, 0, 0, 0)))

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


def _way_in(cell: Any) -> str:
    """A hint on how to turn this object into a cell, or an empty string."""
    if inspect.isfunction(cell):
        own = cell.__module__.startswith("streamgrad.")
        return ": call it with its sizes" if own else ": streamgrad.cells.from_function makes one of a step"
    modules = {kind.__module__.partition(".")[0] for kind in (cell if isinstance(cell, type) else type(cell)).__mro__}
    for library in ("equinox", "flax", "haiku"):
        if library in modules:
            return f": pass streamgrad.cells.from_{library}(cell)"
    return ""


def worked(model: Model) -> Model:
    """The model as estimators work on it: over matrices and real numbers, whatever its cell is given as.

    Args:
      model: the user's.

    Returns:
      The same model for the cells of this library; else one whose cell is `Cell.worked`, for the `Method` of an
      estimator. Hand the user's model on to other estimators, never this one: an estimator of a worked model is over
      matrices, with the parameters `model.enter(params)`, as the theory is.
    """
    if isinstance(model, Cell):
        raise ValueError("model must be a streamgrad.Model, not a Cell: make it one with Model(cell, head).")
    if not isinstance(model, Model):
        raise ValueError(f"model must be a streamgrad.Model(cell, head), not {kind_of(model)}.")
    return model._worked if model._given is None else model._alone


def users_model(model: Model) -> Model:
    """The user's model, of which `worked` has made this one."""
    return model._given or model


def transition(model: Model, params: Params, state: PyTree, x: PyTree) -> PyTree:
    """h_t = F(h_{t-1}, x_t; θ) in the dtype of the state."""
    return same_dtype(model.cell.step(params.cell, state, x), state)


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
