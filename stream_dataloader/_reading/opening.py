"""How a stream is opened, at any item, and closed again; and what factories and iterators offer for that.

Opening calls the user's factory and takes the first item, since calling a generator function alone opens nothing::

    the factory has a start=0               open_stream(source, start=n)     no item is read
    the iterator has seek_item(n)           iterator.seek_item(n)            no item is read
    it has state_dict, load_state_dict      iterator.load_state_dict(state)  no item is read; a state a batch
    none of these                           next(), n times                  all items before are read again
    none of these, and a live one broke     next()                           nothing is read again

The iterator is what `iter(stream)` returns; methods are looked for on that alone. Nothing is called to find them.

Guarantees: what another object may have meant by the same name does not count. Within a process, an iterator that
another stream is being read from, and a generator that was read from before, are told apart from new ones.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator
from types import GeneratorType
from typing import Any

from stream_dataloader._memory.endings import WeakItems, WeakValues, when_gone
from stream_dataloader._reading.global_draws import GlobalDraws
from stream_dataloader._schedule.sections import Section
from stream_dataloader.errors import OpenError, ReadError, StreamError, shorten
from stream_dataloader.stream_info import StreamInfo, run_as

#: What `next` and `OpenedStream.next_item` return after the last item; None may be an item.
END = object()

_log = logging.getLogger("stream_dataloader")


def seeks_items(iterator: object) -> bool:
    """Whether an iterator goes to any item."""
    return callable(getattr(iterator, "seek_item", None))


def keeps_state(iterator: object) -> bool:
    """Whether an iterator saves and loads its state."""
    return all(callable(getattr(iterator, name, None)) for name in ("state_dict", "load_state_dict"))


_warned_of: set[type] = set()


def _warn_of_unused(kind: type) -> None:
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
        parameters = inspect.signature(factory).parameters
        own = inspect.signature(factory, follow_wrapped=False).parameters
    except (TypeError, ValueError):
        return False
    start = parameters.get("start")
    if start is next(iter(parameters.values()), None) and start is not None and start.kind is not start.KEYWORD_ONLY:
        return False  # that is the source, as of itertools.count
    if start is None or start.kind not in (start.KEYWORD_ONLY, start.POSITIONAL_OR_KEYWORD):
        return False
    if type(start.default) is not int or start.default != 0:
        return False
    return "start" in own or any(parameter.kind is parameter.VAR_KEYWORD for parameter in own.values())


def takes_start(factory: Callable[..., Any]) -> bool:
    """Whether a factory opens streams at any item: it has a parameter `start=0` beside that of the source."""
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


def _why_not_own(iterator: Iterator[Any], reader: Any) -> str:
    """Why an iterator is not the reader's own, or nothing."""
    other = _readers.get(id(iterator))
    if other is not None and other is not reader and other.iterator is iterator:
        return f"source {other.info.source_index} is being read from"
    if isinstance(iterator, Generator):
        if iterator in _begun:
            return "was read from before"
        _begun.add(iterator)
    _readers[id(iterator)] = reader
    return ""


