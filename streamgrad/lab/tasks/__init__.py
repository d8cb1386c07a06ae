"""Tasks to train on.

To add a task: write `lab/tasks/<name>.py` with a function of that name that returns a `Task`, and add its line here.
"""

import importlib
import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamgrad.lab.tasks.base import Task

# Each is imported when it is asked for: not every machine has what the others need.
TASKS = {
    "digits": "8x8 handwritten digits, by rows or pixels; they ship inside scikit-learn",
    "mnist": "28x28 handwritten digits, by rows or pixels; needs the four files in a data folder",
    "queue": "random bits, to be given back after a delay",
    "copy": "read symbols, then give them back; their number grows with what the network can do",
    "text": "predict the next character of a text file",
    "series": "predict the next value of a chaotic series, or of numbers in a file",
}


def find_task(name: str, **options: Any) -> "Task":
    """Make the task of that name.

    Args:
      name: one of `TASKS`.
      **options: the arguments of its function, such as `batch_size` and `length`.

    Returns:
      The task.

    Example:
      >>> find_task("queue", delay=3, batch_size=2).batch_size
      2
    """
    if name not in TASKS:
        raise ValueError(f"task must be one of {', '.join(map(repr, TASKS))}, not {name!r}.")
    function = task_function(name)
    known = inspect.signature(function).parameters
    for option in options:
        if option not in known:
            raise ValueError(f"the task {name} has no option {option!r}: choose from {', '.join(known)}.")
    for option, parameter in known.items():
        if parameter.default is parameter.empty and option not in options:
            raise ValueError(f"the task {name} needs the option {option}.")
    return function(**options)


def task_function(name: str) -> Any:
    """The function that makes the task of that name."""
    return getattr(importlib.import_module(f"streamgrad.lab.tasks.{name}"), name)


def __getattr__(name: str) -> Any:
    if name == "Task":
        from streamgrad.lab.tasks.base import Task

        return Task
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["TASKS", "Task", "find_task", "task_function"]
