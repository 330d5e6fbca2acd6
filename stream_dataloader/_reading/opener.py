"""Opens the streams of one reader's lanes: those whose sources lanes are granted, at the item where they begin.

Guarantee: a lane takes sources by the one rule of `reservations`. What is opened can be seen on the board of activities
meanwhile, so that the death of a worker can be blamed on it.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

from stream_dataloader._notices import log
from stream_dataloader._reading.early import EarlyOpener
from stream_dataloader._reading.meters import Meter, clock
from stream_dataloader._reading.origin import Origin, Retries
from stream_dataloader._reading.plan import Share
from stream_dataloader._reading.starts import IGNORES_START, is_start_ignored
from stream_dataloader._reading.stream import OpenedStream
from stream_dataloader._schedule.reservations import Held, next_grant
from stream_dataloader._schedule.rules import NONE
from stream_dataloader._schedule.snapshot import LaneState
from stream_dataloader.errors import OpenError, shorten
from stream_dataloader.stream_info import StreamInfo

_SLOW_SECONDS = 5.0  # to open a stream


class Opener:
    """Opens the sources that the lanes of a reader are granted, early for reservations if their factories allow that.

    Attributes:
        early: Opens ahead of need; None if nothing may be.
        taken: The sources that lanes took since somebody looked: lane and grant.
    """

    def __init__(self, share: Share, meter: Meter) -> None:
        reading = share.reading
        self._plan = reading.plan
        self._share = share
        self._meter = meter
        self._first = share.reader.lanes.start - share.lanes.start  # of the member's lanes, in the batch
        self._held: list[Held] = [() if reading.plan.rules.lookahead else None] * reading.plan.rules.lanes
        self.taken: list[tuple[int, int]] = []
        self._told_of_slow = False
        self._retries = Retries(reading.plan.retries, reading.plan.retry_on, {})
        self.early: EarlyOpener | None = None
        allowed = None if reading.recovery.cautious else reading.plan.lists.early(locally=reading.locally)
        if allowed is not None:
            may_open = allowed
            self.early = EarlyOpener(
                share.queue, lambda grant: may_open(self._source(grant)), functools.partial(self._open, ahead=True)
            )

    def next(self, lane: int, time: int) -> OpenedStream | None:
        """Take the next source for a lane that is out of data; None if there is none left."""
        take, wait = functools.partial(self._take, lane, time), functools.partial(self._wait, lane)
        grant, self._held[lane] = next_grant(self._held[lane], self._plan.rules.lookahead, take, wait)
        stream = None if grant == NONE else self._stream(lane, grant)
        self.taken.append((lane, grant))
        source = -1 if stream is None else stream.origin.info.source_index
        self._share.reading.board.reading[self._first + lane] = source + 1
        return stream

    def resume(self, lane: int, start: LaneState) -> OpenedStream | None:
        """The stream that a lane was reading before, opened where it stood; None if there is none."""
        if start.grant == NONE:
            return None
        self._share.reading.board.reading[self._first + lane] = self._source(start.grant) + 1
        return self._open(start.grant, lane, start.items, start.stream)

    def close_stream(self, lane: int, stream: OpenedStream) -> None:
        """Close a stream that a lane leaves."""
        stream.close()
        if stream.retried:
            self._meter.retried(stream.retried)
        self._share.reading.board.reading[self._first + lane] = 0

    def restore(self, lane: int, held: Held) -> None:
        """Have a lane hold what it had reserved before."""
        self._held[lane] = held
        if self.early is not None:
            for grant in held or ():
                self.early.reserve(lane, grant)

    def _take(self, lane: int, time: int, ahead: bool) -> int:
        if self.early is not None and not ahead:  # tickets ahead were refused, and their numbers are used again
            self.early.forget(lane)
        ticket = self._share.queue.take(lane, time, ahead)
        if ahead and self.early is not None:
            self.early.reserve(lane, ticket)
        return ticket

    def _wait(self, lane: int, ticket: int) -> int:
        begin = clock()
        grant = self._share.queue.wait(lane, ticket)
        self._meter.granted(begin)
        return grant

    def _stream(self, lane: int, grant: int) -> OpenedStream:
        """The stream of a grant: opened here if that was not begun before."""
        if self.early is not None and self._held[lane] is not None and (opened := self.early.take(lane)) is not None:
            begin = clock()
            stream = opened.result()
            self._meter.waited_for_opening(begin)
            return stream
        return self._open(grant, lane)

    def _source(self, grant: int) -> int:
        """The source that a grant stands for."""
        number = self._share.queue.order[grant].source
        return number if self._plan.cuts is None else self._plan.cuts.source(number)

    def _open(
        self, grant: int, lane: int, items: int | None = None, state: Any = None, *, ahead: bool = False
    ) -> OpenedStream:
        """Open the stream of a grant for a lane, at an item, with the stream's state there or None.

        Args:
            items: How many items of the source come before; None: it is read from where it begins.
            ahead: In the background.
        """
        stream = self._unopened(grant, lane, items)
        if stream.has_item:  # an error
            return stream
        index, begin = stream.origin.info.source_index, clock()
        board, number = self._share.reading.board, self._share.number
        board.opening[number] = index + 1
        try:
            stream.open(stream.items, state)
            if is_start_ignored(stream):
                stream.fail(stream.error(OpenError, IGNORES_START))
        except BaseException as error:
            if not isinstance(error, Exception):  # sys.exit() in the factory, or before the first item
                board.exiting[number] = -index - 1
            raise
        finally:
            board.opening[number] = 0
            self._meter.opened(begin, index, ahead=ahead)
            if (seconds := (clock() - begin) / 1e9) >= _SLOW_SECONDS:
                self._tell_of_slow(stream, seconds, ahead=ahead)
        return stream

    def _unopened(self, grant: int, lane: int, items: int | None) -> OpenedStream:
        """The stream of a grant before it is opened; it fails if that cannot be, or may not be."""
        plan = self._plan
        failure: Exception | None = None
        number, epoch, repeat, fresh = self._share.queue.order[grant]
        section = plan.section(number, epoch)
        index, lengths = section.source, plan.lists.lengths
        place = (section.start, section.stop) if section.stop >= 0 and plan.cuts is not None else (0, None)
        info = StreamInfo(index, epoch, lane, self._share.reader.worker_id, plan.rules.seed, repeat, *place)
        try:
            source = plan.lists.sources[index]
        except Exception as error:
            source, failure = "?", error
        length = -1 if lengths is None else int(lengths[index])
        origin = Origin(info, fresh, source, plan.lists.of(index).open_stream, section, length)
        stream = OpenedStream(origin, self._retries)
        stream.items = stream.begin if items is None else items
        if failure is not None:
            found = stream.error(OpenError, f"the source cannot be had: {shorten(failure)}")
            found.__cause__ = failure
            stream.fail(found)
        elif self._share.reading.killers.get(index) == -1:
            stream.fail(stream.error(OpenError, "workers died again and again over opening it"))
        return stream

    def _tell_of_slow(self, stream: OpenedStream, seconds: float, *, ahead: bool) -> None:
        """Log a slow open: the first that a lane waits for is a warning."""
        info, _, source, *_ = stream.origin
        level = logging.INFO if ahead or self._told_of_slow else logging.WARNING
        self._told_of_slow |= not ahead
        log.log(
            level,
            "opening source %d (%s) took %.1f s%s, lane %d, worker %d",
            *(info.source_index, shorten(source), seconds, ", in the background" if ahead else ""),
            *(info.lane, info.worker_id),
        )

    def close(self) -> None:
        """Open nothing early any more."""
        if self.early is not None:
            self.early.close()
