"""ARTBP: backpropagation that is truncated at random, and compensated so that its mean is the whole gradient."""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.flatten_util import ravel_pytree

from streamgrad._typing import Array, Bool, Float, Int, PyTree
from streamgrad.base import Chunk, EstimatorState, GradientEstimator, Model, Params, worked
from streamgrad.checks import check_number, check_size
from streamgrad.engine.across import finish
from streamgrad.engine.chunk import go_back, go_forward, scaled
from streamgrad.engine.collectives import Devices
from streamgrad.engine.estimator import estimator
from streamgrad.engine.method import Method, Outcome, sum_over_streams
from streamgrad.engine.stored_steps import as_stored, forgotten, latest, no_inputs
from streamgrad.noise.distributions import Noise, find_noise
from streamgrad.step.step_vjp import StepVjp
from streamgrad.step.weights import Outer, sum_outer, zero_rows
from streamgrad.trees import cleared, restart


class StoredSteps(NamedTuple):
    """The last `longest` steps, oldest first, and how long ago the flow was truncated.

    Attributes:
      states: the state that each step began with, ravelled.
      inputs: what each step read.
      factors: what the flow is multiplied by where it leaves a step backwards: (1 - X_t) / (1 - c_t), and 0 where an
        episode begins or nothing was there yet.
      age: δt, how many steps there have been since the latest truncation or beginning.
    """

    states: Float[Array, "W S"]
    inputs: PyTree
    factors: Float[Array, " W"]
    age: Int[Array, ""]


def artbp(
    model: Model,
    mean_length: float | int = 16,
    tail: float | int | None = 4,
    longest: int = 64,
    noise: str | Noise = "uniform",
) -> GradientEstimator:
    """Truncated backpropagation through time without its bias: truncations are random, and the flow is compensated.

        e_t = dL_t/dh_t + (1 - X_{t+1}) / (1 - c_{t+1}) e_{t+1} (dh_{t+1}/dh_t)
        dL/dθ ≈ Σ_t e_t (dh_t/dθ_t),    X_t = 1 with probability c_t

    Between step t - 1 and step t the flow of gradients is truncated where X_t is 1; where it is not, it is made larger
    by 1 / (1 - c_t). Whatever past truncations c_t depends on, the mean over all of them is the gradient of the whole
    stream. They are drawn as the stream runs, and kept with the steps: for the same truncations the sum over all chunks
    is the same, however the stream is cut into them. With L the mean number of steps from one truncation to the next,

        c_t = 1 / L    or    c_t = (α - 1) / ((α - 2) L + δt),    δt = 1 for the step after a truncation, then 2, 3, …

    The first makes factors grow exponentially with the distance that they carry credit over, the second as a power
    of it: it truncates less and less, and some flows go far.

    Memory has to end somewhere. Losses of a chunk reach back to its beginning, and through at most `longest` steps
    before it; a flow that would go on is cut for certain. What it would have carried to older steps is a bias;
    for steps as young as that there is none. `info.diagnostics["cut"]` says how large such flows are: choose `longest`
    so that it is mostly 0. If the parameters have changed since, stored steps are differentiated at the new
    parameters and at the states that the stream really visited, as in `windowed_bptt`.

    Args:
      model: the model whose gradients are estimated.
      mean_length: L, above 1.
      tail: α, above 2: the larger, the fewer flows go far. Above 3 the number of steps between truncations has a finite
        variance. None for a constant c_t, the limit of large α.
      longest: how many steps before the chunk are kept.
      noise: "uniform", or "given": the caller passes numbers in place of the key, one for each step, of which c_t
        in the mean should be below √3 (2 c_t - 1), as of "uniform" noise; those below truncate. For c_t = 1/2 signs
        will do.

    Returns:
      The estimator. A chunk costs what `bptt` does, and the way back through stored steps, which ends where the flow is
      truncated; of many streams, where that of the last one is. Its diagnostics are `truncated`, `[T]`, for each step
      whether the flow ends there by chance; `reach`, `[1]`, how many stored steps the flow went through; and `cut`,
      `[1]`, the norm of the flow that was cut for certain.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.gru(2, 4), sg.heads.softmax(3))
      >>> params = model.init(jax.random.key(0))
      >>> est = sg.artbp(model, mean_length=8, longest=32)
      >>> chunk = sg.Chunk(jnp.ones((5, 2)), jnp.zeros(5, int))
      >>> grads, state, info = est.update(params, est.init(params), chunk, jax.random.key(1))
      >>> state.memory.states.shape, info.diagnostics["truncated"].shape, info.diagnostics["cut"].tolist()
      ((32, 4), (5,), [0.0])

    References:
      Tallec and Ollivier, Unbiasing truncated backpropagation through time, 2017: Equation 11, and 14 for `tail`.
    """
    model = worked(model)
    check_number(mean_length=mean_length)
    if mean_length <= 1:
        raise ValueError(f"mean_length must be above 1, as at 1 every flow is truncated at once, not {mean_length!r}.")
    if tail is not None:
        check_number(tail=tail)
        if tail <= 2:
            raise ValueError(f"tail must be above 2, or truncations have no mean distance, not {tail!r}.")
    check_size(longest=longest)
    source = find_noise(noise)
    if source.name in ("gaussian", "rademacher"):
        raise ValueError(
            f"artbp truncates where uniform noise is low: noise must be 'uniform' or 'given', not {source.name!r}."
        )
    if model.cell.example_input is None:
        raise ValueError(
            "artbp stores inputs across chunks: give cells.from_function an example_input, one x or its shape."
        )
    alpha = None if tail is None else float(tail)
    parts = _Random(model, float(mean_length), alpha, int(longest))
    return estimator(
        Method(
            name="artbp",
            options={"mean_length": mean_length, "tail": tail, "longest": longest},
            model=model,
            init=parts.init,
            run=parts.run,
            draw=lambda shared, key, length, dtype: source.draw(key, (length,), dtype),
            check=lambda chunk, length, key: source.check(key),
        )
    )


