"""`rtrl` equals `bptt` to rounding, however the stream is cut; the variants of `bptt` equal it, too."""

import jax
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import streamgrad as sg
from tests.reference import estimators as oracle
from tests.tools import RTRL, bptt, error, few, made, make_chunk, make_model, make_params, run, split

SPLITS = [(8,), (1, 7), (1,) * 8]
FORMS = [(cell, "chunks") for cell in ("vanilla", "lstm", "gru", "stack", "nested")]
FORMS += [(cell, "steps") for cell in ("vanilla", "stack", "nested")]


@pytest.mark.parametrize("cell, form", few(FORMS, ("lstm", "chunks"), ("vanilla", "steps")))
def test_rtrl_is_bptt(cell, form):
    model = make_model(cell, n_in=2, n_hidden=3)
    params, rtrl, reference = make_params(model), made(RTRL[form], model), made(sg.bptt, model)
    for reset in (None, (2, 5), (0, 1, 7)):
        chunk = make_chunk(model, 8, reset=reset)
        chunk = chunk._replace(weight=np.random.default_rng(1).normal(size=8)) if reset else chunk
        want, losses, _ = run(reference, params, [chunk])
        for sizes in SPLITS if reset else SPLITS[1:]:
            grads, online_losses, _ = run(rtrl, params, split(chunk, sizes))
            assert error(grads, want) < 1e-10, (reset, sizes)
            np.testing.assert_allclose(online_losses, losses, rtol=1e-12)


# Without the stack, where one preactivation feeds another, so that J is not the Jacobian of z (test_rtrl_is_bptt and
# test_cut_factors_the_immediate_jacobian have it).
@pytest.mark.parametrize(
    "cell, form", few([pair for pair in FORMS if pair[0] != "stack"], ("gru", "chunks"), ("nested", "steps"))
)
def test_rtrl_is_the_textbook(cell, form):
    model = make_model(cell)
    params, chunk = make_params(model), make_chunk(model, 4, reset=(2,))
    grads, _, _ = run(made(RTRL[form], model), params, split(chunk, (1, 1, 1, 1)))
    np.testing.assert_allclose(ravel_pytree(grads.cell)[0], oracle.rtrl(model, params, chunk, "state"), rtol=1e-10)


RECOMPUTED = [("lstm", 3), ("nested", 4), *(("lstm", steps) for steps in (1, 8, 20))]


@pytest.mark.parametrize("cell, recompute", few(RECOMPUTED, ("lstm", 3), ("nested", 4)))
def test_recomputation_changes_nothing(cell, recompute):
    model = make_model(cell)
    params, chunk = make_params(model), make_chunk(model, 8, reset=(3,))
    want, losses, state = run(made(sg.bptt, model), params, [chunk])
    got, again, end = run(sg.bptt(model, recompute=recompute), params, [chunk])
    assert error(got, want) < 1e-12
    np.testing.assert_allclose(again, losses, rtol=1e-12)
    assert error(end.cell, state.cell) < 1e-12


def test_recomputation_saves_memory():
    """What the compiled program keeps at its peak shrinks from T to about T/k + k steps."""
    model = make_model("lstm", n_in=4, n_hidden=64)
    params, chunk = make_params(model), make_chunk(model, 400)

    def peak(est):
        state = est.init(params)
        compiled = jax.jit(est.update).lower(params, state, chunk, None).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert peak(sg.bptt(model, recompute=20)) < 0.2 * peak(sg.bptt(model))


@pytest.mark.slow
def test_every_layer_of_a_stack_gets_its_gradient():
    """Three layers: the lower ones' preactivations act through the upper ones' weights."""
    cell = sg.cells.stack(sg.cells.lstm(2, 3), sg.cells.vanilla(3, 2), sg.cells.gru(2, 3))
    model = sg.Model(cell, sg.heads.squared_error(2))
    params, chunk = make_params(model), make_chunk(model, 6)
    grads, _, _ = run(sg.rtrl(model), params, split(chunk, (1, 3, 2)))
    want = bptt(model, params, chunk)
    for layer in range(3):
        assert error(grads.cell[layer], want.cell[layer]) < 1e-10
