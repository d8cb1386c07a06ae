"""Tasks to train on.

To add a task: write `tasks/<name>.py` with a function of that name that returns a `Task`, and add its line here.
"""

import importlib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from streamgrad_lab import own

if TYPE_CHECKING:
    from streamgrad_lab.tasks.base import Task

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
      name: one of `TASKS`; or MODULE:FUNCTION, such as "mine:sine" for the function `sine` of `mine.py` in the current
        folder, or of an installed module, which returns a `Task`.
      **options: the arguments of its function, such as `batch_size` and `length`.

    Returns:
      The task.

    Example:
      >>> find_task("queue", delay=3, batch_size=2).batch_size
      2
    """
    function = task_function(name)
    known = inspect.signature(function).parameters
    for option in options:
        if not accepts_option(function, option):
            listed = f"choose from {', '.join(known)}" if known else "it takes none"
            raise ValueError(f"the task {name} has no option {option!r}: {listed}.")
    if missing := [option for option in required(function) if option not in options]:
        raise ValueError(f"the task {name} needs the option {missing[0]}.")
    return _own_task(name, function, options) if own.is_own(name) else function(**options)


def task_function(name: str) -> Callable[..., Any]:
    """The function that makes the task of that name."""
    if own.is_own(name):
        return own.find_function(name)
    if name not in TASKS:
        raise ValueError(f"task must be one of {', '.join(map(repr, TASKS))}, or {own.FORM}, not {name!r}.")
    return getattr(importlib.import_module(f"streamgrad_lab.tasks.{name}"), name)


def accepts_option(function: Callable[..., Any], name: str) -> bool:
    """Whether a function takes an argument of that name."""
    known = inspect.signature(function).parameters
    return name in known or any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())


def required(function: Callable[..., Any]) -> list[str]:
    """The arguments without which a function cannot be called."""
    several = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    parameters = inspect.signature(function).parameters.values()
    return [one.name for one in parameters if one.default is one.empty and one.kind not in several]


def _own_task(name: str, function: Callable[..., Any], options: dict[str, Any]) -> "Task":
    from streamgrad.trees import kind_of
    from streamgrad_lab.tasks.base import Task
    from streamgrad_lab.tasks.checking import check_task

    task = own.call(name, function, **options)
    if not isinstance(task, Task):
        raise ValueError(f"{name} must return a streamgrad_lab.Task, not {kind_of(task)}.")
    with own.answering(name):
        check_task(task)
    return task


def __getattr__(name: str) -> Any:
    if name == "Task":
        from streamgrad_lab.tasks.base import Task

        return Task
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["TASKS", "Task", "accepts_option", "find_task", "required", "task_function"]
