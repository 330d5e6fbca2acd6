"""Opens sources, in time or ahead of it.

`Opener` opens the sources that a lane has reserved in a background thread, if their factories allow that. The thread
or the lane opens a source, whichever comes first. The other waits or leaves it alone, so calls on one stream never
overlap.

Guarantee: an error is kept, and raised when the lane takes the stream, not earlier and nowhere else. A thread is only
started if a factory allows it, and it only runs code of sources that may be opened early.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from stream_dataloader._notices import log
from stream_dataloader._reading.measured import MeasuredStream
from stream_dataloader._reading.meters import Meter, clock
from stream_dataloader._reading.share import Share
from stream_dataloader._reading.starts import IGNORES_START, is_start_ignored
from stream_dataloader._reading.stream import OpenedStream
from stream_dataloader._schedule.rules import NONE, PENDING
from stream_dataloader.errors import OpenError, shorten
from stream_dataloader.stream_info import StreamInfo

_FIRST_POLL_SECONDS = 100e-6
_LONGEST_POLL_SECONDS = 5e-3
_LONGEST_JOIN_SECONDS = 1.0
_SLOW_SECONDS = 5.0  # to open a stream


class Reservation:
    """A ticket taken out ahead, and, once it is granted and opened, its stream.

    Args:
        lane: Whose it is.
        ticket: Its number.
        decision: What it was granted, if that is known from before.
    """

    def __init__(self, lane: int, ticket: int, decision: int = PENDING) -> None:
        self.lane = lane
        self.ticket = ticket
        self.decision = decision
        self.stream: OpenedStream | None = None
        self._claim = threading.Lock()  # taken by the one who opens, and never let go
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
        self.stream = stream
        self._failure = failure
        self._settled.set()

    def result(self) -> OpenedStream | None:
        """What came of it, for the one who did not; waits."""
        self._settled.wait()
        if self._failure is not None:
            raise self._failure
        return self.stream


class Opener:
    """Opens the sources that the lanes of a worker are granted, early for reservations.

    Args:
        share: Whose lanes they are.
        meter: Where to count what is done.
    """

    def __init__(self, share: Share, meter: Meter) -> None:
        reading = share.reading
        self._plan = reading.plan
        self._share = share
        self._board = reading.board
        self._queue = share.queue
        self._meter = meter
        self._killers = reading.killers
        self._early = None if reading.recovery.cautious else reading.plan.lists.early(locally=reading.locally)
        self._reservations: deque[Reservation] = deque()  # those that the thread has not settled
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._told_of_slow = False
        self._retried: dict[int, int] = {}  # the epoch in which a source was opened again last

    def now(self, lane: int, time: int) -> OpenedStream | None:
        """Take the next source for a lane that is out of data; None if there is none left."""
        begin = clock()
        grant = self._queue.wait(lane, self._queue.take(lane, time, ahead=False))
        self._meter.granted(begin)
        return self._open(lane, grant)

    def reserve(self, lane: int, time: int) -> Reservation:
        """Take out a ticket ahead, to be opened in the background if that is allowed."""
        reservation = Reservation(lane, self._queue.take(lane, time, ahead=True))
        self._prepare((reservation,))
        return reservation

    def restore(self, lane: int, grants: Iterable[int]) -> list[Reservation]:
        """Reservations of a lane that were granted, or refused, before."""
        reservations = [Reservation(lane, -1, grant) for grant in grants]
        self._prepare(reservations)
        return reservations

    def _prepare(self, reservations: Iterable[Reservation]) -> None:
        if self._early is None:
            return
        with self._changed:
            self._reservations.extend(reservations)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="stream-opener", daemon=True)
                self._thread.start()
            self._changed.notify()

    def take(self, reservation: Reservation) -> OpenedStream | None:
        """The stream of a reservation, opened here if the thread has not begun to; None if it was refused."""
        begin = clock()
        if not reservation.claim():
            stream = reservation.result()
            self._meter.waited_for_opening(begin)
            return stream
        if (grant := reservation.decision) == PENDING:
            grant = self._queue.wait(reservation.lane, reservation.ticket)
            self._meter.granted(begin)
        return self._open(reservation.lane, grant)

    def _open(self, lane: int, grant: int) -> OpenedStream | None:
        return None if grant == NONE else self.open_at(self._queue.order.grant(grant), lane)

    def source(self, grant: int) -> int:
        """The source that a grant stands for."""
        number = self._queue.order[grant].source
        return number if self._plan.cuts is None else self._plan.cuts.source(number)

    def open_at(self, grant: int, lane: int, items: int | None = None, state: Any = None) -> OpenedStream:
        """Open the stream of a grant for a lane, at an item, with the stream's state there or None.

        Args:
            items: How many items of the source come before; None: it is read from where it begins.
        """
        stream = self._unopened(grant, lane, items)
        if stream.has_item:  # an error
            return stream
        index, board, number, begin = stream.info.source_index, self._board, self._share.number, clock()
        board.opening[number] = index + 1
        try:
            stream.open(stream.items, state)
            if is_start_ignored(self._plan.lists.of(index).open_stream, stream):
                stream.fail(stream.error(OpenError, IGNORES_START))
        except BaseException as error:
            if not isinstance(error, Exception):  # sys.exit() in the factory, or before the first item
                board.exiting[number] = -index - 1
            raise
        finally:
            board.opening[number] = 0
            ahead = threading.current_thread() is self._thread
            self._meter.opened(begin, index, ahead=ahead)
            if (seconds := (clock() - begin) / 1e9) >= _SLOW_SECONDS:
                self._tell_of_slow(stream, seconds, ahead=ahead)
        return stream

    def _unopened(self, grant: int, lane: int, items: int | None) -> OpenedStream:
        """The stream of a grant before it is opened; it fails if that cannot be, or may not be."""
        plan = self._plan
        kind: Callable[..., OpenedStream] = OpenedStream
        failure: Exception | None = None
        number, epoch, repeat, fresh = self._queue.order[grant]
        section = plan.section(number, epoch)
        index, measured = section.source, section.stop >= 0
        if measured:
            assert plan.lists.lengths is not None
            length, cut = int(plan.lists.lengths[index]), plan.cuts is not None
            kind = functools.partial(MeasuredStream, section=section, length=length, cut=cut)
        place = (section.start, section.stop) if measured and plan.cuts is not None else (0, None)
        info = StreamInfo(index, epoch, lane, self._share.reader.worker_id, plan.rules.seed, repeat, *place)
        try:
            source = plan.lists.sources[index]
        except Exception as error:
            source, failure = "?", error
        options = {"retries": plan.retries, "retry_on": plan.retry_on, "retried": self._retried, "grant": grant}
        stream = kind(info, fresh, source, plan.lists.of(index).open_stream, **options)
        stream.items = stream.begin if items is None else items
        if failure is not None:
            found = stream.error(OpenError, f"the source cannot be had: {shorten(failure)}")
            found.__cause__ = failure
            stream.fail(found)
        elif self._killers.get(index) == -1:
            stream.fail(stream.error(OpenError, "workers died again and again over opening it"))
        return stream

    def _tell_of_slow(self, stream: OpenedStream, seconds: float, *, ahead: bool) -> None:
        """Log a slow open: the first that a lane waits for is a warning."""
        level = logging.INFO if ahead or self._told_of_slow else logging.WARNING
        self._told_of_slow |= not ahead
        log.log(
            level,
            "opening source %d (%s) took %.1f s%s, lane %d, worker %d",
            *(stream.info.source_index, shorten(stream.source), seconds, ", in the background" if ahead else ""),
            *(stream.info.lane, stream.info.worker_id),
        )

    @property
    def has_thread(self) -> bool:
        """Whether there is a thread that opens sources, or may be."""
        return self._early is not None

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
        """Open a reservation's stream if it is granted and may be; False if that is not decided yet."""
        if reservation.claimed:
            return True
        decision = reservation.decision
        if decision == PENDING:
            decision = self._queue.decision(reservation.lane, reservation.ticket)
        if decision == PENDING:
            return False
        assert self._early is not None
        if decision != NONE and not self._early(self.source(self._queue.order.grant(decision))):
            return True  # left to the lane
        if reservation.claim():
            stream, failure = None, None
            try:
                stream = self._open(reservation.lane, decision)
            except BaseException as error:  # sys.exit() in user code, say: the lane that waits must learn of it
                failure = error
            with self._changed:
                if self._closed and stream is not None:  # `close` did not wait so long: no lane takes it any more
                    stream.close()
                else:
                    reservation.settle(stream, failure)
        return True
