"""What a model is made of: a cell with the ways to cut it, and a head."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from streamgrad._typing import Array, PyTree


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
