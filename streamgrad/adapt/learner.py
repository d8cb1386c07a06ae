"""Statistics of past windows, gathered while streams run, and Q_0 and α solved from them.

After each update `learn` looks back over a window of the streams it watches. Its statistics are not used before the
next window. The watched stream, and the step from which the reverse pass starts, go by turns.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from streamgrad._typing import Array, Bool, Float, Int, PyTree
from streamgrad.adapt.averages import Averages, CarriedShared, Gathered, solve
from streamgrad.adapt.window import Back, Window, estimate_b, estimate_c, go_back
from streamgrad.base import Chunk, EstimatorState, Model, Params, real_dtype
from streamgrad.engine.collectives import Devices, PerDevice
from streamgrad.engine.method import Outcome
from streamgrad.noise.groups import Groups
from streamgrad.noise.rescale import total_log_alpha
from streamgrad.noise.shaping import Shaping
from streamgrad.step import cuts
from streamgrad.theory.spatial import with_shaping
from streamgrad.trees import cleared, finite_streams

# An α that is carried over does not look at the two factors. A tangent this many times as large as GIR would make it,
# or as small, comes of an α that has outlived its dynamics; GIR brings it back.
_LARGEST_IMBALANCE = 100.0


@dataclasses.dataclass(frozen=True)
class Carry:
    """The user's choices, checked by `carried`."""

    episode: int | None
    window: int
    decay: float
    damping: float
    refresh: int
    streams: int | None
    least: int | None
    q0: str
    alpha: str

    @property
    def passes(self) -> int:
        """The number of reverse passes before their averages are used."""
        if self.least is not None:
            return self.least
        return 16 if self.episode is None else max(16, self.episode)


