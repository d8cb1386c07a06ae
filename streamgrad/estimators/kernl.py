"""KeRNL: a learnt kernel in place of dh/dh, sensitivities and decays of units, and one trace for each weight."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from streamgrad._typing import Array, Bool, Float, Int, PyTree
from streamgrad.base import Chunk, EstimatorState, GradientEstimator, Model, Params, real_dtype, transition, worked
from streamgrad.checks import check_choice, check_number, check_size, find_cut
from streamgrad.engine import sparse_influence
from streamgrad.engine.across import finish, older_credit, with_older
from streamgrad.engine.chunk import Forward, episode_over, go_forward
from streamgrad.engine.collectives import Devices
from streamgrad.engine.estimator import estimator
from streamgrad.engine.method import Method, Outcome
from streamgrad.noise.distributions import Noise, find_noise
from streamgrad.noise.settings import check_sigma
from streamgrad.step import cuts
from streamgrad.step.influence_sparsity import MOST_OWN_UNITS, InfluencePattern, LeafPattern, colour, own_units
from streamgrad.step.jacobian_sparsity import feature_pattern, find_jacobian_pattern
from streamgrad.step.weights import Outer, by_matrix, like_params, sum_outer
from streamgrad.trees import all_finite, cleared, restart

LONGEST = 0.999  # the largest κ, a time constant of 1,000 steps: with 1 a trace would be a sum over all the past


class Kernel(NamedTuple):
    """The kernel that all streams share and learn: dh_t/dz_s ≈ β diag(κ)^{t-s}.

    Attributes:
      sensitivity: β.
      decay: κ.
      sigma: σ, the size of the perturbations.
    """

    sensitivity: Float[Array, "S n"]
    decay: Float[Array, " n"]
    sigma: Float[Array, ""]


class Twin(NamedTuple):
    """The perturbed copy of the network, and the perturbations that it has seen; of one stream or of all.

    Attributes:
      state: ĥ, ravelled.
      filtered: Ω.
      slope: Γ = dΩ/dκ.
      age: the number of steps since ĥ was h; None where the twin is never brought back.
    """

    state: Float[Array, "*B S"]
    filtered: Float[Array, "*B n"]
    slope: Float[Array, "*B n"]
    age: Int[Array, "*B"] | None


class KernlMemory(NamedTuple):
    """The memory of a stream.

    Attributes:
      twin: the perturbed copy.
      eligibility: the traces e, `[p, rows, A]` for each weight matrix whose rows enter p units.
    """

    twin: Twin
    eligibility: PyTree


def kernl(
    model: Model,
    learning_rate: float | int = 0.1,
    sigma: float | Array = 0.01,
    time_constant: float | int = 10,
    cut: str = "state",
    immediate: str = "estimated",
    restart: int | None = 100,
    noise: str | Noise = "gaussian",
) -> GradientEstimator:
    """KeRNL: the influence of a unit on the others is a learnt sensitivity, which decays with a learnt time constant.

        dh_t^i/dh_s^j ≈ β_ij κ_j^{t-s},    κ_j = exp(-1 / time constant of unit j)
        e_t = κ e_{t-1} + dh_t/dθ_t,    dL/dθ ≈ Σ_t (dL_t/dh_t) β e_t

    Each weight has one trace, which decays as its unit is thought to. β and κ are learnt from perturbations. A twin of
    the network has noise added to its state, ĥ_t = F(ĥ_{t-1}, x_t) + σ ψ_t, and its distance from the network is
    regressed on the noise, filtered by the same kernel:

        Ω_t = κ Ω_{t-1} + ψ_t,    (ĥ_t - h_t) / σ ≈ β Ω_t

    Once per chunk β and κ take a step of gradient descent on the squared error, over all steps and streams. Plain
    descent is what was published; here the step of each column of β and of each κ_j is divided by the mean square of
    its regressor and by their number. Learning the kernel needs no loss, and the gradient no backpropagation in time.
    The gradient is exact where the true kernel has this form, as in a network of leaky units that do not hear each
    other; else it is biased.

    Args:
      model: the model whose gradients are estimated. At the state, each row of its cell's weights must enter few units:
        vanilla, LSTM, GRU, spiking and diagonal cells in one layer.
      learning_rate: η, from 0, which learns nothing, to below 1. It should be small where a chunk has few steps and
        streams.
      sigma: σ > 0, the size of the perturbations. It should be small beside the states.
      time_constant: of all units at the beginning, in steps. Learning keeps it below 1,000.
      cut: "state", where the noise is as published, or "preactivation", for any cell with weights: then β is the
        sensitivity to the input of each unit, traces are filtered features, and β begins at zero.
      immediate: "estimated" as published, or "exact": the effect of the present step, dh_t/dθ_t, is known, and
        β κ^{t-s-1} stands for s < t alone.
      restart: the number of steps after which the twin begins again from the network's state, since in a chaotic
        network it gets lost; None for never.
      noise: any of zero mean and unit variance, or "given" (the caller passes ψ, `[T, n]`, in place of the key).

    Returns:
      The estimator. Memory is P for each unit that a row enters; time per step is a few times that of BPTT, as network
      and twin both run, and S² for β. `state.shared` is the `Kernel`, with β, `sensitivity`, and κ, `decay`, which all
      streams of a batch have in common. Its diagnostics, `[T]`, are the norms of the twin's distance over σ, `seen`,
      and of the error of its prediction, `missed`. `advance` learns the kernel as `update` does.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.vanilla(2, 4, leak=0.1), sg.heads.softmax(3))
      >>> params = model.init(jax.random.key(0))
      >>> est = sg.batched(sg.kernl(model), 8)
      >>> chunk = sg.Chunk(jnp.ones((8, 5, 2)), jnp.zeros((8, 5), int))
      >>> grads, state, info = est.update(params, est.init(params), chunk, jax.random.key(1))
      >>> state.shared.sensitivity.shape, info.diagnostics["missed"].shape
      ((4, 4), (8, 5))

    References:
      Roth, Kanitscheider and Fiete, Kernel RNN Learning (KeRNL), 2019.
      Marschall, Cho and Savin, A unified framework of online learning algorithms for training recurrent neural
      networks, 2020.
    """
    model = worked(model)
    check_number(learning_rate=learning_rate, time_constant=time_constant)
    if not 0 <= learning_rate < 1:
        raise ValueError(
            "learning_rate must be at least 0 and below 1, from where a normalised step may go too far, not "
            f"{learning_rate!r}."
        )
    if not time_constant > 0:
        raise ValueError(f"time_constant must be a number above 0, not {time_constant!r}.")
    check_sigma("sigma", sigma)
    check_choice("cut", cut, ("state", "preactivation"))
    check_choice("immediate", immediate, ("estimated", "exact"))
    if restart is not None:
        check_size(restart=restart)
    source, entered = find_noise(noise), _entries(model, cut)
    layout = cuts.layout(model.cell, model.cell.cuts[cut])
    exact = immediate == "exact"

    def init(params: Params) -> EstimatorState:
        dtype, size = real_dtype(params.cell), layout.size
        check_sigma("sigma", sigma, dtype)
        begin = jnp.eye(size, dtype=dtype) if cut == "state" else jnp.zeros((layout.state_size, size), dtype)
        kernel = Kernel(begin, jnp.full(size, np.exp(-1 / time_constant), dtype), jnp.asarray(sigma, dtype))
        state = ravel_pytree(model.init_state(params))[0]
        age = None if restart is None else jnp.zeros((), jnp.int32)
        twin = Twin(state, jnp.zeros(size, dtype), jnp.zeros(size, dtype), age)
        memory = KernlMemory(twin, sparse_influence.zeros(entered, params.cell))
        return EstimatorState(model.init_state(params), memory, kernel)

    def draw(shared: Kernel, key: Any, length: int, dtype: Any) -> Float[Array, "T n"]:
        del shared
        return source.draw(key, (length, layout.size), dtype)

    def contract(memory: KernlMemory, asked: Float[Array, "B n"]) -> PyTree:
        return sparse_influence.contract(entered, asked / len(asked), memory.eligibility)

    def run(params: Params, state: EstimatorState, chunk: Chunk, noise: Array, devices: Devices) -> Outcome:
        beta, kappa, _ = state.shared
        forward = go_forward(model, params, state.cell, chunk)
        twin, pairs = _follow(model, params, cut, state, forward, chunk, noise, restart, exact)
        kernel, missed = _learnt(state.shared, pairs, learning_rate / layout.size, devices)

        now, later, left, asked, moved = _backwards(forward.dl_dstate @ beta, kappa, forward.reset)
        pushed = _pushed(entered, forward) if cut == "state" else None
        credit = _at_rows(entered, later if exact else now, pushed, params.cell)
        rows = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=2), credit)
        grads = sum_outer(Outer(rows, forward.features))
        if exact:
            pull = jax.vmap(jax.vmap(forward.maps.pull))
            known = pull(forward.residuals, forward.dl_dstate)[1]
            grads = jax.tree.map(jnp.add, grads, sum_outer(Outer(known, forward.features)))
        older = older_credit(contract, state, asked if exact else kappa[None] * asked, forward)
        grads, memory = with_older(grads, older, state, forward)

        over, begun = episode_over(forward.reset), forward.begun(len(noise))
        # What is left of an episode that is over is zero, but may stand beside NaN.
        left, features = cleared(over, (_at_rows(entered, left, pushed, params.cell), forward.features))
        moved = _at_rows(entered, moved[None], None, params.cell)

        def advance(e: Array, by: Array, left: Array, a: Array) -> Array:
            return by[0][..., None] * e + jnp.einsum("kbpn,kba->bpna", left, a)

        traces = jax.tree.map(advance, cleared(begun, memory.eligibility), moved, left, features)
        told = {"seen": jnp.linalg.norm(pairs.distance, axis=-1).T, "missed": missed.T}
        return finish(model, params, forward, grads, KernlMemory(twin, traces), kernel, told)

    options = {"learning_rate": learning_rate, "time_constant": time_constant, "cut": cut, "immediate": immediate}
    return estimator(
        Method(
            name="kernl",
            options=options | {"restart": restart},
            model=model,
            init=init,
            run=run,
            draw=draw,
            check=lambda chunk, length, key: source.check(key),
        )
    )


def _entries(model: Model, cut: str) -> InfluencePattern:
    """The entries of z at the cut that each row of weights enters; raises ValueError where these are too many."""
    if cut == "preactivation":
        reached = np.eye(cuts.layout(model.cell, find_cut(model, cut)).size, dtype=bool)
    else:
        pattern = find_jacobian_pattern(model)
        if pattern is None or feature_pattern(model) is None or pattern.cut.sum(axis=0).max() > MOST_OWN_UNITS:
            raise ValueError(
                "kernl(cut='state') needs a cell with weights that says what its input is, in which each row of "
                "weights enters few units and no preactivation is made of another one, such as vanilla, lstm or gru in "
                "one layer: for stacks use cut='preactivation'."
            )
        reached = pattern.cut
    colours = colour(reached, np.ones(len(reached), bool))
    units = [own_units(part, colours) for part in by_matrix(reached, cuts.preactivation_rows(model.cell))]
    leaves = tuple(LeafPattern(own, np.zeros(0, int), own < len(reached)) for own in units)
    return InfluencePattern(leaves, colours, int(colours.max()) + 1, np.zeros((len(reached), len(reached)), bool))


class Pairs(NamedTuple):
    """The regression for β and κ: at every step the twin's distance, and the noise that should explain it.

    Attributes:
      filtered: Ω.
      slope: Γ.
      distance: (ĥ - h) / σ.
    """

    filtered: Float[Array, "K B n"]
    slope: Float[Array, "K B n"]
    distance: Float[Array, "K B S"]


def _follow(
    model: Model,
    params: Params,
    cut: str,
    state: EstimatorState,
    forward: Forward,
    chunk: Chunk,
    noise: Float[Array, "B K n"],
    again: int | None,
    exact: bool,
) -> tuple[Twin, Pairs]:
    """The twins of all streams through the chunk.

    With `exact`, distances are read before the noise of the step is added, beside Ω and Γ of the step before.
    """
    kappa, sigma = state.shared.decay, state.shared.sigma
    fresh, unravel = ravel_pytree(model.init_state(params))
    numbers, vertex = jnp.asarray(model.numbers), model.cell.cuts[cut]
    start = jax.vmap(lambda cell: ravel_pytree(cell)[0])(state.cell)
    before = jnp.concatenate([start[None], forward.states[:-1]])
    inputs, noise = jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), (chunk.inputs, noise))
    if cut == "state":  # noise would make another counter or key of it
        noise = jnp.where(numbers[None, None], noise, 0)

    def one(twin: Twin, now: tuple) -> tuple[Twin, Pairs]:
        x, reset, psi, before, after = now
        before, begins = restart(reset, fresh, before), reset
        if again is not None:
            begins = (twin.age == again) if reset is None else reset | (twin.age == again)
        zero = jnp.zeros_like(twin.filtered)
        age = None if twin.age is None else jnp.zeros_like(twin.age)
        twin = restart(begins, Twin(before, zero, zero, age), twin)
        kick = unravel(sigma * psi) if cut == "state" else like_params(params.cell, sigma * psi)
        unkicked = ravel_pytree(transition(model, params, unravel(twin.state), x))[0]
        kicked = ravel_pytree(vertex.inject(params.cell, unravel(twin.state), x, kick))[0].astype(unkicked.dtype)
        filtered, slope = kappa * twin.filtered + psi, kappa * twin.slope + twin.filtered
        new = Twin(kicked, filtered, slope, None if twin.age is None else twin.age + 1)
        read, place = (twin, unkicked) if exact else (new, kicked)
        return new, Pairs(read.filtered, read.slope, jnp.where(numbers, place - after, 0) / sigma)

    steps = (inputs, forward.reset, noise, before, forward.states)
    return jax.lax.scan(jax.vmap(one), state.memory.twin, steps)


def _learnt(kernel: Kernel, pairs: Pairs, rate: float, devices: Devices) -> tuple[Kernel, Float[Array, "K B"]]:
    """One normalised step of descent on |β Ω - distance|² / 2 for β and κ, and the norms of these errors.

    Steps of streams whose state has gone to NaN or infinity are left out: all streams share the kernel.
    """
    beta, kappa, _ = kernel
    missed = pairs.filtered @ beta.T - pairs.distance
    norms = jnp.linalg.norm(missed, axis=-1)
    fine = jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf), axis=-1) for leaf in (*pairs, missed)]), axis=0)
    (omega, slope, seen), missed = cleared(~fine, (tuple(pairs), missed))
    sums = (
        jnp.einsum("kbs,kbn->sn", missed, omega),
        jnp.einsum("kbn,kbn->n", missed @ beta, slope),
        jnp.sum(omega**2, axis=(0, 1)),
        jnp.sum(slope**2, axis=(0, 1)),
        jnp.sum(seen**2),
        jnp.sum(fine.astype(beta.dtype)),
    )
    *sums, count = devices.mean(sums)
    down_beta, down_kappa, omega2, slope2, seen2 = (part / jnp.where(count > 0, count, 1) for part in sums)
    # The means of Ω² and Γ² are at least 1, as that of ψ² is: a smaller one is chance, and no divisor.
    omega2, slope2 = jnp.maximum(omega2, 1), jnp.maximum(slope2, 1)
    # To |β_:j|² comes that of a β which explains all that is seen, so that κ keeps still until β is learnt.
    size2 = jnp.sum(beta**2, axis=0) + seen2 / jnp.sum(omega2)
    new_beta = beta - rate * down_beta / omega2[None]
    new_kappa = kappa - rate * down_kappa / (jnp.where(size2 > 0, size2, 1) * slope2)
    new = kernel._replace(sensitivity=new_beta, decay=jnp.clip(new_kappa, 0, LONGEST))
    return restart(~all_finite(new), kernel, new), norms


def _backwards(
    wanted: Float[Array, "K B n"], kappa: Float[Array, " n"], reset: Bool[Array, "K B"] | None
) -> tuple[Array, Array, Array, Array, Array]:
    """The credit of each step's z, filtered by the kernel in reverse; nothing flows back through a reset.

        q_t = wanted_t + κ q_{t+1},    r_t = κ^{K-t}

    Returns:
      q_t, q_{t+1} and r_t, `[K, B, n]`; and q_1 and κ^K, `[B, n]`, as they leave the chunk.
    """
    zero = jnp.zeros_like(wanted[0])

    def step(carry: tuple, now: tuple) -> tuple[tuple, tuple]:
        later, left = carry
        here, begins = now
        here = here + kappa[None] * later
        return cleared(begins, (here, kappa[None] * left)), (here, later, left)

    (asked, moved), found = jax.lax.scan(step, (zero, jnp.ones_like(zero)), (wanted, reset), reverse=True)
    return *found, asked, moved


def _pushed(entered: InfluencePattern, forward: Forward) -> PyTree:
    """dh_u/dz_n for the units u that each row n enters, `[K, B, p, rows]`, of all steps at once."""
    vectors = sparse_influence.colour_vectors(entered, forward.states.dtype)
    pull = jax.vmap(forward.maps.pull, in_axes=(None, 0))
    for size in reversed(forward.states.shape[:2]):  # which residuals need not tell: a linear step has none
        pull = jax.vmap(pull, in_axes=(0, None), axis_size=size)
    return sparse_influence.pick(entered, pull(forward.residuals, vectors)[1])


def _at_rows(
    entered: InfluencePattern, vectors: Float[Array, "K B n"], pushed: PyTree | None, params: PyTree
) -> PyTree:
    """Vectors over z at the entries of each row, `[K, B, p, rows]`; times dz/d(row) where that is not 1."""
    structure = jax.tree.structure(params)
    found = jax.tree.unflatten(structure, sparse_influence.at_units(entered, vectors))
    return found if pushed is None else jax.tree.map(jnp.multiply, found, pushed)
