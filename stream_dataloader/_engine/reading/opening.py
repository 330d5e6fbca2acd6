"""Opening of a stream at any item, and closing, with the means that factories and iterators offer for it.

Opening calls the user's factory and takes the first item, since calling a generator function alone opens nothing::

    the factory has a start=0               open_stream(source, start=n)     no item is read
    the iterator has seek_item(n)           iterator.seek_item(n)            no item is read
    it has state_dict, load_state_dict      iterator.load_state_dict(state)  no item is read; a state per batch
    none of these                           next(), n times                  all items before are read again
    none of these, and a live one broke     next()                           nothing is read again

The iterator is the object that `iter(stream)` returns; methods are looked up on it alone. Nothing is called to find
them.

Guarantees: a function that means something else by the same name is not mistaken for one of these. Within a process, an
iterator that another stream is reading, and a generator that was read before, are recognized and refused.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import time
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator
from types import GeneratorType
from typing import Any

from stream_dataloader._engine.memory.endings import WeakValues, when_gone
from stream_dataloader._engine.reading.global_draws import GlobalDraws
from stream_dataloader._engine.schedule.sections import Section
from stream_dataloader.errors import OpenError, ReadError, StreamError, shorten
from stream_dataloader.protocols import NOTHING_YET
from stream_dataloader.stream_info import StreamInfo, running

#: Returned by `next` and `OpenedStream.next_item` after the last item, because None may be an item.
END = object()

_NOTHING_YET_SECONDS = 0.001  # between two attempts to read on to the place where a stream is to begin

_log = logging.getLogger("stream_dataloader")


def seeks_items(iterator: object) -> bool:
    """Return whether an iterator can go to any item."""
    return callable(getattr(iterator, "seek_item", None))


def keeps_state(iterator: object) -> bool:
    """Return whether an iterator can save and load its state."""
    return callable(getattr(iterator, "state_dict", None)) and callable(getattr(iterator, "load_state_dict", None))


def _remedy_for(returned: object) -> str:
    """Return what to do about a value that a factory returned and that is no stream."""
    if hasattr(returned, "__aiter__") or inspect.iscoroutine(returned):
        return "run it to its end in an event loop of its own (asyncio.Runner) and yield the items"
    return f"{'call it, or ' if callable(returned) else ''}return or yield items"


_warned_of: set[type] = set()


def _warn_of_unused(kind: type) -> None:
    """Warn once that a stream is read forward although it has a method that would avoid it."""
    if kind in _warned_of:
        return
    _warned_of.add(kind)
    if found := [name for name in ("seek_item", "load_state_dict") if hasattr(kind, name)]:
        _log.warning(
            "%s has %s, but its iter() returns another object, to which that may not apply, so the stream is read "
            "forward to its position; return self from __iter__ and define __next__, or give open_stream a parameter "
            "start=0",
            *(kind.__qualname__, " and ".join(found)),
        )


#: Known answers of `takes_start`. References are weak: a factory that the user drops must not keep its files open.
_known: weakref.WeakKeyDictionary[Callable[..., Any], bool] = weakref.WeakKeyDictionary()


def _takes_start(factory: Callable[..., Any]) -> bool:
    code: Any = factory
    while isinstance(code, functools.partial):
        if "start" in code.keywords:
            return False  # the user has already set it
        code = code.func
    if getattr(code, "__module__", None) == "builtins":  # `start` of enumerate and sum means something else
        return False
    try:
        parameters = inspect.signature(factory).parameters
        own = inspect.signature(factory, follow_wrapped=False).parameters
    except (TypeError, ValueError):
        return False
    start = parameters.get("start")
    if start is next(iter(parameters.values()), None) and start is not None and start.kind is not start.KEYWORD_ONLY:
        return False  # as the first parameter it takes the source, as in itertools.count
    if start is None or start.kind not in (start.KEYWORD_ONLY, start.POSITIONAL_OR_KEYWORD):
        return False
    if type(start.default) is not int or start.default != 0:
        return False
    return "start" in own or any(parameter.kind is parameter.VAR_KEYWORD for parameter in own.values())


def takes_start(factory: Callable[..., Any]) -> bool:
    """Return whether a factory can open streams at any item: it has a parameter `start=0` besides the source."""
    try:
        if (known := _known.get(factory)) is None:
            known = _known[factory] = _takes_start(factory)
        return known
    except TypeError:  # the factory is not hashable, or does not support weak references
        return _takes_start(factory)


def declares_early(code: object) -> bool:
    """Return whether a factory, or a sequence of sources, declares that another thread may call it; see `OpensEarly`.

    A subclass that overrides the called method does not inherit the declaration, as its own code may not be safe.
    """
    while isinstance(code, functools.partial):
        code = code.func
    if getattr(code, "open_early", None) is not True:
        return False
    # functools.wraps copies the attribute from the wrapped function, and so says nothing about the wrapper's own code.
    if "open_early" in getattr(code, "__dict__", ()):
        return getattr(getattr(code, "__wrapped__", None), "open_early", None) is not True
    for kind in () if inspect.isclass(code) else type(code).__mro__:
        if "open_early" in kind.__dict__:
            return True
        if kind.__dict__.keys() & {"__call__", "__getitem__"}:
            return False
    return False


#: Readers by the identity of the iterator they read, because not every iterator supports weak references.
_readers: WeakValues[int, Any] = WeakValues()
#: Generators, which can be read once, with the reader of each.
_begun: dict[weakref.ref[Any], weakref.ref[Any]] = {}


@functools.lru_cache(maxsize=64)
def _is_generator(kind: type) -> bool:
    return issubclass(kind, Generator)


def _why_not_own(iterator: Iterator[Any], reader: Any) -> str:
    """Return the reason why an iterator is not the reader's own; empty if it is."""
    is_generator = type(iterator) is GeneratorType or _is_generator(type(iterator))
    if not is_generator:
        other = _readers.get(id(iterator))
    elif (ref := weakref.ref(iterator, _begun.pop)) in _begun:
        other = _begun[ref]()
    else:
        _begun[ref] = weakref.ref(reader)
        return ""
    if other is not None and other is not reader and other.iterator is iterator:
        return f"source {other.info.source_index} is being read from"
    if is_generator:
        return "was read from before"
    _readers[id(iterator)] = reader
    return ""


