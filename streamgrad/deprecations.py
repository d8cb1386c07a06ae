"""Renamed public names: each goes once through this table, works for a version, and says its new name."""

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple


class Renamed(NamedTuple):
    """A public name that has been renamed.

    Attributes:
      new: how it is written now.
      since: the version that renamed it; the next minor version drops the old name.
      value: the module-level name in `streamgrad` that stands for it; empty where the old name cannot work any more.
    """

    new: str
    since: str
    value: str = ""


RENAMED: Mapping[str, Renamed] = {
    "tbptt": Renamed("streamgrad.windowed_bptt(model, window)", "0.2", "windowed_bptt"),
    "variance": Renamed("streamgrad.theory", "0.2", "theory"),
    "online": Renamed("streamgrad.estimator(streamgrad.Method(...)) with streamgrad.by_steps", "0.2"),
    "Influence": Renamed("streamgrad.Method, whose run streamgrad.by_steps makes", "0.2"),
    "lab": Renamed("the package streamgrad_lab, which pip install 'streamgrad[lab]' brings", "0.2"),
}


def renamed(module: Mapping[str, Any], name: str) -> Any:
    """The value of a public name that has been renamed, with a DeprecationWarning; for a module's `__getattr__`.

    Args:
      module: the module's namespace.
      name: the old name.

    Returns:
      The value under its new name. Raises AttributeError, which says the new name, where the old one cannot work.

    Example:
      >>> import warnings, streamgrad as sg
      >>> with warnings.catch_warnings(record=True) as caught:
      ...     warnings.simplefilter("always")
      ...     same = sg.tbptt is sg.windowed_bptt
      >>> same, str(caught[0].message)
      (True, 'streamgrad.tbptt is now streamgrad.windowed_bptt(model, window); the old name goes after version 0.2.')
    """
    row = RENAMED.get(name)
    if row is None:
        raise AttributeError(f"module 'streamgrad' has no attribute {name!r}")
    if not row.value:
        raise AttributeError(f"streamgrad.{name} is gone since version {row.since}: use {row.new}.")
    return module[current_name(name, stacklevel=4)]


def current_name(name: str, stacklevel: int = 3, silent: bool = False) -> str:
    """The name that a public name has now, with a DeprecationWarning where it had another one, unless `silent`."""
    row = RENAMED.get(name)
    if row is None or not row.value:
        return name
    if silent:
        return row.value
    text = f"streamgrad.{name} is now {row.new}; the old name goes after version {row.since}."
    warnings.warn(text, DeprecationWarning, stacklevel=stacklevel)
    return row.value
