"""Gradient estimators, one file each; noise, shaping, rescaling and groups are parts that they wire together."""

from streamgrad.adapt.choice import Carry, carried
from streamgrad.estimators.bptt import bptt
from streamgrad.estimators.nobacktrack import nobacktrack
from streamgrad.estimators.preuoro import preuoro
from streamgrad.estimators.registry import REGISTRY, Row, find_estimator, markdown_table
from streamgrad.estimators.reinforce import reinforce, with_sigma
from streamgrad.estimators.rtrl import rtrl
from streamgrad.estimators.spatial_rtrl import spatial_rtrl
from streamgrad.estimators.tbptt import tbptt
from streamgrad.estimators.uoro import uoro
from streamgrad.noise.rescale import Rescaling, given, greedy
from streamgrad.noise.shaping import Shaping, shaping
from streamgrad.noise.sources import Noise, find_noise

__all__ = [
    "REGISTRY",
    "Carry",
    "Noise",
    "Rescaling",
    "Row",
    "Shaping",
    "bptt",
    "carried",
    "find_estimator",
    "find_noise",
    "given",
    "greedy",
    "markdown_table",
    "nobacktrack",
    "preuoro",
    "reinforce",
    "rtrl",
    "shaping",
    "spatial_rtrl",
    "tbptt",
    "uoro",
    "with_sigma",
]
