"""streamgrad: gradients of recurrent networks while the stream runs.

model = sg.Model(sg.cells.gru(n_in, n_hidden), sg.heads.softmax(n_classes))
est = sg.rtrl(model)  # exact; `sg.ok` where the network is too large for it, `sg.bptt` for truncated BPTT
params = model.init(key)
state = est.init(params)
grads, state, info = est.update(params, state, chunk)

Tasks, training, experiments, the report and the command line are in `streamgrad_lab`, a distribution of its own.
"""

from streamgrad import cells, estimators, heads, noise, theory
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
from streamgrad.engine.by_steps import by_steps
from streamgrad.engine.estimator import estimator
from streamgrad.engine.method import Method, Outcome, per_stream
from streamgrad.engine.monitored import monitored
from streamgrad.engine.sharded import sharded
from streamgrad.engine.streams import batched
from streamgrad.estimators import (
    artbp,
    bptt,
    dni,
    eprop,
    immediate,
    local_rtrl,
    nobacktrack,
    ok,
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
from streamgrad.noise.settings import with_noise
from streamgrad.step import cuts

__version__ = "0.1.0"

__all__ = [
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
    "artbp",
    "batched",
    "bptt",
    "by_steps",
    "carried",
    "cells",
    "cuts",
    "dni",
    "eprop",
    "estimator",
    "estimators",
    "heads",
    "immediate",
    "local_rtrl",
    "monitored",
    "nobacktrack",
    "noise",
    "ok",
    "per_stream",
    "preuoro",
    "reinforce",
    "rflo",
    "rtrl",
    "sharded",
    "sketch",
    "snap",
    "spatial_rtrl",
    "theory",
    "uoro",
    "uoro_across",
    "windowed_bptt",
    "with_noise",
    "worked",
]
