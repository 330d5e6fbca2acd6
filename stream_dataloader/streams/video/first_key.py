"""First packet of a video at which decoding may begin.

The container's mark is a claim that may be missing: some formats have no marks (RoQ, SWF), and some programs forget
them. Frames must not be left out for that reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import av.error
import av.video.frame

from stream_dataloader.streams._media.container import choose_stream, open_container

__all__ = ["from_first_key", "is_key_picture"]

_INTRA = av.video.frame.PictureType.I


def is_key_picture(frame: Any) -> bool:
    """Return True if a decoded frame refers to no other frame, according to its decoder."""
    return bool(frame.key_frame) and frame.pict_type == _INTRA


def from_first_key(path: str, track: int, packets: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Yield packets from the first one that is marked as a key frame, or whose picture is one if decoded alone.

    If there is none, yield all packets. `packets()` reads them from the beginning; None among them is the end.
    """
    found = packets()
    with ExitStack() as stack:
        video: Any = None
        for packet in found:
            if packet is None:
                break
            if video is None and not packet.is_keyframe:  # rare, so the decoder is made only here
                video = choose_stream(stack.enter_context(open_container(path)), "video", track)
            if packet.is_keyframe or _decodes_alone(video, packet):
                stack.close()
                yield packet
                yield from found
                return
    yield from packets()


def _decodes_alone(video: Any, packet: Any) -> bool:
    try:
        frames = [*video.decode(packet), *video.decode(None)]
    except av.error.FFmpegError:
        frames = []
    video.codec_context.flush_buffers()
    return bool(frames) and all(is_key_picture(frame) and not frame.is_corrupt for frame in frames)
