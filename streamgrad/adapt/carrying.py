"""Q_0 and α carried over from past windows: the estimator's side of it. The mathematics is in `variance.carried`.

A flag in the shared state says for each chunk whether what is carried over is used. Where that is Q_0 alone, Q_0 is the
identity until then. Where it is α as well, there are two estimators of the same parts, the other one with GIR, and only
the chosen one is computed: once the statistics are used, GIR's norms cost nothing.

After each update `learn` looks back over a window of the streams it watches. What it finds is not used before the next
window; which stream is watched, and from which step the reverse pass starts, go by turns.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from streamgrad._typing import Array, Bool, Float, Int, PyTree
from streamgrad.adapt.averages import Averages, CarriedShared, Gathered, all_finite, solve
from streamgrad.adapt.choice import Carry
from streamgrad.adapt.window import (
    Back,
    Window,
    estimate_b,
    estimate_c,
    go_back,
)
from streamgrad.base import Chunk, EstimatorState, GradientEstimator, Influence, Info, Model, Params, real_dtype
from streamgrad.engine.online import Check, Learn, Parts, estimator
from streamgrad.noise.groups import Groups
from streamgrad.noise.rescale import (
    Rescaling,
    Scales,
    Terms,
    find_rescaling,
    given,
    total_log_alpha,
)
from streamgrad.noise.shaping import Shaping
from streamgrad.step import cuts
from streamgrad.theory.online_b import draw_b_noise, estimate_b_online
from streamgrad.theory.spatial import Spatial

# An α that is carried over does not look at the two factors. A tangent this many times as large as GIR would make it,
# or as small, comes of an α that has outlived its dynamics; GIR brings it back.
_LARGEST_IMBALANCE = 100.0


def carried_rescaling(carry: Carry) -> Rescaling:
    """How γ and β follow from the α that is carried over."""
    if carry.alpha != "optimal":
        return find_rescaling(carry.alpha)
    assert carry.episode is not None
    return given(np.ones(carry.episode))


def until_ready(rescaling: Rescaling) -> Rescaling:
    """GIR, which keeps `rescaling`'s memory up to date while it stands in for it."""
    gir = find_rescaling("gir")

    def coefficients(shared: PyTree, memory: PyTree, terms: Terms) -> tuple[Scales, Scales, PyTree]:
        past, present, _ = gir.coefficients(None, None, terms)
        return past, present, rescaling.coefficients(shared, memory, terms)[2]

    return rescaling._replace(name="gir", coefficients=coefficients, uses_norms=True)


def switched(
    when_ready: Parts, otherwise: Parts | None, view: Callable[[Shaping | None, Array | None], PyTree]
) -> Parts:
    """One of two `parts`, by the flag in the shared state.

    Args:
      when_ready: with Q_0 and α.
      otherwise: with the identity and GIR; None where α is not carried over, and only Q_0 differs.
      view: `view(shaping, alpha)`, what the parts call shared.

    Returns:
      Parts that pass the shared state through.
    """

    def parts(params: Params, state: EstimatorState, chunk: Chunk, key: Any) -> tuple[PyTree, EstimatorState, Info]:
        shared: CarriedShared = state.shared

        def branch(parts: Parts, shaping: Shaping | None) -> Callable:
            def run(cell: PyTree, memory: PyTree) -> tuple:
                inner = EstimatorState(cell, memory, view(shaping, shared.alpha))
                summands, new, info = parts(params, inner, chunk, key)
                return summands, new.cell, new.memory, info

            return run

        if otherwise is None:
            shaping = jax.tree.map(lambda q: jnp.where(shared.ready, q, identity_like(q)), shared.shaping)
            summands, cell, memory, info = branch(when_ready, shaping)(state.cell, state.memory)
        else:
            summands, cell, memory, info = jax.lax.cond(
                shared.ready, branch(when_ready, shared.shaping), branch(otherwise, None), state.cell, state.memory
            )
        flag = jnp.broadcast_to(shared.ready.astype(info.loss.dtype), info.loss.shape)
        return summands, EstimatorState(cell, memory, shared), Info(info.loss, {**info.diagnostics, "carried": flag})

    return parts


def identity_like(q0: Array) -> Array:
    """The identity as a matrix or as a diagonal."""
    return jnp.ones_like(q0) if q0.ndim == 1 else jnp.eye(len(q0), dtype=q0.dtype)


