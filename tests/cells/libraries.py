"""Other people's libraries, where they are installed and work with this JAX; elsewhere, a skipped test."""

import functools
import importlib
import warnings
from typing import Any

import pytest


@functools.cache
def _load(name: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a library says about itself while it is imported is not ours
            return importlib.import_module(name)
    except Exception as error:  # an old library with a new JAX fails with anything
        return error


def have(name: str) -> bool:
    return not isinstance(_load(name), Exception)


def library(name: str) -> Any:
    """The module, or a skipped test."""
    found = _load(name)
    if isinstance(found, Exception):
        pytest.skip(f"{name} cannot be imported here: {found}", allow_module_level=True)
    return found
