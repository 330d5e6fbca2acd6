"""A value: a window of steps, written and read.

Guarantee: what a value says is checked against its size before anything is allocated or copied; steps are copied once,
from the map into the batch, where they are neither compressed nor images.
"""

from __future__ import annotations

import importlib
import struct
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from stream_dataloader.stores._base.leaves import LeafSpec
from stream_dataloader.stores._base.tables import crc_of

__all__ = ["HEAD_BYTES", "Windows", "check_value", "is_image", "steps_of_window"]

_HEAD = struct.Struct("<II")
HEAD_BYTES = _HEAD.size

_SIZE, _WORD = np.dtype("<u4"), np.dtype("<u8")
_BLOCK_BYTES = 4096
_MOST_VALUE_BYTES = (1 << 32) - (1 << 17)
_WANTED_BYTES, _MOST_WINDOW = 1 << 20, 1024


def is_image(leaf: LeafSpec) -> bool:
    """Whether a leaf is what JPEG keeps: uint8, `(H, W)`, or with 1 or 3 channels first or last."""
    if str(leaf.dtype) != "torch.uint8" or len(leaf.shape) not in (2, 3) or not all(leaf.shape):
        return False
    height, width = _size_of(leaf.shape)
    return (len(leaf.shape) == 2 or _channels_last(leaf.shape) or leaf.shape[0] in (1, 3)) and max(
        height, width
    ) < 1 << 16


