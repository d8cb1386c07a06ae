"""An agent that learns at every step: actor-critic with eligibility traces, for any estimator that can `advance`.

    δ_{t-1} = r_{t-1} + γ V_t - V_{t-1}                    (V_t counts as 0 where an episode begins with t)
    θ      ← Adam ascent along the mean over streams of  δ_{t-1} e_{t-1} + β dH_t/dθ
    e_t     = γ λ e_{t-1} + d(log π(a_t) + c V_t)/dθ       (e_{t-1} counts as 0 where an episode begins with t)

π is the policy, H its entropy and V the value, which one head reads from the output of a recurrent cell; the
derivatives through the cell are `credit` of an estimator. One TD error multiplies the traces of actor and critic, so
that their sum is all that is kept: P numbers for each stream.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from streamgrad._typing import Array, Bool, Float, Int, PyTree
from streamgrad.base import Cell, GradientEstimator, Head, Model, Params
from streamgrad.checks import check_number, check_size
from streamgrad.engine.streams import batched
from streamgrad.heads import from_function
from streamgrad.lab.environments import Environment


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
    """

    hidden: int = 32
    streams: int = 16
    steps: int = 60_000
    window: int = 2_000
    gamma: float = 0.99
    lam: float = 0.8
    entropy: float = 0.01
    critic: float = 1.0

    def __post_init__(self) -> None:
        check_size(hidden=self.hidden, streams=self.streams, steps=self.steps, window=self.window)
        check_number(gamma=self.gamma, lam=self.lam, entropy=self.entropy, critic=self.critic)
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


