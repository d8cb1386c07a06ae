"""Gradient estimators: one published algorithm per file, and the registry of what they promise."""

from streamgrad.estimators.bptt import bptt
from streamgrad.estimators.nobacktrack import nobacktrack
from streamgrad.estimators.ok import ok
from streamgrad.estimators.preuoro import preuoro
from streamgrad.estimators.registry import REGISTRY, Row, find_estimator, markdown_table
from streamgrad.estimators.reinforce import reinforce
from streamgrad.estimators.rtrl import rtrl
from streamgrad.estimators.sketch import sketch
from streamgrad.estimators.spatial_rtrl import spatial_rtrl
from streamgrad.estimators.tbptt import tbptt
from streamgrad.estimators.uoro import uoro

__all__ = [
    "REGISTRY",
    "Row",
    "bptt",
    "find_estimator",
    "markdown_table",
    "nobacktrack",
    "ok",
    "preuoro",
    "reinforce",
    "rtrl",
    "sketch",
    "spatial_rtrl",
    "tbptt",
    "uoro",
]
