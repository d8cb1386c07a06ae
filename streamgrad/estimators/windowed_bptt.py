"""Backpropagation through a window of steps, across chunks: BPTT(h; h'), with rolling windows among them."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from streamgrad._typing import Array, Bool, Int, PyTree
from streamgrad.base import Chunk, EstimatorState, GradientEstimator, Info, Model, Params, worked
from streamgrad.checks import check_flag, check_size, leading_length
from streamgrad.engine.estimator import estimator
from streamgrad.engine.method import Method, Outcome, per_stream, sum_over_streams
from streamgrad.engine.stored_steps import as_stored, forgotten, latest, no_inputs
from streamgrad.estimators.bptt import sum_factors
from streamgrad.step.weights import Outer, zero_rows
from streamgrad.step.window_copies import in_copies
from streamgrad.trees import cleared, restart, same_dtype


class Past(NamedTuple):
    """The last window - every steps, oldest first.

    Attributes:
      states: the state that each step began with; with `replay` that of the oldest step alone.
      inputs: what each step read.
      begins: whether no credit may pass to before the step: an episode begins with it, or nothing was there yet.
      steps: how many of these steps there have been; fewer than all of them at the beginning of a stream.
    """

    states: PyTree
    inputs: PyTree
    begins: Bool[Array, " W"]
    steps: Int[Array, ""]


def windowed_bptt(model: Model, window: int, every: int = 1, replay: bool = False) -> GradientEstimator:
    """The losses of each block of `every` steps go back together, through the last `window` steps of the stream.

        Σ_t Σ_{e(t) - window < s <= t} dL_t/dθ_s,    e(t) the last step of the block that t is in

    A loss reaches back between `window - every + 1` and `window` steps, its own among them. With `every=1` each loss
    reaches back exactly `window` steps; with `every=window` blocks know nothing of each other, and a chunk of one block
    is what `bptt` makes of it. The reach does not depend on how the stream is cut into chunks: the last
    `window - every` states and inputs are kept from one chunk to the next.

    If the parameters have changed since, the stored steps are differentiated at the new parameters and at the states
    that the stream really visited. Those are no trajectory of the new parameters, which matters where parameters change
    much within a window, as with an update at every step. `replay` makes them one: of the stored states the oldest
    alone is kept, and all later ones are computed again from it and the stored inputs. The state of the network, and
    what the head reads, then is what the current parameters would have reached from `window - every` steps ago. While
    parameters stay the same, it changes nothing.

    Args:
      model: the model whose gradients are estimated.
      window: how many steps credit goes back, counted from the end of a block; at least `every`. With 1, only the
        immediate effect of the parameters counts.
      every: steps in a block. The length of a chunk must be a multiple of it.
      replay: whether stored steps are taken again with the current parameters. It costs no time, as stored steps are
        linearised in any case, and stores one state in place of `window - every`. The state that an update is given
        then counts at the beginning of a stream alone.

    Returns:
      The estimator. Each chunk is one forward pass over the stored steps and its own, and a reverse pass for as many
      blocks as there are in the chunk or in the window, whichever is less: a little over `window / every` reverse
      steps per step on long chunks, and the price of `bptt` with `every=window`.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.vanilla(2, 4), sg.heads.squared_error(1))
      >>> params = model.init(jax.random.key(0))
      >>> est = sg.windowed_bptt(model, window=6, every=2)
      >>> chunk = sg.Chunk(jnp.ones((2, 2)), jnp.zeros((2, 1)))  # two steps at a time
      >>> grads, state, info = est.update(params, est.init(params), chunk)
      >>> state.memory.inputs.shape
      (4, 2)

    References:
      Williams and Peng, An efficient gradient-based algorithm for on-line training of recurrent network
      trajectories, 1990: BPTT(h; h') with h = window, h' = every.
    """
    model = worked(model)
    check_size(window=window, every=every)
    check_flag(replay=replay)
    if window < every:
        raise ValueError(
            f"window must be at least every, as the losses of so many steps go back together, but window={window} and "
            f"every={every}."
        )
    if model.cell.example_input is None and window > every:
        raise ValueError(
            "windowed_bptt stores inputs across chunks: give cells.from_function an example_input, one x or its shape."
        )
    # As Python's own numbers: a caller's may be numpy's, of any width.
    parts = _Windows(model, int(window), int(every), replay)
    return estimator(
        Method(
            name="windowed_bptt",
            options={"window": window, "every": every, "replay": replay or None},
            model=model,
            init=parts.init,
            run=per_stream(parts.one, sum_factors if parts.outer else sum_over_streams),
            check=parts.check,
        )
    )


@dataclasses.dataclass(frozen=True)
class _Windows:
    """The method's functions, for one stream.

    Attributes:
      model: the model whose gradients are estimated.
      window: as in `windowed_bptt`.
      every: likewise.
      replay: likewise.
    """

    model: Model
    window: int
    every: int
    replay: bool

    @property
    def stored(self) -> int:
        """How many steps are stored."""
        return self.window - self.every

    @property
    def outer(self) -> bool:
        """Whether the weights' gradient is a product of displacements and features, one for all steps, as in `bptt`."""
        return "preactivation" in self.model.cell.cuts

    def check(self, chunk: Chunk, length: int, key: Any) -> None:
        """A chunk is made of whole blocks."""
        del chunk, key
        if length % self.every:
            raise ValueError(
                f"the number of steps in a chunk must be a multiple of every={self.every}, but this chunk has {length}."
            )

    def init(self, params: Params) -> EstimatorState:
        """Nothing stored yet."""
        state = self.model.init_state(params)
        if not self.stored:
            return EstimatorState(state, (), ())

        def repeated(leaf: Array) -> Array:
            return jnp.repeat(leaf[None], 1 if self.replay else self.stored, axis=0)

        past = Past(
            jax.tree.map(repeated, state),
            no_inputs(self.model, params, self.stored),
            jnp.ones(self.stored, bool),
            jnp.zeros((), jnp.int32),
        )
        return EstimatorState(state, past, ())

    def one(self, params: Params, state: EstimatorState, chunk: Chunk, noise: None) -> Outcome:
        """A chunk: forward through stored steps and its own, then back."""
        del noise
        length = leading_length(chunk, "time")
        if self.stored:
            # What an episode that is over has left, perhaps NaN, is not looked at again.
            state = restart(None if chunk.reset is None else chunk.reset[0], self.init(params), state)
            chunk = chunk._replace(inputs=as_stored(params, state.memory.inputs, chunk.inputs))
        displaced = params.cell
        if self.outer:
            displaced = [zero_rows(params.cell, steps) for steps in (self.stored, length) if steps]
        after, pull, (end, memory, features) = jax.vjp(
            lambda displaced: self._forward(params, displaced, state, chunk, length), displaced, has_aux=True
        )
        loss, head_grads, dl_dstate = self.model.read_out_chunk(params.head, after, chunk.targets)
        (cell_grads,) = pull(jax.vmap(ravel_pytree(end)[1])(dl_dstate))
        if self.outer:
            cell_grads = [Outer(dz, a) for dz, a in zip(cell_grads, features, strict=True)]
        info = Info(loss, {}, jax.vmap(self.model.cell.output)(after))
        return Outcome(Params(cell_grads, head_grads), EstimatorState(end, memory, ()), info)

    def _forward(
        self, params: Params, displaced: PyTree, state: EstimatorState, chunk: Chunk, length: int
    ) -> tuple[PyTree, tuple]:
        """The chunk's states, each with the derivative that the window of its block leaves it.

        Args:
          params: the parameters.
          displaced: what is differentiated: displacements of all preactivations, in a list of those of the stored
            steps, if there are any, and those of the chunk; or else the cell's parameters.
          state: at the beginning of the chunk.
          chunk: its inputs as they are stored.
          length: its number of steps.

        Returns:
          The states, and what is not differentiated: the last one, the memory, and the features in a list like that of
          the displacements.
        """
        kept, cell, past, begins = self.stored, state.cell, state.memory, chunk.reset
        starts, own = _windows(length, self.window, self.every)
        copies = _no_derivative(cell, starts.shape[1])
        step = self._step(params, displaced)
        *dz_stored, dz = displaced if self.outer else [None] * (2 if kept else 1)
        features, before = [], None
        if kept:
            # The very first step of a stream begins an episode: there is nothing before it that could get credit.
            begins = jnp.zeros(length, bool) if begins is None else begins
            begins = begins.at[0].set(begins[0] | (past.steps == 0))
            stored = _Now(past.inputs, dz_stored[0], *_cuts(starts[:kept], own[:kept], past.begins), past.states)
            if self.replay:
                # The oldest step begins with the state that is kept; where there was none yet, the state stays.
                cell = restart(past.steps == 0, cell, jax.tree.map(lambda leaf: leaf[0], past.states))
                age = jnp.arange(kept) - (kept - past.steps)
                stored = stored._replace(stored=None, reset=past.begins & (age > 0), stays=age < 0)
            (reached, copies), (before, _, stored_features) = jax.lax.scan(step, (cell, copies), stored)
            cell = reached if self.replay else cell
            features.append(stored_features)
        now = _Now(chunk.inputs, dz, *_cuts(starts[kept:], own[kept:], begins), reset=chunk.reset)
        (end, _), (states, after, chunk_features) = jax.lax.scan(step, (cell, copies), now)
        memory = ()
        if kept:
            memory = self._remember(past, before, states, chunk.inputs, begins, length)
            memory = self._forget(params, memory, chunk.reset, length)
        return after, (end, memory, [*features, chunk_features])

    def _step(self, params: Params, displaced: PyTree) -> Callable[[tuple, "_Now"], tuple[tuple, tuple]]:
        """One step as the scans take it: the state and its copies go in and out.

        Beside them it returns the state that it began with, the new one with its derivative, and the features.
        """
        cell, fresh = self.model.cell, self.model.init_state(params)
        cut = cell.cuts.get("preactivation")

        def transition(params: PyTree, displaced: PyTree, state: PyTree, x: PyTree) -> PyTree:
            new = cell.step(displaced, state, x) if cut is None else cut.inject(params, state, x, displaced)
            return same_dtype(new, state)

        copied = in_copies(transition)

        def step(carry: tuple, now: _Now) -> tuple[tuple, tuple]:
            state, copies = carry
            before = restart(now.reset, fresh, state) if now.stored is None else now.stored
            features = None
            if cut is not None:
                assert cut.features is not None
                features = cut.features(params.cell, before, now.x)
            moved = displaced if cut is None else now.dz
            new, copies, seen = copied(params.cell, moved, before, copies, now.x, now.starts, now.own, now.begins)
            return (restart(now.stays, before, new), copies), (before, seen, features)

        return step

    def _remember(
        self, past: Past, replayed: PyTree, states: PyTree, inputs: PyTree, begins: Array | None, length: int
    ) -> Past:
        """The last steps after a chunk; `replayed` and `states` are what stored steps and the chunk's began with."""
        if self.replay:
            source, oldest = (replayed, length) if length < self.stored else (states, length - self.stored)
            states = jax.tree.map(lambda leaf: leaf[oldest][None], source)
        else:
            states = jax.tree.map(latest, past.states, states)
        inputs = jax.tree.map(latest, past.inputs, inputs)
        assert begins is not None
        return Past(states, inputs, latest(past.begins, begins), jnp.minimum(past.steps + length, self.stored))

    def _forget(self, params: Params, past: Past, reset: Array | None, length: int) -> Past:
        """The last steps as if an episode that has begun in the chunk were the first."""
        over = forgotten(reset, self.stored)
        if reset is None or over is None:
            return past
        first = length - 1 - jnp.argmax(reset[::-1]).astype(past.steps.dtype)  # of the last episode
        steps = jnp.where(jnp.any(reset), jnp.minimum(length - first, self.stored), past.steps)
        begun = jnp.any(reset) & (length - first <= self.stored) if self.replay else over

        def again(new: Array, old: Array) -> Array:
            return jnp.where(begun.reshape(-1, *(1,) * new.ndim), new[None], old)

        states = jax.tree.map(again, self.model.init_state(params), past.states)
        return Past(states, cleared(over, past.inputs), past.begins | over, steps)


class _Now(NamedTuple):
    """What one step needs beside the state.

    Attributes:
      x: what it reads.
      dz: the displacement of its preactivations; None where parameters are differentiated.
      starts: as in `in_copies`.
      own: likewise.
      begins: likewise.
      stored: the state that it begins with, where that is stored.
      reset: whether it begins an episode.
      stays: whether the state stays as it is.
    """

    x: PyTree
    dz: PyTree
    starts: Array | None
    own: Array | None
    begins: Array | None
    stored: PyTree = None
    reset: Array | None = None
    stays: Array | None = None


def _windows(length: int, window: int, every: int) -> tuple[np.ndarray, np.ndarray]:
    """Where windows start in which copy of the state, and which copy each step belongs to.

    Windows that overlap need copies of their own, so that there are as many as overlap: block b has copy b modulo their
    number. The window of its last block is over when the next one starts.

    Args:
      length: of the chunk.
      window: as in `windowed_bptt`.
      every: likewise.

    Returns:
      `[L, copies]` and `[L]` over stored steps and chunk. Nothing need be forgotten at the first of all steps, and no
      loss is read from stored ones.

    Example:
      >>> starts, own = _windows(length=6, window=4, every=2)
      >>> starts.astype(int).tolist(), own.tolist()
      ([[0, 0], [0, 0], [0, 1], [0, 0], [1, 0], [0, 0], [0, 0], [0, 0]], [0, 0, 0, 0, 1, 1, 0, 0])
    """
    kept, block = window - every, np.arange(length // every)
    copies = min(len(block), -(-window // every))
    starts = np.zeros((kept + length, copies), bool)
    starts[every * block[1:], block[1:] % copies] = True
    return starts, np.concatenate([np.zeros(kept, int), np.repeat(block % copies, every)])


def _cuts(
    starts: np.ndarray, own: np.ndarray, begins: Bool[Array, " L"] | None
) -> tuple[Array | None, Array | None, Array | None]:
    """`starts`, `own` and `begins` as `in_copies` takes them; all windows of a single copy start by `begins`."""
    if starts.shape[1] > 1:
        return jnp.asarray(starts), jnp.asarray(own), begins
    if starts.any():
        begins = jnp.asarray(starts[:, 0]) if begins is None else begins | jnp.asarray(starts[:, 0])
    return None, None, begins


def _no_derivative(state: PyTree, copies: int) -> PyTree:
    """Copies of the state to begin with, which depend on nothing; a single one has no axis."""
    axes = (copies,) if copies > 1 else ()
    return jax.tree.map(lambda leaf: jnp.zeros((*axes, *leaf.shape), leaf.dtype), state)
