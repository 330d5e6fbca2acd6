"""Options that are on or off, or one of a few values.

Guarantee: what is neither true nor false is refused, as `"false"` would count as true.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

import numpy as np

__all__ = ["check_choices", "check_flags"]


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


def check_choices(options: Any, **allowed: tuple[Any, ...]) -> None:
    """Check options by the values that they may have.

    Args:
        options: An object that has them as attributes.
        **allowed: The values, by the option's name.

    Raises:
        ValueError: One has another value.
    """
    for name, values in allowed.items():
        if getattr(options, name) not in values:
            raise ValueError(f"{name} is {getattr(options, name)!r}; use one of {', '.join(map(repr, values))}")
