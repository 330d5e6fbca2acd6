"""Steps that lie end to end in flat files, a file for each leaf: mapped into memory, and read from there.

Guarantee: a window is copied once, from the map into the batch. A file that is cut off or written to while it is read
is an error, not a crash or other data.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from stream_dataloader._items.layout import as_array
from stream_dataloader._items.structure import Node, flatten, unflatten
from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.leaves import LeafSpec, owned
from stream_dataloader.streams._media.known_file import KnownFile

__all__ = ["Column", "LeafFile", "MappedSteps"]


class Column:
    """All steps of a leaf, which are in memory, such as texts.

    Attributes:
        rows: They, `(steps, ...)`.
    """

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def check_size(self) -> None:
        """Called before they are read: reading mapped memory behind a file's end would kill the process (SIGBUS)."""

    def check(self) -> None:
        """Called when they were read: raises if they are others than they were."""

    def own(self, row: Any) -> Any:
        """One of them, as a copy."""
        return row

    def __str__(self) -> str:
        return "an object"


class LeafFile(Column):
    """A leaf's file, mapped. It may be inherited by fork.

    Args:
        path: The file. It need not exist if it has no bytes.
        spec: The leaf.
        steps: How many there are.
        exact: Whether a longer file is an error.
        readahead: Whether the system reads ahead of what is read.

    Attributes:
        rows: All steps, `(steps, ...)`.

    Raises:
        StoreError: The file is missing, or of another size.
    """

    def __init__(self, path: str, spec: LeafSpec, steps: int, *, exact: bool = True, readahead: bool = True) -> None:
        self.path = path
        self.spec = spec
        self._known: KnownFile | None = None
        wanted = steps * spec.step_bytes
        shape = (steps, *spec.shape)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            if wanted:
                raise StoreError(f"{path} is missing: the store is unfinished or damaged; write it anew") from None
            self.rows = np.empty(shape, spec.stored)
            return
        weakref.finalize(self, os.close, descriptor).atexit = False
        known = KnownFile.of(path, descriptor)
        if known.size < wanted or (exact and known.size > wanted):
            raise StoreError(f"{path} is damaged: {known.size:,} bytes of {wanted:,}; write the store anew")
        flat: Any = b""
        if wanted:
            self._known, self._map = known, mmap.mmap(descriptor, wanted, access=mmap.ACCESS_READ)
            flat = self._map
            if not readahead:
                self._map.madvise(mmap.MADV_RANDOM)
        self.rows = np.frombuffer(flat, spec.stored).reshape(shape)

    def check_size(self) -> None:
        if self._known is not None and self._map.size() < self._known.size:
            self._known.check()

    def check(self) -> None:
        if self._known is not None:
            self._known.check()

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
        assert self._structure is not None
        leaves = []
        for column, rows in zip(self._columns, self._rows, strict=True):
            column.check_size()
            leaves.append(column.own(rows[index]))
            column.check()
        return unflatten(self._structure, iter(leaves))

    def read(self, start: int, out: Any) -> None:
        _, leaves = flatten(out)
        for column, rows, leaf in zip(self._columns, self._rows, leaves, strict=True):
            target = as_array(leaf) if isinstance(leaf, torch.Tensor) else leaf
            column.check_size()
            target[...] = rows[start : start + len(leaf)]
            column.check()

    def close(self) -> None:
        self._rows = []
