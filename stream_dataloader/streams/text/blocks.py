r"""A text block by block. Each block ends where a character begins, so that it can be decoded by itself.

A character belongs to the byte at which it begins, "\r\n" to its "\r" if newlines are universal. So a text can be cut
in two at any offset without decoding what is before: `boundary` is the first beginning at or after the offset.

Guarantee: blocks decoded one by one are the text decoded as a whole, also if bytes are invalid and replaced.
"""

from __future__ import annotations

import bisect
import codecs
from typing import Any

import numpy as np

from stream_dataloader.streams.text.bytes import TextBytes, invalid

__all__ = ["NOTHING", "Codes", "TextBlocks"]

Codes = np.ndarray[Any, np.dtype[Any]]
NOTHING: Codes = np.zeros(0, np.uint8)

#: Enough bytes before and behind an offset to find where a character begins.
_AROUND = 4


class TextBlocks:
    r"""The blocks of a text in UTF-8, each ending at the first character at or behind a multiple of `block_bytes`.

    Args:
        file: Its bytes.
        block_bytes: Size of a block.
        errors: What Python's decoder does about invalid bytes; None: nothing is decoded, each byte is a character.
        universal: "\r\n" and "\r" are read as "\n".
        marked: It may begin with a byte order mark, which is left out.
        start: Characters that begin before this byte are left out.
        stop: As are those that begin here or later; None for the end.

    Attributes:
        decoded: Whether its bytes become characters.
        begin: Offset of the first character.
        stop: Offset behind the last one; None if that is not known yet.
        offset: Offset of the next block.
    """

    def __init__(
        self,
        file: TextBytes,
        block_bytes: int,
        errors: str | None,
        *,
        universal: bool,
        marked: bool,
        start: int = 0,
        stop: int | None = None,
    ) -> None:
        self.file = file
        self._block_bytes, self._errors, self._universal = block_bytes, errors, universal
        self.decoded = errors is not None
        mark = codecs.BOM_UTF8 if marked else b""
        self.mark_bytes = len(mark) if file.read_at(0, len(mark)) == mark else 0
        self.begin = self.offset = self.boundary(start)
        self.stop = file.size if stop is None else self.boundary(stop)
        self._cut_short = False

    def boundary(self, offset: int) -> int:
        """The first character at or behind a byte of the file, or the end."""
        if offset <= self.mark_bytes or not self.decoded:
            return max(offset, self.mark_bytes)
        begin = max(0, offset - _AROUND)
        return begin + self._cut(self.file.read_at(begin, 2 * _AROUND + offset - begin), offset - begin)

    def _cut(self, data: bytes, place: int) -> int:
        """The first character at or behind a place in some bytes."""
        # No character has more than three bytes that continue it: one more is invalid, and replaced by itself.
        while _continues(data, place) and not all(_continues(data, place - i) for i in range(1, _AROUND + 1)):
            place += 1
        if self._universal and place and data[place - 1 : place + 1] == b"\r\n":
            place += 1
        return min(place, len(data))

    def read(self) -> bytes:
        """The bytes of the next block, none at the end."""
        first = self.offset
        wanted = (first // self._block_bytes + 1) * self._block_bytes - first
        if self.stop is not None:
            wanted = min(wanted, self.stop - first)
        if not self.decoded or first + wanted == self.stop:
            data = self.file.read_at(first, wanted)
        else:
            data = self.file.read_at(first, wanted + 2 * _AROUND)
            data = data[: self._cut(data, wanted)]
        self.offset += len(data)
        self._cut_short = self.file.error is not None and not self.file.read_at(self.offset, 1)
        if not data:
            self.file.check()
        return data

    def ends_line(self, data: bytes) -> bool:
        """Whether a line of the text ends with these bytes."""
        return data.endswith(b"\n") or (self._universal and data.endswith(b"\r"))

    def lines(self, data: bytes) -> list[int]:
        """Where lines begin in the bytes of a block, but for the first."""
        if self._universal and b"\r" in data:  # of as many bytes as the pairs have
            data = data.replace(b"\r\n", b"-\n").replace(b"\r", b"\n")
        begins, place = [], data.find(b"\n") + 1
        while 0 < place < len(data):
            begins.append(place)
            place = data.find(b"\n", place) + 1
        return begins

    def decode(self, data: bytes, *, final: bool = True) -> str:
        """The text of bytes between two boundaries; with `final=False` an incomplete last character is left out."""
        text, _ = codecs.utf_8_decode(data, self._errors or "strict", final and not self._cut_short)
        if self._universal and "\r" in text:
            text = text.replace("\r\n", "\n").replace("\r", "\n")
        return text

    def codes(self, data: bytes) -> Codes:
        """The code points of bytes between two boundaries, as unsigned integers; otherwise as `decode`."""
        if self.decoded and not data.isascii():
            return np.frombuffer(self.decode(data).encode("utf-32-le", "surrogatepass"), "<u4")
        if self._universal and b"\r" in data:
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        return np.frombuffer(data, np.uint8)

    def count(self, data: bytes) -> int:
        """How many characters there are between two boundaries, unless bytes are invalid, which is not looked for."""
        if self._errors == "replace" and not data.isascii():
            return len(self.decode(data))
        pairs = data.count(b"\r\n") if self._universal and b"\r" in data else 0
        if not self.decoded or data.isascii():
            return len(data) - pairs
        return int(np.count_nonzero(np.frombuffer(data, np.int8) >= -64)) - pairs  # all but 10xxxxxx

    def place(self, first: int, data: bytes, index: int) -> str:
        """Where character `index` is, of bytes between two boundaries that begin at `first`."""

        def complete(count: int) -> int:
            return len(self.decode(data[:count], final=False))

        place = bisect.bisect_left(range(len(data) + 1), index, key=complete)
        return self.file.place.format(first + self._cut(data, place))

    def invalid(self, first: int, error: UnicodeDecodeError) -> ValueError:
        """The error to raise for invalid bytes, in data that begins at `first`."""
        return invalid(self.file, "utf-8", error, first)


def _continues(data: bytes, place: int) -> bool:
    """Whether there is a byte of UTF-8 that continues a character."""
    return 0 <= place < len(data) and data[place] & 0xC0 == 0x80