class Handle:
    """A source that is read: what it belongs to, and what it is opened as.

    Attributes:
        info: Source, epoch, lane and worker.
        factory: Opens the source.
        section: The items of the source that are read.
        items: Number of items handed out, those before the section counted too.
        base: How many of them came before what is open, if that is live and began anew.
        iterator: What it is read from; None if it is not open.
        writes: It writes items where they are wanted, by `read_into`.
        keeps_state: It has a state with which it is opened again.
        marks: It says which items begin a sequence; see `protocols.MarksStarts`.
        saved: A state of the iterator to begin with, and the item that it belongs to.
        returned: What the factory returned.
        draws: Its global generators; None: it shares those of the process.
    """

    iterator: Iterator[Any] | None = None
    draws: GlobalDraws | None = None
    writes = keeps_state = marks = False

    def __init__(self, info: StreamInfo, factory: Callable[..., Any], source: Any, section: Section) -> None:
        self.info, self.factory, self.source, self.section = info, factory, source, section
        self.items, self.base = section.start, 0
        self.saved: tuple[Any, int] = None, 0
        self.returned: Any = None
        self._forget: list[Callable[[], Any]] = []  # to be called where it is closed, not only gone

    def enter(self) -> StreamInfo | None:
        """Have what follows in this thread run as the stream; returns what `leave` takes.

        The global generators, if it has its own, stay its own until the reader calls `give_back`.
        """
        before = run_as(self.info)
        if self.draws is not None:
            self.draws.enter()
        return before

    def leave(self, before: StreamInfo | None) -> None:
        """Undo `enter`."""
        run_as(before)

    def _begin(self, *, live: bool = False) -> Iterator[Any]:
        """Open it behind the items that were handed out; its iterator, which is there.

        Args:
            live: What it had is gone: if it cannot go anywhere by itself, `base` is set, and nothing is read again.
        """
        if self.draws is not None:
            self.draws.seed()
        first, known, self.base = 0, {}, 0
        if self.items and takes_start(self.factory):
            first, known = self.items, {"start": self.items}
        try:
            returned = self.returned = self.factory(self.source, **known)
        except Exception as error:
            raise self.error(OpenError, f"open_stream raised {text_of(error)}") from error
        try:
            iterator: Iterator[Any] = iter(returned)
        except Exception as error:
            what = f"open_stream returned {shorten(returned, 80)}, a {type(returned).__name__}, "
            why = "which is no iterable" if isinstance(error, TypeError) else f"whose iter() raised {text_of(error)}"
            raise self.error(OpenError, f"{what}{why}; return or yield items") from error
        if why := _why_not_own(iterator, self):
            kind = type(iterator).__name__
            raise self.error(OpenError, f"open_stream returned a {kind} that {why}; make a new one with each call")
        self.iterator = iterator
        self.writes = callable(getattr(returned, "read_into", None))
        self.keeps_state = keeps_state(iterator) and not seeks_items(iterator) and not takes_start(self.factory)
        for closable in (iterator,) if iterator is returned else (iterator, returned):
            close = getattr(closable, "close", None)
            if callable(close) and not isinstance(closable, GeneratorType):  # which Python itself closes
                self._forget.append(when_gone(self, close))
        self.marks = callable(getattr(returned, "starts_within", None))
        if live and first < self.items and not seeks_items(iterator) and not keeps_state(iterator):
            first = self.base = self.items
        if first < self.items:
            first = self._go_on(iterator)
        for position in range(first, self.items):
            if next(iterator, END) is END:
                before = f"had {self.items} before it was opened again; has its source changed?"
                section = f"a section of it begins at item {self.items}; correct lengths="
                why = before if self.items > self.section.start else section
                raise self.error(ReadError, f"the stream ended at item {position}, and {why}")
        return iterator

    def _go_on(self, iterator: Any) -> int:
        """Have the iterator go towards the next item itself; the item that it is at then."""
        try:
            if seeks_items(iterator):
                iterator.seek_item(self.items)
                return self.items
            state, item = self.saved
            if state is not None and keeps_state(iterator):
                iterator.load_state_dict(copy.deepcopy(state))
                return item
        except Exception as error:
            raise self.error(ReadError, f"going to item {self.items} raised {text_of(error)}") from error
        if iterator is not self.returned:
            _warn_of_unused(type(self.returned))
        return 0

    def close(self) -> None:
        """Close what the factory returned, and its iterator; an error in that becomes a warning."""
        iterator, returned = self.iterator, self.returned
        self.iterator = self.returned = None
        self.writes = self.keeps_state = False
        while self._forget:
            self._forget.pop()()
        for closable in (iterator, returned):
            if callable(end := getattr(closable, "close", None)):
                before = self.enter()
                try:
                    end()
                except Exception as error:
                    warnings.warn(
                        f"closing the stream of source {self.info.source_index} ({shorten(self.source)}) "
                        f"raised {text_of(error)}; it was read all the same",
                        RuntimeWarning,
                        stacklevel=2,
                    )
                finally:
                    self.leave(before)
            if returned is iterator:
                break

    def error(self, kind: type[StreamError], what: str, *, handed_out: bool = False) -> StreamError:
        """An error that says where it happened: at the item handed out last, or at the next one."""
        info, source, item = self.info, shorten(self.source), self.items - handed_out
        return kind(
            f"source {info.source_index} ({source}), item {item}, lane {info.lane}, worker {info.worker_id}: {what}",
            source_index=info.source_index,
            source=source,
            position=item,
            lane=info.lane,
            worker_id=info.worker_id,
        )


def text_of(error: Exception) -> str:
    """What an error of a stream says; a hint follows what Python makes of a bare `next()` in a generator."""
    text = shorten(error, 2000)
    if isinstance(error, StopIteration) or isinstance(error.__cause__, StopIteration):
        text += "; a next() in it found no more: give it a default, next(iterator, None), or catch StopIteration"
    return text
