"""Opening of the streams that one reader's lanes draw, each at the item where it begins.

Guarantee: while a source is being opened, the status shows it, so that a worker's death can be traced to it. The
background thread starts with the first reservation, and only runs code of sources that may be opened early.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future

from stream_dataloader._engine.memory.endings import start_thread
from stream_dataloader._engine.notices import log
from stream_dataloader._engine.reading.activity import AHEAD_NS, OPENING_NS, WAITING_NS, Meter
from stream_dataloader._engine.reading.global_draws import GlobalDraws
from stream_dataloader._engine.reading.plan import Reading
from stream_dataloader._engine.reading.source_queue import SourceQueue
from stream_dataloader._engine.reading.starts import IGNORES_START, is_start_ignored
from stream_dataloader._engine.reading.stream import OpenedStream, Retries
from stream_dataloader._engine.reading.worker_info import worker_info_hidden
from stream_dataloader._engine.schedule.draws import Held, next_draw
from stream_dataloader._engine.schedule.place import LanePlace
from stream_dataloader._engine.schedule.rules import NONE, PENDING
from stream_dataloader.errors import OpenError, shorten
from stream_dataloader.stream_info import StreamInfo

_SLOW_SECONDS = 5.0  # an opening that takes longer is logged
_FIRST_POLL_SECONDS = 100e-6
_LONGEST_POLL_SECONDS = 5e-3
_LONGEST_JOIN_SECONDS = 1.0


class Opener:
    """Opens the sources that the lanes of a reader draw.

    Attributes:
        lanes: The reader's lanes.
        opens_early: Whether some sources may be opened ahead of need.
        taken: The draws that each lane took in this step.
    """

    def __init__(self, reading: Reading, number: int, queue: SourceQueue, meter: Meter) -> None:
        self.reading, self.reader, self.queue = reading, reading.readers[number], queue
        self._number, self.lanes = number, self.reader.lanes
        self._plan, self._sources, self._killers = reading.plan, reading.plan.lists.sources, reading.recovery.killers
        self._factories = reading.plan.factories()
        self._lookahead = reading.plan.rules.lookahead
        self._reads, self._opens = reading.status.reading.data, reading.status.opening.data
        self._meter = meter
        self.taken: dict[int, list[int]] = {}
        self._told_of_slow = False
        self._retries = Retries(
            reading.plan.retries, reading.plan.retry_on, {}, live=not reading.plan.rules.deterministic
        )
        # No second thread where all streams are read in the main process, whose other code may not be ready for one.
        # After deaths, a stream that kills its worker must be the only one that is being opened. And the global
        # generators, if they are seeded, belong to the process: a background thread would draw from those of the
        # stream that a lane is reading at the same moment.
        is_refused = reading.locally or reading.recovery.cautious or reading.plan.seed_globals
        allowed = None if is_refused else reading.plan.lists.early()
        self.opens_early = allowed is not None
        may_open = allowed and (lambda draw: allowed(self._source(draw)))
        self._early = EarlyOpener(queue, may_open, functools.partial(self._open, ahead=True))
        self._waiting = reading.place.waiting
        self._held: list[Held] = [lane.reserved for lane in reading.place.lanes_by(reading.plan.rules)]
        for lane in self.lanes:
            for draw in self._held[lane] or ():
                self._early.reserve(lane, draw)

    def next(self, lane: int, time: int) -> OpenedStream | None:
        """Take the next source for a lane that is out of data; None if there is none left."""
        take = functools.partial(self._take_early if self.opens_early else self.queue.take, lane, time)
        wait = functools.partial(self._wait, lane, time) if self.queue.is_shared else int
        draw, self._held[lane] = next_draw(self._held[lane], self._lookahead, take, wait)
        # `NONE` is reported, too: the main process repeats each draw to follow the cursors.
        self.taken.setdefault(lane, []).append(draw)
        stream = None
        if draw != NONE:
            opened = self._early.take(lane) if self.opens_early else None
            if opened is None:
                stream = self._open(draw, lane)
            else:
                begin = self._meter.begin(OPENING_NS)
                stream = opened.result()
                self._meter.waited_for_opening(begin)
                self._count_retries(stream)
        self._reads[lane] = 0 if stream is None else stream.info.source_index + 1
        return stream

    def resume(self, lane: int, start: LanePlace) -> OpenedStream | None:
        """Open the stream that a lane was reading before, if any, where it stopped."""
        if start.draw == NONE:
            return None
        self._reads[lane] = self._source(start.draw) + 1
        return self._open(start.draw, lane, start)

    def close_stream(self, lane: int, stream: OpenedStream) -> None:
        """Close a stream that a lane leaves."""
        stream.close()
        self._reads[lane] = 0

    def _count_retries(self, stream: OpenedStream) -> None:
        """Count how often a stream is opened again. Runs in the lane's thread, as the meter allows one writer only."""
        if stream.retried:
            self._meter.retried(stream.retried)
        stream.on_retry = self._meter.retried

    def _take_early(self, lane: int, time: int, ahead: bool) -> int:
        # A request that is needed now means that the lane's reservations were refused. The ledger reuses their numbers,
        # so the background thread must not wait for them any more.
        if not ahead:
            self._early.forget(lane)
        request = self.queue.take(lane, time, ahead)
        if ahead:
            self._early.reserve(lane, request)
        return request

    def _wait(self, lane: int, time: int, request: int) -> int:
        begin = self._meter.begin(WAITING_NS)
        draw = self.queue.wait(lane, time, request)
        self._meter.waited_for_draw(begin)
        return draw

    def _source(self, draw: int) -> int:
        """Return the source of a draw."""
        number = self.queue.order[draw].source
        return number if self._plan.cuts is None else self._plan.cuts.source(number)

    def _open(self, draw: int, lane: int, start: LanePlace | None = None, *, ahead: bool = False) -> OpenedStream:
        """Open the stream of a draw for a lane, at the item where it continues."""
        resumes = start is not None
        start = start or self._waiting.get(draw)
        stream = self._unopened(draw, lane)
        if not ahead:
            stream.on_retry = self._meter.retried
        if start is not None:
            if resumes and start.items != stream.stop:
                start = start.back(min(self._plan.context, start.items - stream.section.start))
            stream.items, stream.place = start.items, start
            stream.restarted = self.reading.recovery.number > 0
        # Nothing is opened for a stream that already holds an error, or whose section has no item left.
        if stream.has_item or (stream.items == stream.stop and not stream.section.ends):
            return stream
        index, begin = stream.info.source_index, self._meter.begin(AHEAD_NS if ahead else OPENING_NS)
        self._opens[self._number] = index + 1
        try:
            stream.open(stream.items, None if start is None else start.stream)
            if stream.has_item and is_start_ignored(stream):
                stream.fail(stream.error(OpenError, IGNORES_START))
        except BaseException as error:
            # sys.exit() in the factory, or before the first item, ends the worker: note which source did it.
            if not isinstance(error, Exception):
                self.reading.status.exiting[self._number] = -index - 1
            raise
        finally:
            self._opens[self._number] = 0
            if (seconds := self._meter.opened(begin, index, ahead=ahead) / 1e9) >= _SLOW_SECONDS:
                self._log_slow(stream, seconds, ahead=ahead)
        return stream

    def _unopened(self, draw: int, lane: int) -> OpenedStream:
        plan = self._plan
        failure: Exception | None = None
        number, epoch, repeat, fresh = self.queue.order[draw]
        section = plan.section(number, epoch)
        index = section.source
        is_cut = plan.cuts is not None and section.stop >= 0 and not plan.cuts.skips(index)
        start, stop = (section.start, section.stop) if is_cut else (0, None)
        where = index, epoch, lane, self.reader.worker_id
        key = None if plan.rules.mix is None else plan.lists.key(index)
        info = StreamInfo(*where, plan.rules.seed, repeat, start, stop, key)
        try:
            source = self._sources[index]
        except Exception as error:
            source, failure = "?", error
        factory = self._factories[plan.lists.list_of(index) if plan.rules.mix is not None else 0]
        stream = OpenedStream(info, factory, source, section, self._retries, fresh=fresh)
        if plan.seed_globals:
            stream.draws = GlobalDraws(info)
        if failure is not None:
            found = stream.error(OpenError, f"the source cannot be read from the list: {shorten(failure)}")
            found.__cause__ = failure
            stream.fail(found)
        elif self._killers and self._killers.get(index) == -1:
            stream.fail(stream.error(OpenError, "workers died again and again while they opened it"))
        return stream

    def _log_slow(self, stream: OpenedStream, seconds: float, *, ahead: bool) -> None:
        info = stream.info
        level = logging.INFO if ahead or self._told_of_slow else logging.WARNING
        self._told_of_slow |= not ahead
        log.log(
            level,
            "opening source %d (%s) took %.1f s%s, lane %d, worker %d",
            *(info.source_index, shorten(stream.source), seconds, ", in the background" if ahead else ""),
            *(info.lane, info.worker_id),
        )

    def close(self) -> None:
        """Stop opening sources early."""
        self._early.close()


