"""Encodings of a column's values as bytes, by name.

Source: `streaming/base/format/mds/encodings.py` of mosaicml-streaming 0.13, and Pillow 13.
Numbers are little-endian. Dtype and shape are in the encoding's name or before the values::

    ndarray:uint8:4,5     values
    ndarray:uint8         [axes << 2 | k: 1 byte] [shape: axes * 2**k bytes] values
    ndarray               [dtype: 1 byte] [axes << 2 | k: 1 byte] [shape: axes * 2**k bytes] values
    list[...]             [0: 4 bytes] [count: 4 bytes] [sizes: count * 4 bytes] values
    jpeg_array            [count: 4 bytes] [sizes: count * 4 bytes] values
    pil                   [width: 4 bytes] [height: 4 bytes] [length of the mode: 4 bytes] mode, rows

Guarantee: decoding returns a value that owns its memory, or raises a `ValueError`.
"""

from __future__ import annotations

import decimal
import json
import math
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stream_dataloader.errors import shorten
from stream_dataloader.streams._media.limits import DEFAULT, Limits
from stream_dataloader.streams._media.opencv import decoded_image, import_opencv

__all__ = ["ARRAY_DTYPES", "ArrayEncoding", "Encoding", "PictureEncoding", "encoding_of"]

#: Dtypes of arrays by their code: the number of bits, plus one if signed, plus two for floats.
ARRAY_DTYPES = {
    bits + more: f"{kind}{bits}" for bits in (8, 16, 32, 64) for more, kind in enumerate(("uint", "int", "float"))
}
del ARRAY_DTYPES[10]  # float8
_BYTE_OF_DTYPE = {name: byte for byte, name in ARRAY_DTYPES.items()}
_SHAPE_DTYPES = ("u1", "<u2", "<u4", "<u8")

_PICTURES = ("jpeg", "png", "pil")

#: Lists of pictures: the kind of picture, and the number of bytes before their count.
_LISTS = {"jpeg_array": ("jpeg", 0), "jpegarray": ("jpeg", 0)} | {f"list[{kind}]": (kind, 4) for kind in _PICTURES}

#: Dtype and channels of Pillow's modes.
_MODES: dict[str, tuple[str, int]] = {
    **dict.fromkeys(("L", "P"), ("u1", 1)),
    **dict.fromkeys(("LA", "La", "PA"), ("u1", 2)),
    **dict.fromkeys(("RGB", "YCbCr", "HSV", "LAB"), ("u1", 3)),
    **dict.fromkeys(("RGBA", "RGBX", "RGBa", "CMYK"), ("u1", 4)),
    **dict.fromkeys(("I;16", "I;16L"), ("<u2", 1)),
    "I;16B": (">u2", 1),
    "I": ("<i4", 1),
    "F": ("<f4", 1),
}
_MODE_OF_ARRAY = {
    ("|u1", 0): "L",
    ("|u1", 3): "RGB",
    ("|u1", 4): "RGBA",
    ("<u2", 0): "I;16",
    ("<i4", 0): "I",
    ("<f4", 0): "F",
}


class Encoding(ABC):
    """Encoding of values as bytes.

    Attributes:
        size: Number of bytes of each value; None if it varies.
        is_sequence: Whether a value has rows or elements, which can be time steps.
    """

    size: int | None = None
    is_sequence = False

    @abstractmethod
    def encode(self, value: Any) -> bytes: ...

    @abstractmethod
    def decode(self, data: memoryview) -> Any:
        """Decode bytes to a value that shares no memory with them."""

    def split(self, data: memoryview) -> tuple[Encoding, NDArray[np.int64]]:
        """Return the encoding of the elements, and their start and end, `(2, elements)`."""
        return self, np.array([[0], [len(data)]])


