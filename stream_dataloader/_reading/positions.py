"""What a factory, or an iterator, offers to begin later than at a stream's first item.

Guarantee: what another object may have meant by the same name does not count; see `stream` for what is done with each.
"""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Callable
from typing import Any

_log = logging.getLogger("stream_dataloader")


def seeks_items(iterator: object) -> bool:
    """Whether an iterator goes to any item by `seek_item`."""
    return callable(getattr(iterator, "seek_item", None))


def keeps_state(iterator: object) -> bool:
    """Whether an iterator goes where it was by its own state."""
    return all(callable(getattr(iterator, name, None)) for name in ("state_dict", "load_state_dict"))


_warned_of: set[type] = set()


def warn_of_unused(kind: type) -> None:
    """Say once that a stream is read forward although it offers more."""
    if kind in _warned_of:
        return
    _warned_of.add(kind)
    if found := [name for name in ("seek_item", "load_state_dict") if hasattr(kind, name)]:
        _log.warning(
            "%s has %s, and its iter() returns another object, which that may say nothing of: it is read forward to "
            "where it was; return self from __iter__ and define __next__, or give open_stream a parameter start=0",
            *(kind.__qualname__, " and ".join(found)),
        )


#: Of factories that are still there: one that is dropped must not keep what it has open.
_known: weakref.WeakKeyDictionary[Callable[..., Any], bool] = weakref.WeakKeyDictionary()


def _takes_start(factory: Callable[..., Any]) -> bool:
    code: Any = factory
    while isinstance(code, functools.partial):
        if "start" in code.keywords:
            return False  # its own
        code = code.func
    if getattr(code, "__module__", None) == "builtins":  # enumerate and sum, which mean another thing
        return False
    try:
        start = inspect.signature(factory).parameters.get("start")
        own = inspect.signature(factory, follow_wrapped=False).parameters
    except (TypeError, ValueError):
        return False
    if start is None or start.kind not in (start.KEYWORD_ONLY, start.POSITIONAL_OR_KEYWORD):
        return False
    if type(start.default) is not int or start.default != 0:
        return False
    return "start" in own or any(parameter.kind is parameter.VAR_KEYWORD for parameter in own.values())


def takes_start(factory: Callable[..., Any]) -> bool:
    """Whether a factory opens streams at any item: it has a parameter `start` whose default is the integer 0."""
    try:
        if (known := _known.get(factory)) is None:
            known = _known[factory] = _takes_start(factory)
        return known
    except TypeError:  # not hashable, or without weak references
        return _takes_start(factory)