@dataclasses.dataclass(frozen=True)
class _Random:
    """The method's functions.

    Attributes:
      model: the model whose gradients are estimated.
      mean_length: as in `artbp`.
      tail: likewise.
      longest: likewise.
    """

    model: Model
    mean_length: float
    tail: float | None
    longest: int

    def init(self, params: Params) -> EstimatorState:
        """Nothing stored yet."""
        state = self.model.init_state(params)
        vector = ravel_pytree(state)[0]
        stored = StoredSteps(
            jnp.repeat(vector[None], self.longest, axis=0),
            no_inputs(self.model, params, self.longest),
            jnp.zeros(self.longest, vector.dtype),
            jnp.zeros((), jnp.int32),
        )
        return EstimatorState(state, stored, ())

    def run(
        self, params: Params, state: EstimatorState, chunk: Chunk, noise: Float[Array, "B T"], devices: Devices
    ) -> Outcome:
        """A chunk: forward, back with the losses, and on through stored steps as far as the flow goes."""
        del devices
        fresh = self.init(params).memory

        def begin(
            past: StoredSteps, reset: Array | None, uniform: Array
        ) -> tuple[StoredSteps, Array, tuple[Array, Array]]:
            # The memory of an episode that is over, perhaps NaN, is not looked at again.
            past = restart(None if reset is None else reset[0], fresh, past)
            return past, *jax.lax.scan(self._truncate, past.age, (uniform, reset))

        past, age, (factors, truncated) = jax.vmap(begin)(state.memory, chunk.reset, noise)
        inputs = as_stored(params, past.inputs, chunk.inputs)
        forward = go_forward(self.model, params, state.cell, chunk._replace(inputs=inputs))
        back = go_back(forward, params.cell, factors=factors.T)
        reach = jax.vmap(_reach)(factors[:, 0], past.factors)
        walk = functools.partial(_walk_back, forward.maps, params.cell, forward.features is not None)
        beyond, older = jax.vmap(walk)(back.dl_dstart, past, reach)
        older = sum_over_streams(older) if forward.features is None else sum_outer(older)
        start = jax.vmap(lambda cell: ravel_pytree(cell)[0])(state.cell)
        before = jnp.concatenate([start[:, None], jnp.swapaxes(forward.states, 0, 1)[:, :-1]], axis=1)
        if chunk.reset is not None:
            before = jnp.where(chunk.reset[:, :, None], fresh.states[None, :1], before)
        memory = jax.vmap(functools.partial(self._store, fresh))(past, before, inputs, factors, age, chunk.reset)
        told = {"truncated": truncated, "reach": reach[:, None], "cut": jnp.linalg.norm(beyond, axis=1)[:, None]}
        grads = jax.tree.map(jnp.add, back.inside, older)
        return finish(self.model, params, forward, grads, memory, (), told)

    def _store(
        self,
        fresh: StoredSteps,
        past: StoredSteps,
        before: Array,
        inputs: PyTree,
        factors: Array,
        age: Array,
        reset: Array | None,
    ) -> StoredSteps:
        """The last steps after a chunk."""
        over, states = forgotten(reset, self.longest), latest(past.states, before)
        inputs, factors = cleared(over, (jax.tree.map(latest, past.inputs, inputs), latest(past.factors, factors)))
        return StoredSteps(
            states if over is None else jnp.where(over[:, None], fresh.states, states), inputs, factors, age
        )

    def _truncate(self, age: Int[Array, ""], now: tuple) -> tuple[Array, tuple[Array, Array]]:
        """δt after a step, the factor of the flow that leaves it backwards, and whether chance has truncated it."""
        uniform, reset = now
        begins = age == 0 if reset is None else reset | (age == 0)
        if self.tail is None:
            c = jnp.full_like(uniform, 1 / self.mean_length)
        else:
            # Where an episode begins nothing is drawn, and an age of 0 would do harm.
            c = (self.tail - 1) / ((self.tail - 2) * self.mean_length + jnp.maximum(age, 1).astype(uniform.dtype))
        truncated = (uniform < math.sqrt(3) * (2 * c - 1)) & ~begins
        over = truncated | begins
        return jnp.where(over, 1, age + 1), (jnp.where(over, 0, 1 / (1 - c)), truncated)


