"""Gradient estimators, one file each; noise, shaping, rescaling and groups are parts that they wire together."""

from streamgrad.estimators.bptt import bptt
from streamgrad.estimators.carry import Carry, carried
from streamgrad.estimators.nobacktrack import nobacktrack
from streamgrad.estimators.noise import Noise, find_noise
from streamgrad.estimators.preuoro import preuoro
from streamgrad.estimators.registry import REGISTRY, Row, find_estimator, markdown_table
from streamgrad.estimators.reinforce import reinforce, with_sigma
from streamgrad.estimators.rescale import Rescaling, given, greedy
from streamgrad.estimators.rtrl import rtrl
from streamgrad.estimators.shaping import Shaping, shaping
from streamgrad.estimators.spatial_rtrl import spatial_rtrl
from streamgrad.estimators.tbptt import tbptt
from streamgrad.estimators.uoro import uoro

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
