"""A file that must stay what it was: a change is noticed by inode, size and time of change.

Guarantee: what was read within `with known:` is what the file held when it became known, or an error. A file that is
shorter by then is not touched: reading mapped memory behind its end would kill the process (SIGBUS).
"""

from __future__ import annotations

import os
from typing import NamedTuple

from stream_dataloader.errors import StoreError

__all__ = ["KnownFile"]


class KnownFile(NamedTuple):
    """A file, as it was when it became known; `with known:` is held while it is read.

    Errors call it `name`. With a `descriptor` the open file is looked at, which may have lost its name.
    """

    path: str
    inode: int
    size: int
    modified_ns: int
    name: str
    descriptor: int = -1

    @classmethod
    def of(cls, path: str, descriptor: int = -1, *, name: str | None = None) -> KnownFile:
        """A file as it is now."""
        found = os.stat(path) if descriptor < 0 else os.fstat(descriptor)
        return cls(path, found.st_ino, found.st_size, found.st_mtime_ns, name or path, descriptor)

    def check(self) -> None:
        """Raise a `StoreError` if the file was cut off, replaced or written to."""
        try:
            found = os.stat(self.path) if self.descriptor < 0 else os.fstat(self.descriptor)
        except FileNotFoundError:
            raise StoreError(f"{self.name} is missing: it was deleted or moved since it was opened") from None
        if found.st_size < self.size:
            raise StoreError(
                f"{self.name} was cut off while it was read: {found.st_size:,} bytes are left of {self.size:,}"
            )
        if (found.st_ino, found.st_size, found.st_mtime_ns) != (self.inode, self.size, self.modified_ns):
            raise StoreError(
                f"{self.name} is another file now than when it was opened: it was replaced or written to; open it again"
            )

    def __enter__(self) -> None:
        self.check()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or issubclass(kind, Exception):  # the change may be why something else was raised
            self.check()
