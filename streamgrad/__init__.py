"""streamgrad: gradients of recurrent networks while the stream runs.

model = sg.Model(sg.cells.gru(n_in, n_hidden), sg.heads.softmax(n_classes))
est = sg.rtrl(model)  # exact; `sg.ok` where the network is too large for it, `sg.bptt` for truncated BPTT
params = model.init(key)
state = est.init(params)
grads, state, info = est.update(params, state, chunk)

Tasks, training, experiments, the report and the command line are in `streamgrad_lab`, a distribution of its own.
"""

from typing import Any

from streamgrad import cells, engine, estimators, heads, noise, theory
from streamgrad.adapt.carried import carried
from streamgrad.base import (
    Cell,
    Chunk,
    Cut,
    EstimatorState,
    GradientEstimator,
    Head,
    Info,
    Model,
    Params,
    Trace,
    worked,
)
from streamgrad.deprecations import renamed
from streamgrad.engine.by_steps import by_steps
from streamgrad.engine.estimator import batched, estimator
from streamgrad.engine.method import Method, Outcome, per_stream
from streamgrad.engine.monitored import monitored
from streamgrad.engine.sharded import sharded
from streamgrad.noise.settings import with_noise
from streamgrad.step import cuts

# estimators: written by `make generated`
from streamgrad.estimators import (
    artbp,
    bptt,
    dni,
    eprop,
    immediate,
    kernl,
    local_rtrl,
    nobacktrack,
    ok,
    pes,
    preuoro,
    reinforce,
    rflo,
    rtrl,
    sketch,
    snap,
    spatial_rtrl,
    uoro,
    uoro_across,
    windowed_bptt,
)
# /estimators

__version__ = "0.2.0"

__all__ = [  # noqa: RUF022, the estimators by themselves
    "Cell",
    "Chunk",
    "Cut",
    "EstimatorState",
    "GradientEstimator",
    "Head",
    "Info",
    "Method",
    "Model",
    "Outcome",
    "Params",
    "Trace",
    "batched",
    "by_steps",
    "carried",
    "cells",
    "cuts",
    "engine",
    "estimator",
    "estimators",
    "heads",
    "monitored",
    "noise",
    "per_stream",
    "sharded",
    "theory",
    "with_noise",
    "worked",
    # estimators: written by `make generated`
    "artbp",
    "bptt",
    "dni",
    "eprop",
    "immediate",
    "kernl",
    "local_rtrl",
    "nobacktrack",
    "ok",
    "pes",
    "preuoro",
    "reinforce",
    "rflo",
    "rtrl",
    "sketch",
    "snap",
    "spatial_rtrl",
    "uoro",
    "uoro_across",
    "windowed_bptt",
    # /estimators
]


def __getattr__(name: str) -> Any:
    """Names that have been renamed."""
    return renamed(globals(), name)
