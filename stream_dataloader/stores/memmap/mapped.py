"""Steps that lie end to end in flat files, a file for each leaf: mapped into memory.

Guarantee: a window is copied once. A file that is cut off or written to meanwhile is an error, not a crash.
"""

from __future__ import annotations

import mmap
import os
import weakref
from typing import Any

import numpy as np

from stream_dataloader._items.layout import as_array
from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.leaves import LeafSpec, owned
from stream_dataloader.streams._media.section import KnownFile

__all__ = ["LeafFile"]


class LeafFile:
    """A leaf's file, mapped; a `tables.Table`. It may be inherited by fork.

    Args:
        path: The file. It need not exist if it has no bytes.
        spec: The leaf.
        steps: How many there are.
        exact: Whether a longer file is an error.
        readahead: Whether the system reads ahead of what is read.

    Attributes:
        rows: All steps, `(steps, ...)`; see `check_size` and `check`.
    """

    def __init__(self, path: str, spec: LeafSpec, steps: int, *, exact: bool = True, readahead: bool = True) -> None:
        self.path, self.spec = path, spec
        self._known: KnownFile | None = None
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
        self.rows = np.frombuffer(flat, spec.stored).reshape(steps, *spec.shape)

    def __len__(self) -> int:
        return len(self.rows)

    def check_size(self) -> None:
        """Called before rows are read: reading behind a mapped file's end is a SIGBUS."""
        if self._known is not None and self._map.size() < self._known.size:
            self._known.check()

    def check(self) -> None:
        """Called after: raises if they were written to."""
        if self._known is not None:
            self._known.check()

    def row(self, index: int) -> Any:
        """One step, as a copy."""
        self.check_size()
        found = owned(self.rows[index], self.spec.dtype)
        self.check()
        return found

    def read(self, start: int, out: Any) -> None:
        """Write steps `[start, start + len(out))` to `out`."""
        self.check_size()
        as_array(out)[...] = self.rows[start : start + len(out)]
        self.check()
