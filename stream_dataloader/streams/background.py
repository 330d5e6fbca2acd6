"""`live`: streams that never block a batch for long, made of streams that wait for cameras, servers or queues.

::

    open_stream(source) --> items --> [ buffer_items ] --> the lane's window     a a a .    padded: nothing came in time
      in a thread of its own          full: it waits                             a a a a

Guarantee: every item is delivered once, in order. A batch waits at most `max_wait_seconds` for all streams of a worker
together, as long as another lane has an item.
"""

from __future__ import annotations

import copy
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from stream_dataloader._engine.hints import hinted
from stream_dataloader._engine.memory.endings import start_thread
from stream_dataloader.errors import shorten
from stream_dataloader.protocols import NOTHING_YET, StreamFactory
from stream_dataloader.stream_info import StreamInfo, run_as, running

__all__ = ["live"]

_SHORTEST_WAIT_SECONDS = 0.001  # so that streams that have nothing do not keep a core busy
_LONGEST_JOIN_SECONDS = 1.0
_REPORT_SECONDS = 10.0  # without an item; each further report comes after twice the time

_log = logging.getLogger("stream_dataloader")


@hinted
def live(open_stream: StreamFactory, max_wait_seconds: float = 0.05, *, buffer_items: int = 32) -> StreamFactory:
    """Let lanes go on without streams that have no item at the moment.

    Each stream is read in a thread of its own. Where no item has arrived in time, the rest of the lane's window is
    padded (`mask` is False), and the stream goes on in the lane's next window. A `RecurrentState` keeps the lane's
    state meanwhile. So one slow camera or server does not hold up the other lanes of a batch.

    Which batch an item is in depends on time. So the dataset needs `deterministic=False`. A batch in which no lane has
    an item is not delivered.

    Args:
        open_stream: Opens a stream that blocks until its next item is there. It is called, iterated and closed in the
            stream's thread, with `get_stream_info()`; objects that streams share must be thread-safe. A parameter
            `start=0` is passed on.
        max_wait_seconds: How long a batch waits for such streams, for all of one worker together. 0: as good as not.
        buffer_items: Number of items that are read ahead of the lane. When there are as many, the stream is not read
            on. 1 gives the newest items of a camera that drops what is not fetched.

    Returns:
        A factory to pass to `StreamDataset` as `open_stream`.

    Raises:
        TypeError: `open_stream` is not callable, or an option is no number.
        ValueError: `max_wait_seconds` is negative, or `buffer_items` is less than 1.

    Example:
        >>> import time
        >>> from stream_dataloader import StreamDataLoader, StreamDataset, streams
        >>> def open_camera(seconds):
        ...     for number in range(3):
        ...         time.sleep(seconds)
        ...         yield number
        >>> factory = streams.live(open_camera, max_wait_seconds=0.01)
        >>> dataset = StreamDataset([0.001, 0.1], factory, batch_size=2, time_steps=1, deterministic=False)
        >>> batches = list(StreamDataLoader(dataset))
        >>> sum(int(batch.mask.sum()) for batch in batches)
        6
    """
    if not callable(open_stream):
        raise TypeError(f"open_stream must be a function that opens a source, and is {shorten(open_stream)}")
    for name, value, least in (("max_wait_seconds", max_wait_seconds, 0), ("buffer_items", buffer_items, 1)):
        if isinstance(value, bool) or not isinstance(value, (int, float) if least == 0 else int):
            raise TypeError(f"{name} must be {'a number' if least == 0 else 'an integer'}, and is {shorten(value)}")
        if not least <= value < float("inf"):
            raise ValueError(f"{name} must be {least} or more, and is {value}")
    return LiveStream(open_stream, float(max_wait_seconds), buffer_items)


class LiveStream:
    """The factory; `__wrapped__` shows the parameters of the user's, such as `start`."""

    reads_in_threads = True  # so `seed_globals` cannot be

    def __init__(self, open_stream: StreamFactory, max_wait_seconds: float, buffer_items: int) -> None:
        self.__wrapped__ = open_stream
        self._max_wait_seconds, self._buffer_items = max_wait_seconds, buffer_items
        self._yields_steps = getattr(open_stream, "_yields_steps", False)

    def __call__(self, source: Any, **given: Any) -> _LiveItems:
        return _LiveItems(self.__wrapped__, source, given, self._max_wait_seconds, self._buffer_items)

    def __repr__(self) -> str:
        options = f"max_wait_seconds={self._max_wait_seconds:g}, buffer_items={self._buffer_items}"
        return f"live({self.__wrapped__!r}, {options})"