@dataclasses.dataclass(frozen=True)
class Learner:
    """The statistics at the beginning, `init(params)`, and after each update, `learn`.

    Attributes:
      model: the model, with preactivations.
      groups: the partition of its preactivations; each group has its own block of Q_0 and its own α.
      carry: the user's choices.
    """

    model: Model
    groups: Groups
    carry: Carry

    def __post_init__(self) -> None:
        if self.carry.episode is None and self.model.cell.example_input is None:
            raise ValueError("carried on streams must know what an input looks like: give the cell an example_input.")

    @property
    def optimal(self) -> bool:
        """Whether α is carried over, too."""
        return self.carry.alpha == "optimal"

    def init(self, params: Params) -> CarriedShared:
        """Nothing is known yet: the identity, and an α of 1."""
        dtype, size = real_dtype(params.cell), len(self.groups.index)
        count, length = self.groups.count, self.carry.episode
        averages, alpha, shaping, gathered = Averages(jnp.zeros((), dtype)), None, None, None
        if self.carry.q0 != "none":
            one = jnp.eye(size, dtype=dtype) if self.carry.q0 == "full" else jnp.ones(size, dtype)
            shaping, averages = Shaping(one, one), averages._replace(b=jnp.zeros_like(one))
        if self.optimal:
            assert length is not None
            alpha, each = jnp.ones((length, count), dtype), jnp.zeros(length, dtype)
            averages = averages._replace(c=jnp.zeros((length, length, count), dtype), visits=each, steps=each)
        if length is None and self.carry.streams is not None:
            gathered = self._empty_window(dtype, self.carry.streams)
        no, none = jnp.zeros((), bool), jnp.zeros((), jnp.int32)
        shared = CarriedShared(shaping, alpha, no, no, none, none, averages, gathered)
        # Every array for itself, since a training loop may donate them.
        return jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), shared)

    def _empty_window(self, dtype: Any, watched: int) -> Gathered:
        steps = (watched, self.carry.window)

        def zeros(x: Any) -> Array:
            return jnp.zeros((*steps, *x.shape), dtype if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype)

        inputs = jax.tree.map(zeros, self.model.cell.example_input)
        state_size = cuts.layout(self.model.cell, self.model.cell.cuts["preactivation"]).state_size
        vectors = jnp.zeros((*steps, state_size), dtype)
        window = Window(vectors, inputs, vectors, jnp.zeros(steps, bool))
        scales = jnp.ones((*steps, 2, self.groups.count), dtype)
        return Gathered(PerDevice((window, scales)), jnp.zeros((), jnp.int32))

    def _log_alpha_of(self, shared: CarriedShared, scales: Float[Array, "T 2 G"], position: Array | None) -> Array:
        """log α of a window: carried over, or the estimator's own."""
        if not self.optimal:
            return total_log_alpha(scales[:, 0], scales[:, 1])
        assert shared.alpha is not None and position is not None
        return jnp.log(shared.alpha)[position]

    def _statistics(self, params: Params, shared: CarriedShared, turn: Array, filled: Any, watched: tuple) -> Averages:
        """The statistics of one window of one stream."""
        window, scales, position = watched
        log_alpha = self._log_alpha_of(shared, scales, position)
        found = Averages(jnp.ones((), log_alpha.dtype))
        back = go_back(self.model, params, self.groups, window, in_turns(turn, len(scales), filled), filled)
        if self.carry.q0 != "none":
            found = found._replace(b=estimate_b(self.groups, back, log_alpha, self.carry.q0 == "diagonal"))
        return found if position is None else self._by_position(found, shared, back, position)

    def _by_position(self, found: Averages, shared: CarriedShared, back: Back, position: Int[Array, " T"]) -> Averages:
        assert self.carry.episode is not None
        c = estimate_c(with_shaping(self.groups, shared.shaping), back)
        at = position[back.start]
        total = jnp.zeros((self.carry.episode, self.carry.episode, self.groups.count), c.row.dtype)
        total = total.at[position[:, None], position[None, :]].add(c.known)
        total = total.at[at, position].add(back.length * c.row)
        each = jnp.zeros(self.carry.episode, c.row.dtype)
        return found._replace(c=total, visits=each.at[at].add(back.length), steps=each.at[position].add(1))

    def _observe(
        self, params: Params, shared: CarriedShared, watched: tuple, filled: Any, devices: Devices
    ) -> CarriedShared:
        """Add windows of all watched streams to the averages; every few windows solve for Q_0 and α."""
        own = jax.tree.leaves(watched)[0].shape[0]
        many = own * devices.count
        turns = shared.windows * many + devices.index * own + jnp.arange(own, dtype=jnp.int32)
        found = jax.vmap(lambda turn, one: self._statistics(params, shared, turn, filled, one))(turns, watched)
        # A window that is not finite is left out: an average would never recover.
        finite = finite_streams(found, own)
        found, share = devices.mean(_mean_of((found, finite.astype(found.weight.dtype)), finite))
        good = share > 0

        def average(old: Array, new: Array) -> Array:
            new = new / jnp.where(good, share, 1)
            return jnp.where(good, self.carry.decay * old + (1 - self.carry.decay) * new, old)

        averages = jax.tree.map(average, shared.averages, found)
        seen = jnp.round(many * share).astype(shared.passes.dtype)
        windows, passes = shared.windows + 1, jnp.minimum(shared.passes + seen, 1 << 20)
        shared = shared._replace(averages=averages, windows=windows, passes=passes)
        old_enough = passes >= self.carry.passes
        due = old_enough & ((windows % self.carry.refresh == 0) | (passes < self.carry.passes + many))
        solved = functools.partial(solve, self.groups, self.carry.damping)
        return jax.lax.cond(due, solved, lambda shared: shared, shared)

    def learn(
        self, params: Params, before: EstimatorState, outcome: Outcome, chunk: Chunk, devices: Devices
    ) -> CarriedShared:
        """The statistics after a chunk of all streams; as in `streamgrad.Method`.

        On several devices each watches as many of its own streams, and no stream travels.
        """
        shared, info = before.shared, outcome.info
        assert outcome.seen is not None
        batch, steps = info.loss.shape
        many = min(self.carry.streams or batch, batch)
        which = (shared.windows % batch * many + jnp.arange(many, dtype=jnp.int32)) % batch

        def watched(tree: PyTree) -> PyTree:
            return jax.tree.map(lambda leaf: leaf[which], tree)

        reset = jnp.zeros((many, steps), bool) if chunk.reset is None else chunk.reset[which]
        fresh = ravel_pytree(self.model.init_state(params))[0]
        first = jax.vmap(lambda cell: ravel_pytree(cell)[0])(watched(before.cell))
        earlier = jnp.concatenate([first[:, None], watched(outcome.seen.state)[:, :-1]], axis=1)
        earlier = jnp.where(reset[:, :, None], fresh[None, None], earlier)
        window = Window(earlier, watched(chunk.inputs), watched(outcome.seen.dl_dstate), reset)
        scales = jnp.stack([watched(info.diagnostics["gamma"]), watched(info.diagnostics["beta"])], axis=2)
        if self.carry.episode is not None:
            position = None
            if self.optimal:
                positions = functools.partial(_positions, length=self.carry.episode)
                position = jax.vmap(positions)(watched(before.memory.rescaling), reset)
            shared = self._observe(params, shared, (window, scales, position), steps, devices)
        else:
            shared = self._gather(params, shared, window, scales, devices)
        calm = jnp.ones((), bool)
        if self.optimal:
            calm = devices.mean(balanced(outcome.state.memory).astype(scales.dtype)) > 1 - 0.5 / devices.count
        return shared._replace(ready=shared.solved & calm)

    def _gather(
        self, params: Params, shared: CarriedShared, window: Window, scales: Array, devices: Devices
    ) -> CarriedShared:
        """Fill the window; look back once it is full."""
        many, steps = scales.shape[:2]
        if steps >= self.carry.window:
            whole = jax.tree.map(lambda leaf: leaf[:, : self.carry.window], (window, scales))
            return self._observe(params, shared, (*whole, None), self.carry.window, devices)
        before = shared.gathered
        if before is None:
            raise ValueError(
                f"to watch all streams, streams=None, chunks must be at least as long as the window, "
                f"{self.carry.window} steps, not {steps}: give a number of streams, or a shorter window."
            )
        # Chunks of another length than before may not fit: then it begins again.
        at = jnp.where(before.filled + steps > self.carry.window, 0, before.filled)

        def write(old: Array, new: Array) -> Array:
            old = old[:many]
            return jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), at, axis=1)

        old_window, old_scales = before.steps.value
        # The rest of the window before must not be looked back from.
        cleared_window = jax.tree.map(lambda leaf: jnp.where(at == 0, jnp.zeros_like(leaf), leaf), old_window)
        filled, (window, scales) = at + steps, jax.tree.map(write, (cleared_window, old_scales), (window, scales))
        full = filled + steps > self.carry.window

        def look_back(shared: CarriedShared) -> CarriedShared:
            return self._observe(params, shared, (window, scales, None), filled, devices)

        shared = jax.lax.cond(full, look_back, lambda shared: shared, shared)
        now = jax.tree.map(
            lambda new, old: jnp.concatenate([new, old[many:]]), (window, scales), (old_window, old_scales)
        )
        return shared._replace(gathered=Gathered(PerDevice(now), jnp.where(full, 0, filled)))


