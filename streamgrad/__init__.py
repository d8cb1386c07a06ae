"""streamgrad: gradients of recurrent networks while the stream runs.

model = sg.Model(sg.cells.lstm(n_in, n_hidden), sg.heads.softmax(n_classes))
est = sg.uoro(model)
grads, state, info = est.update(params, state, chunk, key)
"""

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamgrad import cells, cuts, estimators, heads, tasks, train, variance
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
    "tasks",
    "tbptt",
    "train",
    "uoro",
    "variance",
]

# Names are imported when they are first used (PEP 562), so that the command line answers before jax is loaded. What
# stands in neither list is a module of this package.
_HOMES: dict[str, str] = dict.fromkeys(
    ("Cell", "Chunk", "Cut", "EstimatorState", "GradientEstimator", "Head", "Influence", "Info", "Model", "Params"),
    "streamgrad.base",
)
_HOMES |= dict.fromkeys(
    ("bptt", "nobacktrack", "preuoro", "reinforce", "rtrl", "spatial_rtrl", "tbptt", "uoro"), "streamgrad.estimators"
)
_HOMES |= dict.fromkeys(("batched", "online"), "streamgrad.online")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _HOMES:
        found = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = found
        return found
    return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


class _Package(types.ModuleType):
    """The package, in which `online` is the function, although importing its module of that name would replace it."""

    @property
    def online(self) -> Any:
        return importlib.import_module("streamgrad.online").online

    @online.setter
    def online(self, module: Any) -> None:
        pass


sys.modules[__name__].__class__ = _Package
