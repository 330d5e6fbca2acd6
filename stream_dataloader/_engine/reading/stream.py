"""A stream being read: hands out its items, one by one or in runs, and is opened again if it breaks.

Guarantee: an error names its place, and is raised where the item would have been handed out. A source whose length
differs from `lengths` is an error, at the first item too many, or at the end that comes too early.
"""

from __future__ import annotations

import copy
import itertools
import logging
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from types import GeneratorType
from typing import Any, NamedTuple

from stream_dataloader._engine.items.step_writer import Taken
from stream_dataloader._engine.items.structure import ITEMS_ALIKE, Misfit
from stream_dataloader._engine.reading.opening import END, Handle, takes_start, text_of
from stream_dataloader._engine.schedule.place import LanePlace
from stream_dataloader._engine.schedule.sections import Section
from stream_dataloader.errors import GapError, ItemError, LengthError, ReadError, StreamError, detached, shorten
from stream_dataloader.protocols import NOTHING_YET
from stream_dataloader.stream_info import StreamInfo, stream_seed

_FIRST_BACKOFF_SECONDS = 0.1
_LONGEST_BACKOFF_SECONDS = 30.0

_OPEN: Any = object()

_log = logging.getLogger("stream_dataloader")


class Retries(NamedTuple):
    """Policy for opening a broken stream again.

    Attributes:
        most: How often in a row.
        on: The exceptions after which it is opened again.
        epochs: The epoch in which each source was opened again last.
        live: Streams may be live: items from before the break are gone.
    """

    most: int
    on: tuple[type[Exception], ...]
    epochs: dict[int, int]
    live: bool = False