def watched(influence: Influence) -> Influence:
    """An influence that leaves states and gradients of the losses among its diagnostics, for `learn` to look at."""

    def advance(shared: PyTree, memory: PyTree, step: Any, noise: PyTree, dl_dstate: Array) -> tuple[PyTree, dict]:
        memory, diagnostics = influence.advance(shared, memory, step, noise, dl_dstate)
        return memory, {**diagnostics, "state": ravel_pytree(step.state)[0], "dl_dstate": dl_dstate}

    return influence._replace(advance=advance)


def carried_estimator(
    model: Model,
    groups: Groups,
    carry: Carry,
    begin: Callable[[Params], EstimatorState],
    parts: Parts,
    total: Callable[[PyTree], Params],
    check: Check,
    asked: int = 1,
) -> GradientEstimator:
    """An estimator of switched parts, with the statistics as its shared state; see `make_learner`."""
    begin_shared, learn = make_learner(model, groups, carry, asked)

    def init(params: Params) -> EstimatorState:
        return begin(params)._replace(shared=begin_shared(params))

    return estimator(model, init, parts, total, check, learn)


def make_learner(
    model: Model, groups: Groups, carry: Carry, asked: int = 1
) -> tuple[Callable[[Params], CarriedShared], Learn]:
    """The statistics at the beginning, and what each update adds to them.

    Args:
      model: the model, with preactivations.
      groups: the partition of its preactivations; each group has its own block of Q_0 and its own α.
      carry: the user's choice.
      asked: how many groups the user asked for.

    Returns:
      `init(params)` and `learn` as `engine.online.estimator` takes it. The parts must leave the states and the gradients
      of the losses with respect to them among their diagnostics, as "state" and "dl_dstate".
    """
    size, count = len(groups.index), groups.count
    optimal = carry.alpha == "optimal"
    reverse = optimal or carry.statistics == "reverse"
    length = carry.episode
    example = model.cell.example_input
    if length is None and example is None:
        raise ValueError("carry on streams must know what an input looks like: give the cell an example_input.")
    state_size = cuts.layout(model.cell, model.cell.cuts["preactivation"]).state_size

    def init(params: Params) -> CarriedShared:
        dtype = real_dtype(params.cell)
        zero = jnp.zeros((), dtype)
        averages, alpha, shaping, gathered = Averages(zero), None, None, None
        if carry.q0 == "full":
            shaping = Shaping(jnp.eye(size, dtype=dtype), jnp.eye(size, dtype=dtype))
        elif carry.q0 == "diagonal":
            shaping = Shaping(jnp.ones(size, dtype), jnp.ones(size, dtype))
        if shaping is not None:
            averages = averages._replace(b=jnp.zeros_like(shaping.q0))
        if optimal:
            assert length is not None
            alpha, each = jnp.ones((length, count), dtype), jnp.zeros(length, dtype)
            averages = averages._replace(c=jnp.zeros((length, length, count), dtype), visits=each, steps=each)
        if length is None and carry.streams is not None:
            gathered = empty_window(dtype, carry.streams)
        no, none = jnp.zeros((), bool), jnp.zeros((), jnp.int32)
        shared = CarriedShared(shaping, alpha, no, no, none, none, averages, gathered)
        # Every array for itself, since a training loop may donate them.
        return jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), shared)

    def empty_window(dtype: Any, watched: int) -> Gathered:
        steps = (watched, carry.window)
        inputs = jax.tree.map(lambda x: jnp.zeros((*steps, *x.shape), _stored(x.dtype, dtype)), example)
        vectors = jnp.zeros((*steps, state_size), dtype)
        window = Window(vectors, inputs, vectors, jnp.zeros(steps, bool))
        return Gathered(window, jnp.ones((*steps, 2, count), dtype), jnp.zeros((), jnp.int32))

    def spatial(shaping: Shaping | None) -> Spatial:
        return Spatial(groups, None, None) if shaping is None else Spatial(groups, shaping.q0, shaping.inverse)

    def log_alpha_of(shared: CarriedShared, scales: Float[Array, "T 2 G"], position: Array | None) -> Array:
        """log α of a window: what is carried over, or what the estimator used."""
        if not optimal:
            return total_log_alpha(scales[:, 0], scales[:, 1])
        assert shared.alpha is not None and position is not None
        return jnp.log(shared.alpha)[position]

    def statistics(params: Params, shared: CarriedShared, turn: Array, filled: Any, watched: tuple) -> Averages:
        """What one window of one stream adds."""
        window, scales, position, chunk = watched
        log_alpha = log_alpha_of(shared, scales, position)
        found = Averages(jnp.ones((), log_alpha.dtype))
        if carry.statistics == "appendix_f":
            # Not from the caller's key, which the gradient's noise comes from.
            noise = draw_b_noise(jax.random.fold_in(jax.random.key(0), turn), len(scales), size, log_alpha.dtype)
            b = estimate_b_online(model, params, chunk, noise, jnp.exp(log_alpha), asked).b
            found = found._replace(b=jnp.diagonal(b) if carry.q0 == "diagonal" else b)
        if not reverse:
            return found
        back = go_back(model, params, groups, window, in_turns(turn, len(scales), filled), filled)
        if carry.q0 != "none" and carry.statistics == "reverse":
            found = found._replace(b=estimate_b(groups, back, log_alpha, carry.q0 == "diagonal"))
        return found if position is None else by_position(found, shared, back, position)

    def by_position(found: Averages, shared: CarriedShared, back: Back, position: Int[Array, " T"]) -> Averages:
        assert length is not None
        c = estimate_c(spatial(shared.shaping), back)
        at = position[back.start]
        total = jnp.zeros((length, length, count), c.row.dtype)
        total = total.at[position[:, None], position[None, :]].add(c.known)
        total = total.at[at, position].add(back.length * c.row)
        each = jnp.zeros(length, c.row.dtype)
        return found._replace(c=total, visits=each.at[at].add(back.length), steps=each.at[position].add(1))

    def observe(params: Params, shared: CarriedShared, watched: tuple, filled: Any) -> CarriedShared:
        """Add windows of all watched streams to the averages; every few windows solve for Q_0 and α."""
        many = jax.tree.leaves(watched)[0].shape[0]
        turns = shared.windows * many + jnp.arange(many)
        found = jax.vmap(lambda turn, one: statistics(params, shared, turn, filled, one))(turns, watched)
        found = jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), found)
        good = all_finite(found)  # a window that is not is left out: an average would never recover
        averages = jax.tree.map(
            lambda old, new: jnp.where(good, carry.decay * old + (1 - carry.decay) * new, old), shared.averages, found
        )
        windows, passes = shared.windows + 1, jnp.minimum(shared.passes + jnp.where(good, many, 0), 1 << 20)
        shared = shared._replace(averages=averages, windows=windows, passes=passes)
        old_enough = passes >= carry.passes
        due = old_enough & ((windows % carry.refresh == 0) | (passes < carry.passes + many))
        return jax.lax.cond(due, functools.partial(solve, groups, carry.damping), lambda shared: shared, shared)

    def learn(
        params: Params, before: EstimatorState, after: EstimatorState, chunk: Chunk, info: Info
    ) -> tuple[CarriedShared, Info]:
        shared: CarriedShared = before.shared
        diagnostics = dict(info.diagnostics)
        states, dl_dstate = diagnostics.pop("state"), diagnostics.pop("dl_dstate")
        batch, steps = info.loss.shape
        many = min(carry.streams or batch, batch)
        which = (shared.windows % batch * many + jnp.arange(many)) % batch

        def take(tree: PyTree) -> PyTree:
            return jax.tree.map(lambda leaf: leaf[which], tree)

        reset = jnp.zeros((many, steps), bool) if chunk.reset is None else chunk.reset[which]
        fresh = ravel_pytree(model.init_state(params))[0]
        first = jax.vmap(lambda cell: ravel_pytree(cell)[0])(take(before.cell))
        earlier = jnp.concatenate([first[:, None], take(states)[:, :-1]], axis=1)
        earlier = jnp.where(reset[:, :, None], fresh[None, None], earlier)
        window = Window(earlier, take(chunk.inputs), take(dl_dstate), reset)
        scales = jnp.stack([take(diagnostics["gamma"]), take(diagnostics["beta"])], axis=2)
        if length is not None:
            position = None
            if optimal:
                position = jax.vmap(_positions, in_axes=(0, 0, None))(take(before.memory.rescaling), reset, length)
            shared = observe(params, shared, (window, scales, position, take(chunk)), steps)
        else:
            shared = gather(params, shared, window, scales)
        calm = balanced(after.memory) if optimal else jnp.ones((), bool)
        return shared._replace(ready=shared.solved & calm), Info(info.loss, diagnostics)

    def gather(params: Params, shared: CarriedShared, window: Window, scales: Array) -> CarriedShared:
        """Fill the window; look back once it is full."""
        many, steps = scales.shape[:2]
        if steps >= carry.window:
            whole = jax.tree.map(lambda leaf: leaf[:, : carry.window], (window, scales))
            return observe(params, shared, (*whole, None, None), carry.window)
        before = shared.gathered
        if before is None:
            raise ValueError(
                f"to watch all streams, streams=None, chunks must be at least as long as the window, {carry.window} "
                f"steps, not {steps}: give a number of streams, or a shorter window."
            )
        # Chunks of another length than before may not fit: then it is begun anew.
        at = jnp.where(before.filled + steps > carry.window, 0, before.filled)

        def write(old: Array, new: Array) -> Array:
            # What is left of the window before must not be looked back from.
            old = old[:many]
            return jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), at, axis=1)

        kept = before.window._replace(dl_dstate=jnp.where(at == 0, 0, before.window.dl_dstate))
        filled, (window, scales) = at + steps, jax.tree.map(write, (kept, before.scales), (window, scales))
        full = filled + steps > carry.window

        def look_back(shared: CarriedShared) -> CarriedShared:
            return observe(params, shared, (window, scales, None, None), filled)

        shared = jax.lax.cond(full, look_back, lambda shared: shared, shared)
        window, scales = jax.tree.map(
            lambda new, old: jnp.concatenate([new, old[many:]]), (window, scales), (before.window, before.scales)
        )
        return shared._replace(gathered=Gathered(window, scales, jnp.where(full, 0, filled)))

    return init, learn


