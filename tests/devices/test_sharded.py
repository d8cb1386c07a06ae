"""Streams on several devices: the numbers of one device, and no traffic but the gradient's."""

import functools
import json
import math
import re
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import streamgrad as sg
from streamgrad.estimators import REGISTRY
from tests.devices.cases import NAMES, STEPS, STREAMS, chunk_of, difference, make, model_of, params_of, train
from tests.tools import ROOT, few

FAST = ("rtrl", "uoro that shrinks")  # without and with noise and something that all streams learn
CLOSE = 1e-12
each = pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)


def mesh_of(*shape: int, types: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    return jax.make_mesh(shape, ("streams", "columns")[: len(shape)], axis_types=(types,) * len(shape))


@each
def test_the_numbers_of_one_device(name):
    alone = train(sg.batched(make(name), STREAMS))
    assert difference(train(sg.sharded(make(name), STREAMS, mesh_of(2))), alone) < CLOSE
    if name not in FAST:
        for devices in (1, 4):
            assert difference(train(sg.sharded(make(name), STREAMS, mesh_of(devices))), alone) < CLOSE


def two_processes(names: list[str]) -> dict[str, float]:
    """What `tests.devices.process` finds, of two processes with two devices each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "tests.devices.process"]
    started = [
        subprocess.Popen([*command, str(rank), port, *names], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    printed = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    return json.loads(printed[0].splitlines()[-1])


def test_two_processes():
    found = two_processes(["rtrl", "uoro", "rtrl by columns"])
    assert max(found.values()) < CLOSE


@pytest.mark.slow
def test_two_processes_with_every_estimator():
    found = two_processes(NAMES)
    assert list(found) == NAMES and max(found.values()) < CLOSE


@pytest.mark.parametrize("cell", ["vanilla", *(pytest.param(cell, marks=pytest.mark.slow) for cell in ("gru", "lru"))])
@pytest.mark.parametrize("shape", [(2, 2), pytest.param((1, 4), marks=pytest.mark.slow)])
def test_an_influence_by_columns(cell, shape):
    est = sg.sharded(make("rtrl", cell), STREAMS, mesh_of(*shape), columns="columns")
    assert difference(train(est, cell), train(sg.batched(make("rtrl", cell), STREAMS), cell)) < CLOSE


def by_columns(est, model) -> tuple[float, sg.EstimatorState]:
    """How far the last of three gradients is from that of one device, on two devices by two columns; the state."""
    params = jax.tree.map(lambda w: w.astype(jnp.float64), model.init(jax.random.key(0)))
    found = []
    for many in (sg.batched(est, STREAMS), sg.sharded(est, STREAMS, mesh_of(2, 2), columns="columns")):
        state = many.init(params)
        for number in range(3):
            grads, state, _ = many.update(params, state, chunk_of(number), jax.random.key(number))
        found.append([np.asarray(leaf) for leaf in jax.tree.leaves(jax.device_get(grads))])
    return difference(found[1], found[0]), state


@pytest.mark.parametrize(("hidden", "parts"), [(6, 1), (71, 2)])
def test_kronecker_sums_by_columns(hidden, parts):
    """Cut are matrices that are mixed by a sketch: those with more rows than it has directions."""
    model = sg.Model(sg.cells.vanilla(2, hidden), sg.heads.squared_error(2))
    far, state = by_columns(sg.ok(model, rank=2), model)
    assert far < CLOSE
    left = state.memory.left["w"]
    assert {part.data.nbytes * 2 * parts for part in left.addressable_shards} == {left.nbytes}


def test_a_single_row_by_columns():
    """Which cannot be cut: every device keeps it, and it is counted once."""
    model = sg.Model(sg.cells.vanilla(2, 1), sg.heads.squared_error(2))
    assert by_columns(sg.ok(model), model)[0] < CLOSE


@pytest.mark.slow
def test_a_stack_of_layers_by_columns():
    model = sg.Model(sg.cells.stack(sg.cells.gru(2, 3), sg.cells.lru(3, 4)), sg.heads.squared_error(2))
    for make_one in (sg.local_rtrl, sg.rtrl):
        assert by_columns(make_one(model), model)[0] < CLOSE


@pytest.mark.slow
def test_long_chunks_by_columns():
    """Whose products are added up in blocks."""
    model = model_of("gru")
    params, rng = params_of("gru"), np.random.default_rng(0)
    chunk = sg.Chunk(rng.normal(size=(4, 600, 2)), rng.normal(size=(4, 600, 2)))
    layouts = [sg.batched(sg.rtrl(model), 4), sg.sharded(sg.rtrl(model), 4, mesh_of(2, 2), columns="columns")]
    found = []
    for est in layouts:
        state = est.init(params)
        for _ in range(2):
            grads, state, _ = est.update(params, state, chunk, None)
        found.append([np.asarray(leaf) for leaf in jax.tree.leaves(jax.device_get(grads))])
    assert difference(*found) < CLOSE


def test_memory_by_columns():
    """M of each device is 1 / devices of the whole, but for what does not divide, and a column for biases."""
    model = sg.Model(sg.cells.vanilla(7, 8), sg.heads.squared_error(2))  # 16 features with the bias
    est = sg.sharded(sg.rtrl(model), 4, mesh_of(1, 4), columns="columns")
    (leaf,) = jax.tree.leaves(est.init(model.init(jax.random.key(0))).memory)
    assert leaf.shape == (4, 8, 8, 16)
    assert {part.data.shape for part in leaf.addressable_shards} == {(4, 8, 8, 4)}
    assert {part.data.nbytes * 4 for part in leaf.addressable_shards} == {leaf.nbytes}


def test_memory_of_ok_by_columns():
    """Rows of its left factors are cut, and right factors are not."""
    model = sg.Model(sg.cells.vanilla(7, 256), sg.heads.squared_error(2))
    params, kept = model.init(jax.random.key(0)), {}
    for count, columns in ((1, None), (4, "columns")):
        memory = sg.sharded(sg.ok(model, rank=2), 1, mesh_of(1, count), columns=columns).init(params).memory
        kept[count] = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(memory))
    assert kept[4] < 0.26 * kept[1]


def test_a_stream_too_large_for_one_device(monkeypatch):
    """Which is why it is spread by columns: what must fit is what each device keeps."""
    model = sg.Model(sg.cells.vanilla(7, 8), sg.heads.squared_error(2))
    params = model.init(jax.random.key(0))
    whole = 8 * 8 * 16 * params.cell["w"].dtype.itemsize
    monkeypatch.setattr("streamgrad.checks._device_memory", lambda: whole // 2)
    assert sg.sharded(sg.rtrl(model), 1, mesh_of(1, 4), columns="columns").init(params).memory["w"].nbytes == whole
    with pytest.raises(ValueError, match="the device has"):
        sg.sharded(sg.rtrl(model), 1, mesh_of(1, 4)).init(params)


@pytest.mark.parametrize("columns", [None, "columns"])
def test_wrong_input_is_one_sentence(columns):
    est, params = sg.sharded(make("rtrl"), STREAMS, mesh_of(2, 2), columns=columns), params_of()
    state, chunk = est.init(params), chunk_of(0)
    with pytest.raises(ValueError, match="inputs"):
        est.update(params, state, chunk._replace(inputs=chunk.inputs[..., :1]), None)
    with pytest.raises(ValueError, match=r"params\.cell"):
        est.init(params._replace(cell={"w": params.cell["w"][:, :-1]}))
    with pytest.raises(ValueError, match=r"params\.cell"):
        est.update(params._replace(cell={"w": params.cell["w"][:, :-1]}), state, chunk, None)


def collectives(est, cell: str = "vanilla") -> list[str]:
    """The collectives of the compiled program of an update, with what they carry."""
    params = params_of(cell)
    given = jax.tree.map(jnp.asarray, (params, est.init(params), chunk_of(0), jax.random.key(0)))
    return collectives_in(jax.jit(est.update).lower(*given).compile().as_text())


def collectives_in(text: str) -> list[str]:
    """Those of a compiled program."""
    kinds = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|collective-broadcast"
    return re.findall(rf"= (.*? (?:{kinds})(?:-start)?)\(", text)


@each
def test_traffic_is_the_gradient_alone(name):
    found = collectives(sg.sharded(make(name), STREAMS, mesh_of(4)))
    size = sum(leaf.size for leaf in jax.tree.leaves(params_of()))
    assert all("all-reduce" in one for one in found)
    assert any(f"f64[{size}]" in one for one in found)
    if name in REGISTRY and not REGISTRY[name].learns:  # which streams do together
        assert len(found) == 1


def numbers_of(shapes: str) -> list[int]:
    """How many numbers each array has that a collective carries."""
    return [math.prod(map(int, filter(None, one.split(",")))) for one in re.findall(r"\w+\[([\d,]*)\]", shapes)]


BY_COLUMNS = {
    "vanilla": lambda: (sg.rtrl, sg.cells.vanilla(2, 6)),
    "gru": lambda: (sg.rtrl, sg.cells.gru(2, 6)),
    "lstm": lambda: (sg.rtrl, sg.cells.lstm(2, 6)),
    "diagonal": lambda: (sg.rtrl, sg.cells.lru(20, 6)),
    "stack": lambda: (sg.local_rtrl, sg.cells.stack(sg.cells.gru(2, 6), sg.cells.lru(6, 8))),
    "ok": lambda: (functools.partial(sg.ok, rank=2), sg.cells.vanilla(2, 70)),
}


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("shape", [(2, 2), pytest.param((1, 4), marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", few(BY_COLUMNS, "gru", "ok"))
def test_traffic_by_columns(name, shape, types):
    """The gradient is gathered from columns and summed over streams; no influence travels, nor anything step by step.

    Besides there are one flag for each matrix, of a credit that is not finite, and `ok`'s sketch of a matrix.
    """
    make_one, cell = BY_COLUMNS[name]()
    n_in = cell.example_input.shape[-1]
    model = sg.Model(cell, sg.heads.squared_error(2))
    params = jax.tree.map(lambda w: w.astype(jnp.float64), model.init(jax.random.key(0)))
    est = sg.sharded(make_one(model), STREAMS, mesh_of(*shape, types=types), columns="columns")
    state = est.init(params)
    chunk = chunk_of(0)._replace(inputs=np.ones((STREAMS, STEPS, n_in)))
    given = jax.tree.map(jnp.asarray, (params, state, chunk, jax.random.key(0)))
    text = jax.jit(est.update).lower(*given).compile().as_text()
    begin = text.index("\nENTRY ")
    assert not collectives_in(text[:begin])  # which is where loops and branches are
    found = collectives_in(text[begin:])
    sizes = [[n for n in numbers_of(one) if n > 1] for one in found]
    gathered = [n for one, carried in zip(found, sizes, strict=True) if "all-gather" in one for n in carried]
    reduced = [n for one, carried in zip(found, sizes, strict=True) if "all-reduce" in one for n in carried]
    assert len(gathered) + len(reduced) == sum(map(len, sizes))
    total = sum(leaf.size for leaf in jax.tree.leaves(params))
    filled = sum(leaf.size + 3 * max(leaf.shape) for leaf in jax.tree.leaves(params.cell))
    assert sum(gathered) <= filled
    *sketch, gradient = sorted(reduced, reverse=True)
    assert sketch == ([STREAMS // shape[0] * 2 * 70 * 64] if name == "ok" else [])
    assert 0.9 * total < gradient <= total  # but for what is known to be zero
    for leaf in jax.tree.leaves(state.memory):
        axes = [axis for axis in leaf.sharding.spec if axis is not None]
        part = math.prod(leaf.addressable_shards[0].data.shape)
        assert part * shape[0] * (shape[1] if "columns" in axes else 1) == leaf.size
    assert any("columns" in leaf.sharding.spec for leaf in jax.tree.leaves(state.memory))


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("columns", [None, "columns"])
def test_inside_compiled_loops(types, columns):
    """As in a training program: `init`, `update` and a scan inside of `jit`, in the mesh's context or not."""
    mesh = mesh_of(2, types=types) if columns is None else mesh_of(2, 2, types=types)
    est, params = sg.sharded(make("rtrl"), STREAMS, mesh, columns=columns), params_of()
    chunks = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[chunk_of(number) for number in range(3)])

    @jax.jit
    def run(params, chunks):
        def step(state, chunk):
            grads, state, _ = est.update(params, state, chunk, jax.random.key(1))
            return state, grads

        return jax.lax.scan(step, est.init(params), chunks)[1]

    plain = jax.device_get(run(params, chunks))
    with jax.set_mesh(mesh):
        inside = jax.device_get(run(params, chunks))
    alone = sg.batched(make("rtrl"), STREAMS)
    state = alone.init(params)
    for number in range(3):
        grads, state, _ = alone.update(params, state, chunk_of(number), None)
        want = [np.asarray(leaf) for leaf in jax.tree.leaves(grads)]
        for found in (plain, inside):
            assert difference([leaf[number] for leaf in jax.tree.leaves(found)], want) < CLOSE


