"""Opening of media files with PyAV. A file without the requested track raises an error that names the file.

All differences between the supported versions of PyAV, 17 and later, are handled here.
"""

from __future__ import annotations

import functools
import os
from fractions import Fraction
from typing import Any, Literal

import av
import av.container
import av.error
from av.sidedata.sidedata import SideDataContainer

from stream_dataloader._engine.descriptors import above_standard
from stream_dataloader.streams._media.extent import missing, runs_over, second_file, surplus
from stream_dataloader.streams._media.limits import DEFAULT, Limits
from stream_dataloader.streams._media.section import check_file

__all__ = [
    "ACCURATE_BILINEAR",
    "ANY_METADATA",
    "check_not_cut",
    "choose_stream",
    "drop_reserved_tags",
    "ffmpeg_path",
    "file_options",
    "frame_rate",
    "most_pixels",
    "open_container",
    "runs_over",
    "side_data",
    "ticks_a_frame",
    "ticks_of_untimed",
]

_MAJOR = int(av.__version__.split(".")[0])

#: Options for `av.open`: a title that is not UTF-8 must not raise an error. In PyAV 19 it never does.
ANY_METADATA: dict[str, Any] = {"metadata_errors": "replace"} if _MAJOR < 19 else {}

#: SWS_BILINEAR | SWS_ACCURATE_RND; `Interpolation` names them only in PyAV 18 and later.
ACCURATE_BILINEAR = 0x2 | 0x40000

#: Formats whose files name other files or URLs, which FFmpeg would open.
_NAMING = {
    "concat",
    "concatf",
    "dash",
    "hls",
    "imf",
    "rtsp",
    "sdp",
    "vobsub",
    "webm_dash_manifest",
    "avisynth",
    "vapoursynth",
}
_NAMING_BEGINS = (b"#EXTM3U", b"<?xml", b"<MPD", b"ffconcat", b"v=0", b"# VobSub")

_RESERVED, _UNSPECIFIED = 0, 2  # of AVColorPrimaries and AVColorTransferCharacteristic
_NO_TIMESTAMPS = 0x80  # AVFMT_NOTIMESTAMPS
_ATTACHED_PICTURE = 0x400  # AV_DISPOSITION_ATTACHED_PIC: the cover picture of a recording is not a video


def open_container(path: str) -> av.container.InputContainer:
    """Open a media file, which the caller must close."""
    path = check_file(path)
    how = file_options()
    if runs_over(path):
        how |= {"ignore_length": "1"}  # for FFmpeg's WAV demuxer: the sound lasts to the end of the file
    try:
        with above_standard():
            container: av.container.InputContainer = av.open(ffmpeg_path(path), "r", options=how, **ANY_METADATA)
    except av.error.FFmpegError as error:
        with open(path, "rb") as file:
            if file.read(16).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(_NAMING_BEGINS):
                remedy = "join what it names to one file: ffmpeg -i PLAYLIST -c copy JOINED.mp4"
                raise ValueError(f"{path} is a playlist, which names other files; {remedy}") from error
        raise ValueError(f"{path} cannot be read as a media file ({error.strerror}); is it cut off?") from error
    return container


def file_options() -> dict[str, str]:
    """Return FFmpeg's options for a file: the allowed formats, and that a name such as `%d.png` is not a pattern.

    FFmpeg checks these before a format opens other files.
    """
    return {"format_whitelist": _formats(), "pattern_type": "none"}


@functools.cache
def _formats() -> str:
    return ",".join(sorted(av.formats_available - _NAMING))


def ffmpeg_path(path: str) -> str:
    """Return a file's path in a form in which FFmpeg takes no colon (`12:00.mp4`) for the end of a protocol."""
    return os.path.join(os.curdir, path) if ":" in path and not os.path.isabs(path) else path


