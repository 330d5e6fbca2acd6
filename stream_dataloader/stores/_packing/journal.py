"""The journal: which streams are packed, kept beside what is being packed.

A text file, one line an entry, each with its checksum::

    1f2e3d4c {"header": {...}}             what is packed, and how
    5b6a7988 {"part": 3}                   a part with this number was begun
    90ab12cd {"stream": [7, 120, place]}   stream 7 has 120 steps, and lies there
    34ef56a7 {"finishing": [2, 9]}         all streams are in it but these, which were skipped

Guarantee: an entry is on the disk when `add` returns. What a power failure left of the last lines is dropped: the
streams that they told of are packed again.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from stream_dataloader.errors import StoreError

__all__ = ["Entry", "Journal"]

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
        parts: How many parts were begun.
        finishing: The streams that were skipped, once all others are packed; None before.
        header: As it was when packing was begun.

    Raises:
        StoreError: The journal is of something else.
    """

    def __init__(self, path: str, header: Mapping[str, Any], remedy: str) -> None:
        self.entries: dict[int, Entry] = {}
        self.parts = 0
        self.finishing: list[int] | None = None
        self.header: Mapping[str, Any] = {"version": _VERSION, **header}
        self._path = path
        size = self._read()
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        os.ftruncate(self._file, size)
        os.lseek(self._file, size, os.SEEK_SET)
        self.is_new = not size
        if not size:
            self._write([{"header": self.header}])
            return
        wanted = {"version": _VERSION, **header}
        changed = [name for name in wanted if self.header.get(name) != wanted[name] and not name.startswith("_")]
        if changed:
            self.close()
            told = "; ".join(f"{name} was {self.header.get(name)}, and is {wanted[name]}" for name in changed)
            raise StoreError(f"{os.path.dirname(path)} holds what was packed with something else: {told}. {remedy}")

    def look_again(self) -> None:
        """Take in what the file has: an interrupt may come after that was written, and before it was noted here."""
        self._read()

    def _read(self) -> int:
        """Take in what is there; the size of what is whole."""
        try:
            with open(self._path, "rb") as file:
                lines = file.read().split(b"\n")
        except FileNotFoundError:
            return 0
        size = 0
        for number, line in enumerate(lines[:-1]):
            entry = _parse(line)
            if entry is None or (number == 0) != ("header" in entry):
                break
            self._take(entry)
            size += len(line) + 1
        return size

    def _take(self, entry: Mapping[str, Any]) -> None:
        if "header" in entry:
            self.header = entry["header"]
        elif "part" in entry:
            self.parts = max(self.parts, entry["part"] + 1)
        elif "stream" in entry:
            found = Entry(*entry["stream"])
            self.entries[found.number] = found
        else:
            self.finishing = list(entry["finishing"])

    def add(self, entries: Iterable[Entry]) -> None:
        """Enter streams."""
        entries = list(entries)
        if entries:
            self._write([{"stream": list(entry)} for entry in entries])
            self.entries.update((entry.number, entry) for entry in entries)

    def begin_part(self) -> int:
        """The number of a new part, which none had before."""
        self._write([{"part": self.parts}])
        self.parts += 1
        return self.parts - 1

    def begin_finish(self, skipped: Iterable[int]) -> None:
        """Enter that the store is about to be finished, without some streams."""
        if self.finishing is None:
            self.finishing = sorted(skipped)
            self._write([{"finishing": self.finishing}])

    def _write(self, entries: Iterable[Mapping[str, Any]]) -> None:
        text = memoryview(b"".join(map(_line, entries)))
        while text:
            text = text[os.write(self._file, text) :]
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file; what was entered stays."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


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
