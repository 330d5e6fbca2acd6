"""Values of a packed LMDB store: windows of steps, written and read.

::

    checksum, uint32 | number of steps, uint32 | body

Numbers are little-endian. The checksum is the CRC-32 of the number of steps, of what follows
the last whole 4,096 bytes of the body, and of the sums (uint64) of each whole 4,096 bytes.

The body has each leaf's steps; with `"zstd"` it is one frame. With `"jpeg"`, a leaf of images
is the sizes of all steps' files, uint32 each, and then the files.

Guarantee: the sizes that a value claims are compared with its own size before memory is allocated.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from stream_dataloader.stores._base import codecs
from stream_dataloader.stores._base.leaves import LeafSpec
from stream_dataloader.streams._media.limits import Limits
from stream_dataloader.streams._media.opencv import decoded_image, import_opencv

__all__ = ["CODECS", "Windows", "check_value", "steps_of_window"]

CODECS = ("none", "zstd", "jpeg")

_HEAD = struct.Struct("<II")
_SIZE, _WORD = np.dtype("<u4"), np.dtype("<u8")
_BLOCK_BYTES = 4096
_WANTED_BYTES, _MOST_WINDOW = 1 << 20, 1024


def steps_of_window(leaves: Sequence[LeafSpec]) -> int:
    """Return the number of steps that make about 1 MB."""
    return max(1, min(_MOST_WINDOW, _WANTED_BYTES // max(1, sum(leaf.step_bytes for leaf in leaves))))


def _checksum(steps: int, body: Any) -> int:
    whole = len(body) // _BLOCK_BYTES * _BLOCK_BYTES
    crc = zlib.crc32(body[whole:], zlib.crc32(steps.to_bytes(4, "little")))
    if not whole:
        return crc
    blocks = np.frombuffer(body, _WORD, whole // 8).reshape(-1, _BLOCK_BYTES // 8)
    sums = blocks.sum(axis=1, dtype=np.uint64)
    return zlib.crc32(sums.astype(_WORD).data, crc)


def check_value(value: Any) -> int:
    """Return the checksum of a value; raise a ValueError if the content does not match it."""
    found, steps = _HEAD.unpack_from(value)
    if _checksum(steps, value[_HEAD.size :]) != found:
        raise ValueError("its checksum is another")
    return int(found)


def _as_image(pixels: Any) -> Any:
    """Return a step's pixels as `(H, W, C)`, or None if they are not an image."""
    if pixels.ndim not in (2, 3):
        return None
    image = pixels[..., None] if pixels.ndim == 2 else pixels
    if image.shape[2] not in (1, 3):
        image = image.transpose(1, 2, 0)
    return image if image.shape[2] in (1, 3) and image.size and max(image.shape) < 1 << 16 else None


class Windows:
    """Writer and reader of the values of one store with the given leaves.

    `images` are the leaves encoded as JPEG; `is_compressed` says whether values are one frame.
    """

    def __init__(self, leaves: Sequence[LeafSpec], codec: str, quality: int = 95, limits: Limits | None = None) -> None:
        if codec not in CODECS:
            raise ValueError(f"codec is {codec!r}; use one of {', '.join(map(repr, CODECS))}")
        self._leaves, self._quality, self._limits = leaves, quality, limits
        self.is_compressed = codec == "zstd"
        self.images = [
            codec == "jpeg"
            and leaf.dtype is torch.uint8
            and _as_image(np.broadcast_to(np.uint8(0), leaf.shape)) is not None
            for leaf in leaves
        ]
        if self.is_compressed:
            codecs.pack("zstd", b"")  # raises now if the package is missing
        if any(self.images):
            self._cv2: Any = import_opencv('codec="jpeg"')

    def encode(self, columns: Sequence[Any], steps: int) -> tuple[bytes, int]:
        parts: list[Any] = []
        for column, is_image in zip(columns, self.images, strict=True):
            if is_image:
                files = [self._encode_image(_as_image(pixels)) for pixels in column[:steps]]
                parts += [np.array([len(file) for file in files], _SIZE).tobytes(), *files]
            else:
                parts.append(column[:steps].reshape(-1).view(np.uint8).data)
        body = b"".join(parts)
        if self.is_compressed:
            body = codecs.pack("zstd", body)
        checksum = _checksum(steps, body)
        return _HEAD.pack(checksum, steps) + body, checksum

    def columns(self, value: Any, steps: int) -> list[Any]:
        if _HEAD.unpack_from(value)[1] != steps:
            raise ValueError(f"it has not the {steps} steps that it should have")
        body = value[_HEAD.size :]
        if self.is_compressed:
            size = steps * sum(leaf.step_bytes for leaf in self._leaves)
            body = codecs.unpack("zstd", body, size, "its window", self._limits)
        found: list[Any] = []
        end = 0
        for leaf, is_image in zip(self._leaves, self.images, strict=True):
            if is_image:
                sizes = np.ndarray(steps, _SIZE, body, end)
                begin, *stops = np.cumsum([end + sizes.nbytes, *sizes.tolist()]).tolist()
                found.append([body[first:stop] for first, stop in zip([begin, *stops[:-1]], stops, strict=True)])
                end = stops[-1]
            else:
                found.append(np.ndarray((steps, *leaf.shape), leaf.stored, body, end))
                end += found[-1].nbytes
        if end != len(body):
            raise ValueError(f"it has {len(body):,} bytes instead of {end:,}")
        return found

    def copy(self, column: Any, out: Any) -> None:
        if not isinstance(column, list):
            out[...] = column
            return
        for file, target in zip(column, map(_as_image, out), strict=True):
            pixels = decoded_image(
                bytes(file), "an image", gray=target.shape[2] == 1, upright=False, limits=self._limits
            )
            if pixels.shape[:2] != target.shape[:2]:
                raise ValueError(f"an image is {pixels.shape[:2]} instead of {target.shape[:2]}")
            if target.shape[2] == 3 and target.flags.c_contiguous:
                self._cv2.cvtColor(pixels, self._cv2.COLOR_BGR2RGB, dst=target)
            else:
                target[...] = pixels.reshape(target.shape)[..., ::-1]

    def _encode_image(self, pixels: Any) -> bytes:
        pixels = np.ascontiguousarray(pixels)
        if pixels.shape[2] == 3:
            pixels = self._cv2.cvtColor(pixels, self._cv2.COLOR_RGB2BGR)
        return bytes(self._cv2.imencode(".jpg", pixels, [self._cv2.IMWRITE_JPEG_QUALITY, self._quality])[1])
