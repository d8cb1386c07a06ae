"""Random-feedback local online learning: the leak of each unit, and errors through random weights."""

from streamgrad.base import GradientEstimator, Model, worked
from streamgrad.engine.estimator import estimator
from streamgrad.engine.learning_signal import find_feedback
from streamgrad.engine.method import Method
from streamgrad.engine.row_influence import by_own_units
from streamgrad.estimators.eprop import find_traces


def rflo(model: Model, feedback: str = "random", seed: int = 0) -> GradientEstimator:
    """RFLO: for each weight one trace, which leaks as its unit does.

        h_t = (1 - α) h_{t-1} + α φ(W a_t)
        p_t = (1 - α) p_{t-1} + α φ'(W a_t) a_t^T,    dL/dW ≈ Σ_t (B^T e_t) p_t

    e_t is the error at the head, and B fixed random weights in place of the head's own. In a network without a leak
    (α = 1, `cells.vanilla` as it comes) traces hold the current step alone. `eprop` is the same idea for neurons of
    several variables.

    Args:
      model: the model whose gradients are estimated. Each row of its cell's weights must enter one unit, as in
        `cells.vanilla(n_in, n_hidden, leak=0.1)`.
      feedback: "random" as published, or "symmetric" for the gradient at the output.
      seed: of the random weights; symmetric feedback has none. `credit` takes the gradient it is given as the signal.

    Returns:
      The estimator. Memory is P; time per step about that of BPTT.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.vanilla(2, 4, leak=0.1), sg.heads.softmax(3))
      >>> params = model.init(jax.random.key(0))
      >>> est = sg.rflo(model)
      >>> chunk = sg.Chunk(jnp.ones((5, 2)), jnp.zeros(5, int))
      >>> grads, state, info = est.update(params, est.init(params), chunk)
      >>> [[place.shape for place in block] for block in state.memory]
      [[(4, 7)]]

    References:
      Murray, Local online learning in recurrent networks with random feedback, 2019.
    """
    model = worked(model)
    signal = find_feedback("rflo", model, feedback, seed)
    units = find_traces("rflo", model)
    if any(len(leaf.own) > 1 for leaf in units.by_row.leaves):
        raise ValueError(
            "rflo needs a cell in which each row of weights has one unit, such as cells.vanilla: for others, such as "
            "an LSTM, use eprop."
        )
    init, run = by_own_units(model, units, "estimated", signal)
    options = {"feedback": feedback, "seed": seed or None}
    return estimator(Method(name="rflo", options=options, model=model, init=init, run=run, watchable=True))
