"""Reads a camera in a thread of its own, by PyAV or OpenCV, and connects again when it is lost.

::

    connection --> frames --> [ queue of buffer_frames ] --> get()
        ^            |         full: "latest" drops its oldest frame and counts it, "all" has the camera wait
        +-- wait <---+ an end or an error: 0.5 s, 1 s, 2 s, ... until a frame comes; too often in a row: the error

Guarantee: a reader is never behind by more than the queue, it counts every frame that it drops, and it ends with
`close`, or with one `ConnectionError` that says why it gave up. Nothing waits for longer than `timeout_seconds`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

__all__ = ["Frame", "LiveReader", "is_device"]

_LONGEST_JOIN_SECONDS = 1.0
_LONGEST_GAP_SECONDS = 60.0  # a longer gap means that the camera's clock was set

_log = logging.getLogger("stream_dataloader")


@dataclass(slots=True)
class Frame:
    """A picture as PyAV or OpenCV returns it, and how it came in; see `CameraStream` for the numbers."""

    image: Any
    pts_seconds: float = math.nan
    lost: int = 0
    time_seconds: float = math.nan
    dropped: int = 0
    connection: int = 0


class LiveReader:
    """Reads a camera, by its index, device or URL, from now on; the first connection must succeed.

    Errors call it `name`; `options` is a `CameraStream`.
    """

    def __init__(self, name: str, address: int | str, by_opencv: bool, options: Any) -> None:
        self._name = name
        self._address = address
        self._connect = _opencv_frames if by_opencv else _av_frames
        self._options = options
        self._changed = threading.Condition()
        self._queue: deque[Frame] = deque()
        self._dropped = self._dropped_lost = 0  # between the frame that was got last and the queue's first
        self._connection = -1  # no connection had a frame so far
        self._error: Exception | None = None
        self._closed = False
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name=f"camera {name}", daemon=True)
        self._thread.start()

    def wait(self) -> bool:
        """Wait for a frame; False when closed. Raises a ConnectionError if the camera was lost or never reached."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._error or self._closed)
            if self._error and not self._queue and not self._closed:
                raise self._error
            return not self._closed

    def get(self) -> Frame | None:
        """The next frame, once there is one; None when closed. Raises what `wait` does."""
        with self._changed:
            if not self.wait():
                return None
            frame = self._queue.popleft()
            frame.dropped, self._dropped = self._dropped, 0
            frame.lost, self._dropped_lost = frame.lost + self._dropped_lost, 0
            self._changed.notify_all()  # there is room
            return frame

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
        tries, (first_wait, longest_wait) = self._options.reconnect_tries, self._options.reconnect_seconds
        failed, since = 0, time.monotonic()
        while not self._closed:
            had, reason = self._connection, "the stream ended"
            cause: Exception | None = None
            try:
                self._read()
            except Exception as error:
                reason, cause = str(error) or type(error).__name__, error
            failed += 1
            if self._connection > had:
                failed, since = 0, time.monotonic()
            if self._connection < 0 or (tries is not None and failed >= tries):
                self._give_up(reason, cause, failed, time.monotonic() - since)
                return
            wait = min(first_wait * 2.0 ** min(failed, 60), longest_wait)
            with self._changed:
                if not self._closed:
                    again = f"connecting again in {wait:.1f} s, try {failed + 1} of {tries or 'any number'}"
                    _log.warning("%s: %s; %s", self._name, reason, again)
                self._changed.wait_for(lambda: self._closed, wait)

    def _give_up(self, reason: str, cause: Exception | None, failed: int, seconds: float) -> None:
        tries = self._options.reconnect_tries
        if self._connection >= 0 and failed:
            reason = (
                f"lost, and gave up after {failed} tries in {seconds:.1f} s to connect again; the last: {reason}; if "
                f"it may be away for longer, raise reconnect_tries ({tries}; None: no limit)"
            )
        elif self._connection >= 0:
            reason += "; reconnect_tries is 0"
        error = ConnectionError(f"{self._name}: {reason}")
        error.__cause__ = cause
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _read(self) -> None:
        """One connection, to its end."""
        had, due, lost = self._connection, -math.inf, 0
        period = 1 / self._options.fps if self._options.fps else 0.0
        with contextlib.closing(self._connect(self._address, self._options)) as frames:
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
                frame.lost, frame.time_seconds, frame.connection = lost, now, self._connection
                self._put(frame)
                lost = 0

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


