"""Options that are on or off.

Guarantee: what is neither true nor false is refused, as `"false"` would count as true.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

import numpy as np

__all__ = ["check_flags"]


def check_flags(kind: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Check the options that are True or False by default.

    Args:
        kind: What takes the options.
        given: Their values, by name; those of other options are left alone.

    Raises:
        TypeError: One is neither True nor False.
    """
    for name, parameter in signature(kind).parameters.items():
        value = given.get(name, parameter.default)
        if not isinstance(parameter.default, bool) or isinstance(value, np.bool_):
            continue
        if not (isinstance(value, int) and value in (0, 1)):
            raise TypeError(f"{name} is {value!r}; give True or False")
