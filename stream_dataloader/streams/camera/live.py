"""Reader of a camera in its own thread, which reconnects when the camera is lost.

::

    connection --> frames --> [ queue of buffer_frames ] --> get()
        ^            |         full: "latest" drops its oldest frame and counts it, "all" has the camera wait
        +-- wait <---+ an end or an error: 0.5 s, 1 s, 2 s, ... until a frame comes; too often in a row: the error

Guarantee: a reader is at most the queue behind the camera, and waits at most `timeout_seconds`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

from stream_dataloader._engine.memory.endings import start_thread
from stream_dataloader.errors import shown

__all__ = ["Frame", "LiveReader", "av_frames", "opencv_frames"]

_LONGEST_JOIN_SECONDS = 1.0
_LONGEST_GAP_SECONDS = 60.0  # a longer gap means that the camera's clock was set

_SILENT = "nothing came in for timeout_seconds={:g}"

_log = logging.getLogger("stream_dataloader")


@dataclass(slots=True)
class Frame:
    """A picture with its time of arrival, losses and connection; see `CameraStream`."""

    image: Any
    pts_seconds: float = math.nan
    lost: int = 0
    time_seconds: float = math.nan
    dropped: int = 0
    connection: int = 0


class LiveReader:
    """Reader of the frames that `connect(options)` yields. The first connection must succeed."""

    def __init__(self, name: str, connect: Callable[[Any], Generator[Frame | None, None, None]], options: Any) -> None:
        self._name = name
        self._connect = connect
        self._options = options
        self._changed = threading.Condition()
        self._queue: deque[Frame] = deque()
        self._dropped = self._dropped_lost = 0  # between the last frame delivered and the first one in the queue
        self._connection = -1  # -1: no connection had a frame so far
        self._error: Exception | None = None
        self._closed = False
        self._process = os.getpid()
        self._thread = start_thread(self._run, f"camera {name}")

    def wait(self) -> bool:
        """Wait for a frame; return False when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._error or self._closed)
            if self._error and not self._queue and not self._closed:
                raise self._error
            return not self._closed

    def frames(self) -> Iterator[tuple[Any, Frame]]:
        """Yield pictures of PyAV or OpenCV, each with its `Frame`, until closed."""
        while True:
            with self._changed:
                if not self.wait():
                    return
                frame = self._queue.popleft()
                frame.dropped, self._dropped = self._dropped, 0
                frame.lost, self._dropped_lost = frame.lost + self._dropped_lost, 0
                self._changed.notify_all()  # there is room
            yield frame.image, frame

    def close(self) -> None:
        """End the thread, at the latest after the time limit of its library's call."""
        if os.getpid() != self._process:  # a forked copy has no such thread, and its lock would never be freed
            return
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(_LONGEST_JOIN_SECONDS)

    def _run(self) -> None:
        tries, (first_wait, longest_wait) = self._options.reconnect_tries, self._options.reconnect_seconds
        failed, since = 0, time.monotonic()
        while not self._closed:
            had, error = self._connection, ConnectionError("the stream ended")
            try:
                self._read()
            except Exception as raised:
                error = ConnectionError(str(raised) or type(raised).__name__)
                error.__cause__ = raised
            failed += 1
            if self._connection > had:
                failed, since = 0, time.monotonic()
            wait = min(first_wait * 2.0 ** min(failed, 60), longest_wait)
            with self._changed:
                if self._connection < 0 or (tries is not None and failed >= tries):
                    why = str(error)
                    if self._connection >= 0:
                        tried = f"{failed} tries in {time.monotonic() - since:.1f} s, as reconnect_tries is {tries}"
                        why = f"lost, and gave up after {tried}; the last: {why}"
                    error.args = (f"{self._name}: {why}",)
                    self._error = error
                    self._changed.notify_all()
                    return
                if not self._closed:
                    again = f"connecting again in {wait:.1f} s, try {failed + 1} of {tries or 'any number'}"
                    _log.warning("%s: %s; %s", self._name, shown(error), again)
                self._changed.wait_for(lambda: self._closed, wait)

    def _read(self) -> None:
        """Read one connection to its end."""
        had, due, lost = self._connection, -math.inf, 0
        period = 1 / self._options.fps if self._options.fps else 0.0
        with contextlib.closing(self._connect(self._options)) as frames:
            for frame in frames:
                if self._closed:
                    return
                if frame is None:
                    continue
                frame.time_seconds, frame.connection = time.time(), had + 1
                self._connection = had + 1
                lost += frame.lost
                if period:
                    moment = frame.time_seconds if math.isnan(frame.pts_seconds) else frame.pts_seconds
                    early = due - moment
                    # Time stamps are rounded. A frame earlier than this means that a clock was set back.
                    if 0.01 * period < early < 2 * period:
                        continue
                    due = due + period if abs(early) < period else moment + period
                frame.lost, lost = lost, 0
                self._put(frame)

    def _put(self, frame: Frame) -> None:
        room = self._options.buffer_frames
        with self._changed:
            if self._options.keep == "all":
                self._changed.wait_for(lambda: self._closed or len(self._queue) < room)
            elif len(self._queue) >= room:
                self._dropped += 1
                self._dropped_lost += self._queue.popleft().lost
            if not self._closed:
                self._queue.append(frame)
                self._changed.notify_all()


