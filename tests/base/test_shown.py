"""What an interactive user sees of an estimator, and how long a call makes them wait."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import streamgrad as sg
from streamgrad.contract import HELP
from tests.estimators.registered import CASES, make
from tests.tools import make_chunk, make_model, make_params, one_sentence


def shown():
    model = make_model("vanilla")
    for row, cut in CASES:
        yield row.name, make(row, cut, model)
    est = sg.rtrl(model)
    yield "batched(rtrl(), 16, watched=4)", sg.batched(est, 16, watched=4)
    yield "sharded(rtrl(), 4, mesh(1,))", sg.sharded(est, 4, jax.make_mesh((1,), ("streams",)))
    yield "monitored(batched(rtrl(), 2))", sg.monitored(sg.batched(est, 2))
    yield "carried(uoro(", sg.carried(sg.uoro(model))
    yield "reinforce(baseline=", sg.reinforce(model, sigma=lambda step: 0.1)
    yield "windowed_bptt(window=7, every=1, replay=True)", sg.windowed_bptt(model, window=7, replay=True)
    yield "GradientEstimator", sg.GradientEstimator(est.init, est.update)


def test_an_estimator_in_a_line():
    """Its name and its options, and nothing of its insides; its functions say what they do."""
    for begins, est in shown():
        assert repr(est).startswith(begins) and len(repr(est)) < 100 and "\n" not in repr(est)
        assert "function" not in repr(est) and " at 0x" not in repr(est)
        if begins != "GradientEstimator":
            assert est.init.__doc__ and all(getattr(est, name).__doc__ == HELP[name] for name in list(HELP)[1:])


def test_words_of_ones_own_stay():
    """Of functions that are a user's own, documented or not."""

    def init(params):
        """Mine."""

    est = sg.GradientEstimator(init, lambda *_: None)
    assert est.init.__doc__ == "Mine." and est.update.__doc__ is None


def test_an_update_does_not_wait_for_its_input():
    """Numbers are looked at where they are there already: elsewhere the caller goes on at once."""
    model = make_model("vanilla")
    est, params = sg.rtrl(model), make_params(model)
    chunk = make_chunk(model, 4)
    est.update(params, est.init(params), chunk, None)

    @jax.jit
    def late(x):
        """Half a second and more, on whatever machine; the number of turns is not known to the compiler."""
        turns = 3_000 + jnp.sum(x).astype(int) % 2
        a = jax.lax.fori_loop(0, turns, lambda _, a: jnp.tanh(a @ a), jnp.full((100, 100), 0.01))
        return x + 0 * a[0, 0]

    jax.block_until_ready(late(chunk.inputs))
    inputs = late(chunk.inputs)
    _, _, info = est.update(params, est.init(params), chunk._replace(inputs=inputs), None)
    assert not inputs.is_ready()
    assert np.all(np.isfinite(info.loss))


class Foreign:
    """What a class of another library looks like."""

    def __call__(self, x):
        return x


class Equinox(Foreign):
    __module__ = "equinox.nn._rnn"


class Flax(Foreign):
    __module__ = "flax.linen.recurrent"


def unknown_input():
    """A cell that does not say what it reads: its weights cannot be looked for."""
    return sg.cells.from_function(
        lambda params, h, x: jnp.tanh(params @ h + x), lambda key: jnp.ones((2, 2)), lambda: jnp.zeros(2)
    )


HEAD = sg.heads.squared_error(1)
WAYS_OUT = {
    "equinox": (lambda: sg.Model(Equinox(), HEAD), r"from_equinox\(cell\)"),
    "a class of equinox": (lambda: sg.Model(Equinox, HEAD), r"from_equinox\(cell\)"),
    "flax": (lambda: sg.Model(Flax(), HEAD), r"from_flax\(cell\)"),
    "a step": (lambda: sg.Model(lambda params, h, x: h, HEAD), "from_function makes one of a step"),
    "uncalled": (lambda: sg.Model(sg.cells.gru, HEAD), "call it with its sizes"),
    "ok": (lambda: sg.ok(sg.Model(unknown_input(), HEAD)), "give cells.from_function an example_input"),
    "snap": (lambda: sg.snap(make_model("stack"), inside="backprop"), "for stacks and encoders use rtrl or local_rtrl"),
    "monitored inside": (lambda: sg.carried(sg.monitored(sg.uoro(make_model("vanilla")))), "monitored go around it"),
    "time first": (
        lambda: sg.batched(sg.rtrl(make_model("vanilla")), 3).update(
            make_params(make_model("vanilla")),
            sg.batched(sg.rtrl(make_model("vanilla")), 3).init(make_params(make_model("vanilla"))),
            sg.Chunk(jnp.ones((4, 3, 1)), jnp.ones((4, 3, 2))),
            None,
        ),
        r"streams come first and then time, \[B, T, ...\], so swap the first two axes",
    ),
}


@pytest.mark.usefixtures("as_a_user")
@pytest.mark.parametrize("case", WAYS_OUT)
def test_errors_that_name_a_way_out(case):
    call, says = WAYS_OUT[case]
    with pytest.raises(ValueError, match=says) as error:
        call()
    assert one_sentence(error)