@pytest.mark.filterwarnings("ignore:The default axis_types")  # jax 0.8 says that they will change
def test_defaults_of_make_mesh():
    est = sg.sharded(make("rtrl"), STREAMS, jax.make_mesh((4,), ("streams",)))
    assert difference(train(est), train(sg.batched(make("rtrl"), STREAMS))) < CLOSE


@pytest.mark.parametrize("columns", [None, "explicit"])
def test_axes_of_two_types(columns):
    mesh = jax.make_mesh((2, 2), ("explicit", "auto"), axis_types=(AxisType.Explicit, AxisType.Auto))
    est = sg.sharded(make("rtrl"), STREAMS, mesh, streams="auto", columns=columns)
    assert difference(train(est), train(sg.batched(make("rtrl"), STREAMS))) < CLOSE


@pytest.mark.parametrize("columns", [pytest.param(None, marks=pytest.mark.slow), "columns"])
def test_advance_and_credit(columns):
    params, inputs = params_of(), [chunk_of(number).inputs for number in range(2)]
    mesh = mesh_of(2, 2)
    found = []
    for est in (sg.batched(make("rtrl"), STREAMS), sg.sharded(make("rtrl"), STREAMS, mesh, columns=columns)):
        state = est.init(params)
        for given in inputs:
            output, state, trace = est.advance(params, state, given, None)
        grads = [
            est.credit(params, trace, jnp.sin(output)),
            est.credit(params, trace, jnp.sin(output), per_stream=True),
        ]
        found.append([np.asarray(leaf) for leaf in jax.tree.leaves(jax.device_get((output, grads)))])
    assert difference(found[1], found[0]) < CLOSE


