r"""What a text is made of: its bytes, its characters or its tokens, as arrays of numbers, a block at a time.

Tokens are made of pieces of text, which must be the same wherever reading begins and however much is read at a
time. So where a piece ends depends on the text around it alone::

    blocks of the file     |            |            |            |            |
    "ab..\ncd..\n" lines   ^   ^    ^     ^                   ^        ^            a piece begins with each line
    and in a long line                                ^                             and in each block without one,
                                                                                    at its first space

Guarantee: units come in order, each once, and those before an error come before it.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from stream_dataloader.streams.text.blocks import NOTHING, Codes, TextBlocks

__all__ = ["ByteUnits", "Marks", "TokenUnits", "Units"]

#: At least so much text is between two marks.
_MARK_BYTES = 1 << 20

_MARKED_TEXTS = 256


class Marks(dict[Any, list[tuple[int, int]]]):
    """Pairs `(units before it, offset)` of texts, ascending, for when a text is opened again in the same process.

    Streams that are read at the same time each make a list of their own, so that no lock is needed.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return Marks, ()  # they belong to the process that read the texts

    def until(self, key: Any, units: int) -> list[tuple[int, int]]:
        """The marks of a text that have at most so many units before them."""
        marks = self.get(key, [])
        return marks[: bisect.bisect_right(marks, units, key=lambda mark: mark[0])]

    def keep(self, key: Any, marks: list[tuple[int, int]]) -> None:
        """Keep a text's marks, if they go further than those known."""
        if marks and marks[-1] > self.get(key, [(-1, 0)])[-1]:
            self[key] = marks
            for oldest in list(self)[:-_MARKED_TEXTS]:  # a copy: another thread may keep marks meanwhile
                self.pop(oldest, None)


class Units:
    """The bytes or the characters of a text.

    Args:
        blocks: The text; its bytes are the units if it is not decoded.
        marks: Marks of texts read before.
        key: The text's key among them; None to leave them alone.
        table: The number of each code point, and of all that are larger in its last place; -1 for those that are
            an error. None for the code points themselves.
        refused: Why a character with a -1 is an error.
    """

    what = "characters"
    _marks_blocks = True
    _begins = True  # a piece of tokens begins with the next block

    def __init__(
        self,
        blocks: TextBlocks,
        marks: Marks,
        key: tuple[Any, ...] | None = None,
        table: Codes | None = None,
        refused: str = "",
    ) -> None:
        self._blocks = blocks
        self._marks, self._key = marks, key
        self._known: list[tuple[int, int]] = []
        self._table, self._refused = table, refused
        self._done = 0  # units before the next block's
        self._ended = False

    def read(self, start: int) -> Iterator[Codes]:
        """Units from number `start` on; the first array, which may be empty, comes as soon as that is reached.

        Raises:
            ValueError: There are not as many, or some are invalid.
            OSError: The file cannot be read.
        """
        blocks = self._blocks
        if self._key is not None and start and (known := self._marks.until(self._key, start)):
            self._known, self._begins = known, True
            self._done, blocks.offset = known[-1]
        while not self._ended:
            first = blocks.offset
            if self._marks_blocks:
                self._mark(self._done, first)
            data = blocks.read()
            self._ended = not data
            # The block that holds the start is decoded in any case, so that invalid bytes in it are found.
            if self._done < start and (count := self._count(data)) is not None and self._done + count < start:
                self._done += count
                continue
            for rows in self._made(first, data):
                before, self._done = self._done, self._done + len(rows)
                if self._done >= start:
                    yield rows[max(start - before, 0) :]
        if self._done < start:
            raise self.beyond(self._done, start)

    def beyond(self, units: int, start: int) -> ValueError:
        """The error to raise if a text has fewer units than are to be skipped."""
        name = self._blocks.file.name
        return ValueError(f"{name} has {units} {self.what} here, and start is {start}; give at most as many")

    def _mark(self, units: int, offset: int) -> None:
        """Note that so many units are before an offset, unless the last mark is close."""
        if self._key is not None and (not self._known or offset - self._known[-1][1] >= _MARK_BYTES):
            self._known.append((units, offset))

    def _count(self, data: bytes) -> int | None:
        """How many units a block has; None if unknown until they are made."""
        return self._blocks.count(data)

    def _made(self, first: int, data: bytes) -> Iterator[Codes]:
        """The units that end in a block, whose bytes begin at `first`; no bytes stand for the end."""
        blocks = self._blocks
        error: Exception | None = None
        try:
            rows = codes = blocks.codes(data)
        except UnicodeDecodeError as invalid:
            error = blocks.invalid(first, invalid)
            data = data[: invalid.start]
            rows = codes = blocks.codes(data)
        if self._table is not None:
            rows = self._table[np.minimum(codes, len(self._table) - 1)]
            if len(rows) and rows.min() < 0:
                index = int(np.argmax(rows < 0))
                error = ValueError(
                    f"{blocks.file.name} has {chr(codes[index])!r} (U+{codes[index]:04X}) at "
                    f"{blocks.place(first, data, index)}, {self._refused}"
                )
                rows = rows[:index]
        yield rows
        if error is not None:
            raise error

    def close(self) -> None:
        """Close the text."""
        if self._key is not None:
            self._marks.keep(self._key, self._known)
        self._blocks.file.close()


