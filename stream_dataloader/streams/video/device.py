"""Decoding of videos by a GPU's own decoder (NVIDIA's NVDEC), through PyAV.

Guarantee: each frame was decoded by the device; FFmpeg alone would silently use the CPU. Frames are copied to host
memory, semi-planar, and are then handled like the CPU's.
"""

from __future__ import annotations

import re
from typing import Any

import av
import av.container
import av.error
from av.codec.hwaccel import HWAccel, hwdevices_available
from av.video.reformatter import VideoReformatter

from stream_dataloader._engine.notices import warn
from stream_dataloader.errors import DeviceError
from stream_dataloader.streams._media.container import (
    ANY_METADATA,
    choose_stream,
    drop_reserved_tags,
    ffmpeg_path,
    file_options,
    open_container,
)
from stream_dataloader.streams._media.section import check_file

__all__ = ["DeviceDecoder", "device_of", "tell_fallback"]

_DEVICE = re.compile(r"cuda(?::([0-9]+))?")

#: FFmpeg uses the process's primary context, unless torch uses it.
_CONTEXTS: tuple[dict[str, Any], ...] = ({"primary_ctx": "1"}, {})

#: Formats that libswscale converts in another way than planar ones.
_PLANAR = {"p010le": "yuv420p10le", "p012le": "yuv420p12le", "p016le": "yuv420p16le"}

_NO_DECODER = "FFmpeg's decoder for it does not use the device"

_warned: set[tuple[str, str]] = set()  # device and codec of each fallback that this process has warned about


def device_of(device: Any) -> str | None:
    """Return the device that an option names, or None for the CPU."""
    name = "cpu" if device is None else str(device)
    if name == "cpu":
        return None
    if _DEVICE.fullmatch(name):
        return name
    raise ValueError(f'device is {device!r}; give None or "cpu", or "cuda" or "cuda:1"')


class DeviceDecoder:
    """Opener of one video with a device's decoder, which checks that the device decoded the frames."""

    def __init__(self, path: str, index: int, device: str) -> None:
        self._path = path
        self._index = index
        self._device = device
        self._codec = ""
        self._begun = False
        self._size: tuple[int, int] | None = None
        self._reformatter = VideoReformatter()

    def open(self) -> av.container.InputContainer:
        """Open the file with decoders on the device. The caller must close it."""
        path = check_file(self._path)
        if "cuda" not in hwdevices_available():
            raise self._not_opened("the FFmpeg of this PyAV was built without CUDA")
        index, problem = self._device.partition(":")[2] or None, ""
        for context in _CONTEXTS:
            device = HWAccel("cuda", index, allow_software_fallback=False, options=context)
            try:
                opened: av.container.InputContainer = av.open(
                    ffmpeg_path(path), "r", hwaccel=device, options=file_options(), **ANY_METADATA
                )
                return opened
            except av.error.FFmpegError as error:
                problem = str(error.strerror)
            except RuntimeError:  # PyAV found no stream that has a decoder on the device
                raise self._not_opened(_NO_DECODER) from None
        why = "there is no such GPU or driver, its memory is full, or this process was forked after CUDA was used"
        raise self._not_opened(f'it does not come up ({problem}): {why}; multiprocessing_context="spawn" helps')

    def _not_opened(self, why: str) -> DeviceError:
        """Return the device's error; raise an error of the file here if the file is at fault."""
        with open_container(self._path) as container:
            self._codec = choose_stream(container, "video", self._index).codec_context.name
        return self._refused(why)

    def _refused(self, why: str) -> DeviceError:
        return DeviceError(
            f"{self._path} ({self._codec}) cannot be decoded by the device {self._device!r}: {why}; use device=None, "
            "or device_fallback=True",
            device=self._device,
            codec=self._codec,
        )

    def check(self, context: Any) -> None:
        """Check that this stream's decoder was set up on the device."""
        self._codec = context.name
        if not context.is_hwaccel:
            raise self._refused(_NO_DECODER)

    def check_able(self, error: av.error.FFmpegError | None) -> None:
        """Raise if `error` is from the device, or if no frame has been decoded."""
        if isinstance(error, av.error.ExternalError):  # from CUDA's library
            raise self._refused(f"it failed ({error.strerror})") from error
        if not self._begun:
            problem = f" ({error.strerror})" if error else ""
            reasons = "the device may lack the profile or the size, or the file is damaged"
            raise self._refused(f"its first frame cannot be decoded{problem}: {reasons}") from error

    def frame(self, frame: Any, context: Any) -> Any:
        """Return a frame as the CPU's decoder would give it; raise if the device did not decode it."""
        if context.pix_fmt != "cuda":
            raise self._refused("FFmpeg decoded it by the CPU")
        size = frame.width, frame.height
        if size != self._size:  # later on, the decoder may be some frames ahead of this one
            if size != (context.width, context.height):
                shown = f"{context.width}x{context.height}"
                raise self._refused(f"its pictures of {shown} are cut out of larger ones")
            self._size = size
        self._begun = True
        drop_reserved_tags(frame)
        planar = _PLANAR.get(frame.format.name)
        return frame if planar is None else self._reformatter.reformat(frame, format=planar, threads=1)


def tell_fallback(error: DeviceError) -> None:
    """Warn that the CPU decodes instead, once in a process for each codec."""
    if (error.device, error.codec) in _warned:
        return
    _warned.add((error.device, error.codec))
    text = f"decoding by the CPU, as device_fallback=True asks for; warned once for each codec. {error}"
    warn(text, 2)
