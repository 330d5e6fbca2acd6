"""Reads an encoded text block by block. Each block ends where a character begins.

Guarantee: blocks put together are the text, and one block is in memory at a time. What was decoded before an invalid
byte is returned, and the error is raised in place of the next block.
"""

from __future__ import annotations

import bisect
import io
from typing import Any

import numpy as np

from stream_dataloader.streams.text.bytes import TextBytes
from stream_dataloader.streams.text.encoding import AHEAD_BYTES, BEHIND_BYTES, Codes, TextEncoding

__all__ = ["MARK_BYTES", "NOTHING", "ForwardBlocks", "Marks", "TextBlocks", "blocks_of"]


class TextBlocks:
    """The blocks of a text, each ending at the first character at or behind a multiple of `block_bytes`.

    Args:
        file: Its bytes.
        encoding: How they are encoded.
        block_bytes: Size of a block.
        start: Characters that begin before this byte are left out.
        stop: As are those that begin here or later; None for the end.

    Attributes:
        begin: Offset of the first character.
        stop: Offset behind the last one; None if that is not known yet.
        offset: Offset of the next block.
    """

    def __init__(
        self, file: TextBytes, encoding: TextEncoding, block_bytes: int, start: int = 0, stop: int | None = None
    ) -> None:
        self.file = file
        self.encoding = encoding
        self._block_bytes = block_bytes
        self.begin = self.offset = self.boundary(start)
        self.stop = file.size if stop is None else self.boundary(stop)
        self._cut_short = False
        self._error: ValueError | None = None

    @property
    def failed(self) -> bool:
        """The block read last ended before an error."""
        return self._error is not None or self.file.broken

    def boundary(self, offset: int) -> int:
        """The first character at or behind a byte of the file."""
        if offset <= self.encoding.mark_bytes:
            return self.encoding.mark_bytes
        begin = max(0, offset - BEHIND_BYTES)
        return self.encoding.boundary(self.file.read_at(begin, BEHIND_BYTES + AHEAD_BYTES), begin, offset)

    def read(self) -> bytes:
        """The bytes of the next block, none at the end.

        Raises:
            ValueError: A byte of the block before was invalid, or the file is damaged.
            OSError: The file cannot be read.
        """
        if self._error is not None:
            raise self._error
        first = self.offset
        wanted = (first // self._block_bytes + 1) * self._block_bytes
        if self.stop is not None and wanted >= self.stop:
            data = self.file.read_at(first, max(self.stop - first, 0))
            stop = first + len(data)
        else:
            data = self.file.read_at(first, wanted - first + AHEAD_BYTES)
            stop = self.encoding.boundary(data, first, wanted)
        self._cut_short = self.file.broken and stop == first + len(data)
        self.offset = stop
        if stop == first:
            self.file.check()
        return data[: stop - first]

    def text(self, data: bytes) -> tuple[bytes, str]:
        """What `read` returned, decoded, as far as it is valid; and that part of it."""
        try:
            return data, self.encoding.decode(data, final=not self._cut_short)
        except UnicodeDecodeError as error:
            data = self._valid(data, error)
            return data, self.encoding.decode(data)

    def codes(self, data: bytes) -> tuple[bytes, Codes]:
        """As `text`, as code points."""
        try:
            return data, self.encoding.codes(data, final=not self._cut_short)
        except UnicodeDecodeError as error:
            data = self._valid(data, error)
            return data, self.encoding.codes(data)

    def _valid(self, data: bytes, error: UnicodeDecodeError) -> bytes:
        self._error = self._invalid(error, self.offset - len(data) + error.start)
        return data[: error.start]

    def _invalid(self, error: UnicodeDecodeError, place: int) -> ValueError:
        found = " ".join(f"{byte:02x}" for byte in error.object[error.start : error.end][:4])
        return ValueError(
            f"{self.file.name} is not valid {self.encoding.name} at byte {place} ({found}): {error.reason}; "
            "repair it, give the encoding it has, or have errors='replace'"
        )

    def place(self, first: int, data: bytes, index: int) -> str:
        """Where a character is: character `index` of a block, which begins at `first`."""
        return f"byte {first + self.encoding.offset_of(data, index)}"


class ForwardBlocks(TextBlocks):
    """The blocks of a text whose encoding can only be read from its begin; see `TextBlocks`."""

    def __init__(self, file: TextBytes, encoding: TextEncoding, block_bytes: int) -> None:
        super().__init__(file, encoding, block_bytes)
        self._bytes = encoding.decoder()
        self._newlines = io.IncrementalNewlineDecoder(None, translate=True)
        self._final = False

    def read(self) -> bytes:
        if self._error is not None:
            raise self._error
        data = self.file.read_at(self.offset, self._block_bytes)
        self.offset += len(data)
        self._final = not self.file.read_at(self.offset, 1) and not self.file.broken
        if not data:
            self.file.check()
        return data

    def text(self, data: bytes) -> tuple[bytes, str]:
        state = self._bytes.getstate()
        waiting = len(state[0])
        try:
            text = self._bytes.decode(data, self._final)
        except UnicodeDecodeError as error:
            self._error = self._invalid(error, self.offset - len(data) - waiting + error.start)
            self._bytes.setstate(state)
            text = self._bytes.decode(data[: max(error.start - waiting, 0)])
        return data, self._newlines.decode(text, self._final) if self.encoding.universal else text

    def codes(self, data: bytes) -> tuple[bytes, Codes]:
        data, text = self.text(data)
        return data, self.encoding.codes_of(text)

    def place(self, first: int, data: bytes, index: int) -> str:  # noqa: ARG002
        return f"a byte behind {first}"


def blocks_of(
    file: TextBytes, encoding: TextEncoding, block_bytes: int, start: int = 0, stop: int | None = None
) -> TextBlocks:
    """The blocks of a text, or of a section of it.

    Raises:
        ValueError: Its encoding has no sections.
    """
    if encoding.width:
        return TextBlocks(file, encoding, block_bytes, start, stop)
    if start or stop is not None:
        raise ValueError(
            f"{file.name}: a section of {encoding.name} text cannot be told without what is before it; "
            "give whole files, or convert them to utf-8"
        )
    return ForwardBlocks(file, encoding, block_bytes)


#: At least so much text is between two marks.
MARK_BYTES = 1 << 20

_MARKED_TEXTS = 256


class Marks:
    """Where some units of a text begin: `(units before it, where, ...)`, ascending; for when it is opened again.

    Marks are made while a text is read, and belong to the process that reads it. Streams that are read at the same time
    each make a list of their own, so that no lock is needed.
    """

    def __init__(self) -> None:
        self._marks: dict[Any, list[tuple[int, ...]]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Marks, ()

    def until(self, key: Any, units: int) -> list[tuple[int, ...]]:
        """The marks of a text that have at most so many units before them."""
        marks = self._marks.get(key, [])
        return marks[: bisect.bisect_right(marks, units, key=lambda mark: mark[0])]

    def keep(self, key: Any, marks: list[tuple[int, ...]]) -> None:
        """Keep a text's marks, if they go further than those known."""
        known = self._marks.get(key)
        if not marks or (known and known[-1] >= marks[-1]):
            return
        self._marks[key] = marks
        for oldest in list(self._marks)[:-_MARKED_TEXTS]:  # at once: another thread may keep marks meanwhile
            self._marks.pop(oldest, None)


NOTHING: Codes = np.zeros(0, np.uint8)
