"""From a method to an estimator, and the parts that methods are made of: `sg.engine`."""

from streamgrad.engine.across import finish, older_credit, with_older
from streamgrad.engine.by_steps import by_steps
from streamgrad.engine.chunk import Back, Forward, go_back, go_forward
from streamgrad.engine.collectives import Devices
from streamgrad.engine.estimator import batched, estimator
from streamgrad.engine.method import Method, Outcome, per_stream

__all__ = [
    "Back",
    "Devices",
    "Forward",
    "Method",
    "Outcome",
    "batched",
    "by_steps",
    "estimator",
    "finish",
    "go_back",
    "go_forward",
    "older_credit",
    "per_stream",
    "with_older",
]