def av_frames(address: str, options: Any) -> Generator[Frame | None, None, None]:
    """Yield the frames of one connection by PyAV, and None for packets without a frame."""
    import av

    from stream_dataloader.streams._media.container import ANY_METADATA

    limit, is_url = options.timeout_seconds, "://" in address
    with _opening(limit, av.error.FFmpegError):
        container = av.open(
            address,
            format=None if is_url else "v4l2",
            timeout=(limit, limit),
            options={**({"rtsp_transport": "tcp"} if address.startswith("rtsp") else {}), **options.options},
            **ANY_METADATA,
        )
    with container:
        if not container.streams.video:
            raise ConnectionError("it has no video")
        video: Any = container.streams.video[0]
        video.thread_type, video.codec_context.thread_count = "NONE", 1  # frame threads would delay each frame
        # Without a rate (MJPEG) FFmpeg invents time stamps, so gaps in them say nothing.
        period = 1 / float(video.average_rate) if video.average_rate else None
        packets, broken, last, frame_came = container.demux(video), 0, math.nan, time.monotonic()
        while True:
            try:
                packet: Any = next(packets, None)
            except av.error.ExitError as error:
                raise ConnectionError(_SILENT.format(limit)) from error
            except av.error.FFmpegError as error:
                raise ConnectionError(f"the stream ended, or broke off: {error.strerror}") from error
            if packet is None:
                return
            yield None
            try:
                frames = packet.decode()
            except av.error.FFmpegError:  # damaged on its way, or before the first key frame
                frames, broken = [], broken + 1
            for frame in frames:
                if frame.is_corrupt and options.on_corrupt == "drop":
                    broken += 1
                    continue
                seconds, missing = math.nan, broken
                if period is not None:
                    seconds = math.nan if frame.time is None else frame.time
                    gap = seconds - last
                    if math.isnan(gap):  # the first
                        missing = 0
                    elif gap < _LONGEST_GAP_SECONDS:
                        missing = max(broken, round(gap / period) - 1)
                yield Frame(frame, seconds, missing)
                broken, last, frame_came = 0, seconds, time.monotonic()
            if time.monotonic() - frame_came > limit:
                raise ConnectionError(f"no frame could be decoded for timeout_seconds={limit:g}")


def opencv_frames(address: int | str, options: Any) -> Generator[Frame | None, None, None]:
    """Yield frames like `av_frames`, by OpenCV, which has its own waits for devices."""
    import cv2

    limit, wanted = options.timeout_seconds, []
    if isinstance(address, str) and "://" in address:
        milliseconds = math.ceil(1000 * limit)
        wanted = [cv2.CAP_PROP_OPEN_TIMEOUT_MSEC, milliseconds, cv2.CAP_PROP_READ_TIMEOUT_MSEC, milliseconds]
        if hasattr(cv2, "CAP_PROP_N_THREADS"):  # newer versions would use a thread for each core
            wanted += [cv2.CAP_PROP_N_THREADS, 1]
    with _opening(limit, ConnectionError):
        capture = cv2.VideoCapture(address, cv2.CAP_FFMPEG if wanted else cv2.CAP_ANY, wanted)
        if not capture.isOpened():
            raise ConnectionError("OpenCV does not tell why")
    try:
        began = time.monotonic()
        while (found := capture.read())[0]:
            yield Frame(found[1])
            began = time.monotonic()
        if _late(began, limit):
            raise ConnectionError(_SILENT.format(limit))
    finally:
        capture.release()


@contextlib.contextmanager
def _opening(limit: float, failure: type[Exception]) -> Iterator[None]:
    """Turn a failure to connect into a `ConnectionError`."""
    began = time.monotonic()
    try:
        yield
    except failure as error:
        late = f"no answer within timeout_seconds={limit:g}"
        reason = late if _late(began, limit) else getattr(error, "strerror", None) or error
        raise ConnectionError(f"cannot be opened: {reason}") from error


def _late(began: float, limit: float) -> bool:
    return time.monotonic() - began >= 0.9 * limit
