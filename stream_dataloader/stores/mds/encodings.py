"""How a column's values are bytes: numbers, arrays, text and lists. Pictures are in `pictures`.

Source: `streaming/base/format/mds/encodings.py` of mosaicml-streaming 0.13. All numbers are little-endian. Of arrays,
dtype and shape are either in the encoding's name or before the values::

    ndarray:uint8:4,5     values
    ndarray:uint8         [axes << 2 | k: 1 byte] [shape: axes * 2**k bytes] values
    ndarray               [dtype: 1 byte] [axes << 2 | k: 1 byte] [shape: axes * 2**k bytes] values
    list[...]             [0: 4 bytes] [count: 4 bytes] [sizes: count * 4 bytes] values
    jpeg_array            [count: 4 bytes] [sizes: count * 4 bytes] values

Guarantee: decoding takes no more memory than the bytes at hand, but for pictures, and ends in a value that owns its
memory, or in a `ValueError`. Nothing is unpickled unless that was asked for.
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

__all__ = ["ARRAY_DTYPES", "PLAIN", "ArrayEncoding", "Encoding", "ListEncoding", "PlainEncoding"]

#: The dtypes of arrays, by the byte that stands for them.
ARRAY_DTYPES = {
    8: "uint8",
    9: "int8",
    16: "uint16",
    17: "int16",
    18: "float16",
    32: "uint32",
    33: "int32",
    34: "float32",
    64: "uint64",
    65: "int64",
    66: "float64",
}
_BYTE_OF_DTYPE = {name: byte for byte, name in ARRAY_DTYPES.items()}
_SHAPE_DTYPES = ("u1", "<u2", "<u4", "<u8")
_MOST_AXES = 32  # of NumPy before 2
_MOST_BYTES = 1 << 32  # places in a shard are uint32


class Encoding(ABC):
    """One way to write a value as bytes. What does not fit raises a ValueError, or a TypeError.

    Attributes:
        size: How many bytes each value has; None if that differs.
        is_sequence: A value has rows or elements, which can be the time steps of a stream.
    """

    size: int | None = None
    is_sequence = False

    @abstractmethod
    def encode(self, value: Any) -> bytes:
        """A value as bytes."""

    @abstractmethod
    def decode(self, data: memoryview) -> Any:
        """The value that some bytes are, as a copy."""

    def rows(self, data: memoryview) -> Any:
        """The rows or elements of a sequence, as they are in the file."""
        raise NotImplementedError

    def row(self, rows: Any, index: int) -> Any:
        """One of what `rows` returned, as a copy."""
        raise NotImplementedError


class ArrayEncoding(Encoding):
    """Arrays and single numbers.

    Args:
        dtype: None if it is before the values.
        shape: None if it is before the values; `()` is a single number.
        kind: What single numbers are returned as.

    Attributes:
        delivered: The dtype of what is decoded, which may be bool where the file has uint8; None if it is in the file.
    """

    def __init__(
        self, dtype: str | None, shape: tuple[int, ...] | None, kind: Callable[[Any], Any] | None = None
    ) -> None:
        self.dtype = None if dtype is None else np.dtype(dtype).newbyteorder("<")
        self.shape = shape
        self.delivered = None if dtype is None else np.dtype(dtype)
        self._kind = kind
        self.is_sequence = shape != ()
        if self.dtype is not None and shape is not None:
            self.size = math.prod(shape) * self.dtype.itemsize

    @classmethod
    def named(cls, text: str) -> ArrayEncoding:
        """What `ndarray:text` stands for."""
        name, _, sizes = text.partition(":")
        if name and name not in _BYTE_OF_DTYPE:
            raise ValueError(f"no arrays of {name!r}; there are {', '.join(_BYTE_OF_DTYPE)}")
        shape = tuple(map(int, sizes.split(","))) if sizes else None
        if shape is not None and (min(shape) < 1 or len(shape) > _MOST_AXES or math.prod(shape) >= _MOST_BYTES):
            raise ValueError(f"no arrays of shape {shape}")
        return cls(name or None, shape)

    def as_bool(self) -> None:
        """Deliver bool: the format has none, and `MdsPacker` writes uint8."""
        self.delivered, self._kind = np.dtype(bool), np.bool_

    def layout(self, data: memoryview) -> tuple[np.dtype[Any], tuple[int, ...], int]:
        """Dtype and shape of a value, and where its numbers begin."""
        at, dtype, shape = 0, self.dtype, self.shape
        try:
            if dtype is None:
                dtype = np.dtype(ARRAY_DTYPES[data[0]]).newbyteorder("<")
                at = 1
            if shape is None:
                axes, kind = data[at] >> 2, np.dtype(_SHAPE_DTYPES[data[at] & 3])
                at += 1 + axes * kind.itemsize
                shape = tuple(np.frombuffer(data[at - axes * kind.itemsize : at], kind, axes).tolist())
                if not shape:
                    raise ValueError
        except (KeyError, IndexError, ValueError):
            raise ValueError(f"an array that begins with the bytes {bytes(data[:16]).hex()}") from None
        if len(data) - at != math.prod(shape) * dtype.itemsize or len(shape) > _MOST_AXES:
            raise ValueError(f"an array {dtype.name} {shape} in {len(data) - at} bytes")
        return dtype, shape, at

    def decode(self, data: memoryview) -> Any:
        found = self._copy(self.rows(data))
        if self.shape == ():
            return found[()] if self._kind is None else self._kind(found[()])
        return found

    def _copy(self, found: NDArray[Any]) -> NDArray[Any]:
        return np.array(found, self.delivered or found.dtype.newbyteorder("="))

    def rows(self, data: memoryview) -> NDArray[Any]:
        dtype, shape, at = self.layout(data)
        return np.frombuffer(data, dtype, offset=at).reshape(shape)

    def row(self, rows: NDArray[Any], index: int) -> Any:
        return self._copy(rows[index])[()]

    def encode(self, value: Any) -> bytes:
        array = np.asarray(value)
        if self.shape == ():
            return self._encode_number(value, array)
        name = "uint8" if array.dtype.kind == "b" and self.delivered == array.dtype else array.dtype.name
        if name not in _BYTE_OF_DTYPE or (self.dtype is not None and name != self.dtype.name):
            wanted = ", ".join(_BYTE_OF_DTYPE) if self.dtype is None else self.dtype.name
            raise ValueError(f"an array of {array.dtype} where {wanted} is to be written")
        if not array.ndim or not array.size or (self.shape is not None and array.shape != self.shape):
            wanted = "one with at least one number" if self.shape is None else str(self.shape)
            raise ValueError(f"an array of shape {array.shape} where {wanted} is to be written")
        head = b"" if self.dtype is not None else bytes([_BYTE_OF_DTYPE[name]])
        if self.shape is None:
            kind = next(k for k in range(4) if max(array.shape) < 1 << (8 << k))
            head += bytes([array.ndim << 2 | kind]) + np.array(array.shape, _SHAPE_DTYPES[kind]).tobytes()
        return head + array.astype(np.dtype(name).newbyteorder("<"), copy=False).tobytes()

    def _encode_number(self, value: Any, array: NDArray[Any]) -> bytes:
        assert self.dtype is not None
        if array.ndim or array.dtype.kind not in "biuf" or (self.dtype.kind != "f" and array.dtype.kind == "f"):
            raise TypeError(f"{shorten(value)} where a number of {self.dtype.name} is to be written")
        found = array.astype(self.dtype)
        if self.dtype.kind != "f" and int(found) != int(array):
            raise ValueError(f"{shorten(value)}, which {self.dtype.name} cannot hold")
        return found.tobytes()


class PlainEncoding(Encoding):
    """Text, or what is written as text or bytes."""

    def __init__(self, decode: Callable[[bytes], Any], encode: Callable[[Any], bytes], *accepted: type) -> None:
        self._decode = decode
        self._encode = encode
        self._accepted = accepted

    def encode(self, value: Any) -> bytes:
        if self._accepted and (not isinstance(value, self._accepted) or isinstance(value, (bool, np.bool_))):
            raise TypeError(f"a {type(value).__name__} where a {self._accepted[0].__name__} is to be written")
        return self._encode(value)

    def decode(self, data: memoryview) -> Any:
        try:
            return self._decode(bytes(data))
        except Exception as error:  # of a pickle, any
            raise ValueError(f"{shorten(bytes(data[:80]))}, which cannot be read: {error!r}") from error


def _as_plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


PLAIN = {
    "bytes": PlainEncoding(bytes, bytes, bytes, bytearray),
    "str": PlainEncoding(bytes.decode, str.encode, str),
    "str_int": PlainEncoding(int, lambda value: str(int(value)).encode(), int, np.integer),
    "str_float": PlainEncoding(float, lambda value: str(float(value)).encode(), float, np.floating),
    "str_decimal": PlainEncoding(
        lambda data: decimal.Decimal(data.decode()), lambda value: str(value).encode(), decimal.Decimal
    ),
    "json": PlainEncoding(json.loads, lambda value: json.dumps(_as_plain(value)).encode()),
    "pkl": PlainEncoding(pickle.loads, pickle.dumps),
}


class ListEncoding(Encoding):
    """Several values of one encoding, behind their count and sizes; `head` bytes come before the count."""

    is_sequence = True

    def __init__(self, element: Encoding, head: int) -> None:
        self._element = element
        self._head = head

    def rows(self, data: memoryview) -> list[memoryview]:
        begin = self._head + 4
        count = int.from_bytes(data[self._head : begin], "little")
        if len(data) < begin + 4 * count:
            raise ValueError(f"a list of {count:,} values in {len(data):,} bytes")
        sizes = np.frombuffer(data, "<u4", count, begin).astype(np.int64)
        stops = (begin + 4 * count + np.cumsum(sizes)).tolist()
        if (stops[-1] if stops else begin) != len(data):
            raise ValueError(f"a list whose values do not end where its {len(data):,} bytes do")
        return [data[stop - size : stop] for stop, size in zip(stops, sizes.tolist(), strict=True)]

    def row(self, rows: list[memoryview], index: int) -> Any:
        return self._element.decode(rows[index])

    def decode(self, data: memoryview) -> list[Any]:
        return [self._element.decode(part) for part in self.rows(data)]

    def encode(self, value: Sequence[Any]) -> bytes:
        if not isinstance(value, (list, tuple)):
            raise TypeError(f"a {type(value).__name__} where a list is to be written")
        parts = [bytes(one) if isinstance(one, (bytes, bytearray)) else self._element.encode(one) for one in value]
        sizes = np.array([len(part) for part in parts], "<u4").tobytes()
        return b"".join([bytes(self._head), len(parts).to_bytes(4, "little"), sizes, *parts])
