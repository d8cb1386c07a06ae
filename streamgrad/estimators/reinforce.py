"""REINFORCE on the hidden state: noise in the network itself, its score accumulated, times the loss."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from streamgrad._typing import Array, Bool, Float, Int, PyTree
from streamgrad.base import (
    Chunk,
    EstimatorState,
    GradientEstimator,
    Info,
    Model,
    Params,
    real_dtype,
    transition,
    worked,
)
from streamgrad.checks import check_choice, check_decay, check_size, find_cut
from streamgrad.engine.chunk import episode_over
from streamgrad.engine.estimator import estimator
from streamgrad.engine.method import Method, Outcome, per_stream
from streamgrad.noise.distributions import Noise, find_noise
from streamgrad.noise.settings import NoiseSettings, check_sigma
from streamgrad.noise.shaping import Shaped, check_q0, shape_noise, shaping
from streamgrad.step import cuts
from streamgrad.trees import cleared, finite_streams, restart

BASELINES = ("none", "average", "noise_free")


class Average(NamedTuple):
    """The baseline "average": an exponential average of past losses, one for all steps or one for each position.

    Attributes:
      total: the weighted sum of the losses, `[]` or `[positions]`.
      weight: the sum of the weights, likewise.
      score: of one for all steps, Σ_s b_s ∇ log p(h̄_s | h̄_{s-1}), like the cell's parameters; else None.
      position: of one for each position, that of the next step in its episode; else None.
    """

    total: Float[Array, "*positions"]
    weight: Float[Array, "*positions"]
    score: PyTree
    position: Int[Array, ""] | None


class ReinforceMemory(NamedTuple):
    """What a stream remembers.

    Attributes:
      score: w̄_t = ∇_θ log p(h̄_1, …, h̄_t), like the cell's parameters.
      twin: the state of the same network without noise; None unless the baseline is "noise_free".
      average: None unless the baseline is "average".
    """

    score: PyTree
    twin: PyTree
    average: Average | None


def reinforce(
    model: Model,
    sigma: float | Array | Callable[[Any], Any] = 0.01,
    baseline: str = "noise_free",
    q0: Any = None,
    noise: str | Noise = "gaussian",
    decay: float = 0.99,
    positions: int | None = None,
) -> GradientEstimator:
    """REINFORCE as approximate RTRL: the state is perturbed, and what lowers the loss is reinforced (Section 9).

        h̄_t = F(h̄_{t-1}, x_t; θ) + σ Q_0 u_t
        w̄_t = w̄_{t-1} + (dF/dθ at h̄_{t-1})^T Q_0^{-T} u_t / σ
        dL_t/dθ ≈ (L_t(h̄_t) - b_t) w̄_t

    Unbiased for the *noisy* network: the mean is the gradient of the expected loss, which differs from that of the
    network without noise by O(σ²). Also `info.loss` is that of the noisy network. As σ goes to zero the estimate under
    "noise_free" becomes `uoro(cut="state", rescale="none")` under the same noise; without a baseline a term of zero
    mean and a variance of order 1/σ² is added (`streamgrad.theory.score_variance`).

    | baseline b_t | what is subtracted | costs |
    |---|---|---|
    | "none" | nothing | nothing |
    | "average" | an exponential average of past losses, see below | as much memory again as w̄, or `positions` |
    | "noise_free" | the loss of a twin without noise at the same step | a second forward pass |

    To subtract an average of past losses of the *same* episode from L_t would be biased: they depend on noise that is
    part of w̄_t. There are two ways out, and a stream's average goes on through resets in both. With `positions`, the
    average at a position of the episode is over earlier episodes alone. Without, for streams that have no end, there is
    one average for all steps, and what each step added to w̄_t is given the one of the losses before *that* step,
    Σ_{s<=t} (L_t - b_s) ∇ log p(h̄_s | h̄_{s-1}): b_s knows nothing of u_s.

    Args:
      model: the model whose gradients are estimated.
      sigma: σ > 0, or a schedule in the manner of optax, `sigma(updates made) -> σ`, positive throughout.
        `streamgrad.with_noise` changes a σ that follows none.
      baseline: "noise_free", "average" or "none".
      q0: Q_0, an invertible matrix `[S, S]` or diagonal `[S]` over the ravelled state; None is the identity. The noise
        has the covariance σ² Q_0 Q_0^T. Counters, masks and keys in the state have no noise: beside them Q_0 must be
        diagonal.
      noise: "gaussian", or "given" (the caller passes u in place of the key). The score is that of
        Gaussian noise, so that there are no signs.
      decay: of the baseline "average": the loss k steps, or with `positions` k episodes, back counts decay^k.
      positions: of the baseline "average": None, or the length of the longest episode, whose positions each have an
        average of their own. Steps beyond have none.

    Returns:
      The estimator. Its diagnostics are `baseline`, `[T]`: under "noise_free", the loss of the network without noise.
      `advance` gives the outputs of the noisy network. `credit` is the estimate for the loss that is linear in them,
      dl_doutput · y_t: it is told no other. The baseline "average" looks at losses, and cannot advance without them.

    Example:
      >>> import jax, jax.numpy as jnp, optax, streamgrad as sg
      >>> model = sg.Model(sg.cells.lstm(2, 4), sg.heads.softmax(3))
      >>> params = model.init(jax.random.key(0))
      >>> est = sg.reinforce(model, sigma=optax.exponential_decay(0.1, 1000, 0.5))
      >>> chunk = sg.Chunk(jnp.ones((5, 2)), jnp.zeros(5, int))
      >>> grads, state, info = est.update(params, est.init(params), chunk, jax.random.key(1))
      >>> info.diagnostics["baseline"].shape, int(state.shared.updates)
      ((5,), 1)

    References:
      Williams, Simple statistical gradient-following algorithms for connectionist reinforcement learning, 1992.
      Cooijmans and Martens, On the variance of unbiased online recurrent optimization, 2019.
    """
    model = worked(model)
    check_choice("baseline", baseline, BASELINES)
    check_decay(decay)
    if positions is not None:
        check_size(positions=positions)
    source = find_noise(noise)
    if source.kurtosis != 0:
        raise ValueError(f"reinforce accumulates the score of Gaussian noise, and cannot do so for {source.name!r}.")
    schedule = sigma if callable(sigma) else None
    check_sigma("sigma" if schedule is None else "sigma(0)", sigma if schedule is None else schedule(0))
    size = cuts.layout(model.cell, find_cut(model, "state")).size
    check_q0(q0, size)
    is_digit = None if model.numbers.all() else ~model.numbers
    if is_digit is not None and np.ndim(q0) == 2:
        raise ValueError("q0 must be a diagonal where counters, masks or keys are in the state, which have no noise.")

    def init(params: Params) -> EstimatorState:
        dtype = real_dtype(params.cell)
        state = model.init_state(params)
        first = sigma if schedule is None else schedule(0)
        check_sigma("sigma", first, dtype)
        updates = None if schedule is None else jnp.zeros((), jnp.int32)

        def zeros() -> PyTree:  # each of its own: a state may be donated, and XLA takes no buffer twice
            return jax.tree.map(jnp.zeros_like, params.cell)

        average = None
        if baseline == "average" and positions is None:
            average = Average(jnp.zeros((), dtype), jnp.zeros((), dtype), zeros(), None)
        elif baseline == "average":
            average = Average(jnp.zeros(positions, dtype), jnp.zeros(positions, dtype), None, jnp.zeros((), jnp.int32))
        memory = ReinforceMemory(zeros(), model.init_state(params) if baseline == "noise_free" else None, average)
        settings = NoiseSettings(shaping(q0, dtype), sigma=jnp.asarray(first, dtype), updates=updates)
        return EstimatorState(state, memory, settings)

    def draw(shared: NoiseSettings, key: Any, length: int, dtype: Any) -> Shaped:
        return shape_noise(shared.shaping, source.draw(key, (length, size), dtype))

    def one(params: Params, state: EstimatorState, chunk: Chunk, noise: Shaped) -> Outcome:
        memory, shared = state.memory, state.shared
        if schedule is not None:
            now = jnp.asarray(schedule(shared.updates), shared.sigma.dtype)
            shared = shared._replace(sigma=now, updates=shared.updates + 1)
        kicks, left = shared.sigma * noise.right, noise.left / shared.sigma
        if is_digit is not None:  # noise would make another counter of it, or another key
            kicks = jnp.where(is_digit[None], 0, kicks)

        end, before, after = _walk(model, params, (state.cell, memory.twin), chunk, kicks)
        loss, head_grads, _ = model.read_out_chunk(params.head, after[0], chunk.targets)
        average, subtracted = memory.average, jnp.zeros_like(loss)
        if baseline == "noise_free":
            subtracted, _, _ = model.read_out_chunk(params.head, after[1], chunk.targets)
        elif average is not None:
            average, subtracted = _average(average, loss, chunk.reset, decay)
        by_step = baseline == "average" and positions is None  # each step's score has its own b
        gone = _gone((before, chunk.inputs), chunk.reset)
        before, inputs = cleared(gone, (before, chunk.inputs))

        def pull(weights: list[Array]) -> PyTree:
            return _scores(model, params, before, inputs, jnp.stack(weights)[:, :, None] * left[None])

        memory = memory._replace(average=average)
        cell_grads, new = _reinforced(memory, loss, subtracted, chunk.reset, gone, by_step, pull)
        state = EstimatorState(end[0], new._replace(twin=end[1]), shared)
        info = Info(loss, {"baseline": subtracted}, jax.vmap(model.cell.output)(after[0]))
        return Outcome(Params(cell_grads, head_grads), state, info)

    return estimator(
        Method(
            name="reinforce",
            options={"sigma": sigma if isinstance(sigma, int | float) else None, "baseline": baseline},
            model=model,
            init=init,
            run=per_stream(one),
            draw=draw,
            check=lambda chunk, length, key: source.check(key),
            uses_loss=baseline == "average",
        )
    )


def _reinforced(
    memory: ReinforceMemory,
    loss: Float[Array, " T"],
    subtracted: Float[Array, " T"],
    reset: Bool[Array, " T"] | None,
    gone: Bool[Array, " T"] | None,
    by_step: bool,
    pull: Callable[[list[Array]], PyTree],
) -> tuple[PyTree, ReinforceMemory]:
    """Σ_t (L_t - b_t) w̄_t, and the scores after the chunk.

        Σ_t k_t w̄_t = Σ_s (Σ_{t>=s} k_t) ∇ log p(h̄_s | h̄_{s-1}),    sums within episodes

    Each step's score is needed once, with a weight, and one reverse pass over all steps at once adds them up.

    Args:
      memory: before the chunk, with the average after it.
      loss: L_t.
      subtracted: b_t, or with `by_step` the b of each step's own score.
      reset: where episodes begin.
      gone: the steps whose place is not finite, from `_gone`. Their own credit is not either, whatever their loss.
      by_step: see above.
      pull: `pull(weights)`, the sums of the scores of all steps with each of these weights.

    Returns:
      The gradient, and the memory.
    """
    last = jnp.zeros_like(loss).at[-1].set(1)
    per_step = jnp.stack([loss if by_step else loss - subtracted, last, jnp.ones_like(loss)], axis=1)
    # `alive` are the steps that the score at the end still counts.
    (credit, alive, count), (old_credit, old_alive, old_count) = _sum_ahead(per_step, reset)
    credit = credit if gone is None else jnp.where(gone, jnp.nan, credit)
    weights = [credit, alive]
    if by_step:
        weights = [credit - count * subtracted, alive, jnp.where(alive == 0, 0, alive * subtracted)]
    pulled = pull(weights)
    # Scores of before the chunk have a weight of zero where an episode has begun since, but may have gone to NaN.
    begins, begun = (None, None) if reset is None else (reset[0], jnp.any(reset))

    def add(k: int, weight: Array, old: PyTree) -> PyTree:
        """The k-th of what was pulled, and a score of before the chunk with its weight."""
        return jax.tree.map(lambda new, before: new[k] + weight * before, pulled, old)

    score, grads = add(1, old_alive, cleared(begun, memory.score)), add(0, old_credit, cleared(begins, memory.score))
    average = memory.average
    if average is not None and by_step:
        grads = jax.tree.map(lambda a, b: a - old_count * b, grads, cleared(begins, average.score))
        average = average._replace(score=add(2, old_alive, cleared(begun, average.score)))
    return grads, memory._replace(score=score, average=average)


def _gone(steps: PyTree, reset: Bool[Array, " T"] | None) -> Bool[Array, " T"] | None:
    """The steps of an episode that is over whose state or input is not finite; None where no episode begins.

    They are of no account at the end of the chunk, but their scores are pulled back together with those of the others.
    """
    over = episode_over(reset)
    return None if over is None else over & ~finite_streams(steps, len(over))


def _walk(
    model: Model, params: Params, states: tuple[PyTree, PyTree], chunk: Chunk, kicks: Float[Array, "T S"]
) -> tuple[tuple[PyTree, PyTree], PyTree, tuple[PyTree, PyTree]]:
    """Run the noisy network, and its twin where there is one.

    Returns:
      Both states at the end; h̄_{t-1}, fresh where an episode begins; and both states after every step.
    """
    fresh = model.init_state(params)
    unravel = ravel_pytree(fresh)[1]

    def step(states: tuple[PyTree, PyTree], now: tuple) -> tuple[tuple[PyTree, PyTree], tuple]:
        x, reset, kick = now
        noisy, twin = states
        noisy = restart(reset, fresh, noisy)
        after = jax.tree.map(jnp.add, transition(model, params, noisy, x), unravel(kick))
        if twin is not None:
            twin = transition(model, params, restart(reset, fresh, twin), x)
        return (after, twin), (noisy, (after, twin))

    end, (before, after) = jax.lax.scan(step, states, (chunk.inputs, chunk.reset, kicks))
    return end, before, after


def _average(
    average: Average, losses: Float[Array, " T"], reset: Bool[Array, " T"] | None, decay: float
) -> tuple[Average, Float[Array, " T"]]:
    """The average after the chunk, and what it was before each step: 0 where there was none.

    It goes on through episodes, but for what is not finite: such a loss is left out, and such an average begins again
    with the next episode.
    """

    def step(average: Average, now: tuple) -> tuple[Average, Array]:
        loss, reset = now
        total, weight, score, position = average
        if reset is not None:
            total, weight = cleared(reset & ~(jnp.isfinite(total) & jnp.isfinite(weight)), (total, weight))
        if position is None:
            at, here = total, weight
        else:
            position = restart(reset, jnp.zeros_like(position), position)
            at, here = (x.at[position].get(mode="fill", fill_value=0) for x in (total, weight))
        b = jnp.where(here > 0, at / jnp.where(here > 0, here, 1), 0)
        known = jnp.isfinite(loss)
        at = jnp.where(known, decay * at + (1 - decay) * loss, at)
        here = jnp.where(known, decay * here + (1 - decay), here)
        if position is None:
            return Average(at, here, score, None), b
        total, weight = total.at[position].set(at, mode="drop"), weight.at[position].set(here, mode="drop")
        return Average(total, weight, score, position + 1), b

    after, before = jax.lax.scan(step, average._replace(score=None), (losses, reset))
    return after._replace(score=average.score), before


def _sum_ahead(
    per_step: Float[Array, "T K"], reset: Bool[Array, " T"] | None
) -> tuple[Float[Array, "K T"], Float[Array, " K"]]:
    """Sums over each step and the later ones of its episode.

    Returns:
      The sums; and what an episode that began before the chunk receives from it, 0 where a reset comes first.
    """

    def step(later: Array, now: tuple) -> tuple[Array, Array]:
        here, reset = now
        total = here + later
        return total if reset is None else jnp.where(reset, 0, total), total

    before, sums = jax.lax.scan(step, jnp.zeros_like(per_step[0]), (per_step, reset), reverse=True)
    return sums.T, before


def _scores(model: Model, params: Params, before: PyTree, inputs: PyTree, cotangents: Float[Array, "K T S"]) -> PyTree:
    """Σ_t v_t^T dF/dθ at (h̄_{t-1}, x_t), for K vectors v at once; stacked along a leading axis."""

    def all_steps(cell_params: PyTree) -> Float[Array, "T S"]:
        def one(state: PyTree, x: PyTree) -> Array:
            return ravel_pytree(transition(model, params._replace(cell=cell_params), state, x))[0]

        return jax.vmap(one)(before, inputs)

    values, pull = jax.vjp(all_steps, params.cell)
    return jax.vmap(lambda v: pull(v)[0])(cotangents.astype(values.dtype))