def _channels_last(shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and shape[-1] in (1, 3)


def _size_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """Height and width."""
    if len(shape) == 3 and not _channels_last(shape):
        return shape[1], shape[2]
    return shape[0], shape[1]


def steps_of_window(leaves: Sequence[LeafSpec]) -> int:
    """How many steps a window has if the user does not say: as many as make about 1 MB."""
    return max(1, min(_MOST_WINDOW, _WANTED_BYTES // max(1, sum(leaf.step_bytes for leaf in leaves))))


def _checksum(steps: int, body: Any) -> int:
    """See `format`."""
    whole = len(body) // _BLOCK_BYTES * _BLOCK_BYTES
    crc = crc_of(body[whole:], crc_of(steps.to_bytes(4, "little")))
    if not whole:
        return crc
    sums = np.frombuffer(body, _WORD, whole // 8).reshape(-1, _BLOCK_BYTES // 8).sum(axis=1, dtype=np.uint64)
    return crc_of(sums.astype(_WORD).data, crc)


def check_value(value: Any) -> int:
    """The checksum that a value says it has.

    Raises:
        ValueError: It has another.
    """
    if len(value) < HEAD_BYTES:
        raise ValueError(f"it has {len(value)} bytes")
    found, steps = _HEAD.unpack_from(value)
    if _checksum(steps, value[HEAD_BYTES:]) != found:
        raise ValueError("its checksum is another")
    return int(found)


class Windows:
    """Writes and reads values of one store.

    Args:
        leaves: Of an item.
        codec: See `format.CODECS`.
        quality: Of JPEG, 1 to 100; only to write.
    """

    def __init__(self, leaves: Sequence[LeafSpec], codec: str, quality: int = 95) -> None:
        self._leaves = leaves
        self._quality = quality
        self.compressed = codec == "zstd"
        self._zstd = _Zstd() if self.compressed else None
        self._jpeg = [codec == "jpeg" and is_image(leaf) for leaf in leaves]
        self._dtypes = [leaf.stored for leaf in leaves]
        self._step_bytes = [leaf.step_bytes for leaf in leaves]
        self._cv2: Any = None
        if any(self._jpeg):
            self._cv2 = importlib.import_module("cv2")

    def encode(self, columns: Sequence[Any], steps: int) -> tuple[bytes, int]:
        """A value.

        Args:
            columns: The steps of each leaf, `(steps or more, ...)`, as they are stored.
            steps: How many there are.

        Returns:
            The value, and its checksum.
        """
        parts: list[Any] = []
        for column, jpeg in zip(columns, self._jpeg, strict=True):
            if jpeg:
                files = [self._encode_image(image) for image in column[:steps]]
                parts += [np.array([len(file) for file in files], _SIZE).tobytes(), *files]
            else:
                parts.append(column[:steps].reshape(-1).view(np.uint8).data)
        body = b"".join(parts)
        if self._zstd is not None:
            body = self._zstd.compress(body)
        if len(body) > _MOST_VALUE_BYTES:
            raise ValueError(f"a window of {steps} steps has {len(body):,} bytes, and LMDB holds 4 GB; use window=")
        checksum = _checksum(steps, body)
        return _HEAD.pack(checksum, steps) + body, checksum

    def body(self, value: Any, steps: int) -> Any:
        """What follows a value's head, without compression.

        Raises:
            ValueError: It has another number of steps, or another size.
        """
        if len(value) < HEAD_BYTES or _HEAD.unpack_from(value)[1] != steps:
            raise ValueError(f"it has {len(value)} bytes, and not the {steps} steps that it should have")
        body = value[HEAD_BYTES:]
        size = steps * sum(self._step_bytes)
        if self._zstd is not None:
            body = self._zstd.decompress(body, size)
        if len(body) != size and not any(self._jpeg):
            raise ValueError(f"it has {len(body):,} bytes instead of {size:,}")
        return body

    def copy(self, body: Any, steps: int, start: int, stop: int, out: Sequence[Any], at: int) -> None:
        """Write steps `[start, stop)` of a value's `steps` to rows from `at` on.

        Args:
            body: See `body`.
            steps: Of the value.
            start: The first wanted.
            stop: The one after the last.
            out: For each leaf an array `(n, ...)`, or None if it is not wanted.
            at: Its first row to write to.

        Raises:
            ValueError: An image is damaged.
        """
        offset = 0
        for leaf, (spec, dtype) in enumerate(zip(self._leaves, self._dtypes, strict=True)):
            target = out[leaf]
            if self._jpeg[leaf]:
                offset = self._copy_images(body, offset, steps, start, stop, spec, target, at)
                continue
            end = offset + steps * self._step_bytes[leaf]
            if end > len(body):
                raise ValueError(f"it ends at {len(body):,} of {end:,} bytes")
            if target is not None:
                column: Any = np.ndarray((steps, *spec.shape), dtype, body, offset)
                target[at : at + stop - start] = column[start:stop]
            offset = end

    def _copy_images(
        self, body: Any, offset: int, steps: int, start: int, stop: int, spec: LeafSpec, target: Any, at: int
    ) -> int:
        """Decode some images of a leaf; returns where the next leaf begins."""
        begin = offset + steps * _SIZE.itemsize
        if begin > len(body):
            raise ValueError(f"it ends at {len(body):,} of {begin:,} bytes")
        stops = np.cumsum(np.ndarray((steps,), _SIZE, body, offset), dtype=np.int64) + begin
        if stops[-1] > len(body):
            raise ValueError(f"it ends at {len(body):,} of {stops[-1]:,} bytes")
        if target is not None:
            for step in range(start, stop):
                image = np.frombuffer(body, np.uint8)[int(stops[step - 1]) if step else begin : int(stops[step])]
                self._decode_image(image, spec.shape, target[at + step - start])
        return int(stops[-1])

    def _encode_image(self, image: Any) -> bytes:
        if image.ndim == 3 and not _channels_last(image.shape):
            image = image.transpose(1, 2, 0)
        if image.ndim == 3 and image.shape[-1] == 3:
            image = image[..., ::-1]  # OpenCV's colours are blue, green, red
        _, file = self._cv2.imencode(
            ".jpg", np.ascontiguousarray(image), [self._cv2.IMWRITE_JPEG_QUALITY, self._quality]
        )
        text: bytes = file.tobytes()
        return text

    def _decode_image(self, file: Any, shape: tuple[int, ...], target: Any) -> None:
        cv2 = self._cv2
        size = _size_of(shape)
        if (said := _jpeg_size(bytes(file[:4096]))) not in (None, size):  # before OpenCV makes room for it
            raise ValueError(f"an image is {said} instead of {size}")
        color = len(shape) == 3 and (shape[-1] if _channels_last(shape) else shape[0]) == 3
        flags = (cv2.IMREAD_COLOR if color else cv2.IMREAD_GRAYSCALE) | cv2.IMREAD_IGNORE_ORIENTATION
        try:
            image = cv2.imdecode(file, flags)
        except cv2.error as error:
            raise ValueError(f"an image cannot be decoded: {error}") from error
        if image is None or image.shape[:2] != size:
            raise ValueError(f"an image cannot be decoded, or is not {size}")
        if not color:
            target[...] = image.reshape(target.shape)
        elif not _channels_last(shape):
            target[...] = image[..., ::-1].transpose(2, 0, 1)
        elif target.flags.c_contiguous:
            cv2.cvtColor(image, cv2.COLOR_BGR2RGB, dst=target)
        else:
            target[...] = image[..., ::-1]


def _jpeg_size(head: bytes) -> tuple[int, int] | None:
    """Height and width as a JPEG file says (ITU-T T.81, B.2.2); None if its head does not."""
    at = 2
    while at + 9 <= len(head) and head[at] == 0xFF:
        kind = head[at + 1]
        if 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):
            return int.from_bytes(head[at + 5 : at + 7], "big"), int.from_bytes(head[at + 7 : at + 9], "big")
        at += 2 + int.from_bytes(head[at + 2 : at + 4], "big")
    return None


class _Zstd:
    """Zstandard (RFC 8878), by Python's own module or the package zstandard."""

    def __init__(self) -> None:
        if sys.version_info >= (3, 14):
            own = importlib.import_module("compression.zstd")
            self.compress = own.compress
            self._decompress = own.decompress
            self._error: Any = own.ZstdError
            self._said: Any = lambda text: own.get_frame_info(text).decompressed_size
            return
        try:
            zstandard: Any = importlib.import_module("zstandard")
        except ImportError as error:
            raise ImportError(
                "this store is compressed by Zstandard: pip install 'stream-dataloader[lmdb,zstd]', or use Python 3.14"
            ) from error
        self.compress = zstandard.ZstdCompressor().compress
        self._decompress = zstandard.ZstdDecompressor().decompress
        self._error = zstandard.ZstdError
        self._said: Any = lambda text: zstandard.get_frame_parameters(text).content_size

    def decompress(self, text: Any, size: int) -> Any:
        """What was compressed, which had `size` bytes."""
        try:
            if (said := self._said(text)) != size:  # before anything is allocated
                raise ValueError(f"it says that it holds {said:,} bytes instead of {size:,}")
            return self._decompress(text)
        except self._error as error:
            raise ValueError(f"it cannot be decompressed: {error}") from None
