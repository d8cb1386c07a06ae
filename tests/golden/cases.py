"""Every estimator with every option, on every cell, by a name that stays the same when the API changes."""

import functools

import numpy as np

import streamgrad as sg
from streamgrad.estimators.rtrl import rtrl_by_steps
from streamgrad.estimators.snap import snap_by_steps
from streamgrad.estimators.uoro import uoro_plain
from tests.cells.libraries import have
from tests.tools import nested_cell, random_alpha, random_q0

ESTIMATORS = {
    "bptt": lambda m: sg.bptt(m),
    "bptt recompute": lambda m: sg.bptt(m, recompute=2),
    "window 3": lambda m: sg.windowed_bptt(m, window=3),
    "window 4 every 2": lambda m: sg.windowed_bptt(m, window=4, every=2),
    "window 3 replay": lambda m: sg.windowed_bptt(m, window=3, replay=True),
    "artbp": lambda m: sg.artbp(m, mean_length=2, tail=None, longest=8),
    "artbp tail": lambda m: sg.artbp(m, mean_length=3, tail=4),
    "dni": lambda m: sg.dni(m),
    "dni discount": lambda m: sg.dni(m, learning_rate=0.5, discount=0.5),
    "immediate": lambda m: sg.immediate(m),
    "rtrl": lambda m: sg.rtrl(m),
    "rtrl by steps": lambda m: rtrl_by_steps(m),
    "local_rtrl": lambda m: sg.local_rtrl(m),
    "snap 1": lambda m: sg.snap(m),
    "snap 2": lambda m: sg.snap(m, order=2),
    "snap backprop": lambda m: sg.snap(m, inside="backprop"),
    "snap by steps": lambda m: snap_by_steps(m),
    "eprop": lambda m: sg.eprop(m),
    "eprop random": lambda m: sg.eprop(m, feedback="random", seed=3),
    "rflo": lambda m: sg.rflo(m, feedback="symmetric"),
    "rflo random": lambda m: sg.rflo(m, feedback="random"),
    "ok": lambda m: sg.ok(m),
    "ok 1": lambda m: sg.ok(m, rank=1),
    "ok 2": lambda m: sg.ok(m, rank=2),
    "sketch": lambda m: sg.sketch(m, rank=2),
    "sketch append": lambda m: sg.sketch(m, rank=1, append=1),
    "spatial state": lambda m: sg.spatial_rtrl(m, cut="state"),
    "spatial params": lambda m: sg.spatial_rtrl(m, cut="params"),
    "spatial preactivation": lambda m: sg.spatial_rtrl(m),
    "uoro": lambda m: sg.uoro(m),
    "uoro plain": lambda m: uoro_plain(m),
    "uoro state": lambda m: sg.uoro(m, cut="state"),
    "uoro params": lambda m: sg.uoro(m, cut="params"),
    "uoro groups": lambda m: sg.uoro(m, groups=4),
    "uoro greedy": lambda m: sg.uoro(m, rescale="greedy"),
    "uoro none": lambda m: sg.uoro(m, rescale="none"),
    "uoro alpha": lambda m: sg.uoro(m, rescale=random_alpha(15)),
    "uoro gaussian": lambda m: sg.uoro(m, noise="gaussian"),
    "uoro exact": lambda m: sg.uoro(m, immediate="exact"),
    "uoro plain exact": lambda m: uoro_plain(m, immediate="exact"),
    "uoro q0": lambda m: sg.uoro(m, q0=random_q0(_size(m, "preactivation"))),
    "uoro diagonal q0": lambda m: sg.uoro(m, cut="state", q0=_diagonal(m)),
    "across": lambda m: sg.uoro_across(m),
    "across blocks": lambda m: sg.uoro_across(m, blocks=2),
    "across shrink": lambda m: sg.uoro_across(m, shrink=0.5),
    "across auto": lambda m: sg.uoro_across(m, shrink="auto"),
    "across none": lambda m: sg.uoro_across(m, rescale="none"),
    "preuoro": lambda m: sg.preuoro(m),
    "preuoro exact": lambda m: sg.preuoro(m, immediate="exact"),
    "preuoro greedy": lambda m: sg.preuoro(m, rescale="greedy"),
    "nobacktrack": lambda m: sg.nobacktrack(m),
    "reinforce": lambda m: sg.reinforce(m),
    "reinforce average": lambda m: sg.reinforce(m, baseline="average"),
    "reinforce positions": lambda m: sg.reinforce(m, baseline="average", positions=9),
    "reinforce none": lambda m: sg.reinforce(m, baseline="none", sigma=lambda n: 0.1 / (1 + n)),
    "carried uoro": lambda m: sg.carried(sg.uoro(m), window=5, least=2, refresh=1),
    "carried episode": lambda m: sg.carried(sg.uoro(m), episode=15, least=1, refresh=1),
    "carried preuoro": lambda m: sg.carried(sg.preuoro(m), episode=15, least=1, refresh=1),
    "monitored": lambda m: sg.monitored(sg.rtrl(m)),
}


