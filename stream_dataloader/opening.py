"""Opens streams, in time or ahead of it.

`open_stream` calls the user's factory and takes the first item, since calling a generator function alone
opens nothing. `Opener` does so in a background thread for sources that a lane has reserved. Whoever comes
first, that thread or the lane, opens; the other waits or keeps off, so calls on one stream never overlap.

Guarantee: errors are kept and raised where the lane takes the stream, never earlier or elsewhere.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from stream_dataloader.errors import ItemError, OpenError, ReadError, StreamError, shorten
from stream_dataloader.schedule import NONE, PENDING, Assignment
from stream_dataloader.source_queue import SourceQueue
from stream_dataloader.stream_info import StreamInfo, run_as

_FIRST_POLL_SECONDS, _LONGEST_POLL_SECONDS = 100e-6, 5e-3
_LONGEST_JOIN_SECONDS = 1.0

#: What `OpenedStream.next_item` returns after the last item; None may be an item.
END = object()


class OpenedStream:
    """A stream being read: its iterator, what it belongs to and how far it was read.

    Attributes:
        info: Source, epoch, lane and worker.
        fresh: Whether its items are read for the first time this epoch.
        items: Number of items handed out.
        writes: Items can be written where they are wanted, by `read_into`.
    """

    def __init__(self, info: StreamInfo, fresh: bool, source: Any) -> None:
        self.info, self.fresh, self.source = info, fresh, source
        self.items = 0
        self._ahead: list[Any] = []  # the first item, taken while opening
        self._error: StreamError | None = None
        self._opened: Any = None
        self.writes = False
        self._iterator: Iterator[Any] = iter(())

    def open(self, factory: Callable[[Any], Any]) -> None:
        """Call the factory and take the first item; an error is kept for `next_item`."""
        before = run_as(self.info)
        try:
            self._start(factory)
            first = self.next_item()
            self.items = 0
            self._ahead.append(first)
        except StreamError as error:
            self._error = error
        finally:
            run_as(before)

    def _start(self, factory: Callable[[Any], Any]) -> None:
        try:
            self._opened = factory(self.source)
        except Exception as error:
            raise self.error(OpenError, f"open_stream raised {error!r}") from error
        try:
            self._iterator = iter(self._opened)
        except Exception as error:
            what = f"open_stream returned {shorten(self._opened, 80)}, a {type(self._opened).__name__}, "
            why = "which is no iterable" if isinstance(error, TypeError) else f"whose iter() raised {error!r}"
            raise self.error(OpenError, f"{what}{why}; return or yield items") from error
        self.writes = callable(getattr(self._opened, "read_into", None))

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
            try:
                item = next(self._iterator, END)
            except Exception as error:
                raise self.error(ReadError, f"the stream raised {error!r}") from error
        if item is not END:
            self.items += 1
        return item

    def read_into(self, out: Any, most: int) -> int:
        """Have the stream write its next items to `out`, `most` at most; 0 at its end. Otherwise as `next_item`.

        Raises:
            StreamError: The stream raised, or did not say how many items it wrote.
        """
        try:
            count = self._opened.read_into(out)
        except Exception as error:
            raise self.error(ReadError, f"the stream's read_into raised {error!r}") from error
        if not isinstance(count, int) or not 0 <= count <= most:
            raise self.error(
                ItemError,
                f"the stream's read_into returned {shorten(count)}; return how many time steps were written, "
                f"0 (the stream's end) to {most} (the length of `out`)",
            )
        self.items += count
        return count

    def close(self) -> None:
        """Close what the factory returned, and its iterator; an error in that becomes a warning."""
        for closable in (self._iterator, self._opened):
            if callable(close := getattr(closable, "close", None)):
                before = run_as(self.info)
                try:
                    close()
                except Exception as error:
                    warnings.warn(
                        f"closing the stream of source {self.info.source_index} ({shorten(self.source)}) "
                        f"raised {error!r}; it was read all the same",
                        RuntimeWarning,
                        stacklevel=2,
                    )
                finally:
                    run_as(before)
            if self._opened is self._iterator:
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


class Reservation:
    """A ticket taken out ahead, and, once it is granted and opened, its stream."""

    def __init__(self, lane: int, ticket: int) -> None:
        self.lane, self.ticket = lane, ticket
        self.stream: OpenedStream | None = None
        self._claim = threading.Lock()
        self._settled = threading.Event()
        self._failure: BaseException | None = None

    @property
    def claimed(self) -> bool:
        """Whether somebody has begun to open it."""
        return self._claim.locked()

    def claim(self) -> bool:
        """True for the first who asks: that one has to open the stream."""
        return self._claim.acquire(blocking=False)

    def settle(self, stream: OpenedStream | None, failure: BaseException | None = None) -> None:
        """Hand over what came of it; for the one who claimed it."""
        self.stream, self._failure = stream, failure
        self._settled.set()

    def result(self) -> OpenedStream | None:
        """What came of it, for the one who did not; waits."""
        self._settled.wait()
        if self._failure is not None:
            raise self._failure
        return self.stream


class Opener:
    """Opens the sources that lanes are granted, early for reservations.

    Args:
        queue: Where tickets are taken out.
        open_assignment: Opens the stream of an assignment for a lane.
    """

    def __init__(self, queue: SourceQueue, open_assignment: Callable[[Assignment, int], OpenedStream]) -> None:
        self._queue, self._open_assignment = queue, open_assignment
        self._reservations: deque[Reservation] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def now(self, lane: int, time: int) -> OpenedStream | None:
        """Take the next source for a lane that is out of data; None if there is none left."""
        return self._open(lane, self._queue.wait(lane, self._queue.take(lane, time, ahead=False)))

    def reserve(self, lane: int, time: int) -> Reservation:
        """Take out a ticket ahead, to be opened in the background."""
        reservation = Reservation(lane, self._queue.take(lane, time, ahead=True))
        with self._changed:
            self._reservations.append(reservation)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="stream-opener", daemon=True)
                self._thread.start()
            self._changed.notify()
        return reservation

    def take(self, reservation: Reservation) -> OpenedStream | None:
        """The stream of a reservation, opened here if the thread has not begun to; None if it was refused."""
        if not reservation.claim():
            return reservation.result()
        return self._open(reservation.lane, self._queue.wait(reservation.lane, reservation.ticket))

    def _open(self, lane: int, grant: int) -> OpenedStream | None:
        return None if grant == NONE else self._open_assignment(self._queue.assignment(grant), lane)

    def close(self) -> None:
        """Open nothing early any more, and end the thread; one stuck in user code is left to end by itself."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_LONGEST_JOIN_SECONDS)

    def _run(self) -> None:
        delay = _FIRST_POLL_SECONDS
        while True:
            with self._changed:
                while not self._closed and not self._reservations:
                    self._changed.wait()
                if self._closed:
                    return
                waiting = list(self._reservations)
            settled = [reservation for reservation in waiting if self._settle(reservation)]
            with self._changed:
                for reservation in settled:
                    self._reservations.remove(reservation)
                if not settled and not self._closed:
                    self._changed.wait(delay)
            delay = _FIRST_POLL_SECONDS if settled else min(1.5 * delay, _LONGEST_POLL_SECONDS)

    def _settle(self, reservation: Reservation) -> bool:
        """Open a reservation's stream if it is granted; False if that is not decided yet."""
        if reservation.claimed:
            return True
        decision = self._queue.decision(reservation.lane, reservation.ticket)
        if decision == PENDING:
            return False
        if reservation.claim():
            stream, failure = None, None
            try:
                stream = self._open(reservation.lane, decision)
            except BaseException as error:  # sys.exit() in user code, say: the lane that waits must learn of it
                failure = error
            with self._changed:
                if self._closed and stream is not None:
                    stream.close()
                else:
                    reservation.settle(stream, failure)
        return True
