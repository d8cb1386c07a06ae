"""Optimal Kronecker sums: the influence across chunks as a sum of a few Kronecker products."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from streamgrad._typing import Array, Float, PyTree
from streamgrad.base import Chunk, EstimatorState, GradientEstimator, Model, Params, real_dtype, worked
from streamgrad.checks import check_at_most, check_size, find_cut
from streamgrad.engine.across import finish, older_credit, with_older
from streamgrad.engine.chunk import go_back, go_forward
from streamgrad.engine.collectives import Devices
from streamgrad.engine.estimator import estimator
from streamgrad.engine.method import Method, Outcome, watched_streams
from streamgrad.noise.distributions import Noise, find_noise
from streamgrad.noise.kronecker_reduction import reduce, signs_needed, sketch_width
from streamgrad.step import cuts
from streamgrad.step.weights import Outer, sum_outer, zero_terms
from streamgrad.trees import cleared


class OkMemory(NamedTuple):
    """The estimate dh/dW ≈ Σ_i C_i ⊗ ã_i of every weight matrix W; in the structure of the parameters.

    Attributes:
      left: C_i, leaves `[rank, S, rows]`; of a matrix with fewer features, as many terms as it has.
      right: ã_i, leaves `[rank, A]`.
    """

    left: PyTree
    right: PyTree


def ok(model: Model, rank: int | None = None, noise: str | Noise = "rademacher") -> GradientEstimator:
    """The influence across chunks as a sum of `rank` Kronecker products, reduced once per chunk without bias.

        dL_chunk/dW = backpropagation inside the chunk + Σ_i (dL_chunk/dh_0 C_i) ã_i^T
        dh_K/dW     = Σ_i (Φ C_i) ⊗ ã_i + Σ_s G_s ⊗ a_s  ≈  Σ_i C'_i ⊗ ã'_i

    The first sum of dh_K/dW is exact, and has K terms more than there is room for. The largest in the sense of singular
    values are kept, and the rest is mixed with random signs (`streamgrad.noise.kronecker_reduction`): the mean is
    right, and the noise is close to the least that this number of terms allows. Each weight matrix has a sum of its
    own; one with no more features than terms is exact, such as a bias.

    Args:
      model: the model whose gradients are estimated; its cell must have the cut "preactivation".
      rank: how many terms, at most as many as the state has units. None for 8, or for all of them where there are less.
      noise: "rademacher", or "given" (the caller passes the signs in place of the key).

    Returns:
      The estimator. Memory is rank (S N + A). Time per step is S P beyond that of BPTT.
      `batched(ok(model), 16, watched=4)` takes the influence of 4 of 16 streams alone.

    Example:
      >>> import jax, jax.numpy as jnp, streamgrad as sg
      >>> model = sg.Model(sg.cells.gru(2, 4), sg.heads.softmax(3))
      >>> params = model.init(jax.random.key(0))
      >>> est = sg.ok(model, rank=2)
      >>> chunk = sg.Chunk(jnp.ones((5, 2)), jnp.zeros(5, int))
      >>> grads, state, info = est.update(params, est.init(params), chunk, jax.random.key(1))
      >>> state.memory.left["gates"].shape, state.memory.right["gates"].shape
      ((2, 4, 8), (2, 7))

    References:
      Benzing, Gauy, Mujika, Martinsson and Steger, Optimal Kronecker-sum approximation of real time recurrent learning,
      2019.
    """
    model = worked(model)
    layout = cuts.layout(model.cell, find_cut(model, "preactivation"))
    source = find_noise(noise)
    terms = min(8, layout.state_size) if rank is None else rank
    check_size(rank=terms)
    check_at_most("rank", terms, layout.state_size, "the number of state units")
    if source.name in ("gaussian", "uniform"):
        raise ValueError(f"ok mixes with random signs: noise must be 'rademacher' or 'given', not {source.name!r}.")

    def init(params: Params) -> EstimatorState:
        memory = OkMemory(*zero_terms(params.cell, terms, layout.state_size))
        return EstimatorState(model.init_state(params), memory, ())

    def draw(shared: PyTree, key: Any, length: int, dtype: Any) -> Float[Array, "M n"]:
        return source.draw(key, (len(layout.rows), signs_needed(length, terms)), dtype)

    def run(params: Params, state: EstimatorState, chunk: Chunk, noise: Array, devices: Devices) -> Outcome:
        del devices
        forward = go_forward(model, params, state.cell, chunk)
        watched = watched_streams(state)
        eye = jnp.eye(layout.state_size, dtype=real_dtype(params.cell))
        back = go_back(forward, params.cell, jnp.broadcast_to(eye, (watched, *eye.shape)))
        older = older_credit(_contract, state, back.dl_dstart, forward)
        grads, memory = with_older(back.inside, older, state, forward)
        memory = cleared(forward.begun(watched), memory)
        memory = jax.vmap(_move, in_axes=(0, 0, 0, 1))(memory, noise, back.asked, back.pulled)
        return finish(model, params, forward, grads, memory)

    return estimator(
        Method(
            name="ok",
            options={"rank": terms},
            model=model,
            init=init,
            run=run,
            draw=draw,
            check=lambda chunk, length, key: source.check(key),
            watchable=True,
            sharded_axes=_by_rows,
        )
    )


def _contract(memory: OkMemory, dl_dstart: Float[Array, "b S"]) -> PyTree:
    """The mean over streams of Σ_i (dL_chunk/dh_0 C_i) ã_i^T."""
    mean = dl_dstart / len(dl_dstart)
    left = jax.tree.map(lambda leaf: jnp.einsum("bs,brsn->brn", mean, leaf), memory.left)
    return sum_outer(Outer(left, memory.right))


def _move(memory: OkMemory, signs: Array, back: Float[Array, "S S"], pulled: Outer) -> OkMemory:
    """Σ_i (Φ C_i) ⊗ ã_i + Σ_s G_s ⊗ a_s of one stream, reduced to as many terms as before.

    Args:
      memory: C_i and ã_i.
      signs: for each weight matrix, to mix terms with.
      back: Φ.
      pulled: G_s and a_s, time leading.

    Returns:
      The terms after the chunk.
    """
    structure = jax.tree.structure(memory.right)
    leaves = [jax.tree.leaves(tree) for tree in (memory.left, memory.right, pulled.left, pulled.right)]
    found = []
    for c, a, new_c, new_a, own in zip(*leaves, signs, strict=True):
        moved = jnp.einsum("st,rtn->rsn", back, c)
        if len(a) == a.shape[1]:  # a term for each feature: ã_i is the i-th unit vector, nothing is left out
            exact = moved + jnp.einsum("ksn,ka->asn", new_c, new_a)
            found.append((exact, jnp.eye(len(a), dtype=a.dtype)))
        else:
            found.append(reduce((moved, a), (new_c, new_a), own))
    return OkMemory(*(jax.tree.unflatten(structure, part) for part in zip(*found, strict=True)))


def _by_rows(memory: OkMemory) -> OkMemory:
    """`Method.sharded_axes`: by rows of C_i, and not by features as elsewhere; ã_i is small, and every device has it.

    So is C_i where it has no more rows than a sketch, which every device has whole while terms are mixed.
    """

    def one(left: Any) -> int:
        return 2 if left.shape[2] > sketch_width(len(left)) else -1

    return OkMemory(jax.tree.map(one, memory.left), jax.tree.map(lambda _: -1, memory.right))
