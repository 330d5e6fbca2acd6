"""The journal: which streams are packed, kept beside what is being packed.

A text file, one line an entry, each with its checksum::

    1f2e3d4c {"header": {...}}             what is packed, and how
    5b6a7988 {"part": 3}                   a part with this number was begun
    90ab12cd {"streams": [[7, 120, place], ...], "synced": ...}
                                           stream 7 has 120 steps, and lies there; what the part's `sync` returned
    34ef56a7 {"finishing": [2, 9]}         all streams are in it but these, which were skipped

Guarantee: an entry is on the disk when `append` returns, in any process. A line that a power failure damaged is passed
over: the streams that it told of are packed again.
"""

from __future__ import annotations

import fcntl
import json
import os
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from stream_dataloader.errors import StoreError

__all__ = ["Entry", "Journal", "append", "begin_part"]

_VERSION = 2


class Entry(NamedTuple):
    """A stream that is packed: its number, steps, and place as the format's `PartPacker` told it."""

    number: int
    steps: int
    place: Any


class Journal:
    """What was packed so far.

    Args:
        path: The file; made anew if there is none.
        header: What is packed, by a name for each thing that must not change: plain values.
        remedy: What to do if something has changed.

    Attributes:
        entries: The streams that are packed, by number.
        synced: What parts said when they were synced.
        finishing: The streams that were skipped, once all others are packed; None before.
        header: As it was when packing was begun.
        is_new: Nothing was packed before.

    Raises:
        StoreError: The journal is of something else.
    """

    def __init__(self, path: str, header: Mapping[str, Any], remedy: str) -> None:
        self.header: Mapping[str, Any] = {"version": _VERSION, **header}
        self._path = path
        found = _entries_of(path)
        self.is_new = len(found) < 2
        if not found or "header" not in found[0]:
            with open(path, "wb"):
                append(path, {"header": self.header})
        else:
            self.header, wanted = found[0]["header"], self.header
            changed = [name for name in wanted if self.header.get(name) != wanted[name] and not name.startswith("_")]
            if changed:
                told = "; ".join(f"{name} was {self.header.get(name)}, and is {wanted[name]}" for name in changed)
                folder = os.path.dirname(path)
                raise StoreError(f"{folder} holds what was packed with something else: {told}. {remedy}")
        self.look()

    def look(self) -> None:
        """Take in what was entered since."""
        found = _entries_of(self._path)
        self.entries = _streams_in(found)
        self.synced = [entry["synced"] for entry in found if "synced" in entry]
        self.finishing: list[int] | None = next((entry["finishing"] for entry in found if "finishing" in entry), None)

    def begin_finish(self, skipped: Iterable[int]) -> None:
        """Enter that the store is about to be finished, without some streams."""
        if self.finishing is None:
            self.finishing = sorted(skipped)
            append(self._path, {"finishing": self.finishing})


def append(path: str, entry: Mapping[str, Any]) -> None:
    """Enter something in the journal at a path, from any process."""
    with open(path, "ab", buffering=0) as file:
        _append(file, entry)


def begin_part(path: str) -> tuple[int, set[int]]:
    """The number of a new part, which none had before, entered in the journal at a path; and what is packed."""
    with open(path, "ab", buffering=0) as file:
        _lock(file)
        found = _entries_of(path)
        number = 1 + max((entry["part"] for entry in found if "part" in entry), default=-1)
        _append(file, {"part": number})
    return number, set(_streams_in(found))


def _streams_in(found: Iterable[Mapping[str, Any]]) -> dict[int, Entry]:
    return {stream[0]: Entry(*stream) for entry in found for stream in entry.get("streams", ())}


def _lock(file: Any) -> None:
    """Lock the journal, until the file is closed."""
    fcntl.flock(file, fcntl.LOCK_EX)  # to `lockf` all threads of a process are one, which can be a deadlock


def _append(file: Any, entry: Mapping[str, Any]) -> None:
    _lock(file)
    line = json.dumps(entry, default=lambda number: number.item()).encode()  # NumPy's numbers
    text = memoryview(b"\n%08x %s\n" % (zlib.crc32(line), line))  # what was cut off before is a line of its own
    while text:
        text = text[file.write(text) :]
    os.fsync(file.fileno())


def _entries_of(path: str) -> list[Mapping[str, Any]]:
    """What was entered in the journal at a path, and is whole."""
    found = []
    if os.path.exists(path):
        with open(path, "rb") as file:
            for line in file.read().split(b"\n"):
                check, _, text = line.partition(b" ")
                if check == b"%08x" % zlib.crc32(text):
                    found.append(json.loads(text))
    return found