def is_device(address: int | str) -> bool:
    """Whether this is a camera of this machine, by index or path, and no URL."""
    return isinstance(address, int) or "://" not in address


def _av_frames(address: int | str, options: Any) -> Generator[Frame | None, None, None]:
    """One connection, by PyAV: frames, and None for packets without one; every failure is a `ConnectionError`."""
    import av

    from stream_dataloader.streams._media.av_versions import ANY_METADATA

    name, limit, began = str(address), options.timeout_seconds, time.monotonic()
    if isinstance(address, int):
        name = f"/dev/video{address}"
    try:
        container = av.open(
            name,
            format="v4l2" if is_device(address) else None,
            timeout=(limit, limit),
            options={**({"rtsp_transport": "tcp"} if name.startswith("rtsp") else {}), **options.options},
            **ANY_METADATA,
        )
    except av.error.FFmpegError as error:
        raise _cannot_open(error.strerror, began, limit) from error
    with container:
        if not container.streams.video:
            raise ConnectionError("it has no video")
        video: Any = container.streams.video[0]
        video.thread_type, video.codec_context.thread_count = "NONE", 1  # frame threads would delay each frame
        # Without a rate (MJPEG) FFmpeg makes time stamps up, so gaps in them say nothing.
        period = 1 / float(video.average_rate) if video.average_rate else None
        packets, broken, last, frame_came = container.demux(video), 0, math.nan, time.monotonic()
        while True:
            try:
                packet: Any = next(packets, None)
            except av.error.ExitError as error:
                raise _nothing_came(limit) from error
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
                seconds = math.nan if period is None or frame.time is None else frame.time
                yield Frame(frame, seconds, broken if period is None else _missing(seconds - last, period, broken))
                broken, last, frame_came = 0, seconds, time.monotonic()
            if time.monotonic() - frame_came > limit:
                raise ConnectionError(f"no frame could be decoded for timeout_seconds={limit:g}")


def _missing(gap_seconds: float, period_seconds: float, broken: int) -> int:
    """How many frames are missing in a gap between two time stamps, `broken` of which came in damaged."""
    if math.isnan(gap_seconds):  # before the first
        return 0
    return max(broken, round(gap_seconds / period_seconds) - 1) if gap_seconds < _LONGEST_GAP_SECONDS else broken


def _opencv_frames(address: int | str, options: Any) -> Generator[Frame, None, None]:
    """As `_av_frames`, by OpenCV. A device's waits are its own (10 s, `OPENCV_VIDEOIO_V4L_SELECT_TIMEOUT`)."""
    import cv2

    limit, began = options.timeout_seconds, time.monotonic()
    if is_device(address):
        capture = cv2.VideoCapture(address)
    else:
        milliseconds = math.ceil(1000 * limit)
        wanted = [cv2.CAP_PROP_OPEN_TIMEOUT_MSEC, milliseconds, cv2.CAP_PROP_READ_TIMEOUT_MSEC, milliseconds]
        if hasattr(cv2, "CAP_PROP_N_THREADS"):  # in newer versions, which have a thread a core without it
            wanted += [cv2.CAP_PROP_N_THREADS, 1]
        capture = cv2.VideoCapture(address, cv2.CAP_FFMPEG, wanted)
    try:
        if not capture.isOpened():
            raise _cannot_open("OpenCV does not tell why", began, limit)
        while True:
            began = time.monotonic()
            read, image = capture.read()
            if read:
                yield Frame(image)
            elif _late(began, limit):
                raise _nothing_came(limit)
            else:
                return
    finally:
        capture.release()


def _late(began: float, limit: float) -> bool:
    return time.monotonic() - began >= 0.9 * limit


def _cannot_open(reason: Any, began: float, limit: float) -> ConnectionError:
    if _late(began, limit):
        reason = f"no answer within timeout_seconds={limit:g}"
    return ConnectionError(f"cannot be opened: {reason}")


def _nothing_came(limit: float) -> ConnectionError:
    return ConnectionError(f"nothing came in for timeout_seconds={limit:g}")
