"""Noise and what shapes it: where it comes from, Q_0, rescaling, groups of preactivations."""

from streamgrad.noise.distributions import Noise, find_noise
from streamgrad.noise.groups import Groups, make_groups
from streamgrad.noise.rescale import Rescaling, find_rescaling, given, greedy
from streamgrad.noise.settings import NoiseSettings, with_noise
from streamgrad.noise.shaping import Shaping, diagonal_q0, shaping

__all__ = [
    "Groups",
    "Noise",
    "NoiseSettings",
    "Rescaling",
    "Shaping",
    "diagonal_q0",
    "find_noise",
    "find_rescaling",
    "given",
    "greedy",
    "make_groups",
    "shaping",
    "with_noise",
]
