"""Training: the loop, checkpoints, metrics and progress."""

from streamgrad.lab.train.load import Loaded, load_params
from streamgrad.lab.train.loop import TrainState, begin, no_summary, run, training_step
from streamgrad.lab.train.metrics import read as read_metrics
from streamgrad.lab.train.session import Diverged, Outcome, Plan, Progress, train

__all__ = [
    "Diverged",
    "Loaded",
    "Outcome",
    "Plan",
    "Progress",
    "TrainState",
    "begin",
    "load_params",
    "no_summary",
    "read_metrics",
    "run",
    "train",
    "training_step",
]