def _diagonal(model: sg.Model) -> np.ndarray:
    return 1 + np.arange(_size(model, "state")) / 7


def _size(model: sg.Model, cut: str) -> int:
    cell = sg.worked(model).cell
    return sg.cuts.layout(cell, cell.cuts[cut]).size


def _flax():
    from flax import nnx

    return sg.cells.from_flax(nnx.GRUCell(1, 2, rngs=nnx.Rngs(1)))


def _equinox():
    import equinox as eqx
    import jax

    return sg.cells.from_equinox(eqx.nn.LSTMCell(1, 2, key=jax.random.key(1)))


def _haiku():
    import haiku as hk

    return sg.cells.from_haiku(lambda: hk.VanillaRNN(2), np.zeros(1))


CELLS = {
    "vanilla": lambda: sg.cells.vanilla(1, 3),
    "leaky": lambda: sg.cells.vanilla(1, 3, leak=0.3),
    "lstm": lambda: sg.cells.lstm(1, 2),
    "gru": lambda: sg.cells.gru(1, 2),
    "stack": lambda: sg.cells.stack(sg.cells.vanilla(1, 2), sg.cells.gru(2, 2)),
    "nested": nested_cell,
    "lru": lambda: sg.cells.lru(1, 2, 2),
    "rtu": lambda: sg.cells.rtu(1, 2),
    "elstm": lambda: sg.cells.elstm(1, 2),
    "mingru": lambda: sg.cells.mingru(1, 2),
    "deep lru": lambda: sg.cells.stack(sg.cells.lru(1, 2, 2), sg.cells.lru(2, 2, 2)),
    "lif": lambda: sg.cells.lif(1, 2),
    "flax": _flax,
    "equinox": _equinox,
    "haiku": _haiku,
}


# Cells of every kind of program get all estimators, the others the main ones.
WHOLE = ("gru", "stack", "nested", "lru")
MAIN = (
    "bptt", "window 3", "artbp", "dni", "immediate", "rtrl", "local_rtrl", "snap 1", "snap 2", "snap backprop",
    "eprop random", "rflo random", "ok 2", "sketch", "uoro", "uoro state", "uoro groups", "across blocks", "preuoro",
    "reinforce",
)  # fmt: skip


def all_cases() -> list[tuple[str, str]]:
    """Names of cells and estimators."""
    return [(cell, name) for cell in models() for name in (ESTIMATORS if cell in WHOLE else MAIN)]


@functools.cache
def models() -> dict[str, sg.Model]:
    """One model for each cell that can be had here."""
    there = {name: make for name, make in CELLS.items() if name not in ("flax", "equinox", "haiku") or have(name)}
    return {name: sg.Model(make(), sg.heads.squared_error(2)) for name, make in there.items()}
