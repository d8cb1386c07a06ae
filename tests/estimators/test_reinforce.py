"""REINFORCE as approximate RTRL (Section 9): equal to the textbook, unbiased for the noisy network, UORO in the limit.

Means over Gaussian noise are taken by quadrature where the network is small enough, so that they are exact. Where they
are sampled the seed is fixed, and each test says how often another seed would raise a false alarm.
"""

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import streamgrad as sg
from streamgrad.lab.experiments import find_experiment
from streamgrad.lab.tasks.base import Task
from streamgrad.lab.train import loop
from streamgrad.noise import find_noise
from tests.reference import estimators as oracle
