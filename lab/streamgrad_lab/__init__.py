"""The laboratory: tasks, training, experiments, the report, the command line. The library does not import it.

task = lab.find_task("queue", delay=4, batch_size=20, length=2)
lab.train("runs/queue", lab.Plan(updates=200), model, task, estimator, optax.adam(1e-2))

Packages beyond jax, numpy and optax are imported where they are used.
"""

from streamgrad_lab.candidates import Candidate, candidates_for
from streamgrad_lab.choice import frontier, ranks
from streamgrad_lab.comparison import Comparison, compare
from streamgrad_lab.tasks import TASKS, Task, find_task
from streamgrad_lab.tasks.base import HeldOut
from streamgrad_lab.training import Diverged, Outcome, Plan, load_params, read_metrics, train

__all__ = [
    "TASKS",
    "Candidate",
    "Comparison",
    "Diverged",
    "HeldOut",
    "Outcome",
    "Plan",
    "Task",
    "candidates_for",
    "compare",
    "find_task",
    "frontier",
    "load_params",
    "ranks",
    "read_metrics",
    "train",
]