def actor_critic_head(n_actions: int) -> Head:
    """A head that reads a policy and a value: logits = W y + b, V = w · y + c. It begins near the even policy.

    Args:
      n_actions: how many there are.

    Returns:
      The head. It predicts `(logits[n_actions], value)`. A target is a pair of an action and the return that followed,
      and the loss -(return - V) log π(action) + (return - V)² / 2, where V is held fixed in the first term.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> head = actor_critic_head(3)
      >>> params = head.init_params(jax.random.key(0), 5)
      >>> logits, value = head.predict(params, jnp.zeros(5))
      >>> logits.tolist(), float(value)
      ([0.0, 0.0, 0.0], 0.0)
    """
    check_size(n_actions=n_actions)

    def init_params(key: Array, width: int) -> PyTree:
        # Small, as a policy that is sure of itself before it has seen anything explores badly.
        return {"w": 0.01 * jax.random.normal(key, (n_actions + 1, width)), "b": jnp.zeros(n_actions + 1)}

    def predict(params: PyTree, output: Array) -> tuple[Float[Array, " n"], Float[Array, ""]]:
        read = params["w"] @ output + params["b"]
        return read[:-1], read[-1]

    def loss(params: PyTree, output: Array, target: tuple[Array, Array]) -> Array:
        logits, value = predict(params, output)
        gap = target[1] - value
        return -jax.lax.stop_gradient(gap) * jax.nn.log_softmax(logits)[target[0]] + gap**2 / 2

    return from_function(init_params, loss, predict)


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
      >>> from streamgrad.lab.environments import t_maze
      >>> agent = make_agent(t_maze(2), sg.cells.gru, sg.rtrl, AgentConfig(hidden=4, streams=3, steps=10, window=10))
      >>> state, totals = agent.run(agent.init(seed=0, rate=1e-3))
      >>> int(state.step), int(totals.episodes) >= 6  # an episode has 4 steps at most
      (10, True)
    """
    model = Model(make_cell(environment.n_observations, config.hidden), actor_critic_head(environment.n_actions))
    learner = _Learner(environment, model, batched(make_estimator(model), config.streams), config)
    return Agent(learner.init, learner.step, learner.run, model)


def windows(
    agent: Agent, config: AgentConfig, rates: Sequence[float], seeds: Sequence[int], state: AgentState | None = None
) -> Iterator[tuple[AgentState, list[dict[str, Any]]]]:
    """Train all learning rates and seeds at once, a window of steps at a time.

    Args:
      agent: from `make_agent`.
      config: the one it was made with.
      rates: learning rates.
      seeds: each rate is tried with all of them.
      state: where to go on, from an earlier call with the same arguments; None to begin.

    Yields:
      The state, whose leaves have a leading axis for the runs, rate by rate, and a row for each run, as `train_agent`
      has them. The state is handed on to the next window: copy what is to be kept (`jax.device_get`).
    """
    runs = [(rate, seed) for rate in rates for seed in seeds]
    if state is None:
        state = jax.jit(jax.vmap(agent.init))(jnp.array([s for _, s in runs]), jnp.array([r for r, _ in runs], float))
    run = jax.jit(jax.vmap(agent.run), donate_argnums=0)
    for _ in range(int(state.step[0]), config.steps, config.window):
        state, totals = run(state)
        finite = jax.vmap(_all_finite)(state.params)
        columns = jax.device_get((state.step, totals, finite))
        yield (
            state,
            [_row(rate, seed, jax.tree.map(lambda c, i=i: c[i], columns)) for i, (rate, seed) in enumerate(runs)],
        )


def train_agent(
    environment: Environment,
    make_cell: Callable[[int, int], Cell],
    make_estimator: Callable[[Model], GradientEstimator],
    config: AgentConfig,
    rates: Sequence[float],
    seeds: Sequence[int],
) -> list[dict[str, Any]]:
    """Train an agent with every learning rate and seed, all at once, and return the curves.

    Args:
      environment: as in `make_agent`, like the next three.
      make_cell: likewise.
      make_estimator: likewise.
      config: likewise.
      rates: learning rates.
      seeds: each rate is tried with all of them.

    Returns:
      A row for each window and run: `rate`, `seed`, `step`, and of the episodes that ended within the window their
      number `episodes`, the part `success` of them that succeeded and their `mean_return` (both NaN if there were
      none); `finite` says whether the parameters still are.

    Example:
      >>> import streamgrad as sg
      >>> from streamgrad.lab.environments import t_maze
      >>> config = AgentConfig(hidden=4, streams=2, steps=20, window=10)
      >>> rows = train_agent(t_maze(2), sg.cells.vanilla, sg.immediate, config, rates=[1e-3, 1e-2], seeds=[0])
      >>> [(row["rate"], row["step"], row["finite"]) for row in rows]
      [(0.001, 10, True), (0.01, 10, True), (0.001, 20, True), (0.01, 20, True)]
    """
    agent = make_agent(environment, make_cell, make_estimator, config)
    return [row for _, rows in windows(agent, config, rates, seeds) for row in rows]


def final_success(rows: Sequence[Mapping[str, Any]], part: float = 0.2) -> dict[tuple[float, int], float]:
    """The success of each run in the last part of its steps.

    Args:
      rows: of `train_agent`.
      part: which part of the windows counts; the last one in any case.

    Returns:
      By rate and seed, the part of the episodes that succeeded; 0 for a run whose parameters are no longer finite.

    Example:
      >>> row = {"rate": 0.1, "seed": 0, "episodes": 10, "success": 0.5, "finite": True}
      >>> final_success([row, row | {"success": 1.0, "episodes": 30}], part=1.0)
      {(0.1, 0): 0.875}
    """
    curves: dict[tuple[float, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        curves.setdefault((row["rate"], row["seed"]), []).append(row)
    return {run: _success(curve[-max(1, round(part * len(curve))) :]) for run, curve in curves.items()}


def _success(rows: Sequence[Mapping[str, Any]]) -> float:
    episodes = sum(row["episodes"] for row in rows)
    if not rows[-1]["finite"] or not episodes:
        return 0.0
    return sum(row["success"] * row["episodes"] for row in rows if row["episodes"]) / episodes


def _row(rate: float, seed: int, columns: tuple[Any, Totals, Any]) -> dict[str, Any]:
    step, totals, finite = columns
    episodes = int(totals.episodes)
    success, mean_return = (float(x) / episodes if episodes else np.nan for x in (totals.successes, totals.returns))
    return {
        "rate": rate,
        "seed": seed,
        "step": int(step),
        "episodes": episodes,
        "success": success,
        "mean_return": mean_return,
        "finite": bool(finite),
    }


def _all_finite(tree: PyTree) -> Bool[Array, ""]:
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]).all()


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
        return optax.scale_by_adam()

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
        outputs, memory = self.est.advance(params, state.memory, state.observation[:, None], noise, begins[:, None])
        output = outputs[:, 0]
        logits, value = self._read(params.head, output)
        _, value_before = self._read(params.head, state.output)
        delta = state.reward + config.gamma * jnp.where(begins, 0, value) - value_before

        action = jax.random.categorical(act_key, logits)
        scored = jax.vmap(jax.grad(self._score, argnums=(0, 1)), in_axes=(None, 0, 0))
        head, dl_doutput = scored(params.head, output, action)
        score = Params(self.est.credit(params, memory, dl_doutput[:, None], per_stream=True), head)
        head, dl_doutput = jax.grad(self._mean_entropy, argnums=(0, 1))(params.head, output)
        # The estimator takes the mean over streams itself.
        spread = Params(self.est.credit(params, memory, config.streams * dl_doutput[:, None]), head)

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
            memory=memory._replace(trace=None),
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

    def _mean_entropy(self, head: PyTree, output: Float[Array, "B width"]) -> Float[Array, ""]:
        log_p = jax.nn.log_softmax(self._read(head, output)[0])
        return -jnp.mean(jnp.sum(jnp.exp(log_p) * log_p, axis=1))


def _key(seed: Any, step: Any) -> Array:
    """The random numbers of one step of a run."""
    return jax.random.fold_in(jax.random.key(seed), step)


def _each(scale: Float[Array, " B"], leaf: Array) -> Array:
    """A leaf times a number for each stream."""
    return leaf * scale.reshape(-1, *[1] * (leaf.ndim - 1))
