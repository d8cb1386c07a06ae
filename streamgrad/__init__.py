"""streamgrad: gradients of recurrent networks while the stream runs.

model = sg.Model(sg.cells.lstm(n_in, n_hidden), sg.heads.softmax(n_classes))
est = sg.uoro(model)
grads, state, info = est.update(params, state, chunk, key)
"""

from streamgrad import cells, cuts, estimators, heads, variance
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
from streamgrad.estimators import bptt, nobacktrack, preuoro, reinforce, rtrl, spatial_rtrl, tbptt, uoro
from streamgrad.online import batched, online

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
    "batched",
    "bptt",
    "cells",
    "cuts",
    "estimators",
    "heads",
    "nobacktrack",
    "online",
    "preuoro",
    "reinforce",
    "rtrl",
    "spatial_rtrl",
    "tbptt",
    "uoro",
    "variance",
]
