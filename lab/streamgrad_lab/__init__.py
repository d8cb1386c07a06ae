"""The laboratory of streamgrad: tasks, training, comparisons, agents, experiments, a report and the command line.

task = lab.find_task("queue", delay=4, batch_size=20, length=2)
model = sg.Model(sg.cells.gru(task.n_in, 32), task.head)
outcome = lab.train("runs/queue", lab.Plan(updates=200), model, task, sg.batched(sg.rtrl(model), 20), optax.adam(1e-2))

Names are imported when they are first used, so that the command can answer Ctrl-C before jax is there, and so that
packages beyond jax, numpy and optax are needed only by the names that use them.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamgrad_lab import agent, environments, tasks
    from streamgrad_lab.agent import AgentConfig, final_success, train_agent
    from streamgrad_lab.candidates import Candidate, candidates_for
    from streamgrad_lab.choice import frontier, ranks
    from streamgrad_lab.comparison import Comparison, compare
    from streamgrad_lab.tasks import TASKS, find_task
    from streamgrad_lab.tasks.base import HeldOut, Task
    from streamgrad_lab.training import Diverged, Outcome, Plan, load_params, read_metrics, train

# Where each public name is defined; a module that stands here by itself is public as a whole.
_MODULES = {
    "AgentConfig": "agent",
    "Candidate": "candidates",
    "Comparison": "comparison",
    "Diverged": "training",
    "HeldOut": "tasks.base",
    "Outcome": "training",
    "Plan": "training",
    "TASKS": "tasks",
    "Task": "tasks.base",
    "agent": "agent",
    "candidates_for": "candidates",
    "compare": "comparison",
    "environments": "environments",
    "final_success": "agent",
    "find_task": "tasks",
    "frontier": "choice",
    "load_params": "training",
    "ranks": "choice",
    "read_metrics": "training",
    "tasks": "tasks",
    "train": "training",
    "train_agent": "agent",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    value = module if name == _MODULES[name] else getattr(module, name)
    globals()[name] = value  # the next use is an ordinary one
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "TASKS",
    "AgentConfig",
    "Candidate",
    "Comparison",
    "Diverged",
    "HeldOut",
    "Outcome",
    "Plan",
    "Task",
    "agent",
    "candidates_for",
    "compare",
    "environments",
    "final_success",
    "find_task",
    "frontier",
    "load_params",
    "ranks",
    "read_metrics",
    "tasks",
    "train",
    "train_agent",
]
