"""The place where a store is packed, beside the one where it will be.

::

    clips.store.partial/
        lock        held by the process that packs, and its workers; tells which
        journal     what is packed so far
        store/      what will be clips.store

Guarantee: one process at a time packs to a path. The store gets its name in one step, when it is whole and on the disk.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import time
from types import TracebackType

from stream_dataloader.errors import StoreError
from stream_dataloader.stores._base.files import sync_folder
from stream_dataloader.streams.cache.file_cache import is_url
from stream_dataloader.streams.cache.file_lock import FileLock, lock

__all__ = ["PartialFolder"]

_PATIENCE_SECONDS = 20.0
_HOST = socket.gethostname()


class PartialFolder:
    """The folder in which one process packs a store.

    Args:
        path: Where the store will be.

    Attributes:
        store: What the store is written to.
        journal: The file of the journal.

    Raises:
        FileExistsError: There is something at the path.
        StoreError: Another process packs to it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path).rstrip("/") or os.fspath(path)
        if is_url(self.path):
            raise ValueError(f"{self.path} is a URL; pack into a folder of this machine, and copy that there")
        self.partial = f"{self.path}.partial"
        self.store = os.path.join(self.partial, "store")
        self.journal = os.path.join(self.partial, "journal")
        self._lock_path = os.path.join(self.partial, "lock")
        self._lock: FileLock | None = None

    def __enter__(self) -> PartialFolder:
        self._refuse_what_exists()
        self._lock = self._locked()
        try:
            self._refuse_what_exists()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is None:
            return
        if not os.path.exists(self.journal):  # nothing is kept
            shutil.rmtree(self.store, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.unlink(self._lock_path)
                os.rmdir(self.partial)
        else:
            os.truncate(self._lock_path, 0)
        self._lock.close()
        self._lock = None

    def _refuse_what_exists(self) -> None:
        if os.path.lexists(self.path):
            raise FileExistsError(
                f"{self.path} exists, and pack overwrites nothing; delete it first, or choose another path"
            )

    def _locked(self) -> FileLock:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            os.makedirs(self.partial, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # another process has just removed the folder
                if (held := lock(self._lock_path, wait=False, create=True)) is not None:
                    break
                holder = self._holder()
                if time.monotonic() > deadline or not holder or not _has_gone(holder):
                    raise StoreError(
                        f"{self.path} is being packed by another process ({holder}); wait for it, or choose another "
                        "path"
                    )
                time.sleep(0.02)  # workers of a process that was killed end within a second or so
        os.truncate(held.fd, 0)
        os.pwrite(held.fd, f"process {os.getpid()} of {_HOST}, since {time.strftime('%Y-%m-%d %H:%M:%S')}".encode(), 0)
        return held

    def _holder(self) -> str:
        with open(self._lock_path, encoding="utf-8") as file:
            return file.read(200)

    def begin_anew(self) -> None:
        """Remove what is there of a store, of which no journal tells."""
        shutil.rmtree(self.store, ignore_errors=True)
        os.makedirs(self.store)

    def free_bytes(self) -> int:
        """What the disk has left."""
        return shutil.disk_usage(self.partial).free

    def publish(self) -> None:
        """Give the store its name."""
        for folder, _, names in os.walk(self.store):
            for name in names:
                sync_folder(os.path.join(folder, name))
            sync_folder(folder)
        try:
            os.rename(self.store, self.path)
        except OSError as error:
            raise FileExistsError(
                f"{self.path} has come to exist while it was packed ({error.strerror}); remove it and pack again"
            ) from error
        sync_folder(os.path.dirname(os.path.abspath(self.path)))
        os.unlink(self.journal)


def _has_gone(holder: str) -> bool:
    """Whether the process that a lock's file names is one of this machine, and no more."""
    words = holder.replace(",", "").split()
    if words[3:4] != [_HOST]:
        return False
    try:
        os.kill(int(words[1]), 0)
    except OSError as error:
        return isinstance(error, ProcessLookupError)
    return False
