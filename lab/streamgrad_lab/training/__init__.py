"""Training: the loop, checkpoints and metrics."""

from streamgrad_lab.training.load import Loaded, load_params
from streamgrad_lab.training.loop import TrainState, begin, no_summary, run, run_one, training_step
from streamgrad_lab.training.metrics import read as read_metrics
from streamgrad_lab.training.session import Diverged, Outcome, Plan, train

__all__ = [
    "Diverged",
    "Loaded",
    "Outcome",
    "Plan",
    "TrainState",
    "begin",
    "load_params",
    "no_summary",
    "read_metrics",
    "run",
    "run_one",
    "train",
    "training_step",
]
