"""Opens what lanes have reserved before they need it, in a background thread.

The thread or the lane opens a source, whichever comes first. The other waits or leaves it alone, so calls on one stream
never overlap.

Guarantee: an error is kept, and raised when the lane takes the stream, not earlier and nowhere else. The thread is
started with the first reservation, and only runs code of sources that may be opened early.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future

from stream_dataloader._reading.source_queue import SourceQueue
from stream_dataloader._reading.stream import OpenedStream
from stream_dataloader._schedule.rules import NONE, PENDING

_FIRST_POLL_SECONDS = 100e-6
_LONGEST_POLL_SECONDS = 5e-3
_LONGEST_JOIN_SECONDS = 1.0


class EarlyOpener:
    """The streams of one reader's reservations."""

    def __init__(
        self, queue: SourceQueue, allowed: Callable[[int], bool], open_at: Callable[[int, int], OpenedStream]
    ) -> None:
        self._queue, self._allowed, self._open_at = queue, allowed, open_at
        self._reserved: defaultdict[int, deque[Future[OpenedStream]]] = defaultdict(deque)  # by lane, in its order
        self._waiting: dict[Future[OpenedStream], tuple[int, int]] = {}  # lane and ticket
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def reserve(self, lane: int, ticket: int) -> None:
        """Open the stream of a lane's next reservation as soon as that may be."""
        with self._changed:
            stream: Future[OpenedStream] = Future()
            self._reserved[lane].append(stream)
            self._waiting[stream] = lane, ticket
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="stream-opener", daemon=True)
                self._thread.start()
            self._changed.notify()

    def take(self, lane: int) -> Future[OpenedStream] | None:
        """A lane's first reservation, if its stream is open or being opened; None: the lane opens it."""
        stream = self._reserved[lane].popleft() if self._reserved[lane] else None
        return None if stream is None or stream.cancel() else stream

    def forget(self, lane: int) -> None:
        """Keep off a lane's reservations, which were refused."""
        while self._reserved[lane]:
            self._reserved[lane].popleft().cancel()

    def close(self) -> None:
        """Open nothing any more, end the thread and close what no lane took.

        A thread that is stuck in user code is left to end by itself.
        """
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
            settled = [stream for stream, (lane, ticket) in waiting if self._settle(stream, lane, ticket)]
            with self._changed:
                for stream in settled:
                    del self._waiting[stream]
                if not settled and not self._closed:
                    self._changed.wait(delay)
            delay = _FIRST_POLL_SECONDS if settled else min(1.5 * delay, _LONGEST_POLL_SECONDS)

    def _settle(self, stream: Future[OpenedStream], lane: int, ticket: int) -> bool:
        """Open the stream of a ticket if it is granted and may be; False if that is not decided yet."""
        if stream.cancelled():
            return True
        grant = self._queue.decision(lane, ticket)
        if grant == PENDING:
            return False
        if grant == NONE or not self._allowed(grant) or not stream.set_running_or_notify_cancel():
            return True  # left to the lane
        try:
            opened = self._open_at(grant, lane)
        except BaseException as error:  # sys.exit() in user code, say: the lane that waits must learn of it
            stream.set_exception(error)
            return True
        with self._changed:
            if self._closed:  # `close` did not wait so long: no lane takes it any more
                opened.close()
            else:
                stream.set_result(opened)
        return True
