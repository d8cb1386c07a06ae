"""What the commands' options share: choices, NAME=VALUE pairs, and the error of a wrong command line."""

import ast
import contextlib
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from streamgrad_lab import own
from streamgrad_lab.tasks import accepts_option, required, task_function


class UsageError(ValueError):
    """The command line is wrong: exit code 2."""


@contextlib.contextmanager
def from_options(**options: str) -> Iterator[None]:
    """What is wrong with values that came from options alone is wrong with the command line.

    Args:
      **options: the option that each argument came from: the error names what the user has typed.

    Example:
      >>> with from_options(n_hidden="--hidden"):
      ...     raise ValueError("n_hidden must be a whole number of at least 1, not 0.")
      Traceback (most recent call last):
      ...
      streamgrad_lab.cli.options.UsageError: --hidden must be a whole number of at least 1, not 0.
    """
    try:
        yield
    except own.Raised:
        raise
    except ValueError as error:
        # An argument's name stands before "must", or before the value that it has.
        named = re.sub(r"\b(\w+)(?= must |, \d)", lambda found: options.get(found[0], found[0]), str(error))
        raise UsageError(named) from error


def choose(option: str, value: str, choices: Sequence[str]) -> None:
    """`value` is one of `choices`."""
    if value not in choices:
        raise UsageError(f"{option} must be one of {', '.join(choices)}, not {value!r}.")


def pairs(option: str, given: Sequence[str], function: Callable, skip: Sequence[str] = ()) -> dict[str, Any]:
    """NAME=VALUE pairs as arguments of a function; values are Python's numbers and words, anything else is text.

    Args:
      option: the option's name, for errors.
      given: the pairs.
      function: whose arguments they are.
      skip: arguments that are not for the user to give.

    Returns:
      The arguments by name.

    Example:
      >>> pairs("--example", ["base=16"], int.from_bytes, skip=["bytes"])
      Traceback (most recent call last):
      ...
      streamgrad_lab.cli.options.UsageError: --example has no 'base'; choose from byteorder, signed.
    """
    known = [name for name in inspect.signature(function).parameters if name not in skip]
    found = {}
    for pair in given:
        name, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"{option} takes pairs NAME=VALUE, not {pair!r}.")
        if name in skip or not accepts_option(function, name):
            listed = f"choose from {', '.join(known)}" if known else "there is none to choose"
            raise UsageError(f"{option} has no {name!r}; {listed}.")
        try:
            found[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[name] = value
    return found


def choose_own(option: str, value: str, choices: Sequence[str]) -> None:
    """`value` is one of `choices`, or names a function of the user's own, which is there."""
    if own.is_own(value):
        with from_options():
            own.find_function(value)
    else:
        choose(option, value, (*choices, own.FORM))


def task_options(task: str, given: Sequence[str]) -> dict[str, Any]:
    """The options of a task from --task-options, but for those that have an option of their own."""
    function = task_function(task)
    apart = ["batch_size", "length", *([] if own.is_own(task) else ["folder"])]
    found = pairs("--task-options", given, function, skip=apart)
    if task == "text" and "path" not in found:
        raise UsageError("the task text needs a file: --task-options path=FILE.")
    for name in required(function):
        if name not in (*found, *apart):
            raise UsageError(f"the task {task} needs {name}: --task-options {name}=VALUE.")
    return found
