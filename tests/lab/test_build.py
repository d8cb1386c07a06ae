"""Models by the names of the command line."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import streamgrad as sg
from streamgrad_lab.cli.main import main
from streamgrad_lab.tasks import find_task
from streamgrad_lab.training.build import CELLS, make_model, make_optimizer
from tests.tools import error, few, run

TASK = find_task("queue", delay=2, batch_size=1, length=4)


@pytest.mark.parametrize("layers", few([1, 2], 2))
@pytest.mark.parametrize("cell", few(CELLS, "gru", "lru"))
def test_every_cell_can_be_stacked(cell, layers):
    """Layers fit on each other, whatever the size of their output is."""
    model = make_model(cell, 3, layers, TASK)
    params = model.init(jax.random.key(0))
    assert len(params.cell) == layers if layers > 1 else isinstance(params.cell, dict)
    shapes = jax.eval_shape(model.run, params, model.init_state(params), jnp.ones((4, TASK.n_in)))
    assert shapes[0].shape == (4, 6 if cell in ("lru", "rtu") else 3)


def test_the_gradient_is_clipped_before_the_optimiser_sees_it():
    """Of a gradient of norm 10 an optimiser that clips at 2 makes what it makes of one of norm 2."""
    gradient = jnp.asarray([6.0, -8.0])
    for name, momentum in (("sgd", 0.9), ("rmsprop", 0.0), ("adam", 0.9)):
        found = []
        for clip, g in ((2.0, gradient), (None, gradient / 5), (100.0, gradient / 5)):
            optimizer = make_optimizer(name, 0.1, momentum, clip)
            state, moved = optimizer.init(g), jnp.zeros(2)
            for _ in range(3):
                updates, state = optimizer.update(g, state, moved)
                moved = moved + updates
            found.append(np.asarray(moved))
        np.testing.assert_allclose(found[0], found[1], rtol=1e-6)
        np.testing.assert_allclose(found[2], found[1], rtol=1e-12)
        if name == "sgd":  # each step adds 0.9 of the last one
            np.testing.assert_allclose(found[0], -0.1 * (1 + 1.9 + 2.71) * np.asarray(gradient) / 5, rtol=1e-6)


@pytest.mark.slow
def test_gradients_of_a_stack():
    model = make_model("lru", 2, 2, TASK)
    params = model.init(jax.random.key(0))
    chunk = jax.tree.map(
        lambda leaf: leaf[0], TASK.sample(TASK.data, TASK.init(jax.random.key(0)), jax.random.key(0))[0]
    )
    want, got = (run(make(model), params, [chunk])[0] for make in (sg.bptt, sg.rtrl))
    assert error(got, want) < 1e-10


@pytest.mark.slow
def test_compare_takes_a_cell_of_other_than_matrices(capsys, as_a_user):
    """Its theory is over matrices, and bounds the noise that is measured."""
    command = ["compare", "--cell", "lru", "--hidden", "2", "--length", "8", "--updates", "2", "--samples", "64"]
    assert main([*command, "--streams", "2", "--estimators", "rtrl", "preuoro", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["rtrl"]["squared_error"] < 1e-10
    assert 0 < rows["preuoro"]["variance"] < rows["preuoro"]["predicted"]
