"""What the network said: `Model.run` and `Model.predict` for one stream and for many, and `Info.outputs`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import streamgrad as sg
from tests.estimators.registered import cases, make, of_each_kind, refuses
from tests.tools import make_chunk, make_model, make_params, one_sentence


def test_many_streams_are_each_of_them():
    model = make_model("lstm", 2, 3)
    params = make_params(model)
    chunks = [make_chunk(model, 4, seed=seed, reset=(seed,)) for seed in range(3)]
    states = [jax.tree.map(lambda leaf, s=seed: leaf + 0.1 * s, model.init_state(params)) for seed in range(3)]
    stacked, state = (jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees) for trees in (chunks, states))
    outputs, end = model.run(params, state, stacked.inputs, stacked.reset)
    for index, (chunk, start) in enumerate(zip(chunks, states, strict=True)):
        alone, last = model.run(params, start, chunk.inputs, chunk.reset)
        np.testing.assert_allclose(outputs[index], alone, rtol=1e-12)
        jax.tree.map(lambda a, b, i=index: np.testing.assert_allclose(a[i], b, rtol=1e-12), end, last)
    one = model.head.predict(params.head, outputs[1, 2])
    np.testing.assert_allclose(model.predict(params, outputs)[1, 2], one, rtol=1e-12)
    np.testing.assert_allclose(model.predict(params, outputs[1])[2], one, rtol=1e-12)


@cases(lambda row, cut: True, of_each_kind)
def test_what_the_network_said(row, cut):
    """`info.outputs` are those of the network itself, from the state before the chunk; alone and in a batch."""
    model = make_model("vanilla", 2, 3)
    if refuses(row, cut, model):
        return
    params, chunk, key = make_params(model), make_chunk(model, 4, reset=(2,)), jax.random.key(0)
    est = make(row, cut, model, **({"noise": "given"} if row.name == "reinforce" else {}))
    given = jnp.zeros((4, 3)) if row.name == "reinforce" else key  # whose noise is in the network
    _, _, info = est.update(params, est.init(params), chunk, given)
    want, _ = model.run(params, model.init_state(params), chunk.inputs, chunk.reset)
    np.testing.assert_allclose(info.outputs, want, rtol=1e-12)
    many = jax.eval_shape(
        sg.batched(est, 2).update,
        params,
        sg.batched(est, 2).init(params),
        jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), chunk),
        jnp.stack([given, given]),
    )[2]
    assert many.outputs.shape == (2, 4, 3)


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize(
    "call, says",
    [
        (lambda model, params: model.predict(params.head, jnp.ones((4, 3))), "params must be"),
        (lambda model, params: model.predict(params, jnp.ones((4, 2))), "outputs must be those of the cell"),
        (lambda model, params: model.predict(params, [1.0]), "outputs must be those of the cell"),
        (
            lambda model, params: model.run(params, jnp.ones((5, 3)), jnp.ones((4, 6, 2))),
            "state is that of 5 streams, but inputs",
        ),
        (lambda model, params: model.run(params, jnp.ones((4, 3)), jnp.ones((4, 6, 5))), "the cell's input"),
        (lambda model, params: model.run(params, jnp.ones(3), jnp.ones((4, 6, 2))), "state is that of one stream"),
    ],
)
def test_bad_input(call, says):
    model = make_model("vanilla", 2, 3)
    with pytest.raises(ValueError, match=says) as error:
        call(model, make_params(model))
    assert one_sentence(error)
