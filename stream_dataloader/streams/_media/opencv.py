"""Import of OpenCV, and images that it decodes. All other code runs without OpenCV.

Guarantee: an image that is cut off or damaged raises an error that names it, and never gives a half-grey picture.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from types import ModuleType
from typing import Any

import numpy as np

from stream_dataloader.streams._media.limits import DEFAULT, Limits

__all__ = ["JPEG_START", "JPEG_TAIL", "check_opencv", "decoded_image", "import_opencv", "jpeg_end"]

_REMEDY = "pip install opencv-python, or opencv-python-headless on a machine without a display"

JPEG_START = b"\xff\xd8\xff"
JPEG_TAIL = b"\xff\xd9"
_JPEG_END, _JPEG_SCAN = 0xD9, 0xDA
_FLOATS = (b"PF", b"Pf")  # the portable float map

#: Within a scan, FF 00 and restarts are data. FF before a marker is padding: the pattern `\xff+` would scan a long run
#: of it again from each of its bytes.
_JPEG_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")


def check_opencv(user: str) -> None:
    """Raise if OpenCV is not installed, without importing it."""
    if importlib.util.find_spec("cv2") is None:
        raise ImportError(f"{user} needs OpenCV, which is not installed: {_REMEDY}")


def import_opencv(user: str) -> ModuleType:
    """Return OpenCV's module `cv2`."""
    check_opencv(user)
    try:
        return importlib.import_module("cv2")
    except ImportError as error:
        raise ImportError(f"{user} needs OpenCV, which cannot be imported ({error}): {_REMEDY}") from error


def decoded_image(
    data: bytes,
    name: str,
    *,
    gray: bool = False,
    deep: bool = False,
    upright: bool = True,
    flags: int | None = None,
    limits: Limits | None = None,
) -> Any:
    """Return an image's pixels, `(H, W, 3)` BGR or `(H, W)`, as uint8; `deep` keeps uint16."""
    import cv2

    if not data:
        raise ValueError(f"{name} is empty, a file of zero bytes")
    (limits or DEFAULT).check_encoded(data, name)
    if data.startswith(JPEG_START) and not _is_whole_jpeg(data):  # OpenCV before 5 fills the rest with grey
        raise ValueError(f"{name} is cut short: a JPEG of {len(data)} bytes without an end")
    if data.startswith(_FLOATS):  # OpenCV would round them to 0 and 1
        raise ValueError(f"{name} has pixels of float32; convert it to 8 or 16 bits a channel")
    if flags is None:
        flags = cv2.IMREAD_GRAYSCALE if gray else cv2.IMREAD_COLOR
        flags |= (cv2.IMREAD_ANYDEPTH if deep else 0) | (0 if upright else cv2.IMREAD_IGNORE_ORIENTATION)
    try:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
    except cv2.error as error:  # for example, more pixels than OpenCV's limit
        raise ValueError(f"{name} cannot be decoded: {' '.join(str(error).split())}") from error
    if image is None:
        raise ValueError(f"{name} cannot be decoded: it is cut short, damaged, or of 32 bits a channel")
    if deep and image.dtype not in (np.uint8, np.uint16):
        raise ValueError(f"{name} has pixels of {image.dtype}; convert it to 8 or 16 bits a channel")
    return image


def _is_whole_jpeg(data: bytes) -> bool:
    return data.endswith(JPEG_TAIL) or jpeg_end(data, 0) is not None


def jpeg_end(data: Any, begin: int) -> int | None:
    """Return the end of the JPEG at `begin`, to which its markers (ITU-T T.81, annex B) lead; None if it is cut off."""
    position = begin + 2
    while (marker := _JPEG_MARKER.search(data, position)) is not None:
        kind, position = data[marker.end() - 1], marker.end()
        if kind == _JPEG_END:
            return position
        if kind == _JPEG_SCAN or 0xC0 <= kind <= 0xFE:  # a segment begins with its length
            position += int.from_bytes(data[position : position + 2], "big")
    return None