def test_watched_streams_are_those_of_each_device():
    """Of four streams the first and the third, which are the first of each device."""
    order = np.array([0, 2, 1, 3])
    params, found = params_of(), []
    devices = sg.sharded(make("rtrl"), STREAMS, mesh_of(2), watched=2)
    alone = sg.batched(make("rtrl"), STREAMS, watched=2)
    for est, pick in ((devices, np.arange(4)), (alone, order)):
        state = est.init(params)
        for number in range(2):
            chunk = jax.tree.map(lambda leaf, pick=pick: leaf[pick], chunk_of(number))
            grads, state, _ = est.update(params, state, chunk, None)
        found.append([np.asarray(leaf) for leaf in jax.tree.leaves(jax.device_get(grads))])
    assert difference(*found) < CLOSE


def test_an_estimator_from_elsewhere():
    own = sg.bptt(model_of())
    other = sg.GradientEstimator(own.init, own.update)
    found = train(sg.sharded(other, STREAMS, mesh_of(2)))
    assert difference(found, train(sg.batched(own, STREAMS))) < CLOSE


def test_carried_watches_streams_of_every_device():
    """With one stream on each device the averages are those of all streams, and nothing but they travel."""
    est = sg.sharded(sg.carried(sg.uoro(model_of()), window=6, least=1, refresh=1, streams=1), STREAMS, mesh_of(4))
    params = params_of()
    state = est.init(params)
    for number in range(5):
        grads, state, info = est.update(params, state, chunk_of(number), jax.random.key(number))
    assert bool(state.shared.solved) and np.all(np.isfinite(jax.tree.leaves(grads)[0]))
    assert float(info.diagnostics["carried"][0, 0]) == 1
    assert int(state.shared.passes) == 4 * int(state.shared.windows)