class ByteUnits(Units):
    """The bytes of a text, which are not marked: where each is, is known."""

    what = "bytes"

    def read(self, start: int) -> Iterator[Codes]:
        blocks = self._blocks
        if blocks.stop is None:
            return super().read(start)
        if start > blocks.stop - blocks.begin:
            raise self.beyond(blocks.stop - blocks.begin, start)
        blocks.offset += start
        return super().read(0)


class TokenUnits(Units):
    """The tokens of a text.

    Args:
        blocks: The whole text, from the block on in which the section begins.
        tokenize: The tokens of a piece of it.
        start: Pieces that begin before this byte are left out.
        stop: As are those that begin here or later; None for the end.
        marks: As for `Units`.
        key: As for `Units`.
    """

    what = "tokens"
    _marks_blocks = False  # but where a piece begins

    def __init__(
        self,
        blocks: TextBlocks,
        tokenize: Callable[[str], Codes],
        start: int,
        stop: int | None,
        marks: Marks,
        key: tuple[Any, ...] | None,
    ) -> None:
        super().__init__(blocks, marks, key)
        self._tokenize = tokenize
        self._start = blocks.boundary(start)
        self._stop = None if stop is None else blocks.boundary(stop)
        self._piece: list[bytes] | None = None  # the bytes so far of the piece that has begun
        self._where = 0  # the offset at which it began
        before = blocks.begin - 1
        self._begins = before < blocks.mark_bytes or blocks.ends_line(blocks.file.read_at(before, 1))

    def _count(self, data: bytes) -> None:  # noqa: ARG002
        return None

    def _made(self, first: int, data: bytes) -> Iterator[Codes]:
        found: list[Codes] = []
        done, marked = 0, False
        try:
            for cut in [*self._cuts(data), *([] if data else [0])]:
                if self._piece is not None:
                    self._piece.append(data[done:cut])
                    found.append(self._end_piece())
                if not data or (self._stop is not None and first + cut >= self._stop):
                    self._ended = True
                    break
                if first + cut >= self._start:
                    self._piece, self._where, done = [], first + cut, cut
                    if not marked:  # a block has no two
                        self._mark(self._done + sum(map(len, found)), self._where)
                        marked = True
        except ValueError:
            yield np.concatenate([NOTHING, *found])
            raise
        if self._piece is not None:
            self._piece.append(data[done:])
        yield found[0] if len(found) == 1 else np.concatenate([NOTHING, *found])

    def _cuts(self, data: bytes) -> list[int]:
        """Where pieces begin in a block."""
        cuts = [0] if self._begins and data else []
        cuts += self._blocks.lines(data)
        self._begins = self._blocks.ends_line(data)
        if data and not cuts and self._blocks.file.error is None:
            cuts.append(max(data.find(b" "), 0))
        return cuts

    def _end_piece(self) -> Codes:
        """The tokens of the piece that has begun."""
        assert self._piece is not None
        piece, self._piece, text = b"".join(self._piece), None, ""
        try:
            text = self._blocks.decode(piece)
            return self._tokenize(text) if text else NOTHING
        except UnicodeDecodeError as error:
            raise self._blocks.invalid(self._where, error) from None
        except Exception as error:
            raise ValueError(
                f"{self._blocks.file.name}: the tokenizer failed on the {len(text)} characters from "
                f"{self._blocks.file.place.format(self._where)} on: {error}"
            ) from error
