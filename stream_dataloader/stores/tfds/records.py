"""Records of ArrayRecord files, fetched by a separate process.

Guarantee: a process that reads may be forked. A crash of array_record raises an error.

array_record 0.8.6 crashes or hangs in a process that was forked after its use. So it is used only in
a newly started child process, which runs this file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import signal
import subprocess
import sys
import threading
from functools import lru_cache
from typing import Any

__all__ = ["Records"]

_PIPE_BYTES = 1 << 20


class Records:
    """Records that a child of this process fetches, for any thread."""

    def __init__(self, _dataset: str) -> None:
        self._lock = threading.Lock()
        self._child: Any = subprocess.Popen(  # noqa: S603
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        self._requests: Any = self._child.stdin
        self._answers: Any = self._child.stdout
        with contextlib.suppress(AttributeError, OSError):  # a larger pipe needs fewer writes
            fcntl.fcntl(self._answers, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)  # type: ignore[arg-type]

    def read(self, path: str, place: int, records: int) -> bytes:
        """Return one record of a file, which has `records` of them."""
        with self._lock:
            try:
                pickle.dump((os.path.abspath(path), place, records), self._requests)
                self._requests.flush()
                found: bytes | Exception = pickle.load(self._answers)
            except (EOFError, BrokenPipeError, pickle.UnpicklingError):
                self.close()
                raise RuntimeError(f"array_record ended with status {self._child.returncode}") from None
            except BaseException:  # else the rest of this answer would be taken for the next one
                self.close()
                raise
        if isinstance(found, bytes):
            return found
        raise found

    def close(self) -> None:
        self._child.kill()
        self._child.communicate()


@lru_cache(maxsize=8)  # a dataset may have thousands
def _opened(path: str, records: int) -> Any:
    from array_record.python import array_record_module

    # No read-ahead, because the next record is often in another file.
    reader = array_record_module.ArrayRecordReader(path, options="readahead_buffer_size:0,max_parallelism:0")
    if reader.num_records() != records:
        raise ValueError(f"it has {reader.num_records()} records, and dataset_info.json says {records}")
    return reader


def _serve() -> None:
    """Answer requests until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    with contextlib.suppress(EOFError):
        while True:
            path, place, records = pickle.load(sys.stdin.buffer)
            try:
                reader = _opened(path, records)
                reader.seek(place)
                found = reader.read()
            except ModuleNotFoundError:
                found = ImportError(f"{path} needs array_record: pip install 'stream-dataloader[tfds]'")
            except Exception as error:
                found = RuntimeError(f"{type(error).__name__}: {error}")
            pickle.dump(found, sys.stdout.buffer, pickle.HIGHEST_PROTOCOL)
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    _serve()
