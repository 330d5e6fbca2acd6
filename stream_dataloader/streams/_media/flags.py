"""Options that are on or off, or one of a few values.

Guarantee: a flag that is neither True nor False raises, as `"false"` would count as true.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

import numpy as np

__all__ = ["check_choices", "check_flags"]


def check_flags(kind: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Check the options of `kind` that are True or False by default; `given` has values by name."""
    for name, parameter in signature(kind).parameters.items():
        value = given.get(name, parameter.default)
        if not isinstance(parameter.default, bool) or isinstance(value, np.bool_):
            continue
        if not (isinstance(value, int) and value in (0, 1)):
            raise TypeError(f"{name} is {value!r}; give True or False")


def check_choices(options: Any, **allowed: tuple[Any, ...]) -> None:
    """Check attributes of `options` by the values that each may have."""
    for name, values in allowed.items():
        if getattr(options, name) not in values:
            raise ValueError(f"{name} is {getattr(options, name)!r}; use one of {', '.join(map(repr, values))}")