class ArrayEncoding(Encoding):
    """Arrays, and numbers of shape `()`. If dtype or shape is None, it is written before the values.

    Numbers are delivered as `kind`, and everything as the dtype `delivered` unless that is None.
    """

    def __init__(self, dtype: Any, shape: tuple[int, ...] | None, kind: Callable[[Any], Any] | None = None) -> None:
        self.dtype = None if dtype is None else np.dtype(dtype).newbyteorder("<")
        self.shape = shape
        self.delivered = None if dtype is None else np.dtype(dtype).newbyteorder("=")
        self._kind = kind
        self.is_sequence = shape != ()
        if self.dtype is not None and shape is not None:
            self.size = math.prod(shape) * self.dtype.itemsize

    def layout(self, data: memoryview) -> tuple[np.dtype[Any], tuple[int, ...], int]:
        at, dtype, shape = 0, self.dtype, self.shape
        if dtype is not None and shape is not None and len(data) == self.size:
            return dtype, shape, at
        try:
            if dtype is None:
                dtype, at = np.dtype(ARRAY_DTYPES[data[0]]).newbyteorder("<"), 1
            if shape is None:
                axes, kind, begin = data[at] >> 2, np.dtype(_SHAPE_DTYPES[data[at] & 3]), at + 1
                at = begin + axes * kind.itemsize
                shape = tuple(np.frombuffer(data[begin:at], kind, axes or 1).tolist())
        except (KeyError, IndexError, ValueError):
            raise ValueError(f"an array that begins with the bytes {bytes(data[:16]).hex()}") from None
        if not len(data) - at == math.prod(shape) * dtype.itemsize > 0:
            raise ValueError(f"an array {dtype.name} {shape} in {len(data) - at} bytes")
        return dtype, shape, at

    def decode(self, data: memoryview) -> Any:
        dtype, shape, at = self.layout(data)
        found = np.ndarray(shape, dtype, data, at)
        copy = np.array(found, self.delivered or found.dtype.newbyteorder("="))
        if shape:
            return copy
        return copy[()] if self._kind is None else self._kind(copy[()])

    def split(self, data: memoryview) -> tuple[Encoding, NDArray[np.int64]]:
        if not self.is_sequence:
            return super().split(data)
        dtype, (rows, *shape), at = self.layout(data)
        element = ArrayEncoding(dtype, tuple(shape))
        element.delivered = self.delivered or element.delivered
        bounds = at + np.arange(rows + 1) * math.prod(shape) * dtype.itemsize
        return element, np.stack([bounds[:-1], bounds[1:]])

    def encode(self, value: Any) -> bytes:
        array = np.asarray(value)
        if self.shape == ():
            return self._encode_number(value, array)
        name = array.dtype.name
        names = list(_BYTE_OF_DTYPE) if self.dtype is None else [self.dtype.name]
        if name not in names:
            raise ValueError(f"an array of {array.dtype} where {', '.join(names)} should be")
        if not array.ndim or not array.size or self.shape not in (None, array.shape):
            wanted = self.shape or "one with at least one number"
            raise ValueError(f"an array of shape {array.shape} where {wanted} should be")
        head = b"" if self.dtype is not None else bytes([_BYTE_OF_DTYPE[name]])
        if self.shape is None:
            kind = next(k for k in range(4) if max(array.shape) < 1 << (8 << k))
            head += bytes([array.ndim << 2 | kind]) + np.array(array.shape, _SHAPE_DTYPES[kind]).tobytes()
        return head + array.astype(np.dtype(name).newbyteorder("<"), copy=False).tobytes()

    def _encode_number(self, value: Any, array: NDArray[Any]) -> bytes:
        assert self.dtype is not None
        is_float = self.dtype.kind == "f"
        if array.ndim or array.dtype.kind not in ("biuf" if is_float else "biu"):
            raise TypeError(f"{shorten(value)} where a number of {self.dtype.name} should be")
        found = array.astype(self.dtype)
        if not is_float and int(found) != int(array):
            raise ValueError(f"{shorten(value)}, which {self.dtype.name} cannot hold")
        return found.tobytes()


