"""Opens databases for reading: each file once a process, and as many at a time as the user allows.

LMDB must not have a file open twice in a process, and what it has open must not be used after a fork. So all stores of
a process share what is open, a forked process opens its own, and what nobody uses any more is closed.

Guarantee: a value that was got stays valid within the `with` in which it was got. A file that is damaged, cut off or
replaced is an error, not a crash.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from stream_dataloader.errors import StoreError
from stream_dataloader.stores.lmdb.pages import read_tree
from stream_dataloader.streams._media.known_file import KnownFile

__all__ = ["Database", "Shelf", "import_lmdb"]


def import_lmdb() -> Any:
    """The package lmdb.

    Raises:
        ImportError: It is missing; says how to install it.
    """
    try:
        import lmdb
    except ImportError as error:
        raise ImportError("LMDB is read with the package lmdb: pip install 'stream-dataloader[lmdb]'") from error
    return lmdb


class _Environment:
    """A file that this process has open; closed as soon as nobody refers to it."""

    def __init__(self, path: str, readahead: bool) -> None:
        lmdb = import_lmdb()
        self._errors = lmdb.Error
        self.path = path
        self.file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.known = KnownFile.of(path, self.file)
            # the map is as large as the file: LMDB's default of 10 MB, or what the file says, may be less
            options = {"subdir": False, "readonly": True, "lock": False, "create": False, "map_size": self.known.size}
            self._opened = lmdb.open(path, readahead=readahead, **options)
        except BaseException as error:
            os.close(self.file)
            if isinstance(error, lmdb.Error):
                raise StoreError(f"{path} cannot be opened: {error}") from error
            raise
        self._transaction = self._opened.begin(buffers=True)
        self.close = weakref.finalize(self, _close, self._transaction, self._opened, self.file)
        self.close.atexit = False

    def get(self, key: bytes) -> Any:
        try:
            with _lock:
                return self._transaction.get(key)
        except self._errors as error:
            raise StoreError(f"{self.path} is damaged: {error}; write it anew") from error


def _close(transaction: Any, opened: Any, file: int) -> None:
    with _lock:
        transaction.abort()
        opened.close()
        os.close(file)


#: Held while LMDB works: what it does at the moment of a fork, the forked process would wait for without end.
_lock = threading.RLock()
#: What is open in this process, by device and inode.
_environments: weakref.WeakValueDictionary[tuple[int, int], _Environment] = weakref.WeakValueDictionary()
_users: weakref.WeakSet[Shelf | Database] = weakref.WeakSet()


def _close_what_was_inherited() -> None:
    """In a forked process: LMDB takes what the parent has open for its own, and would not open it again."""
    global _lock
    _lock = threading.RLock()
    for environment in list(_environments.values()):
        environment.close()
    _environments.clear()
    for user in list(_users):
        user.forget()


def _hold() -> None:
    _lock.acquire()


def _let_go() -> None:
    _lock.release()  # that of now: this process may have been forked itself


os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_close_what_was_inherited)


def _environment(path: str, readahead: bool) -> _Environment:
    with _lock:
        stat = os.stat(path)
        found = _environments.get((stat.st_dev, stat.st_ino))
        if found is None:
            found = _environments[stat.st_dev, stat.st_ino] = _Environment(path, readahead)
        found.known.check()
        return found


class Shelf:
    """The databases of a store, of which a few are open at a time.

    Args:
        most: How many may be open. More are, while more are read at once.
        readahead: Whether the system reads ahead of what is asked for.
    """

    def __init__(self, most: int | None, readahead: bool) -> None:
        self.most = most
        self.readahead = readahead
        self.forget()
        _users.add(self)

    def forget(self) -> None:
        """Have nothing open, as in a process that was forked."""
        self._open: dict[Database, None] = {}  # the one that was used last is last
        self._lock = threading.Lock()

    def used(self, database: Database) -> None:
        """Close what was used the longest time ago, if too many are open."""
        if self.most is None:
            return
        with self._lock:
            self._open.pop(database, None)
            self._open[database] = None
            for other in list(self._open)[: max(0, len(self._open) - self.most)]:
                if other is not database and other.put_away():
                    del self._open[other]


class Database:
    """One database of a store.

    Args:
        path: Its file.
        shelf: The store's.
        expected: Size of the file in bytes, and CRC-32 of its tree, see `pages`; None: not known.

    Attributes:
        checked: For each value 1 if it was compared with its checksum; filled by whoever reads.
    """

    def __init__(self, path: str, shelf: Shelf, expected: tuple[int, int] | None = None) -> None:
        self.path = path
        self._shelf = shelf
        self._expected = expected
        self._known = KnownFile.of(path) if os.path.exists(path) else None
        self._is_right = False  # whether its tree was looked at
        self.checked = bytearray()
        self.forget()
        _users.add(self)

    def forget(self) -> None:
        """Have nothing open, as in a process that was forked."""
        self._environment: _Environment | None = None
        self._users = 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def reading(self) -> Iterator[_Environment]:
        """Have it open; `get` of what is yielded gives a value's bytes, or None.

        Raises:
            StoreError: The file is missing, damaged, or another one than it was.
            OSError: It cannot be read.
        """
        with self._lock:
            environment = self._environment
            if environment is None:
                environment = self._environment = self._open()
            self._users += 1
        try:
            with environment.known:
                yield environment
        finally:
            with self._lock:
                self._users -= 1
            self._shelf.used(self)

    def put_away(self) -> bool:
        """Close it, unless it is being read."""
        with self._lock:
            if self._users:
                return False
            self._environment = None
            return True

    def _open(self) -> _Environment:
        if self._known is None:
            raise StoreError(f"{self.path} is missing: the store is damaged; write it anew")
        with self._known:  # it is what it was when the store was opened
            if not self._is_right:
                self._check_tree(self._known.size)
            return _environment(self.path, self._shelf.readahead)

    def _check_tree(self, size: int) -> None:
        if self._expected is not None and size != self._expected[0]:
            raise StoreError(f"{self.path} is damaged: {size:,} bytes of {self._expected[0]:,}; pack it anew")
        tree = read_tree(self.path)
        if self._expected is not None and tree.crc != self._expected[1]:
            raise StoreError(f"{self.path} is damaged: the checksum of its tree is another; pack the store anew")
        self.checked = bytearray(tree.entries)
        self._is_right = True