def in_turns(turn: Int[Array, ""], size: int, filled: Any) -> Int[Array, ""]:
    """The step q of the reverse pass number `turn`: each of the `filled` steps once, in leaps of the golden ratio.

    `filled` is at most `size`, the steps of a whole window.

    Example:
      >>> [int(in_turns(turn, 8, 5)) for turn in jnp.arange(6)]
      [0, 3, 1, 4, 2, 0]
    """
    strides = [next(n for n in range(max(1, round(k / 1.618)), k + 2) if np.gcd(n, k) == 1) for k in range(1, size + 1)]
    stride = jnp.asarray(strides, jnp.int32)[filled - 1]
    return jnp.asarray((turn % filled) * stride % filled, jnp.int32)


def _positions(start: Int[Array, ""], reset: Bool[Array, " T"], length: int) -> Int[Array, " T"]:
    """Positions in the episode; those beyond the last one count as the last."""
    t = jnp.arange(reset.shape[0], dtype=jnp.int32)
    begun = jax.lax.cummax(jnp.where(reset, t, -1))
    return jnp.minimum(jnp.where(begun >= 0, t - begun, start + t), length - 1)


def balanced(memory: Any) -> Bool[Array, ""]:
    """Whether in every stream tangent and cotangent are within a factor of those of GIR."""

    def square(tree: PyTree) -> Float[Array, " B"]:
        return sum((jnp.sum(leaf**2, axis=tuple(range(1, leaf.ndim))) for leaf in jax.tree.leaves(tree)), jnp.zeros(()))

    # GIR's tangent has the norm sqrt(‖h̃‖ ‖w̃‖), and ‖h̃‖ is sqrt(‖h̃‖ / ‖w̃‖) times as large.
    tangent, cotangent = square(memory.tangent), square(memory.cotangent)
    limit = jnp.asarray(_LARGEST_IMBALANCE, tangent.dtype) ** 2
    apart = jnp.sqrt(tangent) / jnp.sqrt(jnp.where(cotangent > 0, cotangent, 1))
    empty = (tangent == 0) | (cotangent == 0)
    gone = ~jnp.isfinite(tangent + cotangent)  # a stream that waits for its reset does not decide for the others
    return jnp.all(empty | gone | ((apart < limit) & (apart > 1 / limit)))


def _mean_of(tree: PyTree, finite: Bool[Array, " b"]) -> PyTree:
    """The sum over the streams that are finite, divided by the number of all streams."""
    return jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), cleared(~finite, tree))