def choose_stream(
    container: av.container.InputContainer,
    kind: Literal["video", "audio"],
    index: int,
    limits: Limits | None = None,
) -> Any:
    """Return track `index` of a kind, set to decode with one thread."""
    streams = [s for s in container.streams if s.type == kind and not s.disposition.value & _ATTACHED_PICTURE]
    if not 0 <= index < len(streams):
        if (what := missing(container.name)) is not None:  # FFmpeg shows the tracks that it had read until then
            raise ValueError(f"{container.name} is cut off: {what}; fetch it again")
        kinds = ", ".join(sorted({s.type for s in container.streams}))
        there = f"it has {len(streams)} of them, numbered from 0" if streams else f"it has only {kinds}"
        if not kinds:
            there = "no track at all is described in it: it was cut off, or is no media file; fetch it again"
        raise ValueError(f"{container.name} has no {kind} track {index}; {there}")
    stream: Any = streams[index]
    if stream.codec_context is None:
        raise ValueError(f"{container.name}: FFmpeg has no decoder for its {kind} track {index}")
    stream.thread_type = "NONE"
    stream.codec_context.thread_count = 1
    if kind == "video" and not stream.codec_context.is_hwaccel:
        stream.codec_context.options = {"max_pixels": str(most_pixels(limits or DEFAULT))}
    others: list[Any] = [other for other in container.streams if other is not stream]
    for other in others:
        other.discard = type(other.discard)["all"]
    return stream


def most_pixels(limits: Limits) -> int:
    """Return the largest number of pixels that FFmpeg may decode a frame to.

    FFmpeg needs this limit because later frames may be larger than the header says. Decoders work on blocks, so a frame
    may take some more pixels than it shows.
    """
    return min(limits.picture_pixels + limits.picture_pixels // 8 + (1 << 16), (1 << 31) - 1)


def ticks_of_untimed(container: av.container.InputContainer, stream: Any) -> Fraction | None:
    """Return the duration of a frame in the stream's time base if the container has no times of display, else None."""
    # Bare streams have no times. AVI and ASF have times of decoding.
    disordered = container.format.name in ("avi", "asf") and stream.codec_context.has_b_frames
    if not disordered and not int(container.format.flags) & _NO_TIMESTAMPS:
        return None
    return ticks_a_frame(stream)


def frame_rate(stream: Any) -> Fraction:
    """Return the average number of frames per second."""
    return Fraction(stream.average_rate or stream.guessed_rate or 25)


def ticks_a_frame(stream: Any) -> Fraction:
    """Return the average duration of a frame, in the stream's time base."""
    return 1 / (frame_rate(stream) * Fraction(stream.time_base))


def check_not_cut(path: str) -> None:
    """Raise if a file is not as long as its own headers say, or if another file was appended."""
    if (begin := second_file(path)) is not None:
        remedy = f"join them by ffmpeg -f concat -i LIST -c copy JOINED{os.path.splitext(path)[1]}"
        raise ValueError(f"{path} is two files: another one begins at byte {begin}, and is not read; {remedy}")
    if (what := surplus(path)) is not None:
        remedy = "have its sizes written again: ffmpeg -ignore_length 1 -i FILE -c copy -rf64 auto NEW.wav"
        raise ValueError(f"{path} is longer than its header says: {what}; {remedy}")
    if (what := missing(path)) is not None:
        raise ValueError(f'{path} is cut off: {what}; fetch it again, or use on_corrupt="drop" for what there is')


def drop_reserved_tags(frame: av.VideoFrame) -> None:
    """Remove reserved colour tags that NVIDIA's decoder sets and PyAV before 18 cannot convert."""
    for tag in ("color_primaries", "color_trc") if _MAJOR < 18 else ():
        if getattr(frame, tag) == _RESERVED:
            setattr(frame, tag, _UNSPECIFIED)


def side_data(frame: av.VideoFrame) -> SideDataContainer:
    """Return a frame's side data. Before PyAV 19, `frame.side_data` is freed only by the garbage collector."""
    return SideDataContainer(frame)  # type: ignore[call-arg]
