r"""What a text is made of: its bytes, its characters or its tokens, as arrays of numbers, a block at a time.

Tokens are made of pieces of text, which must be the same wherever reading begins and however much is read at a
time. So where a piece ends is told by the text around alone::

    blocks of the file     |            |            |            |            |
    "ab..\ncd..\n" lines   ^   ^    ^     ^                   ^        ^            a piece begins with each line
    and in a long line                                ^                             and in each block without one,
                                                                                    at its first space

Guarantee: units come in order, each once; those before an error are returned, and the error is raised by the
next call, and every one after.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from stream_dataloader.streams.text.blocks import NOTHING, Codes, TextBlocks
from stream_dataloader.streams.text.marks import Marks

__all__ = ["ByteUnits", "CharacterUnits", "TokenUnits", "Units"]


class Units:
    """The units of one text.

    Args:
        blocks: The text.
        marks: Marks of texts read before.
        key: What the text is found by among them; None to leave them alone.
    """

    what = ""
    marks_blocks = True

    def __init__(self, blocks: TextBlocks, marks: Marks, key: tuple[Any, ...] | None = None) -> None:
        self._blocks = blocks
        self._marks, self._key = marks, key
        self._known: list[tuple[int, int]] = []
        self._done = 0  # units before those that the next block ends
        self._ready: Codes = NOTHING
        self._ended = False
        self._error: Exception | None = None

    def _rows(self, first: int, data: bytes) -> Codes:
        """The units that end in a block, whose bytes begin at `first`; no bytes stand for the end.

        An error goes to `_error`, with the units before it returned.
        """
        raise NotImplementedError

    def _count(self, data: bytes) -> int | None:
        """How many units a block has; None if that is found out by making them."""
        raise NotImplementedError

    def skip(self, count: int) -> None:
        """Leave out the first units; called once, before any is read.

        Raises:
            ValueError: There are not as many.
        """
        if self._key is not None and count:
            self._known = self._marks.until(self._key, count)
        if self._known:
            self._done, self._blocks.offset = self._known[-1]
        while self._done < count:
            if self._ended and self._error is None:
                raise self._beyond(self._done, count)
            done = self._done
            self._ready = self._block(count)[max(count - done, 0) :]

    def _beyond(self, units: int, start: int) -> ValueError:
        name = self._blocks.file.name
        return ValueError(f"{name} has {units} {self.what} here, and start is {start}; give at most as many")

    def rows(self) -> Codes:
        """The next units, as many as are at hand; none at the end."""
        rows, self._ready = self._ready, NOTHING
        while not len(rows) and (self._error is not None or not self._ended):
            rows = self._block()
        return rows

    def _block(self, start: int = 0) -> Codes:
        """The units that end in the next block; none of it if they can be counted and all are before unit `start`."""
        if self._error is not None:
            raise self._error
        first = self._blocks.offset
        if self._key is not None and self.marks_blocks:
            self._marks.add(self._known, self._done, first)
        data = self._blocks.read()
        self._ended = not data
        if start and (count := self._count(data)) is not None and self._done + count < start:
            self._done += count
            return NOTHING
        # the block that holds the start is decoded, so that invalid bytes in it are found
        rows = self._rows(first, data)
        self._done += len(rows)
        return rows

    def close(self) -> None:
        """Close the text."""
        if self._key is not None:
            self._marks.keep(self._key, self._known)
        self._blocks.file.close()


class ByteUnits(Units):
    """The bytes of a text, or of a section of it, as they are."""

    what = "bytes"

    def skip(self, count: int) -> None:
        blocks = self._blocks
        if blocks.stop is None:
            return super().skip(count)
        if count > blocks.stop - blocks.begin:
            raise self._beyond(blocks.stop - blocks.begin, count)
        blocks.offset += count
        return None

    def _rows(self, first: int, data: bytes) -> Codes:  # noqa: ARG002
        return np.frombuffer(data, np.uint8)

    def _count(self, data: bytes) -> int:
        return len(data)


class CharacterUnits(Units):
    """The characters of a text, as code points or as a vocabulary has them.

    Args:
        blocks: The text.
        table: The number of each code point, and of all that are larger in its last place; -1 for those that are
            an error. None for the code points themselves.
        refused: Why a character with a -1 is an error.
        marks: As for `Units`.
        key: As for `Units`.
    """

    what = "characters"

    def __init__(
        self, blocks: TextBlocks, table: Codes | None, refused: str, marks: Marks, key: tuple[Any, ...] | None
    ) -> None:
        super().__init__(blocks, marks, key)
        self._table, self._refused = table, refused

    def _count(self, data: bytes) -> int:
        return self._blocks.count(data)

    def _rows(self, first: int, data: bytes) -> Codes:
        blocks = self._blocks
        try:
            codes = blocks.codes(data)
        except UnicodeDecodeError as error:
            self._error = blocks.invalid(first, error)
            data = data[: error.start]
            codes = blocks.codes(data)
        if self._table is None:
            return codes
        rows: Codes = self._table[np.minimum(codes, len(self._table) - 1)]
        if len(rows) and rows.min() < 0:
            index = int(np.argmax(rows < 0))
            self._error = ValueError(
                f"{blocks.file.name} has {chr(codes[index])!r} (U+{codes[index]:04X}) at "
                f"{blocks.place(first, data, index)}, {self._refused}"
            )
            return rows[:index]
        return rows


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
    marks_blocks = False  # but where a piece begins

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

    def skip(self, count: int) -> None:
        begin = self._blocks.offset
        if self._key is not None and (known := self._marks.until(self._key, count)):
            begin = known[-1][1]
        self._begins |= begin > self._blocks.offset  # a piece begins at each mark
        super().skip(count)

    def _count(self, data: bytes) -> None:  # noqa: ARG002
        return None

    def _rows(self, first: int, data: bytes) -> Codes:
        found: list[Codes] = []
        done, marks = 0, self._key is not None
        for cut in [*self._cuts(data), *([] if data else [0])]:
            if self._piece is not None:
                self._piece.append(data[done:cut])
                if not self._end_piece(found):
                    break
            if not data or (self._stop is not None and first + cut >= self._stop):
                self._ended = True
                break
            if first + cut >= self._start:
                self._piece, self._where, done = [], first + cut, cut
                if marks:
                    self._marks.add(self._known, self._done + sum(map(len, found)), self._where)
                    marks = False  # a block has no two
        if self._piece is not None:
            self._piece.append(data[done:])
        return found[0] if len(found) == 1 else np.concatenate([NOTHING, *found])

    def _cuts(self, data: bytes) -> list[int]:
        """Where pieces begin in a block."""
        cuts = [0] if self._begins and data else []
        cuts += self._blocks.lines(data)
        self._begins = self._blocks.ends_line(data)
        if data and not cuts and self._blocks.file.error is None:
            cuts.append(max(data.find(b" "), 0))
        return cuts

    def _end_piece(self, found: list[Codes]) -> bool:
        """Add the tokens of the piece that has begun; False if there is something wrong with them."""
        assert self._piece is not None
        piece, self._piece, text = b"".join(self._piece), None, ""
        try:
            text = self._blocks.decode(piece)
            tokens = self._tokenize(text) if text else NOTHING
        except UnicodeDecodeError as error:
            self._error = self._blocks.invalid(self._where, error)
            return False
        except Exception as error:
            self._error = ValueError(
                f"{self._blocks.file.name}: the tokenizer failed on the {len(text)} characters from "
                f"{self._blocks.file.place.format(self._where)} on: {error}"
            )
            self._error.__cause__ = error
            return False
        if len(tokens):
            found.append(tokens)
        return True
