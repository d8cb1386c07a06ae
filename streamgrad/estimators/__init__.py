"""Gradient estimators: one published algorithm per file, and the registry of what they promise."""

from streamgrad.estimators.registry import REGISTRY, Row, find_estimator, markdown_table

# estimators: written by `make generated`
from streamgrad.estimators.artbp import artbp
from streamgrad.estimators.bptt import bptt
from streamgrad.estimators.dni import dni
from streamgrad.estimators.eprop import eprop
from streamgrad.estimators.immediate import immediate
from streamgrad.estimators.kernl import kernl
from streamgrad.estimators.local_rtrl import local_rtrl
from streamgrad.estimators.nobacktrack import nobacktrack
from streamgrad.estimators.ok import ok
from streamgrad.estimators.pes import pes
from streamgrad.estimators.preuoro import preuoro
from streamgrad.estimators.reinforce import reinforce
from streamgrad.estimators.rflo import rflo
from streamgrad.estimators.rtrl import rtrl
from streamgrad.estimators.sketch import sketch
from streamgrad.estimators.snap import snap
from streamgrad.estimators.spatial_rtrl import spatial_rtrl
from streamgrad.estimators.uoro import uoro
from streamgrad.estimators.uoro_across import uoro_across
from streamgrad.estimators.windowed_bptt import windowed_bptt
# /estimators

__all__ = [  # noqa: RUF022, the estimators by themselves
    "REGISTRY",
    "Row",
    "find_estimator",
    "markdown_table",
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
