"""Loader of the object that MODULE:FUNCTION on the command line names."""

from __future__ import annotations

import importlib
import operator
import os
import sys
from typing import Any


class UserCodeError(ValueError):
    """MODULE:FUNCTION cannot be called, or returns something unexpected."""


def is_name(text: str) -> bool:
    """Return True if a text has the form MODULE:FUNCTION, and is not a path."""
    names = text.replace(".", "_").partition(":")[::2]
    return all(map(str.isidentifier, names)) and not os.path.exists(text)


def call(name: str) -> Any:
    """Import MODULE:FUNCTION; return what it returns, or the object itself if it is not callable.

    Raises:
        UserCodeError: The module or the function does not exist.
    """
    module, _, function = name.partition(":")
    sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise
        raise UserCodeError(f"{name}: there is no module {error.name}") from None
    try:
        make = operator.attrgetter(function)(found)
    except AttributeError as error:
        raise UserCodeError(f"{name}: {error}") from None
    return make() if callable(make) else make