def _reach(first: Float[Array, ""], factors: Float[Array, " W"]) -> Int[Array, ""]:
    """Through how many stored steps a flow goes that leaves the chunk by `first`.

    Example:
      >>> import jax.numpy as jnp
      >>> _reach(jnp.array(2.0), jnp.array([2.0, 0.0, 2.0, 2.0])).item(), _reach(jnp.array(0.0), jnp.ones(4)).item()
      (3, 0)
    """
    passed: Bool[Array, " W"] = jnp.concatenate([first[None], factors[:0:-1]]) != 0
    return jnp.sum(jnp.cumprod(passed.astype(jnp.int32)), dtype=jnp.int32)


@custom_vmap
def _largest(count: Array) -> Array:
    """A number as it is; of many streams the largest, for all of them.

    A loop whose end differs from stream to stream would copy all that it carries at every turn.
    """
    return count


@_largest.def_vmap
def _(axis_size: int, in_batched: list[bool], count: Array) -> tuple[Array, bool]:
    del axis_size, in_batched  # it is not called where nothing is mapped
    return _largest(jnp.max(count, axis=0)), False


def _walk_back(
    maps: StepVjp, params: PyTree, outer: bool, flow: Float[Array, " S"], past: StoredSteps, reach: Int[Array, ""]
) -> tuple[Float[Array, " S"], PyTree]:
    """The flow of one stream on through stored steps, from the latest back.

    Args:
      maps: the linear maps of the steps.
      params: the cell's parameters.
      outer: whether the gradient comes in factors.
      flow: the flow that leaves the chunk.
      past: the stored steps.
      reach: through how many of them it goes.

    Returns:
      The flow to steps that are not stored; and the cell's gradient before the chunk, summed or in factors.
    """
    room = len(past.factors)

    def step(index: Array, carry: tuple) -> tuple:
        flow, sums = carry
        at = room - 1 - index
        vector, x, factor = jax.tree.map(lambda leaf: leaf[at], (past.states, past.inputs, past.factors))
        _, residuals, features = maps.forward(vector, x)
        earlier, here = maps.pull(residuals, flow)
        if outer:
            new = Outer(here, features)
            sums = jax.tree.map(lambda sums, new: sums.at[at].set(new.astype(sums.dtype)), sums, new)
        else:
            sums = jax.tree.map(jnp.add, sums, here)
        return scaled(factor, earlier), sums

    if outer:
        features = jax.tree.map(lambda w: jnp.zeros((room, w.shape[1]), w.dtype), params)
        sums = Outer(zero_rows(params, room), features)
    else:
        sums = jax.tree.map(jnp.zeros_like, params)
    return jax.lax.fori_loop(0, _largest(reach), step, (flow, sums))