class Handle:
    """A source that is being read, and the objects it is read with.

    Attributes:
        info: Source, epoch, lane and worker.
        factory: Opens the source.
        section: The items of the source that are read.
        items: Number of items handed out, counted from the start of the source, not of the section.
        base: Number of these that came before the open iterator, if the stream is live and started over.
        iterator: The open iterator; None if it is not open.
        writes: Whether the stream writes its items into given memory, by `read_into`.
        alike: A key: all streams with an equal one have items of one layout. So the first item need not be taken to
            learn it, and `read_into` writes as much as there is room for, or all that is left. Nothing is open that
            must be closed when it is collected. Some streams of this package have one, as `_alike`.
        keeps_state: Whether the stream is opened again with a state of its own.
        marks: Whether the stream says which items begin a sequence; see `protocols.MarksStarts`.
        saved: A state of the iterator to begin with, and the item that it belongs to.
        returned: The object that the factory returned.
        draws: Its global generators; None: it shares those of the process.
    """

    # Many streams are short, so what most of them never change is set here, once for all.
    iterator: Iterator[Any] | None = None
    draws: GlobalDraws | None = None
    writes = keeps_state = marks = False
    alike: Any = None
    base = 0
    saved: tuple[Any, int] = None, 0
    returned: Any = None
    _forget: tuple[Callable[[], Any], ...] = ()  # cancel the clean-ups that `when_gone` planned; called by `close`

    def __init__(self, info: StreamInfo, factory: Callable[..., Any], source: Any, section: Section) -> None:
        self.info, self.factory, self.source, self.section = info, factory, source, section
        self.items = section.start

    def enter(self) -> StreamInfo | None:
        """Let the code that follows in this thread run as the stream; return the value that `leave` takes.

        If the stream has its own global generators, they stay active until the reader calls `give_back`.
        """
        before, running.info = running.info, self.info
        if self.draws is not None:
            self.draws.enter()
        return before

    def leave(self, before: StreamInfo | None) -> None:
        """Undo `enter`."""
        running.info = before

    def _begin(self, *, live: bool = False) -> Iterator[Any]:
        """Open it behind the items that were handed out, and return its iterator at that item.

        Args:
            live: Its earlier items are gone. If the iterator cannot go to an item by itself, `base` is set and nothing
                is read again.
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
            what = f"open_stream returned {shorten(returned, 80)} ({type(returned).__name__}), "
            why = "which is no iterable" if isinstance(error, TypeError) else f"whose iter() raised {text_of(error)}"
            raise self.error(OpenError, f"{what}{why}; {_remedy_for(returned)}") from error
        if why := _why_not_own(iterator, self):
            kind = type(iterator).__name__
            raise self.error(OpenError, f"open_stream returned a {kind} that {why}; make a new one with each call")
        self.iterator = iterator
        if type(returned) is not GeneratorType:  # a generator offers nothing but items, and Python itself closes it
            self._find_offers(returned, iterator)
        if live and first < self.items and not seeks_items(iterator) and not keeps_state(iterator):
            first = self.base = self.items
        if first < self.items:
            first = self._go_on(iterator)
        for position in range(first, self.items):
            while (item := next(iterator, END)) is NOTHING_YET:
                time.sleep(_NOTHING_YET_SECONDS)
            if item is END:
                before = f"had at least {self.items} before it was opened again; has its source changed?"
                section = f"a section of it begins at item {self.items}; correct lengths="
                why = before if self.items > self.section.start else section
                raise self.error(ReadError, f"the stream ended at item {position}, and {why}")
        return iterator

    def _find_offers(self, returned: Any, iterator: Any) -> None:
        """Find what the stream offers beside its items; it is closed at the latest when this object is gone."""
        self.writes = callable(getattr(returned, "read_into", None))
        self.marks = callable(getattr(returned, "starts_within", None))
        self.alike = getattr(returned, "_alike", None) if self.writes else None
        if self.alike is not None:
            return
        self.keeps_state = keeps_state(iterator) and not seeks_items(iterator) and not takes_start(self.factory)
        for closable in (iterator,) if iterator is returned else (iterator, returned):
            if type(closable) is not GeneratorType and callable(close := getattr(closable, "close", None)):
                self._forget = *self._forget, when_gone(self, close)

    def _go_on(self, iterator: Any) -> int:
        """Let the iterator go to the next item, or towards it, by its own means; return the item it then stands at."""
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
        """Close the object that the factory returned, and its iterator; an error while closing becomes a warning."""
        iterator, returned = self.iterator, self.returned
        self.iterator = self.returned = None
        self.writes = self.keeps_state = False
        for forget in self._forget:
            forget()
        self._forget = ()
        if type(returned) is GeneratorType and returned.gi_frame is None:  # it has ended, so there is nothing to close
            return
        for closable in (iterator, returned):
            if callable(end := getattr(closable, "close", None)):
                before = self.enter()
                try:
                    end()
                except Exception as error:
                    warnings.warn(
                        f"closing the stream of source {self.info.source_index} ({shorten(self.source)}) "
                        f"raised {text_of(error)}; its items were read all the same",
                        RuntimeWarning,
                        stacklevel=2,
                    )
                finally:
                    self.leave(before)
            if returned is iterator:
                break

    def error(self, kind: type[StreamError], what: str, *, handed_out: bool = False) -> StreamError:
        """Create an error that names the place: the item handed out last (`handed_out`), or the next one."""
        info, source, item = self.info, shorten(self.source), self.items - handed_out
        worker = f"worker {info.worker_id}{_ThisNode.node}"
        return kind(
            f"source {info.source_index} ({source}), item {item}, lane {info.lane}, {worker}: {what}",
            source_index=info.source_index,
            source=source,
            position=item,
            lane=info.lane,
            worker_id=info.worker_id,
        )


class _ThisNode:
    node = ""  # of this process, in errors, if it is not the trainer's


def name_node(name: str) -> None:
    """Let errors of streams name this machine, whose files may differ from those of the trainer's."""
    _ThisNode.node = f" on node {name}"


def text_of(error: Exception) -> str:
    """Return the text of a stream's error; with a hint for a bare `next()`, and for a process of a worker's."""
    text = shorten(error, 2000)
    if isinstance(error, StopIteration) or isinstance(error.__cause__, StopIteration):
        text += "; a next() inside found no more items: pass a default, next(iterator, None), or catch StopIteration"
    if isinstance(error, AssertionError) and "daemonic" in str(error):  # of multiprocessing
        text += '; for streams that start processes, pass worker_method="thread", or num_workers=0'
    return text