class _PlainEncoding(Encoding):
    """Text, and values that are written as text or bytes."""

    def __init__(self, decode: Callable[[bytes], Any], encode: Callable[[Any], bytes], *accepted: type) -> None:
        self._decode = decode
        self._encode = encode
        self._accepted = accepted

    def encode(self, value: Any) -> bytes:
        if self._accepted and (not isinstance(value, self._accepted) or isinstance(value, (bool, np.bool_))):
            raise TypeError(f"a {type(value).__name__} where a {self._accepted[0].__name__} should be")
        return self._encode(value)

    def decode(self, data: memoryview) -> Any:
        try:
            return self._decode(bytes(data))
        except Exception as error:  # a pickle may raise anything
            raise ValueError(f"{shorten(bytes(data[:80]))}, which cannot be read: {error!r}") from error


def _as_plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


_PLAIN = {
    "bytes": _PlainEncoding(bytes, bytes, bytes, bytearray),
    "str": _PlainEncoding(bytes.decode, str.encode, str),
    "str_int": _PlainEncoding(int, lambda value: str(int(value)).encode(), int, np.integer),
    "str_float": _PlainEncoding(float, lambda value: str(float(value)).encode(), float, np.floating),
    "str_decimal": _PlainEncoding(
        lambda data: decimal.Decimal(data.decode()), lambda value: str(value).encode(), decimal.Decimal
    ),
    "json": _PlainEncoding(json.loads, lambda value: json.dumps(_as_plain(value)).encode()),
    "pkl": _PlainEncoding(pickle.loads, pickle.dumps),
}


class PictureEncoding(Encoding):
    """One picture. With `upright`, a JPEG is turned as its EXIF data say."""

    def __init__(self, kind: str, upright: bool, limits: Limits) -> None:
        self._kind = kind
        self._upright = upright
        self._limits = limits

    def decode(self, data: memoryview) -> Any:
        if self._kind == "pil":
            return _raw(data)
        cv2 = import_opencv("a picture of an MDS dataset")
        flags = cv2.IMREAD_UNCHANGED  # other flags drop transparency
        if self._kind == "jpeg" and self._upright:
            flags = cv2.IMREAD_ANYCOLOR | cv2.IMREAD_ANYDEPTH
        image = decoded_image(bytes(data), f"a {self._kind}", flags=flags, limits=self._limits)
        if image.ndim == 3:
            code = cv2.COLOR_BGR2RGB if image.shape[2] == 3 else cv2.COLOR_BGRA2RGBA
            cv2.cvtColor(image, code, dst=image)
        return image

    def encode(self, value: Any) -> bytes:
        array = np.asarray(value)
        kind = (array.dtype.newbyteorder("<").str, array.shape[2] if array.ndim == 3 else 0)
        of_pillow = self._kind == "pil" and hasattr(value, "mode")
        if not of_pillow and (array.ndim not in (2, 3) or kind not in _MODE_OF_ARRAY or not array.size):
            raise ValueError(f"a {array.dtype} {array.shape} where a picture (H, W[, 3 or 4]) should be")
        if self._kind == "pil":
            mode, rows = (value.mode, value) if of_pillow else (_MODE_OF_ARRAY[kind], array.astype(kind[0]))
            head = np.array([array.shape[1], array.shape[0], len(mode)], "<u4").tobytes()
            return head + mode.encode() + bytes(rows.tobytes())
        cv2 = import_opencv("a picture of an MDS dataset")
        if array.ndim == 3:
            array = cv2.cvtColor(array, cv2.COLOR_RGB2BGR if array.shape[2] == 3 else cv2.COLOR_RGBA2BGRA)
        done, data = cv2.imencode(".jpg" if self._kind == "jpeg" else ".png", array)
        if not done:
            raise ValueError(f"a {array.dtype} {array.shape} that cannot be written as {self._kind}")
        return bytes(data)


