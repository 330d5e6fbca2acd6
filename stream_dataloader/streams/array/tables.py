"""Rows of one array: in memory, or in a `.npy` file.

Guarantee: a file's rows are handed out as copies, so that the file can be closed. A file that is cut off or written
to while it is read is an error, not a crash or other data.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np
import torch

from stream_dataloader.streams._media.known_file import KnownFile
from stream_dataloader.streams._media.section import closed_on_error

__all__ = ["NpyHeader", "NpyTable", "Table", "check_rows", "checked_header", "memory_table"]

_NUMBERS = "biufc"  # bool, signed and unsigned integers, floats, complex
_LONGEST_HEADER_BYTES = 1 << 20
_MOST_ROWS = 1 << 56


class Table(Protocol):
    """Rows of one array, of a file or in memory."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def row(self, index: int) -> Any:
        """One of them; of a file, a copy."""
        ...

    def read(self, start: int, out: Any) -> None:
        """Write rows `[start, start + len(out))` to `out`."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


def check_rows(shape: Sequence[int], dtype: np.dtype[Any], name: str) -> None:
    """Refuse what has no rows, or rows that no tensor can hold."""
    if not len(shape):
        raise ValueError(f"{name} is a single number, without an axis for time steps; give it one")
    if dtype.names is not None:
        raise ValueError(f"{name} is a structured array of {dtype.names}; save each of its fields as an array")
    if dtype.kind not in _NUMBERS:
        raise ValueError(f"{name} is of dtype {dtype}, and batches are made of numbers; convert it to some")


def memory_table(array: Any, name: str) -> Table:
    """Rows of an array, a tensor, or what NumPy makes an array of; `name` is for errors."""
    if isinstance(array, torch.Tensor):
        if not array.ndim:
            raise ValueError(f"{name} is a single number, without an axis for time steps; give it one")
        return _MemoryTable(array)
    array = np.asarray(array)
    check_rows(array.shape, array.dtype, name)
    return _MemoryTable(array)


class _MemoryTable:
    """Rows of an array or tensor."""

    def __init__(self, array: Any) -> None:
        self._array: Any = array
        foreign = isinstance(array, np.ndarray) and not array.dtype.isnative
        self._native = array.dtype.newbyteorder("=") if foreign else None

    def __len__(self) -> int:
        return len(self._array)

    def row(self, index: int) -> Any:
        row = self._array[index]
        return row if self._native is None else row.astype(self._native)

    def read(self, start: int, out: Any) -> None:
        rows = self._array[start : start + len(out)]
        if isinstance(out, torch.Tensor):
            out.copy_(rows)
        else:
            out[...] = rows

    def close(self) -> None:
        self._array = ()


class NpyHeader(NamedTuple):
    """The header of a `.npy` file; the array begins at byte `offset`."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran_order: bool
    offset: int

    @property
    def file_bytes(self) -> int:
        """How long a whole file is."""
        return self.offset + math.prod(self.shape) * self.dtype.itemsize


def read_header(file: BinaryIO, name: str) -> NpyHeader:
    """The header of a `.npy` file (NumPy enhancement proposal 1).

    NumPy has Python parse the header, which Python 3.11 cannot do in two threads at the same time (a SystemError).
    """
    magic = file.read(8)
    width = 2 if magic[6:7] == b"\x01" else 4
    length = int.from_bytes(file.read(width), "little")
    text = file.read(min(length, _LONGEST_HEADER_BYTES)).decode("latin1")
    if len(text) < length or magic[6:8] not in (b"\x01\x00", b"\x02\x00", b"\x03\x00"):
        raise ValueError(f"{name} is not a whole .npy file: its header cannot be read; write it anew")
    if found := re.search(r"""['"]descr['"]\s*:\s*(\[.*\])""", text):
        raise ValueError(f"{name} is a structured array of {found[1]}; save each of its fields as an array")
    descr = re.search(r"""['"]descr['"]\s*:\s*['"]([^'"]*)['"]""", text)
    order = re.search(r"""['"]fortran_order['"]\s*:\s*(True|False)""", text)
    shape = re.search(r"""['"]shape['"]\s*:\s*\(([\d\s,]*)\)""", text)
    try:
        if descr is None or order is None or shape is None:
            raise ValueError(text)
        sizes = tuple(int(size) for size in shape[1].split(",") if size.strip())
        return NpyHeader(sizes, np.dtype(descr[1]), order[1] == "True", file.tell())
    except (TypeError, ValueError):
        raise ValueError(f"{name} is not a whole .npy file: its header is {text[:200]!r}; write it anew") from None


def checked_header(file: BinaryIO, name: str) -> NpyHeader:
    """The header of a `.npy` file; an error if its rows are not numbers, or not all there."""
    header = read_header(file, name)
    check_rows(header.shape, header.dtype, name)
    found, whole = os.fstat(file.fileno()).st_size, header.file_bytes
    if found < whole:
        raise ValueError(
            f"{name} is cut off: {found:,} bytes of {whole:,}, for {header.shape} of {header.dtype}; write it anew"
        )
    if header.shape[0] >= _MOST_ROWS:
        raise ValueError(f"{name} says that it has {header.shape[0]:,} rows, of no bytes; write it anew")
    return header


class NpyTable:
    """Rows of a `.npy` file, through a memory map of its own."""

    def __init__(self, path: str, name: str) -> None:
        self._file = open(path, "rb")  # noqa: SIM115
        with closed_on_error(self._file):
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

    def all_rows(self) -> Any:
        """A copy of the whole array."""
        with self._known:
            return np.array(self._array, self.dtype)

    def read(self, start: int, out: Any) -> None:
        with self._known:
            out[...] = self._array[start : start + len(out)]

    def close(self) -> None:
        self._array = ()  # the map, and its descriptor, go with the only array over it
        self._file.close()
