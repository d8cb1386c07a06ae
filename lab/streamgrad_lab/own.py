"""Tasks and cells of the user's own, by the name MODULE:FUNCTION: found, called, and answered for in one sentence."""

import contextlib
import importlib
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

FORM = "MODULE:FUNCTION"


class Raised(ValueError):
    """A function of the user's own has failed: what it says is its own affair."""


def is_own(name: Any) -> bool:
    """Whether a name is that of a function of the user's own."""
    return isinstance(name, str) and ":" in name


def find_function(name: str) -> Callable[..., Any]:
    """The function of that name, from a module in the current folder or among those installed.

    Args:
      name: such as "mine:sine", for the function `sine` of `mine.py`, or "package.mine:sine".

    Returns:
      The function. ValueError, which says what is wrong with its name or its module, where there is none.

    Example:
      >>> find_function("math:sqrt")(4)
      2.0
      >>> find_function("nowhere:sqrt")
      Traceback (most recent call last):
      ...
      ValueError: nowhere:sqrt cannot be found, as there is no module 'nowhere' in this folder or among those installed.
    """
    where, _, what = name.partition(":")
    if not what.isidentifier() or not all(part.isidentifier() for part in where.split(".")):
        raise ValueError(f"{name!r} must be {FORM}, such as mine:make for the function make of mine.py in this folder.")
    module = _module(name, where)
    function = getattr(module, what, None)
    if function is None:
        file = getattr(module, "__file__", None)
        raise ValueError(
            f"{name} cannot be found, as the module {where}{f', {file},' if file else ''} has no {what!r}."
        )
    if not callable(function):
        raise ValueError(f"{name} must be a function, not {type(function).__name__}.")
    return function


def call(name: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What the function returns; `Raised`, with where in its module it was raised, in place of its error."""
    with answering(name):
        return function(*args, **options)


@contextlib.contextmanager
def answering(name: str) -> Iterator[None]:
    """Errors that come from the user's module, in one sentence; those that do not pass through it stay as they are."""
    try:
        yield
    except Exception as error:
        file = getattr(sys.modules.get(name.partition(":")[0]), "__file__", None)
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        if file is None or not lines:
            raise
        raise Raised(f"{name} raised {_words(error)} ({os.path.basename(file)}, line {lines[-1]}).") from error


def _module(name: str, where: str) -> types.ModuleType:
    here = os.getcwd()
    if here not in sys.path:  # last: a file of the user's must not stand in for a module that something else imports
        sys.path.append(here)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(where)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{where}.".startswith(f"{error.name}."):
            file, _, suffix = where.rpartition(".")
            hint = f": write {file}:{name.partition(':')[2]} for the file {where}" if suffix == "py" else ""
            places = "in this folder or among those installed"
            raise ValueError(f"{name} cannot be found, as there is no module {where!r} {places}{hint}.") from None
        raise ValueError(f"the module {where} cannot be imported: {_words(error)}{_place(error)}.") from error


def _words(error: Exception) -> str:
    """The error in a few words, whatever it has to say on further lines."""
    text = str(error).strip().partition("\n")[0].rstrip(".")
    return f"{type(error).__name__}{f', {text}' if text else ''}"


def _place(error: Exception) -> str:
    """Where an import has failed: in the file that the import machinery was in last."""
    if isinstance(error, SyntaxError):
        return ""  # says it itself
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    return f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if len(frames) > 2 else ""
