"""A value: a window of steps, written and read.

::

    checksum, uint32 | how many steps, uint32 | body

Numbers are little-endian. The checksum is the CRC-32 (zlib) of the number of steps, of what is left of the body behind
its last whole 4,096 bytes, and of the sums (uint64, modulo 2^64) of each whole 4,096 bytes, which take less time.

The body of codec `"none"` has the steps of each leaf, one leaf after the other, without gaps; that of `"zstd"` is the
same as one zstd frame. In that of `"jpeg"`, a leaf that is an image is the sizes of all steps' JPEG files, uint32 each,
and then the files.

Guarantee: what a value says is checked against its size before anything is allocated or copied.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from stream_dataloader.stores._base import codecs
from stream_dataloader.stores._base.leaves import LeafSpec
from stream_dataloader.streams._media.opencv import import_opencv
from stream_dataloader.streams._media.still import decoded_image

__all__ = ["CODECS", "Windows", "check_value", "steps_of_window"]

CODECS = ("none", "zstd", "jpeg")

#: Of an image: height and width, how many channels, and whether they are last.
_Image = tuple[tuple[int, int], int, bool]

_HEAD = struct.Struct("<II")
_SIZE, _WORD = np.dtype("<u4"), np.dtype("<u8")
_BLOCK_BYTES = 4096
_MOST_VALUE_BYTES = (1 << 32) - (1 << 17)
_WANTED_BYTES, _MOST_WINDOW = 1 << 20, 1024


def steps_of_window(leaves: Sequence[LeafSpec]) -> int:
    """How many steps a window has if the user does not say: as many as make about 1 MB."""
    return max(1, min(_MOST_WINDOW, _WANTED_BYTES // max(1, sum(leaf.step_bytes for leaf in leaves))))


def _checksum(steps: int, body: Any) -> int:
    whole = len(body) // _BLOCK_BYTES * _BLOCK_BYTES
    crc = zlib.crc32(body[whole:], zlib.crc32(steps.to_bytes(4, "little")))
    if not whole:
        return crc
    sums = np.frombuffer(body, _WORD, whole // 8).reshape(-1, _BLOCK_BYTES // 8).sum(axis=1, dtype=np.uint64)
    return zlib.crc32(sums.astype(_WORD).data, crc)


def check_value(value: Any) -> int:
    """The checksum that a value says it has.

    Raises:
        ValueError: It has another.
    """
    if len(value) < _HEAD.size:
        raise ValueError(f"it has {len(value)} bytes")
    found, steps = _HEAD.unpack_from(value)
    if _checksum(steps, value[_HEAD.size :]) != found:
        raise ValueError("its checksum is another")
    return int(found)


def _image_of(leaf: LeafSpec) -> _Image | None:
    """A leaf as JPEG keeps it: uint8, `(H, W)`, or with 1 or 3 channels first or last; None if it is no image."""
    if str(leaf.dtype) != "torch.uint8" or len(leaf.shape) not in (2, 3) or not all(leaf.shape):
        return None
    shape = (*leaf.shape, 1)[:3]
    is_last = shape[2] in (1, 3)
    height, width, channels = shape if is_last else (*shape[1:], shape[0])
    return ((height, width), channels, is_last) if channels in (1, 3) and max(height, width) < 1 << 16 else None


class Windows:
    """Writes and reads values of one store.

    Args:
        leaves: Of an item.
        codec: One of `CODECS`.
        quality: Of JPEG, 1 to 100; only to write.

    Attributes:
        images: For each leaf how JPEG keeps it; None: it does not.
        is_compressed: Values are decompressed as a whole.
    """

    def __init__(self, leaves: Sequence[LeafSpec], codec: str, quality: int = 95) -> None:
        self._leaves = [(leaf.shape, leaf.stored, leaf.step_bytes) for leaf in leaves]
        self._step_bytes = sum(leaf.step_bytes for leaf in leaves)
        self._quality = quality
        self.is_compressed = codec == "zstd"
        self.images = [_image_of(leaf) if codec == "jpeg" else None for leaf in leaves]
        if self.is_compressed:
            codecs.pack("zstd", b"")  # says at once if the package is missing
        if any(self.images):
            self._cv2: Any = import_opencv('codec="jpeg"')

    def encode(self, columns: Sequence[Any], steps: int) -> tuple[bytes, int]:
        """A value, and its checksum.

        Args:
            columns: The steps of each leaf, `(steps or more, ...)`, as they are stored.
            steps: How many there are.
        """
        parts: list[Any] = []
        for column, image in zip(columns, self.images, strict=True):
            if image is None:
                parts.append(column[:steps].reshape(-1).view(np.uint8).data)
            else:
                files = [self._encode_image(image, pixels) for pixels in column[:steps]]
                parts += [np.array([len(file) for file in files], _SIZE).tobytes(), *files]
        body = b"".join(parts)
        if self.is_compressed:
            body = codecs.pack("zstd", body)
        if len(body) > _MOST_VALUE_BYTES:
            raise ValueError(f"a window of {steps} steps has {len(body):,} bytes, and LMDB holds 4 GB; use window=")
        checksum = _checksum(steps, body)
        return _HEAD.pack(checksum, steps) + body, checksum

    def columns(self, value: Any, steps: int) -> list[Any]:
        """The steps of each leaf: an array that lies in the value, or its JPEG files.

        Raises:
            ValueError: The value has another number of steps, or another size.
        """
        if len(value) < _HEAD.size or _HEAD.unpack_from(value)[1] != steps:
            raise ValueError(f"it has {len(value)} bytes, and not the {steps} steps that it should have")
        body = value[_HEAD.size :]
        if self.is_compressed:
            body = codecs.unpack("zstd", body, steps * self._step_bytes, "its window")
        found: list[Any] = []
        end = 0
        for (shape, stored, step_bytes), image in zip(self._leaves, self.images, strict=True):
            begin = end
            end += steps * (step_bytes if image is None else _SIZE.itemsize)
            if end > len(body):
                raise ValueError(f"it ends at {len(body):,} of {end:,} bytes")
            if image is None:
                found.append(np.ndarray((steps, *shape), stored, body, begin))
                continue
            stops = end + np.cumsum(np.ndarray(steps, _SIZE, body, begin), dtype=np.int64)
            if stops[-1] > len(body):
                raise ValueError(f"it ends at {len(body):,} of {stops[-1]:,} bytes")
            found.append([body[first:stop] for first, stop in zip([end, *stops[:-1]], stops, strict=True)])
            end = int(stops[-1])
        if end != len(body):
            raise ValueError(f"it has {len(body):,} bytes instead of {end:,}")
        return found

    def copy(self, column: Any, image: _Image | None, out: Any) -> None:
        """Write some steps of a leaf to `out`, an array of as many.

        Raises:
            ValueError: An image is damaged.
        """
        if image is None:
            out[...] = column
            return
        for file, pixels in zip(column, out, strict=True):
            self._decode_image(image, file, pixels)

    def _encode_image(self, image: _Image, pixels: Any) -> bytes:
        _, channels, is_last = image
        if pixels.ndim == 3 and not is_last:
            pixels = pixels.transpose(1, 2, 0)
        if channels == 3:
            pixels = pixels[..., ::-1]  # OpenCV's colours are blue, green, red
        options = [self._cv2.IMWRITE_JPEG_QUALITY, self._quality]
        file: bytes = self._cv2.imencode(".jpg", np.ascontiguousarray(pixels), options)[1].tobytes()
        return file

    def _decode_image(self, image: _Image, file: Any, out: Any) -> None:
        size, channels, is_last = image
        pixels = decoded_image(bytes(file), "an image", gray=channels == 1, upright=False)
        if pixels.shape[:2] != size:
            raise ValueError(f"an image is {pixels.shape[:2]} instead of {size}")
        if channels == 1:
            out[...] = pixels.reshape(out.shape)
        elif not is_last:
            out[...] = pixels[..., ::-1].transpose(2, 0, 1)
        elif out.flags.c_contiguous:
            self._cv2.cvtColor(pixels, self._cv2.COLOR_BGR2RGB, dst=out)
        else:
            out[...] = pixels[..., ::-1]
