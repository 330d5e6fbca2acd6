"""Reads a live source in a thread of its own, and connects again when the source is lost.

::

    connect() --> frames --> [ queue of buffer_frames ] --> get()
        ^            |         full: "latest" drops its oldest frame and counts it, "all" has the source wait
        +-- wait <---+ an end or an error: 0.5 s, 1 s, 2 s, ... until a frame comes; too often in a row: the error

Guarantee: a reader is never behind by more than the queue, it counts every frame that it drops, and it ends with
`close`, or with one error that says why it gave up.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

__all__ = ["Arrival", "Frame", "LiveReader", "Retry"]

_LONGEST_JOIN_SECONDS = 1.0

_log = logging.getLogger("stream_dataloader")


class Frame(NamedTuple):
    """A picture as it came in.

    Attributes:
        image: The backend's own.
        pts_seconds: The stream's time stamp; NaN if it has none.
        lost: How many seem to be missing before it.
    """

    image: Any
    pts_seconds: float = math.nan
    lost: int = 0


class Arrival(NamedTuple):
    """A frame with the circumstances of its arrival.

    Attributes:
        time_seconds: When it came in, by `time.time`.
        dropped: How many frames came in since the one before and were dropped.
        connection: How often the source had been connected again.
    """

    frame: Frame
    time_seconds: float
    dropped: int
    connection: int


class Retry(NamedTuple):
    """When to connect again.

    Attributes:
        tries: How often in a row without a frame; None has no limit.
        first_seconds: The first wait; each further one is twice as long.
        longest_seconds: The longest.
    """

    tries: int | None
    first_seconds: float
    longest_seconds: float


class LiveReader:
    """Reads a live source from now on; the first connection is made at once, and must succeed.

    Args:
        name: Of the source, for messages.
        connect: Connects, and yields frames as they come in. It yields None now and then, so that the reader can end.
            It runs in the reader's thread. Its first item comes once it is connected.
        keep: What to do with a frame when the queue is full: `"latest"` or `"all"`.
        buffer_frames: The length of the queue.
        fps: The most frames a second to keep, evenly; None keeps all.
        retry: When to connect again.
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[], Generator[Frame | None, None, None]],
        *,
        keep: str,
        buffer_frames: int,
        fps: float | None,
        retry: Retry,
    ) -> None:
        self._name = name
        self._connect = connect
        self._keep_all = keep == "all"
        self._retry = retry
        self._buffer_frames = buffer_frames
        self._fps = fps
        self._changed = threading.Condition()
        self._queue: deque[Arrival] = deque()
        self._dropped = self._dropped_lost = 0  # between the frame that was got last and the queue's first
        self._connection = -1  # no connection had a frame so far
        self._error: Exception | None = None
        self._closed = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name=f"camera {name}", daemon=True)
        self._thread.start()

    def get(self) -> Arrival | None:
        """The next frame, once there is one; None when closed.

        Raises:
            ConnectionError: The source was lost, or cannot be reached.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._error or self._closed)
            if self._closed:
                return None
            if not self._queue:
                assert self._error is not None
                raise self._error
            arrival = self._queue.popleft()
            frame = arrival.frame._replace(lost=arrival.frame.lost + self._dropped_lost)
            arrival = arrival._replace(frame=frame, dropped=self._dropped)
            self._dropped = self._dropped_lost = 0
            self._changed.notify_all()  # there is room
        return arrival

    def wait_for_first(self) -> None:
        """Wait for the first frame; raises what `get` would."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._error or self._closed)
            if self._error and not self._queue:
                raise self._error

    def close(self) -> None:
        """End the thread. If it waits in a call of its library, it ends with that call's time limit."""
        if os.getpid() != self._process:  # a forked copy: it has no such thread, and nobody frees its lock
            return
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(_LONGEST_JOIN_SECONDS)

    def _run(self) -> None:
        failed, since = 0, time.monotonic()
        while not self._closed:
            had, reason = self._connection, "the stream ended"
            cause: Exception | None = None
            try:
                self._read()
            except Exception as error:
                reason, cause = str(error) or type(error).__name__, error
            if self._connection > had:
                failed, since = 0, time.monotonic()
            else:
                failed += 1
            if self._connection < 0 or (self._retry.tries is not None and failed >= self._retry.tries):
                self._give_up(reason, cause, failed, time.monotonic() - since)
                return
            wait = min(self._retry.first_seconds * 2.0 ** min(failed, 60), self._retry.longest_seconds)
            with self._changed:
                if not self._closed:
                    _log.warning(
                        "%s: %s; connecting again in %.1f s, try %d of %s",
                        *(self._name, reason, wait, failed + 1, self._retry.tries or "any number"),
                    )
                self._changed.wait_for(lambda: self._closed, wait)

    def _give_up(self, reason: str, cause: Exception | None, failed: int, seconds: float) -> None:
        message = f"{self._name}: {reason}"
        if self._connection >= 0 and failed:
            message = (
                f"{self._name}: lost, and gave up after {failed} tries in {seconds:.1f} s to connect again; the last: "
                f"{reason}; if it may be away for longer, raise reconnect_tries ({self._retry.tries}; None: for ever)"
            )
        elif self._connection >= 0:
            message += "; reconnect_tries is 0"
        error = ConnectionError(message)
        error.__cause__ = cause
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _read(self) -> None:
        """One connection, to its end."""
        had, due, lost = self._connection, -math.inf, 0
        period = 1 / self._fps if self._fps else 0.0
        with contextlib.closing(self._connect()) as frames:
            for frame in frames:
                now = time.time()
                if self._closed:
                    return
                if frame is None:
                    continue
                self._connection = had + 1
                lost += frame.lost
                if period:
                    moment = now if math.isnan(frame.pts_seconds) else frame.pts_seconds
                    early = due - moment
                    # A frame that is early by more than that is not early: the source's clock was set back. One that
                    # is early by less than a hundredth is on time; time stamps are rounded.
                    if 0.01 * period < early < 2 * period:
                        continue
                    due = due + period if abs(early) < period else moment + period
                self._put(Arrival(frame._replace(lost=lost), now, 0, self._connection))
                lost = 0

    def _put(self, arrival: Arrival) -> None:
        with self._changed:
            if self._keep_all:
                self._changed.wait_for(lambda: self._closed or len(self._queue) < self._buffer_frames)
            elif len(self._queue) >= self._buffer_frames:
                self._dropped += 1
                self._dropped_lost += self._queue.popleft().frame.lost
            if not self._closed:
                self._queue.append(arrival)
                self._changed.notify_all()
