"""e-prop: eligibility traces of what each unit does by itself, and a learning signal."""

from streamgrad.base import GradientEstimator, Model, worked
from streamgrad.checks import find_cut
from streamgrad.engine.estimator import estimator
from streamgrad.engine.learning_signal import find_feedback
from streamgrad.engine.method import Method
from streamgrad.engine.row_influence import by_own_units
from streamgrad.step.row_units import RowUnits, find_trace_units


def eprop(model: Model, feedback: str = "symmetric", seed: int = 0) -> GradientEstimator:
    """Eligibility traces: the influence through what the state does by itself, without the recurrent weights.

        ε_t = (∂h_t/∂h_{t-1}) ε_{t-1} + dh_t/dθ_t,    dL/dθ ≈ Σ_t l_t ε_t,    l_t = dL_t/dh_t or random

    ∂h_t/∂h_{t-1} is taken with the features of all weights held fixed: a leak, the forget gate of an LSTM, the
    threshold of a spiking neuron. What other units hear of a unit is left out. So traces are local: for each weight,
    one number for each variable of its neuron.

    Args:
      model: the model whose gradients are estimated. Each row of its cell's weights must have few units, and no
        preactivation may be made of another one: vanilla, LSTM, GRU, spiking and diagonal cells in one layer.
      feedback: the learning signal l_t: "symmetric", the gradient at the output, or "random", errors at the head times
        fixed random weights.
      seed: of the random weights; symmetric feedback has none. `credit` takes the gradient it is given as the signal.

    Returns:
      The estimator. Memory is P for each variable of a neuron; time per step about that of BPTT. Spiking cells have a
      surrogate derivative (`cells.lif`), which is used wherever their own is.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.lif(2, 4), sg.heads.softmax(3))
      >>> params = model.init(jax.random.key(0))
      >>> est = sg.eprop(model, feedback="random")
      >>> chunk = sg.Chunk(jnp.ones((5, 2)), jnp.zeros(5, int))
      >>> grads, state, info = est.update(params, est.init(params), chunk)
      >>> info.loss.shape
      (5,)

    References:
      Bellec, Scherr, Subramoney, Hajek, Salaj, Legenstein and Maass, A solution to the learning dilemma for recurrent
      networks of spiking neurons, 2020.
    """
    model = worked(model)
    signal = find_feedback("eprop", model, feedback, seed)
    init, run = by_own_units(model, find_traces("eprop", model), "estimated", signal)
    options = {"feedback": feedback, "seed": seed or None}
    return estimator(Method(name="eprop", options=options, model=model, init=init, run=run, watchable=True))


def find_traces(name: str, model: Model) -> RowUnits:
    """The units of each row of weights while features are held fixed; raises ValueError where a row has too many."""
    find_cut(model, "preactivation")
    local = find_trace_units(model)
    if local is None:
        raise ValueError(
            f"{name} needs a cell that says what its input is, in which each row of weights has few units and no "
            "preactivation is made of another one, such as vanilla, lstm, gru or lif in one layer: for others, such as "
            "stacks, use snap or local_rtrl."
        )
    return local
