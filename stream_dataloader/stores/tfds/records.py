"""Fetches records of ArrayRecord files by a process of its own.

Guarantee: the process that reads may be forked, and its children read too. A crash of array_record is an error, not the
end of the training.

array_record keeps threads that wait on locks of their own: in a process that was forked after it was used, opening a
file ends in a segmentation fault or never (array_record 0.8.6). So only a child that is started anew (exec) uses it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import subprocess
import sys
import threading
import weakref
from typing import Any

from stream_dataloader.errors import StoreError
from stream_dataloader.stores.tfds import server

__all__ = ["Records"]

_PIPE_BYTES = 1 << 20


class Records:
    """Records, fetched by a child of this process; it is started when the first is wanted. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._end: Any = None

    def read(self, path: str, place: int, records: int, size: int) -> bytes:
        """One record."""
        with self._lock:
            child = self._started()
            assert child.stdin is not None
            assert child.stdout is not None
            try:
                pickle.dump((os.path.abspath(path), place, records, size), child.stdin)
                child.stdin.flush()
                found: bytes | tuple[str, str] = pickle.load(child.stdout)
            except (EOFError, BrokenPipeError, pickle.UnpicklingError):
                self._stop()
                raise StoreError(
                    f"{path}: array_record ended with status {child.returncode} when it read record {place}; the file "
                    "is damaged, or memory is short"
                ) from None
            except BaseException:  # interrupted within an answer: its rest must not be taken for the next one
                self._stop()
                raise
        if isinstance(found, bytes):
            return found
        kind, text = found
        if kind == "ModuleNotFoundError":
            raise ImportError(f"reading {path} needs array_record; install it: pip install 'stream-dataloader[tfds]'")
        raise StoreError(f"{path}, record {place}: {kind}: {text}; prepare the dataset anew")

    def _started(self) -> subprocess.Popen[bytes]:
        if self._child is None:
            paths = os.pathsep.join(path for path in sys.path if path)
            self._child = subprocess.Popen(  # noqa: S603
                [sys.executable, server.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": paths},
            )
            self._end = weakref.finalize(self, _end, self._child, os.getpid())
            assert self._child.stdout is not None
            with contextlib.suppress(AttributeError, OSError):  # it writes a large part of a record at once
                fcntl.fcntl(self._child.stdout.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        return self._child

    def _stop(self) -> None:
        if self._end is not None:
            self._end()
        self._child = self._end = None

    def close(self) -> None:
        """End the child; the next read starts another."""
        with self._lock:
            self._stop()


def _end(child: subprocess.Popen[bytes], owner: int) -> None:
    """End the child, in the process that started it; one that was forked from it leaves it alone."""
    if os.getpid() != owner:
        return
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(0.05)
    child.kill()
    child.wait()
