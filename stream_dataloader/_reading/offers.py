"""What factories and iterators offer, and what they must not do: found by looking at them, nothing is called.

They may offer to begin later than at a stream's first item, or declare that a background thread may run them.

Guarantees: what another object may have meant by the same name does not count. Within a process, an iterator that
another stream is being read from, and a generator that was read from before, are told apart from new ones.
"""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import Any

from stream_dataloader._memory.endings import WeakItems, WeakValues

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


#: Readers by the identity of what they read from: not each iterator may be referred to weakly.
_readers: WeakValues[int, Any] = WeakValues()
_begun: WeakItems[Any] = WeakItems()  # generators


def why_not_own(iterator: Iterator[Any], reader: Any) -> str:
    """Why an iterator is not the reader's own, or nothing; the reader has it in `opened` as long as it reads."""
    other = _readers.get(id(iterator))
    if other is not None and other is not reader and other.opened is not None and other.opened.iterator is iterator:
        return f"source {other.info.source_index} is being read from"
    if isinstance(iterator, Generator):
        if iterator in _begun:
            return "was read from before"
        _begun.add(iterator)
    _readers[id(iterator)] = reader
    return ""
