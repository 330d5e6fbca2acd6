"""The journal: which streams are packed, kept beside what is being packed.

A text file, one line an entry, each with its checksum::

    1f2e3d4c {"header": {...}}             what is packed, and how
    5b6a7988 {"part": 3}                   a part with this number was begun
    90ab12cd {"stream": [7, 120, place]}   stream 7 has 120 steps, and lies there
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

_VERSION = 1


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
        finishing: The streams that were skipped, once all others are packed; None before.
        header: As it was when packing was begun.
        is_new: Nothing was packed before.

    Raises:
        StoreError: The journal is of something else.
    """

    def __init__(self, path: str, header: Mapping[str, Any], remedy: str) -> None:
        self.entries: dict[int, Entry] = {}
        self.finishing: list[int] | None = None
        self.header: Mapping[str, Any] = {"version": _VERSION, **header}
        self._path = path
        found = _entries_of(path)
        self.is_new = len(found) < 2
        if not found or "header" not in found[0]:
            with open(path, "wb"):
                append(path, [{"header": self.header}])
            return
        self.header, wanted = found[0]["header"], self.header
        if changed := [name for name in wanted if self.header.get(name) != wanted[name] and not name.startswith("_")]:
            told = "; ".join(f"{name} was {self.header.get(name)}, and is {wanted[name]}" for name in changed)
            raise StoreError(f"{os.path.dirname(path)} holds what was packed with something else: {told}. {remedy}")
        self.look()

    def look(self) -> None:
        """Take in what was entered since."""
        for entry in _entries_of(self._path):
            if "stream" in entry:
                stream = Entry(*entry["stream"])
                self.entries[stream.number] = stream
            elif "finishing" in entry:
                self.finishing = list(entry["finishing"])

    def begin_finish(self, skipped: Iterable[int]) -> None:
        """Enter that the store is about to be finished, without some streams."""
        if self.finishing is None:
            self.finishing = sorted(skipped)
            append(self._path, [{"finishing": self.finishing}])


def append(path: str, entries: Iterable[Mapping[str, Any]]) -> None:
    """Enter something in the journal at a path, from any process."""
    with open(path, "ab", buffering=0) as file:
        _lock(file)
        _append(file, entries)


def begin_part(path: str) -> int:
    """The number of a new part, which none had before, entered in the journal at a path."""
    with open(path, "ab", buffering=0) as file:
        _lock(file)
        number = 1 + max((entry["part"] for entry in _entries_of(path) if "part" in entry), default=-1)
        _append(file, [{"part": number}])
    return number


def _lock(file: Any) -> None:
    """Lock the journal, until the file is closed.

    By `flock`. To `lockf` all threads of a process are one: where two processes' threads each wait for what the other's
    hold, it is a deadlock. And it would let go of the lock as soon as the journal is read elsewhere in the process.
    """
    fcntl.flock(file, fcntl.LOCK_EX)


def _append(file: Any, entries: Iterable[Mapping[str, Any]]) -> None:
    text = memoryview(b"\n" + b"".join(map(_line, entries)))  # what was cut off before is a line of its own
    while text:
        text = text[file.write(text) :]
    os.fsync(file.fileno())


def _entries_of(path: str) -> list[Mapping[str, Any]]:
    """What was entered in the journal at a path, and is whole."""
    try:
        with open(path, "rb") as file:
            return [entry for line in file.read().split(b"\n") if (entry := _parse(line)) is not None]
    except FileNotFoundError:
        return []


def _line(entry: Mapping[str, Any]) -> bytes:
    text = json.dumps(entry, default=_plain).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _plain(value: Any) -> Any:
    """NumPy's numbers, as JSON has them."""
    return value.item()


def _parse(line: bytes) -> Mapping[str, Any] | None:
    """An entry; None if it is damaged."""
    try:
        if int(line[:8], 16) != zlib.crc32(line[9:]):
            return None
        found = json.loads(line[9:])
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
