"""Recurrent cells: the transitions h_t = F(h_{t-1}, x_t; θ)."""

from streamgrad.cells.affine import affine, features, init_weights
from streamgrad.cells.elstm import ELSTMState, elstm
from streamgrad.cells.explain import explain
from streamgrad.cells.foreign import Carried
from streamgrad.cells.from_equinox import from_equinox
from streamgrad.cells.from_flax import from_flax
from streamgrad.cells.from_haiku import from_haiku
from streamgrad.cells.function import from_function
from streamgrad.cells.gru import gru
from streamgrad.cells.lif import LIFState, lif
from streamgrad.cells.lru import LRUState, lru
from streamgrad.cells.lstm import LSTMState, lstm
from streamgrad.cells.mingru import mingru
from streamgrad.cells.rtu import rtu
from streamgrad.cells.stack import stack
from streamgrad.cells.vanilla import vanilla

__all__ = [
    "Carried",
    "ELSTMState",
    "LIFState",
    "LRUState",
    "LSTMState",
    "affine",
    "elstm",
    "explain",
    "features",
    "from_equinox",
    "from_flax",
    "from_function",
    "from_haiku",
    "gru",
    "init_weights",
    "lif",
    "lru",
    "lstm",
    "mingru",
    "rtu",
    "stack",
    "vanilla",
]