class OpenedStream(Handle):
    """A stream being read.

    Attributes:
        fresh: Whether its items are read for the first time this epoch.
        seed: The `stream_seed` of its steps.
        stop: The item behind the last that is read; None: the stream's end.
        retried: How often it was opened again.
        on_retry: Called each time it is opened again; None as long as no lane has taken the stream.
        gaps: Reports of places where a live stream lost items; the lane that reads the stream takes them.
        place: The place where a lane left it; None: it is read from its beginning.
        restarted: Whether the worker that read it so far is gone.
    """

    # As in `Handle`, what most streams never change.
    place: LanePlace | None = None
    restarted = False
    retried = 0
    on_retry: Callable[[int], None] | None = None
    gaps: tuple[StreamError, ...] = ()
    _starts: tuple[int, ...] = ()  # of items before `_asked`
    _was_open = False  # whether it was opened at its place once
    _error: Exception | None = None
    _state_now: tuple[Any, StreamError | None] | None = None  # the state before `look_ahead`

    def __init__(
        self,
        info: StreamInfo,
        factory: Callable[..., Any],
        source: Any,
        section: Section,
        retries: Retries = Retries(0, (), {}),  # noqa: B008  with 0 retries nothing is written to the dict
        *,
        fresh: bool = False,
    ) -> None:
        super().__init__(info, factory, source, section)
        self.fresh, self.seed, self._retries = fresh, stream_seed(info), retries
        self._asked = section.start
        self.stop = None if section.stop < 0 else section.stop
        self._ahead: list[Any] = []  # items that `look_ahead` took

    def open(self, items: int = 0, state: Any = None) -> None:
        """Open it and take the first item; an error is kept for `next_item`.

        A stream that cannot start in its middle is left to `next_item`.

        Args:
            items: Number of items that come before.
            state: The iterator's `state_dict()` at that item, if it has one.
        """
        self.items, self.saved = items, (state, items)
        self._asked = items
        # Otherwise all items before would have to be read. `next_item` does so when the lane needs the stream.
        if items == self.section.start or takes_start(self.factory):
            self.look_ahead(self._first_items)

    def _first_items(self) -> list[Any]:
        item = self.next_item(only_open=True)
        return [] if item is _OPEN else [item]

    @property
    def first(self) -> Any:
        """The item that `open` took; `END` if there is none, or it was handed out."""
        return self._ahead[0] if self._ahead else END

    def fail(self, error: StreamError) -> None:
        """Let `next_item` raise an error, without opening the stream."""
        self._error = error

    def state(self) -> Any:
        """Return a copy of the iterator's own state, as it may be a reference to an object that changes.

        Raises:
            StreamError: The item cannot be read.
        """
        before = self.enter()
        try:
            state, error = self._state_now or self._read_state()
        finally:
            self.leave(before)
        if error is not None:
            raise error
        return state

    def _read_state(self) -> tuple[Any, StreamError | None]:
        iterator: Any = self.iterator
        try:
            return None if iterator is None else copy.deepcopy(iterator.state_dict()), None
        except Exception as error:
            failure = self.error(ReadError, f"the stream's state_dict raised {text_of(error)}")
            failure.__cause__ = error
            return None, failure

    def next_item(self, *, only_open: bool = False) -> Any:
        """Return the next item, `NOTHING_YET`, or `END`. The caller runs this between `enter` and `leave`.

        Args:
            only_open: Return `_OPEN` if the stream was opened by this call, and its first item is not needed yet.

        Raises:
            StreamError: The stream could not be opened, raised, or has a length other than the known one.
        """
        if self._error is not None:
            raise self._error
        stop = self.stop
        if stop is not None and self.items >= stop and not self.section.ends:
            return END
        if self._ahead:
            item = self._ahead.pop(0)
            self._state_now = None
        else:
            iterator = self.iterator
            try:
                if iterator is None:
                    iterator = self._begin(live=self.restarted and self._may_be_live)
                    self._was_open = True
                    if self.base:
                        self._note_gap("workers were started again", "the stream goes on from now")
                    if only_open and self.alike is not None:
                        return _OPEN
                item = next(iterator, END)
            except Exception as error:
                item = self._next_item_again(error, "the stream")
        if item is not END and item is not NOTHING_YET:
            self.items += 1
        if stop is not None:
            self._check_length(stop, ended=item is END)
        return item

    def _check_length(self, stop: int, *, ended: bool) -> None:
        if self.items > stop or (ended and self.items < stop):
            info = self.info
            remedy = "correct it" if info.stop is not None else "correct it, or build the dataset without lengths"
            raise self.error(
                LengthError,
                f"the stream has {'only' if ended else 'at least'} {self.items} items, and "
                f"lengths[{info.source_index}] is {self.section.length}; {remedy}",
                handed_out=not ended,
            )

    def run(self, put: Callable[[Iterator[Any]], Taken]) -> None:
        """Let `put` take the next items in one go; `next_item` then returns the item, end or error that stopped it."""
        iterator = self.iterator
        assert iterator is not None
        if self._ahead:
            # `chain` calls `iter`, which may let an iterator of the user's begin anew.
            rest = iterator if type(iterator) is GeneratorType else map(next, itertools.repeat(iterator))
            iterator, self._ahead, self._state_now = itertools.chain(self._ahead, rest), [], None
        written, odd, error = put(iterator)
        self.items += written
        try:
            if isinstance(error, StopIteration):
                odd = (END,)
            elif isinstance(error, Exception):
                odd = (self._next_item_again(error, "the stream"),)
            elif error is not None:
                raise error
        finally:
            del error  # its traceback holds this frame, and the frame the error: a cycle that would keep both alive
        self._ahead += odd

    def starts(self) -> Sequence[int]:
        """Return the items that begin a sequence, among those handed out since the last call."""
        before = self.enter()
        try:
            self._ask_for_starts()
        finally:
            self.leave(before)
        starts, self._starts = self._starts, ()
        return starts

    def _ask_for_starts(self) -> None:
        """Ask for the starts so far; called before the stream is closed, as it may not know them after that."""
        first, stop, base = self._asked, self.items, self.base
        if self.iterator is None or first == stop:
            return
        try:
            found = self.returned.starts_within(first - base, stop - base)
            starts = sorted({operator.index(start) + base for start in found})
        except Exception as error:
            raise self.error(ReadError, f"the stream's starts_within raised {text_of(error)}") from error
        if starts and not first <= starts[0] <= starts[-1] < stop:
            what = f"returned {shorten(starts)}, and was asked for items {first} to {stop}"
            raise self.error(ItemError, f"the stream's starts_within {what}")
        self._starts = *self._starts, *starts
        self._asked = stop

    def _next_item_again(self, error: Exception, what: str) -> Any:
        """Open the broken stream again, if allowed, and return the item at which it broke."""
        info, (most, on, epochs, _) = self.info, self._retries
        live = self._was_open and self._may_be_live
        number, broke, first = 0, time.monotonic(), error
        while True:
            failure = (
                error if isinstance(error, StreamError) else self.error(ReadError, f"{what} raised {text_of(error)}")
            )
            cause = error.__cause__ if isinstance(error, StreamError) and error.__cause__ else error
            if number >= most or not isinstance(cause, on):
                raise failure from (error if failure is not error else error.__cause__)
            wait = min(_FIRST_BACKOFF_SECONDS * 2**number, _LONGEST_BACKOFF_SECONDS)
            number += 1
            self.retried += 1
            if self.on_retry is not None:
                self.on_retry(1)
            _log.log(
                logging.INFO if epochs.get(info.source_index) == info.epoch else logging.WARNING,
                *("%s; opened again in %.1f s, try %d of %d", str(failure), wait, number, most),
            )
            epochs[info.source_index] = info.epoch
            if self.marks:
                self._ask_for_starts()
            self.close()
            time.sleep(wait)
            try:
                item = next(self._begin(live=live), END)
            except Exception as again:
                error = again
                continue
            self._was_open = True
            if self.base:
                went_on = f"it was opened again {time.monotonic() - broke:.1f} s later and goes on from there"
                self._note_gap(f"{what} raised {text_of(first)}", went_on, first)
            return item

    @property
    def _may_be_live(self) -> bool:
        """Whether the stream may be live, so that its earlier items are gone; it is then read on from now."""
        most, _, _, live = self._retries
        return most > 0 and live and self.stop is None and self.items > self.section.start

    def _note_gap(self, why: str, went_on: str, error: Exception | None = None) -> None:
        gap = self.error(GapError, f"{why}; {went_on}: items in between are missing")
        gap.__cause__ = error
        self.gaps = *self.gaps, gap

    def read_into(self, out: Any, most: int) -> int:
        """Let the stream write its next items to `out`, at most `most`; return their number, 0 at its end.

        Return -1 if the stream broke and was opened again, which has taken one item ahead.
        """
        stop = self.stop
        if stop is not None and self.items >= stop and not self.section.ends:
            return 0
        try:
            count = self.returned.read_into(out)
        except Misfit as misfit:  # a stream of this package takes its own items apart, as a lane does
            raise self.error(ItemError, f"{misfit}; {ITEMS_ALIKE}") from None
        except Exception as error:
            if not self._retries.most:
                raise self.error(ReadError, f"the stream's read_into raised {text_of(error)}") from error
            self._ahead.append(self._next_item_again(error, "the stream's read_into"))
            return -1
        if not isinstance(count, int) or not 0 <= count <= most:
            raise self.error(
                ItemError,
                f"the stream's read_into returned {shorten(count)}; return the number of time steps written, "
                f"0 (the stream's end) to {most} (the length of `out`)",
            )
        self.items += count
        if stop is not None and (self.items >= stop or not count):
            self._check_length(stop, ended=count == 0)
        return count

    @property
    def runs(self) -> bool:
        """Whether `run` can take its next items: it is open, and neither an end nor an error was taken ahead."""
        return self._error is None and self.iterator is not None and not (self._ahead and self._ahead[-1] is END)

    @property
    def has_item(self) -> bool:
        """Whether an item or error was taken ahead, which `next_item` returns or raises."""
        return bool(self._ahead) or self._error is not None

    def look_ahead(self, take: Callable[[], list[Any]]) -> bool:
        """Take the next item ahead of need; return False if the stream ends there.

        Until `next_item` hands it out, or raises its error, `items` and `state` are as if it had not been taken.

        Args:
            take: Takes the next items of this stream, and returns those to hand out; `END` may be the last.
        """
        items, before = self.items, self.enter()
        try:
            self._state_now = self._read_state() if self.keeps_state else None
            self._ahead = take()
        except StreamError as error:
            self._error = detached(error)  # its frames would hold the reader, which then would never be collected
        finally:
            self.items = items
            self.leave(before)
        return not self._ahead or self._ahead[-1] is not END