ERRORS = {
    "6 streams cannot be spread evenly over the 4 devices": lambda: sg.sharded(make("rtrl"), 6, mesh_of(4)),
    "2 watched streams cannot be spread": lambda: sg.sharded(make("rtrl"), 4, mesh_of(4), watched=2),
    "mesh must be what jax.make_mesh returns": lambda: sg.sharded(make("rtrl"), 4, jax.devices()),
    "streams must be an axis of the mesh": lambda: sg.sharded(make("rtrl"), 4, mesh_of(4), streams="rows"),
    "columns must be an axis of the mesh": lambda: sg.sharded(make("rtrl"), 4, mesh_of(4), columns="rows"),
    "must be two axes": lambda: sg.sharded(make("rtrl"), 4, mesh_of(4), columns="streams"),
    "axes of mesh must be Auto or Explicit": lambda: sg.sharded(make("rtrl"), 4, mesh_of(4, types=AxisType.Manual)),
    "columns is for an influence": lambda: sg.sharded(make("uoro"), 4, mesh_of(2, 2), columns="columns"),
}


@pytest.mark.parametrize("words", ERRORS)
def test_errors_are_one_sentence(words, as_a_user):
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        ERRORS[words]()
    assert "\n" not in str(error.value) and str(error.value).endswith(".")


def test_a_chunk_of_other_streams_is_refused():
    est, params = sg.sharded(make("rtrl"), STREAMS, mesh_of(2)), params_of()
    few = jax.tree.map(lambda leaf: leaf[:3], chunk_of(0))
    with pytest.raises(ValueError, match="the chunk has 3 streams, but the estimator was made for 4"):
        est.update(params, est.init(params), few, None)
    with pytest.raises(ValueError, match=r"state\.memory"):
        est.update(params, sg.batched(make("snap"), STREAMS).init(params), chunk_of(0), None)
