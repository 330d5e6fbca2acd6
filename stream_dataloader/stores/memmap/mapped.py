"""Steps that lie end to end in flat files, a file for each leaf: mapped into memory.

Guarantee: a window is copied once. A file that is cut off or written to meanwhile is an error, not a crash.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from stream_dataloader._items.layout import as_array
from stream_dataloader._items.structure import Node, flatten, unflatten
from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.leaves import LeafSpec, owned
from stream_dataloader.streams._media.section import KnownFile

__all__ = ["Column", "LeafFile", "MappedSteps"]


class Column:
    """All steps of a leaf, `rows`; texts and the like have no `spec`."""

    spec: LeafSpec | None = None
    _known: KnownFile | None = None
    _map: mmap.mmap

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def check_size(self) -> None:
        """Called before: reading behind a mapped file's end is a SIGBUS."""
        if self._known is not None and self._map.size() < self._known.size:
            self._known.check()

    def check(self) -> None:
        """Called after: raises if they were written to."""
        if self._known is not None:
            self._known.check()

    def own(self, row: Any) -> Any:
        """One of them, as a copy."""
        return row if self.spec is None else owned(row, self.spec.dtype)

    def __str__(self) -> str:
        return "an object" if self.spec is None else str(self.spec)


class LeafFile(Column):
    """A leaf's file, mapped. It may be inherited by fork.

    Args:
        path: The file. It need not exist if it has no bytes.
        spec: The leaf.
        steps: How many there are.
        exact: Whether a longer file is an error.
        readahead: Whether the system reads ahead of what is read.

    Raises:
        FileNotFoundError: The file is missing.
        StoreError: It is of another size.
    """

    spec: LeafSpec

    def __init__(self, path: str, spec: LeafSpec, steps: int, *, exact: bool = True, readahead: bool = True) -> None:
        self.path, self.spec = path, spec
        wanted = steps * spec.step_bytes
        flat: Any = b""
        if wanted or os.path.exists(path):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, descriptor).atexit = False
            known = KnownFile.of(path, descriptor)
            if known.size < wanted or (exact and known.size > wanted):
                raise StoreError(f"{path} is damaged: {known.size:,} bytes of {wanted:,}")
        if wanted:
            self._known = known
            self._map = flat = mmap.mmap(descriptor, wanted, access=mmap.ACCESS_READ)
            if not readahead:
                self._map.madvise(mmap.MADV_RANDOM)
        super().__init__(np.frombuffer(flat, spec.stored).reshape(steps, *spec.shape))


class MappedSteps:
    """One stream's steps; see `Steps`.

    Args:
        structure: Of an item; None if there is no item.
        columns: Its leaves, in the structure's order.
        start: The stream's first step.
        steps: How many it has.
    """

    def __init__(self, structure: Node | None, columns: Sequence[Column], start: int, steps: int) -> None:
        self._structure = structure
        self._steps = steps
        self._parts = [(column, column.rows[start : start + steps]) for column in columns]

    def __len__(self) -> int:
        return self._steps

    def item(self, index: int) -> Any:
        assert self._structure is not None
        leaves = []
        for column, rows in self._parts:
            column.check_size()
            leaves.append(column.own(rows[index]))
            column.check()
        return unflatten(self._structure, iter(leaves))

    def read(self, start: int, out: Any) -> None:
        _, leaves = flatten(out)
        for (column, rows), leaf in zip(self._parts, leaves, strict=True):
            column.check_size()
            as_array(leaf)[...] = rows[start : start + len(leaf)]
            column.check()

    def close(self) -> None:
        self._parts = []