class EarlyOpener:
    """Opens the sources that a reader's lanes have reserved before they need them, in a background thread.

    A source is opened by the thread or by its lane, whichever comes first, so calls on one stream never overlap. An
    error is raised when the lane takes the stream. If `allowed` is None, there is no thread.
    """

    def __init__(
        self, queue: SourceQueue, allowed: Callable[[int], bool] | None, open_at: Callable[[int, int], OpenedStream]
    ) -> None:
        self._queue, self._allowed, self._open_at = queue, allowed, open_at
        self._reserved: defaultdict[int, deque[Future[OpenedStream]]] = defaultdict(deque)  # by lane, in its order
        self._waiting: dict[Future[OpenedStream], tuple[int, int]] = {}  # lane and request
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def reserve(self, lane: int, request: int) -> None:
        """Open the stream of a lane's next reservation as soon as possible."""
        if self._allowed is None:
            return
        with self._changed:
            stream: Future[OpenedStream] = Future()
            self._reserved[lane].append(stream)
            self._waiting[stream] = lane, request
            if self._thread is None:
                # A factory that hangs does not keep the program from exiting.
                self._thread = start_thread(self._run, "stream-opener")
            self._changed.notify()

    def take(self, lane: int) -> Future[OpenedStream] | None:
        """Return a lane's first reservation, if it is open or being opened."""
        stream = self._reserved[lane].popleft() if self._reserved[lane] else None
        return None if stream is None or stream.cancel() else stream

    def forget(self, lane: int) -> None:
        """Drop a lane's reservations, which were refused."""
        while self._reserved[lane]:
            self._reserved[lane].popleft().cancel()

    def close(self) -> None:
        """Stop opening, end the thread, and close streams that no lane took."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_LONGEST_JOIN_SECONDS)
        for lane in self._reserved.values():
            while lane:
                stream = lane.popleft()
                if stream.done() and not stream.cancelled() and stream.exception() is None:
                    stream.result().close()

    def _run(self) -> None:
        delay = _FIRST_POLL_SECONDS
        while True:
            with self._changed:
                while not self._closed and not self._waiting:
                    self._changed.wait()
                if self._closed:
                    return
                waiting = list(self._waiting.items())
            settled = [stream for stream, (lane, request) in waiting if self._settle(stream, lane, request)]
            with self._changed:
                for stream in settled:
                    del self._waiting[stream]
                if not settled and not self._closed:
                    self._changed.wait(delay)
            delay = _FIRST_POLL_SECONDS if settled else min(1.5 * delay, _LONGEST_POLL_SECONDS)

    def _settle(self, stream: Future[OpenedStream], lane: int, request: int) -> bool:
        if stream.cancelled():
            return True
        draw = self._queue.decision(lane, request)
        if draw == PENDING:
            return False
        assert self._allowed is not None
        if draw == NONE or not self._allowed(draw) or not stream.set_running_or_notify_cancel():
            return True  # the lane opens it itself
        try:
            with worker_info_hidden:
                opened = self._open_at(draw, lane)
        except BaseException as error:  # even sys.exit() in user code: otherwise the lane would wait for ever
            stream.set_exception(error)
            return True
        with self._changed:
            if self._closed:  # `close` waits only a limited time, and no lane takes this stream after it
                with worker_info_hidden:
                    opened.close()
            else:
                stream.set_result(opened)
        return True
