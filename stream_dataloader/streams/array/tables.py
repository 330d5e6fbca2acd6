"""Rows of one array in memory or in a `.npy` file.

Guarantee: rows of a file are copies. A file that was cut off or written to raises an error.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np
import torch

from stream_dataloader._engine.descriptors import above_standard
from stream_dataloader._engine.items.layout import is_dense
from stream_dataloader.streams._media.limits import check_empty_rows
from stream_dataloader.streams._media.section import KnownFile, closed_on_error

__all__ = ["MemoryTable", "NpyHeader", "NpyTable", "Table", "check_rows", "checked_header", "chunks_of", "read_header"]

_NUMBERS = "biufc"  # bool, signed and unsigned integers, floats, complex
_LONGEST_HEADER_BYTES = 1 << 20
_MOST_AXES = 64  # NumPy's limit; the product of a million sizes would take minutes


class Table(Protocol):
    """Rows of one array, in a file or in memory.

    Attributes:
        alike: Equal for arrays in memory whose rows have one layout; None for files.
    """

    alike: Any

    def __len__(self) -> int:
        """Return the number of rows."""

    def row(self, index: int) -> Any:
        """Return one row; a copy, if the array is in a file."""

    def read(self, start: int, out: Any) -> None:
        """Write rows `[start, start + len(out))` to `out`."""

    def close(self) -> None:
        """Close the file."""


def check_rows(shape: Sequence[int], dtype: Any, name: str) -> None:
    """Raise if an array has no rows, or rows that no tensor can hold."""
    if isinstance(dtype, np.dtype) and dtype.kind not in _NUMBERS:
        raise ValueError(f"{name} is of dtype {dtype}, and batches are made of numbers")
    if not len(shape):
        raise ValueError(f"{name} is a single number, without an axis for time steps")
    if shape[0] > sys.maxsize:
        raise ValueError(f"{name} claims {shape[0]:,} time steps, which no computer holds; it is damaged")
    if 0 in shape:
        check_empty_rows(int(shape[0]), math.prod(shape[1:]), name)


def chunks_of(array: Any, axis: int = 0) -> int:
    """Return the number of chunks along `axis` and all axes after it, written or not."""
    return math.prod(-(-size // chunk) for size, chunk in zip(array.shape[axis:], array.chunks[axis:], strict=True))


class MemoryTable:
    """Rows of an array, a tensor, or an object that NumPy converts to an array."""

    def __init__(self, array: Any, name: str) -> None:
        if isinstance(array, Mapping):
            raise ValueError(f"{name} is a mapping, and mappings of arrays are flat; give each array its own key")
        self._array: Any = array if isinstance(array, torch.Tensor) else np.asarray(array)
        shape, dtype = self._array.shape, self._array.dtype
        check_rows(shape, dtype, name)
        self.alike = dtype, shape[1:], isinstance(array, torch.Tensor) and not is_dense(array)

    def __len__(self) -> int:
        return len(self._array)

    def row(self, index: int) -> Any:
        row = self._array[index]
        if isinstance(row, torch.Tensor) or row.dtype.isnative:
            return row
        return row.astype(row.dtype.newbyteorder("="))

    def read(self, start: int, out: Any) -> None:
        rows = self._array[start : start + len(out)]
        if isinstance(out, torch.Tensor):
            out.copy_(rows)
        else:
            out[...] = rows

    def close(self) -> None:
        self._array = ()


class NpyHeader(NamedTuple):
    """Header of a `.npy` file; the array begins at byte `offset`."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran_order: bool
    offset: int

    @property
    def file_bytes(self) -> int:
        """Size of a complete file in bytes."""
        return self.offset + math.prod(self.shape) * self.dtype.itemsize


def read_header(file: BinaryIO, name: str) -> NpyHeader:
    """Read the header of a `.npy` file without Python's parser, because that of 3.11 fails in two threads."""
    magic = file.read(8)
    width = 2 if magic[6:7] == b"\x01" else 4
    length = int.from_bytes(file.read(width), "little")
    text = file.read(min(length, _LONGEST_HEADER_BYTES)).decode("latin1")
    if len(text) < length or magic[6:8] not in (b"\x01\x00", b"\x02\x00", b"\x03\x00"):
        raise ValueError(f"{name} is not a whole .npy file: its header cannot be read")
    # The patterns never search for a far end, so each byte is read once.
    if found := re.search(r"""['"]descr['"]\s*:\s*(?=\[)""", text):
        fields = text[found.end() : found.end() + 300].rpartition("]")[0]
        raise ValueError(f"{name} is of dtype {fields}]; save its fields as arrays")
    descr = re.search(r"""['"]descr['"]\s*:\s*['"]([^'"]*)['"]""", text)
    order = re.search(r"""['"]fortran_order['"]\s*:\s*(True|False)""", text)
    shape = re.search(r"""['"]shape['"]\s*:\s*\(([\d\s,]*)\)""", text)
    try:
        if descr is None or order is None or shape is None:
            raise ValueError(text)
        sizes = tuple(int(size) for size in shape[1].split(",")[: _MOST_AXES + 2] if size.strip())
        if len(sizes) > _MOST_AXES:
            raise ValueError(text)
        return NpyHeader(sizes, np.dtype(descr[1]), order[1] == "True", file.tell())
    except (TypeError, ValueError):
        raise ValueError(f"{name} is not a whole .npy file: its header is {text[:200]!r}") from None


def checked_header(file: BinaryIO, name: str) -> NpyHeader:
    """Read the header of a `.npy` file; raise if its rows are not numbers, or the file is cut off."""
    header = read_header(file, name)
    check_rows(header.shape, header.dtype, name)
    found, whole = os.fstat(file.fileno()).st_size, header.file_bytes
    if found < whole:
        raise ValueError(f"{name} is cut off: {found:,} bytes of {whole:,}, for {header.shape} of {header.dtype}")
    return header


class NpyTable:
    """Rows of a `.npy` file, read through its own memory map."""

    alike: Any = None

    def __init__(self, path: str, name: str) -> None:
        with above_standard():
            self._file = open(path, "rb")  # noqa: SIM115
        with above_standard(), closed_on_error(self._file):  # the map has a descriptor of its own
            header = checked_header(self._file, name)
            self._known = KnownFile.of(path, self._file.fileno(), name=name)
            self._array: Any = np.memmap(
                self._file, header.dtype, "r", header.offset, header.shape, "F" if header.fortran_order else "C"
            )
        self.row_shape, self.dtype = header.shape[1:], header.dtype.newbyteorder("=")

    def __len__(self) -> int:
        return len(self._array)

    def row(self, index: int) -> Any:
        with self._known:
            return np.array(self._array[index], self.dtype)[()]

    def read(self, start: int, out: Any) -> None:
        with self._known:
            out[...] = self._array[start : start + len(out)]

    def close(self) -> None:
        self._array = ()  # the map is closed with the only array over it
        self._file.close()
