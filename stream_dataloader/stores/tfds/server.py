"""Reads records of ArrayRecord files for the process that started it, until its input ends.

It is run as a script, and imports array_record and the standard library alone. A request is the lengths of a path and
of the number of records that there should be, with the place of one of them; the answer is a status (0: the record,
1: an error's text), a length, and that many bytes. See `records`.
"""

from __future__ import annotations

import os
import signal
import struct
import sys
from collections import OrderedDict
from typing import Any

REQUEST, ANSWER = struct.Struct("<IqqQ"), struct.Struct("<BQ")

#: Files that are open at once; a dataset may have thousands.
_MOST_OPEN = 8


class Shards:
    """The files that were read last, open."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, Any] = OrderedDict()

    def read(self, path: str, place: int, records: int, size: int) -> bytes:
        """One record.

        Raises:
            ValueError: The file has not as many records, or bytes, as it should.
            OSError: It cannot be read.
            RuntimeError: It is damaged.
        """
        reader = self._open.pop(path, None) or self._opened(path, records, size)
        reader.seek(place)
        found: bytes = reader.read()  # a reader that raised is of no use any more
        self._open[path] = reader
        return found

    def _opened(self, path: str, records: int, size: int) -> Any:
        from array_record.python import array_record_module

        found = os.stat(path).st_size
        if found != size:
            raise ValueError(f"it has {found:,} bytes, and had {size:,} when the store was opened")
        # Without read-ahead: a stream is one record, and the next one read is often in another file.
        reader = array_record_module.ArrayRecordReader(path, options="readahead_buffer_size:0,max_parallelism:0")
        if reader.num_records() != records:
            raise ValueError(f"it has {reader.num_records()} records, and dataset_info.json says {records}")
        while len(self._open) >= _MOST_OPEN:
            self._open.popitem(last=False)[1].close()
        return reader


def main() -> None:
    """Answer requests."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who asks
    shards, requests, answers = Shards(), sys.stdin.buffer, sys.stdout.buffer
    while len(head := requests.read(REQUEST.size)) == REQUEST.size:
        name_bytes, place, records, size = REQUEST.unpack(head)
        path = os.fsdecode(requests.read(name_bytes))
        try:
            status, found = 0, shards.read(path, place, records, size)
        except Exception as error:
            status, found = 1, f"{type(error).__name__}: {error}".encode("utf-8", "backslashreplace")
        answers.write(ANSWER.pack(status, len(found)))
        answers.write(found)
        answers.flush()


if __name__ == "__main__":
    main()
