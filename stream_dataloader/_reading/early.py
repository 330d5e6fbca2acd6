"""Which code declares that a background thread may run it ahead of need: factories, and sequences that make sources."""

from __future__ import annotations

import functools
import inspect


def declares_early(code: object) -> bool:
    """Whether a factory, or a sequence of sources, declares that another thread may call it; see `OpensEarly`.

    A class that overrides what is called answers for itself: it does not inherit the declaration.
    """
    while isinstance(code, functools.partial):
        code = code.func
    if getattr(code, "open_early", None) is not True:
        return False
    if "open_early" in getattr(code, "__dict__", ()):  # else functools.wraps has copied it from other code
        return getattr(getattr(code, "__wrapped__", None), "open_early", None) is not True
    for kind in () if inspect.isclass(code) else type(code).__mro__:
        if "open_early" in kind.__dict__:
            return True
        if kind.__dict__.keys() & {"__call__", "__getitem__"}:
            return False
    return False