def in_turns(turn: Int[Array, ""], size: int, filled: Any) -> Int[Array, ""]:
    """The step q of the reverse pass of that number: every filled step once, in leaps of the golden ratio.

    Args:
      turn: the pass's number.
      size: steps of the window.
      filled: how many of them there are; q stays below.

    Returns:
      q.

    Example:
      >>> [int(in_turns(turn, 8, 5)) for turn in jnp.arange(6)]
      [0, 3, 1, 4, 2, 0]
    """
    strides = [next(n for n in range(max(1, round(k / 1.618)), k + 2) if np.gcd(n, k) == 1) for k in range(1, size + 1)]
    stride = jnp.asarray(strides, jnp.int32)[filled - 1]
    return jnp.asarray((turn % filled) * stride % filled, jnp.int32)


def _positions(start: Int[Array, ""], reset: Bool[Array, " T"], length: int) -> Int[Array, " T"]:
    """Positions in the episode, of which the last counts for all beyond."""
    t = jnp.arange(reset.shape[0])
    begun = jax.lax.cummax(jnp.where(reset, t, -1))
    return jnp.minimum(jnp.where(begun >= 0, t - begun, start + t), length - 1)


def balanced(memory: Any) -> Bool[Array, ""]:
    """Whether in every stream tangent and cotangent are within a factor of what GIR would make of them."""

    def square(tree: PyTree) -> Float[Array, " B"]:
        return sum((jnp.sum(leaf**2, axis=tuple(range(1, leaf.ndim))) for leaf in jax.tree.leaves(tree)), jnp.zeros(()))

    # GIR's tangent has the norm sqrt(‖h̃‖ ‖w̃‖); hence a fourth power of ratios of squares.
    tangent, cotangent = square(memory.tangent), square(memory.cotangent)
    limit = jnp.asarray(_LARGEST_IMBALANCE, tangent.dtype) ** 2
    apart = jnp.sqrt(tangent) / jnp.sqrt(jnp.where(cotangent > 0, cotangent, 1))
    empty = (tangent == 0) | (cotangent == 0)
    return jnp.all(empty | ((apart < limit) & (apart > 1 / limit)))


def _stored(dtype: Any, real: Any) -> Any:
    return real if jnp.issubdtype(dtype, jnp.floating) else dtype
