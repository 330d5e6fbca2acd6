"""Steps that lie end to end in flat files, a file for each leaf: mapped into memory, and read from there.

Guarantee: a window is copied once, from the map into the batch. A file that is cut off while it is read is an error,
not a crash.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from stream_dataloader._items.layout import as_array
from stream_dataloader._items.structure import Node, flatten, unflatten
from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.leaves import LeafSpec, owned

__all__ = ["Column", "LeafFile", "MappedSteps", "TextColumn"]


class Column(Protocol):
    """All steps of a leaf.

    Attributes:
        rows: They, `(steps, ...)`.
    """

    rows: Any

    def check(self) -> None:
        """Raise if they cannot be read any more."""
        ...

    def own(self, row: Any) -> Any:
        """One of them, as a copy."""
        ...


class TextColumn:
    """A leaf of texts; a `Column`."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.rows: Any = texts

    def check(self) -> None:
        pass

    def own(self, row: Any) -> Any:
        return row

    def __str__(self) -> str:
        return "an object"


class LeafFile:
    """A leaf's file, mapped; a `Column`. It may be inherited by fork.

    Args:
        path: The file. It need not exist if it has no bytes.
        spec: The leaf.
        steps: How many there are.
        exact: Whether a longer file is an error.

    Attributes:
        rows: All steps, `(steps, ...)`.

    Raises:
        StoreError: The file is missing, or of another size.
    """

    def __init__(self, path: str, spec: LeafSpec, steps: int, *, exact: bool = True) -> None:
        self.path = path
        self.spec = spec
        self._bytes = steps * spec.step_bytes
        self._fd = -1
        shape = (steps, *spec.shape)
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            if self._bytes:
                raise StoreError(f"{path} is missing: the store is unfinished or damaged; write it anew") from None
            self.rows = np.empty(shape, spec.stored)
            return
        weakref.finalize(self, os.close, self._fd).atexit = False
        found = os.fstat(self._fd).st_size
        if found < self._bytes or (exact and found > self._bytes):
            raise StoreError(f"{path} is damaged: {found:,} bytes of {self._bytes:,}; write the store anew")
        flat: Any = mmap.mmap(self._fd, self._bytes, access=mmap.ACCESS_READ) if self._bytes else b""
        self.rows = np.frombuffer(flat, spec.stored).reshape(shape)

    def check(self) -> None:
        """Reading mapped memory behind the file's end would kill the process (SIGBUS)."""
        if self._bytes and (found := os.fstat(self._fd).st_size) < self._bytes:
            raise OSError(f"{self.path} was cut off while it was read: {found:,} bytes are left of {self._bytes:,}")

    def own(self, row: Any) -> Any:
        """A copy of a step, as a tensor where NumPy lacks the dtype."""
        return owned(row, self.spec.dtype)

    def __str__(self) -> str:
        return str(self.spec)


class MappedSteps:
    """One stream's steps; see `Steps`.

    Args:
        structure: Of an item; None if there is no item.
        columns: Its leaves, in the structure's order.
        start: The stream's first step.
        steps: How many it has.
    """

    def __init__(self, structure: Node | None, columns: Sequence[Column], start: int, steps: int) -> None:
        assert structure is not None or not steps
        self._structure = structure
        self._steps = steps
        self._columns = columns
        self._rows = [column.rows[start : start + steps] for column in columns]

    def __len__(self) -> int:
        return self._steps

    def item(self, index: int) -> Any:
        self._check()
        assert self._structure is not None
        leaves = [column.own(rows[index]) for rows, column in zip(self._rows, self._columns, strict=True)]
        return unflatten(self._structure, iter(leaves))

    def read(self, start: int, out: Any) -> None:
        self._check()
        _, leaves = flatten(out)
        for rows, leaf in zip(self._rows, leaves, strict=True):
            target = as_array(leaf) if isinstance(leaf, torch.Tensor) else leaf
            target[...] = rows[start : start + len(leaf)]

    def _check(self) -> None:
        for column in self._columns:
            column.check()

    def close(self) -> None:
        self._rows = []
