"""An agent that learns at every step: actor-critic with eligibility traces, for any estimator that can `advance`.

    δ_{t-1} = r_{t-1} + γ V_t - V_{t-1}                    (V_t counts as 0 where an episode begins with t)
    θ      ← Adam ascent along the mean over streams of  δ_{t-1} e_{t-1} + β dH_t/dθ
    e_t     = γ λ e_{t-1} + d(log π(a_t) + c V_t)/dθ       (e_{t-1} counts as 0 where an episode begins with t)

π is the policy, H its entropy and V the value, which one head reads from the output of a recurrent cell; the
derivatives through the cell are `credit` of an estimator. One TD error multiplies the traces of actor and critic, so
that their sum is all that is kept: P numbers for each stream.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from streamgrad import Cell, GradientEstimator, Model, Params, batched
from streamgrad._typing import Array, Bool, Float, Int, PyTree
from streamgrad.checks import check_number, check_size
from streamgrad_lab.agent.head import actor_critic_head
from streamgrad_lab.environments import Environment


@dataclasses.dataclass(frozen=True)
class AgentConfig:
    """What an agent is, beside its environment, cell and estimator. Plain numbers.

    Attributes:
      hidden: units of the cell.
      streams: B, environments that one agent acts in at the same time.
      steps: of each environment, in all; an update at each of them.
      window: steps of one point of the curves, and of one call of the compiled program. It divides `steps`.
      gamma: γ, the discount.
      lam: λ, how long traces last; with 0 the last step alone is eligible.
      entropy: β, the weight of the policy's entropy.
      critic: c, the weight of the value beside the policy.
      eps: of Adam. When a task is solved gradients are next to nothing, and so is their average square: without a floor
        under it one rare failure can move the parameters far.
    """

    hidden: int = 32
    streams: int = 16
    steps: int = 60_000
    window: int = 2_000
    gamma: float = 0.99
    lam: float = 0.9
    entropy: float = 0.01
    critic: float = 1.0
    eps: float = 1e-3

    def __post_init__(self) -> None:
        check_size(hidden=self.hidden, streams=self.streams, steps=self.steps, window=self.window)
        check_number(gamma=self.gamma, lam=self.lam, entropy=self.entropy, critic=self.critic, eps=self.eps)
        for name in ("gamma", "lam"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be a number from 0 to 1, not {getattr(self, name)!r}.")
        if self.steps % self.window:
            raise ValueError(f"window must divide steps={self.steps}, but it is {self.window}.")


class AgentState(NamedTuple):
    """All that a run needs to go on: arrays alone, so that it can be saved as it is.

    Attributes:
      params: cell and head.
      optimiser: the state of Adam.
      memory: that of the estimator, for all streams.
      eligibility: e_{t-1}, like `params` with a leading axis for streams.
      output: y_{t-1}, which V_{t-1} is read from.
      world: the states of the environments.
      observation: o_t, which is to be read next.
      begins: whether an episode begins with it.
      reward: r_{t-1}, what the last action brought.
      gained: the return of the episodes so far, without discount.
      step: t, steps taken so far.
      seed: of the run; its random numbers come from seed and step.
      rate: the learning rate.
    """

    params: Params
    optimiser: PyTree
    memory: PyTree
    eligibility: Params
    output: Float[Array, "B width"]
    world: PyTree
    observation: Float[Array, "B n"]
    begins: Bool[Array, " B"]
    reward: Float[Array, " B"]
    gained: Float[Array, " B"]
    step: Int[Array, ""]
    seed: Int[Array, ""]
    rate: Float[Array, ""]


class Seen(NamedTuple):
    """What happened in one step.

    Attributes:
      observation: o_t.
      begins: whether an episode began with it.
      action: a_t.
      reward: r_t.
      done: whether the episode ended with it.
      gained: the return of the episode up to it.
      delta: δ_{t-1}.
      grads: what Adam was given, like `params`: the gradient of a loss, minus the ascent above.
    """

    observation: Float[Array, "B n"]
    begins: Bool[Array, " B"]
    action: Int[Array, " B"]
    reward: Float[Array, " B"]
    done: Bool[Array, " B"]
    gained: Float[Array, " B"]
    delta: Float[Array, " B"]
    grads: Params


class Totals(NamedTuple):
    """Episodes that ended within a window: how many, how many with success, and the sum of their returns."""

    episodes: Array
    successes: Array
    returns: Array


class Agent(NamedTuple):
    """An agent that learns, as pure functions for one run. `jax.vmap` makes many runs of one.

    Attributes:
      init: `init(seed, rate) -> state`, both of them numbers that may be traced.
      step: `step(state) -> (state, seen)`, one step of all environments and one update.
      run: `run(state) -> (state, totals)`, a window of steps.
      model: whose parameters `state.params` are.
    """

    init: Callable[[Any, Any], AgentState]
    step: Callable[[AgentState], tuple[AgentState, Seen]]
    run: Callable[[AgentState], tuple[AgentState, Totals]]
    model: Model


def make_agent(
    environment: Environment,
    make_cell: Callable[[int, int], Cell],
    make_estimator: Callable[[Model], GradientEstimator],
    config: AgentConfig,
) -> Agent:
    """Make an agent for an environment.

    Args:
      environment: what it acts in.
      make_cell: `make_cell(n_in, n_hidden) -> cell`, such as `streamgrad.cells.gru`.
      make_estimator: `make_estimator(model) -> estimator` for one stream, such as `streamgrad.rtrl`. It must have
        `advance` and `credit`.
      config: the rest.

    Returns:
      The agent.

    Example:
      >>> import jax, streamgrad as sg
      >>> from streamgrad_lab.environments import t_maze
      >>> agent = make_agent(t_maze(2), sg.cells.gru, sg.rtrl, AgentConfig(hidden=4, streams=3, steps=10, window=10))
      >>> state, totals = agent.run(agent.init(seed=0, rate=1e-3))
      >>> int(state.step), int(totals.episodes) >= 6  # an episode has 4 steps at most
      (10, True)
    """
    model = Model(make_cell(environment.n_observations, config.hidden), actor_critic_head(environment.n_actions))
    learner = _Learner(environment, model, batched(make_estimator(model), config.streams), config)
    return Agent(learner.init, learner.step, learner.run, model)


@dataclasses.dataclass(frozen=True, eq=False)
class _Learner:
    """The functions of an agent.

    Attributes:
      environment: what it acts in.
      model: cell and head.
      est: the estimator, for all streams.
      config: the rest.
    """

    environment: Environment
    model: Model
    est: GradientEstimator
    config: AgentConfig

    @property
    def adam(self) -> optax.GradientTransformation:
        """Without the learning rate, which is in the state."""
        return optax.scale_by_adam(eps=self.config.eps)

    def init(self, seed: Any, rate: Any) -> AgentState:
        """The first observations are there, and nothing has been read yet."""
        streams = self.config.streams
        weights_key, world_key = jax.random.split(_key(seed, 0))
        params = self.model.init(weights_key)
        world, observation = jax.vmap(self.environment.init)(jax.random.split(world_key, streams))
        dtype = jax.tree.leaves(params.head)[0].dtype
        none = jnp.zeros(streams, dtype)
        return AgentState(
            params=params,
            optimiser=self.adam.init(params),
            memory=self.est.init(params),
            eligibility=jax.tree.map(lambda leaf: jnp.zeros((streams, *leaf.shape), leaf.dtype), params),
            output=jnp.zeros((streams, self.model.width), dtype),
            world=world,
            observation=observation.astype(dtype),
            begins=jnp.ones(streams, bool),
            reward=none,
            gained=none,
            step=jnp.zeros((), jnp.int32),
            seed=jnp.asarray(seed, jnp.int32),
            rate=jnp.asarray(rate, dtype),
        )

    def step(self, state: AgentState) -> tuple[AgentState, Seen]:
        """Read, judge the last action, learn, act."""
        config, params, begins = self.config, state.params, state.begins
        noise, act_key, world_key = jax.random.split(_key(state.seed, state.step + 1), 3)
        seen = state.observation[:, None]
        outputs, memory, trace = self.est.advance(params, state.memory, seen, noise, begins[:, None])
        output = outputs[:, 0]
        logits, value = self._read(params.head, output)
        _, value_before = self._read(params.head, state.output)
        delta = state.reward + config.gamma * jnp.where(begins, 0, value) - value_before

        action = jax.random.categorical(act_key, logits)
        scores = jax.vmap(jax.grad(self._score, argnums=(0, 1)), in_axes=(None, 0, 0))
        head, dl_doutput = scores(params.head, output, action)
        score = Params(self.est.credit(params, trace, dl_doutput[:, None], per_stream=True), head)
        entropies = jax.vmap(jax.grad(self._entropy, argnums=(0, 1)), in_axes=(None, 0))
        head, dl_doutput = entropies(params.head, output)
        spread = Params(self.est.credit(params, trace, dl_doutput[:, None]), jax.tree.map(_mean, head))

        def descent(eligibility: Array, spread: Array) -> Array:
            return -jnp.tensordot(delta, eligibility, axes=1) / config.streams - config.entropy * spread

        grads = jax.tree.map(descent, state.eligibility, spread)
        updates, optimiser = self.adam.update(grads, state.optimiser)
        learnt = jax.tree.map(lambda leaf, update: leaf - state.rate * update, params, updates)
        decay = jnp.where(begins, 0, config.gamma * config.lam).astype(delta.dtype)
        eligibility = jax.tree.map(lambda e, g: _each(decay, e) + g, state.eligibility, score)

        keys = jax.random.split(world_key, config.streams)
        world, observation, reward, done = jax.vmap(self.environment.step)(state.world, action, keys)
        reward = reward.astype(delta.dtype)
        gained = jnp.where(begins, 0, state.gained) + reward
        new = AgentState(
            params=learnt,
            optimiser=optimiser,
            memory=memory,
            eligibility=eligibility,
            output=output,
            world=world,
            observation=observation.astype(output.dtype),
            begins=done,
            reward=reward,
            gained=gained,
            step=state.step + 1,
            seed=state.seed,
            rate=state.rate,
        )
        return new, Seen(state.observation, begins, action, reward, done, gained, delta, grads)

    def run(self, state: AgentState) -> tuple[AgentState, Totals]:
        """A window of steps."""

        def step(_: Any, carry: tuple[AgentState, Totals]) -> tuple[AgentState, Totals]:
            state, seen = self.step(carry[0])
            ended = seen.done.astype(int)
            now = Totals(ended, ended * (seen.reward > self.environment.success), ended * seen.gained)
            return state, jax.tree.map(lambda total, new: total + new.sum(), carry[1], now)

        zero = jnp.zeros((), int)
        return jax.lax.fori_loop(
            0, self.config.window, step, (state, Totals(zero, zero, jnp.zeros((), state.gained.dtype)))
        )

    def _read(self, head: PyTree, output: Float[Array, "B width"]) -> tuple[Float[Array, "B n"], Float[Array, " B"]]:
        return jax.vmap(self.model.head.predict, in_axes=(None, 0))(head, output)

    def _score(self, head: PyTree, output: Float[Array, " width"], action: Int[Array, ""]) -> Float[Array, ""]:
        """log π(a) + c V, for one stream: what is eligible."""
        logits, value = self.model.head.predict(head, output)
        return jax.nn.log_softmax(logits)[action] + self.config.critic * value

    def _entropy(self, head: PyTree, output: Float[Array, " width"]) -> Float[Array, ""]:
        log_p = jax.nn.log_softmax(self.model.head.predict(head, output)[0])
        return -jnp.sum(jnp.exp(log_p) * log_p)


def _key(seed: Any, step: Any) -> Array:
    """The random numbers of one step of a run."""
    return jax.random.fold_in(jax.random.key(seed), step)


def _each(scale: Float[Array, " B"], leaf: Array) -> Array:
    """A leaf times a number for each stream."""
    return leaf * scale.reshape(-1, *[1] * (leaf.ndim - 1))


def _mean(leaf: Array) -> Array:
    return jnp.mean(leaf, axis=0)
