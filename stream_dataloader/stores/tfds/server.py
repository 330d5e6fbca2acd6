"""Reads records of ArrayRecord files for the process that started it, until its input ends.

It is run as a script, and imports array_record and the standard library alone. Requests and answers are pickled: the
arguments of `read`, then the record, or the type and the text of an error. See `records`.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from functools import lru_cache
from typing import Any


@lru_cache(maxsize=8)  # a dataset may have thousands
def _opened(path: str, records: int, size: int) -> Any:
    from array_record.python import array_record_module

    if (found := os.stat(path).st_size) != size:
        raise ValueError(f"it has {found:,} bytes, and had {size:,} when the store was opened")
    # Without read-ahead: a stream is one record, and the next one read is often in another file.
    reader = array_record_module.ArrayRecordReader(path, options="readahead_buffer_size:0,max_parallelism:0")
    if reader.num_records() != records:
        raise ValueError(f"it has {reader.num_records()} records, and dataset_info.json says {records}")
    return reader


def read(path: str, place: int, records: int, size: int) -> bytes | tuple[str, str]:
    """One record; or what raised an error, and its text."""
    try:
        reader = _opened(path, records, size)
        reader.seek(place)
        found: bytes = reader.read()
    except Exception as error:
        _opened.cache_clear()  # a reader that raised is of no use any more
        return type(error).__name__, str(error)
    return found


def main() -> None:
    """Answer requests."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who asks
    while True:
        try:
            request = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(read(*request), sys.stdout.buffer, pickle.HIGHEST_PROTOCOL)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
