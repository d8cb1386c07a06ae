"""Models by the names of the command line."""

import json

import jax
import jax.numpy as jnp
import pytest

import streamgrad as sg
from streamgrad.lab.cli.main import main
from streamgrad.lab.tasks import find_task
from streamgrad.lab.training.build import CELLS, make_model
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
