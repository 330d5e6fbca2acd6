"""One connection to a camera: its frames, as PyAV or OpenCV returns them, until the connection ends.

Guarantee: every failure is a `ConnectionError` that says what went wrong. Nothing waits for longer than
`timeout_seconds`, and nothing stays open when the generator is closed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Mapping
from typing import Any

from stream_dataloader.streams.camera.live import Frame

__all__ = ["av_frames", "is_device", "opencv_frames"]

_LONGEST_GAP_SECONDS = 60.0  # a longer gap means that the camera's clock was set


def is_device(address: int | str) -> bool:
    """Whether this is a camera of this machine, by index or path, and no URL."""
    return isinstance(address, int) or "://" not in address


def av_frames(
    address: int | str, *, timeout_seconds: float, options: Mapping[str, str], drop_corrupt: bool
) -> Generator[Frame | None, None, None]:
    """Frames as `av.VideoFrame`, by PyAV.

    Args:
        address: The index or path of a device, or a URL.
        timeout_seconds: The longest wait for a connection, and for a frame.
        options: FFmpeg's.
        drop_corrupt: Count frames that were decoded with errors as lost.

    Yields:
        Frames, and None for packets without one.

    Raises:
        ConnectionError: It cannot be opened or read, or nothing comes.
    """
    import av

    from stream_dataloader.streams._media.av_versions import ANY_METADATA

    name = f"/dev/video{address}" if isinstance(address, int) else address
    known = {"rtsp_transport": "tcp"} if name.startswith("rtsp") else {}
    began = time.monotonic()
    try:
        container = av.open(
            name,
            format="v4l2" if is_device(address) else None,
            timeout=(timeout_seconds, timeout_seconds),
            options={**known, **options},
            **ANY_METADATA,
        )
    except av.error.FFmpegError as error:
        raise ConnectionError(_cannot_open(error.strerror, began, timeout_seconds)) from error
    with container:
        if not container.streams.video:
            raise ConnectionError("it has no video")
        yield from _decoded(container, timeout_seconds, drop_corrupt)


def _decoded(container: Any, timeout_seconds: float, drop_corrupt: bool) -> Generator[Frame | None, None, None]:
    import av

    video = container.streams.video[0]
    video.thread_type, video.codec_context.thread_count = "NONE", 1  # frame threads would delay each frame
    # Without a rate (MJPEG) FFmpeg makes time stamps up, so gaps in them say nothing.
    gaps = _Gaps(1 / float(video.average_rate)) if video.average_rate else None
    packets, broken, frame_came = container.demux(video), 0, time.monotonic()
    while True:
        try:
            packet = next(packets, None)
        except av.error.ExitError as error:
            raise _nothing_came(timeout_seconds) from error
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
            if drop_corrupt and frame.is_corrupt:
                broken += 1
                continue
            seconds = math.nan if gaps is None or frame.time is None else frame.time
            yield Frame(frame, seconds, broken if gaps is None else gaps.missing(seconds, broken))
            broken, frame_came = 0, time.monotonic()
        if time.monotonic() - frame_came > timeout_seconds:
            raise ConnectionError(f"no frame could be decoded for timeout_seconds={timeout_seconds:g}")


class _Gaps:
    """Tells from time stamps how many frames are missing.

    Args:
        period_seconds: From frame to frame.
    """

    def __init__(self, period_seconds: float) -> None:
        self._period = period_seconds
        self._last = math.nan

    def missing(self, seconds: float, broken: int) -> int:
        """How many frames are missing before the frame of this time stamp, `broken` of which came in damaged."""
        gap, self._last = seconds - self._last, seconds
        if math.isnan(gap):  # the first
            return 0
        return max(broken, round(gap / self._period) - 1) if gap < _LONGEST_GAP_SECONDS else broken


def opencv_frames(address: int | str, *, timeout_seconds: float) -> Generator[Frame | None, None, None]:
    """Frames as `(H, W, 3)` BGR uint8, by OpenCV. Otherwise as `av_frames`.

    A device's waits are OpenCV's own (10 s, `OPENCV_VIDEOIO_V4L_SELECT_TIMEOUT`).
    """
    import cv2

    began, milliseconds = time.monotonic(), math.ceil(1000 * timeout_seconds)
    if is_device(address):
        capture = cv2.VideoCapture(address)
    else:
        options = [cv2.CAP_PROP_OPEN_TIMEOUT_MSEC, milliseconds, cv2.CAP_PROP_READ_TIMEOUT_MSEC, milliseconds]
        if hasattr(cv2, "CAP_PROP_N_THREADS"):  # in newer versions, which have a thread a core without it
            options += [cv2.CAP_PROP_N_THREADS, 1]
        capture = cv2.VideoCapture(address, cv2.CAP_FFMPEG, options)
    try:
        if not capture.isOpened():
            raise ConnectionError(_cannot_open("OpenCV does not tell why", began, timeout_seconds))
        while True:
            began = time.monotonic()
            read, image = capture.read()
            if not read and _late(began, timeout_seconds):
                raise _nothing_came(timeout_seconds)
            if not read:
                return
            yield Frame(image)
    finally:
        capture.release()


def _late(began: float, timeout_seconds: float) -> bool:
    return time.monotonic() - began >= 0.9 * timeout_seconds


def _cannot_open(reason: Any, began: float, timeout_seconds: float) -> str:
    if _late(began, timeout_seconds):
        reason = f"no answer within timeout_seconds={timeout_seconds:g}"
    return f"cannot be opened: {reason}"


def _nothing_came(timeout_seconds: float) -> ConnectionError:
    return ConnectionError(f"nothing came in for timeout_seconds={timeout_seconds:g}")