class _Deadline(threading.local):
    """The time until which streams of this thread wait, in the step that is being read."""

    step: tuple[int, int] | None = None
    until = 0.0

    def of_step(self, seconds: float) -> float:
        now = time.monotonic()
        # Outside of a worker's step, such as in a loop of the user's, each call has a wait of its own.
        if running.step is None or running.step != self.step:
            self.step, self.until = running.step, now + seconds
        return self.until - now


_deadline = _Deadline()


class _Buffer:
    """The items between the stream's thread and its lane."""

    def __init__(self, room: int) -> None:
        self.changed = threading.Condition()
        self.items: deque[Any] = deque()
        self.error: BaseException | None = None
        self.ended = self.closed = False
        self._room = room

    def put(self, item: Any) -> bool:
        """Add an item once there is room; return False if the lane has left the stream."""
        with self.changed:
            self.changed.wait_for(lambda: self.closed or len(self.items) < self._room)
            if not self.closed:
                self.items.append(item)
                self.changed.notify_all()
            return not self.closed

    def end(self, error: BaseException | None) -> None:
        with self.changed:
            self.ended, self.error = True, error
            self.changed.notify_all()

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.items.clear()
            self.changed.notify_all()


class _LiveItems:
    """The items of one stream, and `NOTHING_YET` where none has arrived."""

    def __init__(
        self, open_stream: Callable[..., Iterable[Any]], source: Any, given: Any, seconds: float, room: int
    ) -> None:
        self._source, self._process = source, os.getpid()
        self._seconds = max(seconds, _SHORTEST_WAIT_SECONDS)
        self._buffer = buffer = _Buffer(room)
        self._came, self._report = time.monotonic(), _REPORT_SECONDS
        info = running.info
        # The thread must not refer to this object, which may be collected before the stream has ended.
        self._thread = start_thread(lambda: _read(open_stream, source, given, info, buffer), "live stream")

    def __iter__(self) -> _LiveItems:
        return self

    def __next__(self) -> Any:
        buffer = self._buffer
        with buffer.changed:
            if not buffer.items and not buffer.ended:
                left = _deadline.of_step(self._seconds)
                if left <= 0 or not buffer.changed.wait_for(lambda: buffer.items or buffer.ended, left):
                    self._report_silence()
                    return NOTHING_YET
            if buffer.items:
                item = buffer.items.popleft()
                buffer.changed.notify_all()
                self._came, self._report = time.monotonic(), _REPORT_SECONDS
                return item
        if buffer.error is None:
            raise StopIteration
        raise buffer.error

    def _report_silence(self) -> None:
        silent = time.monotonic() - self._came
        if silent >= self._report:
            self._report *= 2
            _log.warning("a live stream had no item for %.0f s: %s", silent, shorten(self._source))

    def close(self) -> None:
        """End the stream; a thread that is waiting for an item closes it when the item has come."""
        if os.getpid() != self._process:  # a forked copy has no such thread, and its lock would never be freed
            return
        self._buffer.close()
        if self._thread is not threading.current_thread():
            self._thread.join(_LONGEST_JOIN_SECONDS)


def _read(
    open_stream: Callable[..., Iterable[Any]], source: Any, given: Any, info: StreamInfo | None, buffer: _Buffer
) -> None:
    """Read a stream to its end, or until its lane leaves it; runs in the stream's thread."""
    run_as(info)
    stream: Any = None
    error: BaseException | None = None
    try:
        stream = open_stream(source, **given)
        for item in stream:
            # The stream may reuse an item's memory for the next one, which is read before this one is in a batch.
            if not buffer.put(copy.deepcopy(item)):
                break
    except StopIteration as raised:  # raised by `next` it would look like the stream's end
        error = RuntimeError("open_stream raised StopIteration; pass a default to next()")
        error.__cause__ = raised
    except BaseException as raised:
        error = raised
    try:
        if callable(close := getattr(stream, "close", None)):
            close()
    except Exception as raised:
        text = "closing the stream of %s raised %s; its items were read all the same"
        _log.warning(text, shorten(source), shorten(raised))
    finally:
        buffer.end(error)