def _raw(data: memoryview) -> Any:
    width, height, length = (int.from_bytes(data[at : at + 4], "little") for at in (0, 4, 8))
    mode, rows = bytes(data[12 : 12 + length]).decode("ascii", "backslashreplace"), data[12 + length :]
    if mode == "1":  # one bit for each pixel, and rows end at a whole byte
        bits = np.frombuffer(rows, np.uint8).reshape(height, -(-width // 8))
        return np.unpackbits(bits, axis=1, count=width).astype(bool)
    if mode not in _MODES:
        raise ValueError(f"a picture of mode {mode[:20]!r}; {', '.join(_MODES)} are read")
    dtype, channels = _MODES[mode]
    shape = (height, width, channels) if channels > 1 else (height, width)
    return np.frombuffer(rows, dtype).reshape(shape).astype(np.dtype(dtype).newbyteorder("="))


class _ListEncoding(Encoding):
    """Several values of one encoding; `head` bytes come before their count."""

    is_sequence = True

    def __init__(self, element: Encoding, head: int) -> None:
        self._element = element
        self._head = head

    def split(self, data: memoryview) -> tuple[Encoding, NDArray[np.int64]]:
        begin = self._head + 4
        count = int.from_bytes(data[self._head : begin], "little")
        sizes = np.frombuffer(data, "<u4", count, begin).astype(np.int64)
        stops = begin + 4 * count + np.cumsum(sizes)
        if (stops[-1] if count else begin) != len(data):
            raise ValueError(f"a list whose values do not end where its {len(data):,} bytes do")
        return self._element, np.stack([stops - sizes, stops])

    def decode(self, data: memoryview) -> list[Any]:
        element, bounds = self.split(data)
        return [element.decode(data[begin:stop]) for begin, stop in bounds.T.tolist()]

    def encode(self, value: Sequence[Any]) -> bytes:
        if not isinstance(value, (list, tuple)):
            raise TypeError(f"a {type(value).__name__} where a list should be")
        encode = self._element.encode
        parts = [bytes(one) if isinstance(one, (bytes, bytearray)) else encode(one) for one in value]
        sizes = np.array([len(part) for part in parts], "<u4").tobytes()
        return b"".join([bytes(self._head), len(parts).to_bytes(4, "little"), sizes, *parts])


def encoding_of(
    name: str, *, allow_pickle: bool = False, upright: bool = True, limits: Limits | None = None
) -> Encoding:
    """Return the encoding with a name of mosaicml-streaming 0.13."""
    if name == "pkl" and not allow_pickle:
        raise ValueError("'pkl' is refused, as it may run any code; give allow_pickle=True if you trust it")
    limits = limits or DEFAULT
    if name == "json":
        return _PlainEncoding(limits.json, _PLAIN[name].encode)
    if name in _PLAIN:
        return _PLAIN[name]
    if name == "int" or name in _BYTE_OF_DTYPE:
        return ArrayEncoding("int64" if name == "int" else name, (), int if name == "int" else None)
    if name.partition(":")[0] == "ndarray":
        dtype, _, sizes = name[8:].partition(":")
        shape = tuple(map(int, sizes.split(","))) if sizes else None
        if (dtype and dtype not in _BYTE_OF_DTYPE) or (shape and min(shape) < 1):
            raise ValueError(f"no arrays of {name[8:]!r}; there are {', '.join(_BYTE_OF_DTYPE)}")
        return ArrayEncoding(dtype or None, shape)
    if name in _PICTURES:
        return PictureEncoding(name, upright, limits)
    if name in _LISTS:
        kind, head = _LISTS[name]
        return _ListEncoding(PictureEncoding(kind, upright, limits), head)
    known = ["int", *_PLAIN, *_BYTE_OF_DTYPE, "ndarray[:dtype[:shape]]", *_PICTURES, *_LISTS]
    raise ValueError(f"no encoding {shorten(name)}; there are {', '.join(known)}")
