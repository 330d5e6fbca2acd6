"""A stream being read: opened at any item, opened again if it breaks, closed in the end.

Opening calls the user's factory and takes the first item, since calling a generator function alone opens
nothing. Where a stream is not to begin at its first item, the cheapest way that it offers is taken::

    the factory takes start=                open_stream(source, start=n)     no item is read
    the stream has seek(n)                  stream.seek(n)                   no item is read
    it has state_dict, load_state_dict      stream.load_state_dict(state)    no item is read; a state a batch
    none of these                           next(), n times                  all items before are read again

Guarantee: an error says where it happened, and is raised where the item would have been handed out.
"""

from __future__ import annotations

import functools
import inspect
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from stream_dataloader._schedule.rules import NONE
from stream_dataloader.errors import ItemError, OpenError, ReadError, StreamError, shorten
from stream_dataloader.stream_info import StreamInfo, run_as

_FIRST_BACKOFF_SECONDS, _LONGEST_BACKOFF_SECONDS = 0.1, 30.0

#: What `OpenedStream.next_item` returns after the last item; None may be an item.
END = object()

_log = logging.getLogger("stream_dataloader")


class OpenedStream:
    """A stream being read: its iterator, what it belongs to and how far it was read.

    Args:
        info: Source, epoch, lane and worker.
        fresh: Whether its items are read for the first time this epoch.
        source: What it is opened from.
        factory: Opens it.
        retries: How often in a row it is opened again where it broke.
        grant: The number of the grant it was opened for.

    Attributes:
        items: Number of items handed out.
        writes: Items can be written where they are wanted, by `read_into`.
        keeps_state: It has a `state`, and is opened again with that.
    """

    def __init__(
        self,
        info: StreamInfo,
        fresh: bool,
        source: Any,
        factory: Callable[..., Any],
        *,
        retries: int = 0,
        grant: int = NONE,
    ) -> None:
        self.info, self.fresh, self.source, self.grant = info, fresh, source, grant
        self._factory, self._retries, self._failed = factory, retries, 0
        self.items = 0
        self._ahead: list[Any] = []  # the first item, taken while opening
        self._error: StreamError | None = None
        self._state: Any = None  # to begin with
        self._opened: Any = None
        self._iterator: Iterator[Any] | None = None
        self.writes = self.keeps_state = False

    def open(self, items: int = 0, state: Any = None) -> None:
        """Open it and take the first item; an error is kept for `next_item`, which also opens it elsewhere.

        Args:
            items: How many items come before.
            state: What the stream's `state_dict` returned there, if it has one.
        """
        self.items, self._state = items, state
        if items:
            return
        before = run_as(self.info)
        try:
            first = self.next_item()
            self.items = 0
            self._ahead.append(first)
        except StreamError as error:
            self._error = error
        finally:
            run_as(before)

    def fail(self, error: StreamError) -> None:
        """Have `next_item` raise an error, and open nothing."""
        self._error = error

    def _begin(self) -> Iterator[Any]:
        """Open the stream behind the items that were handed out."""
        skipped, known = self.items, {}
        if skipped and takes_start(self._factory):
            skipped, known = 0, {"start": self.items}
        try:
            self._opened = self._factory(self.source, **known)
        except Exception as error:
            raise self.error(OpenError, f"open_stream raised {_text(error)}") from error
        if skipped and self._seek(skipped):
            skipped = 0
        try:
            iterator: Iterator[Any] = iter(self._opened)
        except Exception as error:
            what = f"open_stream returned {shorten(self._opened, 80)}, a {type(self._opened).__name__}, "
            why = "which is no iterable" if isinstance(error, TypeError) else f"whose iter() raised {_text(error)}"
            raise self.error(OpenError, f"{what}{why}; return or yield items") from error
        self._iterator = iterator
        self.writes = callable(getattr(self._opened, "read_into", None))
        self.keeps_state = (
            hasattr(self._opened, "state_dict")
            and hasattr(self._opened, "load_state_dict")
            and not hasattr(self._opened, "seek")
            and not takes_start(self._factory)
        )
        for position in range(skipped):
            if next(iterator, END) is END:
                raise self.error(
                    ReadError,
                    f"the stream ended at item {position}, and had {self.items} before it was opened again; has its "
                    "source changed?",
                )
        return iterator

    def _seek(self, items: int) -> bool:
        """Have the stream go to an item itself; False if it cannot."""
        opened = self._opened
        try:
            if callable(seek := getattr(opened, "seek", None)) and not hasattr(opened, "readline"):  # files seek bytes
                seek(items)
                return True
            if self._state is not None and callable(load := getattr(opened, "load_state_dict", None)):
                load(self._state)
                return True
        except Exception as error:
            raise self.error(ReadError, f"going to item {items} raised {_text(error)}") from error
        return False

    def state(self) -> Any:
        """The stream's own state."""
        return self._opened.state_dict()

    def next_item(self) -> Any:
        """The next item, or `END`. The caller runs it as `info`, see `run_as`.

        Raises:
            StreamError: The stream could not be opened, or raised.
        """
        if self._error is not None:
            raise self._error
        if self._ahead:
            item = self._ahead.pop()
        else:
            iterator = self._iterator
            try:
                item = next(self._begin() if iterator is None else iterator, END)
            except Exception as error:
                item = self._next_item_again(error, "the stream")
        if item is not END:
            self.items += 1
        return item

    def _next_item_again(self, error: Exception, what: str) -> Any:
        """The item at which the stream broke, if it can be had by opening it again."""
        while True:
            failure = (
                error if isinstance(error, StreamError) else self.error(ReadError, f"{what} raised {_text(error)}")
            )
            if self._failed >= self._retries:
                raise failure from (error if failure is not error else error.__cause__)
            wait = min(_FIRST_BACKOFF_SECONDS * 2**self._failed, _LONGEST_BACKOFF_SECONDS)
            self._failed += 1
            _log.warning("%s; opened again in %.1f s, try %d of %d", str(failure), wait, self._failed, self._retries)
            self.close()
            time.sleep(wait)
            try:
                item = next(self._begin(), END)
            except Exception as again:
                error = again
                continue
            self._failed = 0
            return item

    def read_into(self, out: Any, most: int) -> int:
        """Have the stream write its next items to `out`, `most` at most; 0 at its end. Otherwise as `next_item`.

        Raises:
            StreamError: The stream raised, or did not say how many items it wrote.
        """
        try:
            count = self._opened.read_into(out)
        except Exception as error:
            if not self._retries:
                raise self.error(ReadError, f"the stream's read_into raised {_text(error)}") from error
            self._ahead.append(self._next_item_again(error, "the stream's read_into"))
            return -1
        if not isinstance(count, int) or not 0 <= count <= most:
            raise self.error(
                ItemError,
                f"the stream's read_into returned {shorten(count)}; return how many time steps were written, "
                f"0 (the stream's end) to {most} (the length of `out`)",
            )
        self.items += count
        return count

    @property
    def has_item(self) -> bool:
        """An item was taken ahead, which `next_item` hands out before the stream may write again."""
        return bool(self._ahead)

    def close(self) -> None:
        """Close what the factory returned, and its iterator; an error in that becomes a warning."""
        iterator, opened = self._iterator, self._opened
        self._iterator = self._opened = None
        for closable in (iterator, opened):
            if callable(close := getattr(closable, "close", None)):
                before = run_as(self.info)
                try:
                    close()
                except Exception as error:
                    warnings.warn(
                        f"closing the stream of source {self.info.source_index} ({shorten(self.source)}) "
                        f"raised {_text(error)}; it was read all the same",
                        RuntimeWarning,
                        stacklevel=2,
                    )
                finally:
                    run_as(before)
            if opened is iterator:
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


@functools.lru_cache(maxsize=64)
def _takes_start(factory: Callable[..., Any]) -> bool:
    if isinstance(factory, functools.partial) and "start" in factory.keywords:
        return False  # its own
    if inspect.isclass(factory) and factory.__module__ == "builtins":  # enumerate, which means another thing
        return False
    try:
        parameter = inspect.signature(factory).parameters.get("start")
    except (TypeError, ValueError):
        return False
    return parameter is not None and parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)


def takes_start(factory: Callable[..., Any]) -> bool:
    """Whether a factory opens streams at any item: it has a parameter `start`."""
    try:
        return _takes_start(factory)
    except TypeError:  # not hashable
        return _takes_start.__wrapped__(factory)


def _text(error: Exception) -> str:
    return shorten(error, 2000)
