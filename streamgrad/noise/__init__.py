"""Noise and what shapes it: where it comes from, Q_0, rescaling, groups of preactivations."""

from streamgrad.noise.distributions import Noise, find_noise
from streamgrad.noise.rescale import Rescaling, given, greedy
from streamgrad.noise.settings import NoiseSettings, with_noise
from streamgrad.noise.shaping import Shaping, diagonal_q0, shaping

__all__ = [
    "Noise",
    "NoiseSettings",
    "Rescaling",
    "Shaping",
    "diagonal_q0",
    "find_noise",
    "given",
    "greedy",
    "shaping",
    "with_noise",
]
