"""streamgrad: gradients of recurrent networks while the stream runs.

model = sg.Model(sg.cells.gru(n_in, n_hidden), sg.heads.softmax(n_classes))
est = sg.rtrl(model)  # exact; `sg.ok` where the network is too large for it, `sg.bptt` for truncated BPTT
params = model.init(key)
state = est.init(params)
grads, state, info = est.update(params, state, chunk, key)

Tasks, training, experiments, the report and the command line are in `streamgrad_lab`, which nothing here imports.
"""

from streamgrad import cells, estimators, heads, noise
from streamgrad import theory as variance
from streamgrad.adapt.carried import carried
from streamgrad.base import (
    Cell,
    Chunk,
    Cut,
    EstimatorState,
    GradientEstimator,
    Head,
    Influence,
    Info,
    Model,
    Params,
)
from streamgrad.engine.by_steps import online
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
    tbptt,
    uoro,
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
    "Influence",
    "Info",
    "Model",
    "Params",
    "artbp",
    "batched",
    "bptt",
    "carried",
    "cells",
    "cuts",
    "dni",
    "eprop",
    "estimators",
    "heads",
    "immediate",
    "local_rtrl",
    "monitored",
    "nobacktrack",
    "noise",
    "ok",
    "online",
    "preuoro",
    "reinforce",
    "rflo",
    "rtrl",
    "sharded",
    "sketch",
    "snap",
    "spatial_rtrl",
    "tbptt",
    "uoro",
    "variance",
    "with_noise",
]
