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
from typing import Any, Protocol

import numpy as np

from stream_dataloader.streams.text.blocks import MARK_BYTES, NOTHING, ForwardBlocks, Marks, TextBlocks
from stream_dataloader.streams.text.bytes import TextBytes
from stream_dataloader.streams.text.encoding import Codes

__all__ = ["ByteUnits", "CharacterUnits", "TokenUnits", "Units"]


class Units(Protocol):
    """The units of one text."""

    def skip(self, count: int) -> None:
        """Leave out the first units; called once, before any is read.

        Raises:
            ValueError: There are not as many.
        """

    def rows(self) -> Codes:
        """The next units, as many as are at hand; none at the end."""

    def close(self) -> None:
        """Close the text."""


class ByteUnits:
    """The bytes of a text, or of a section of it, as they are; see `Units`."""

    def __init__(self, file: TextBytes, block_bytes: int, start: int = 0, stop: int | None = None) -> None:
        self._file = file
        self._block_bytes = block_bytes
        self._position = start
        self._stop = file.size if stop is None else stop

    def skip(self, count: int) -> None:
        if self._stop is not None:
            if count > self._stop - self._position:
                raise _beyond(self._file, count, self._stop - self._position, "bytes")
            self._position += count
            return
        while count:
            data = self._file.read_at(self._position, min(count, self._block_bytes))
            if not data:
                self._file.check()
                raise _beyond(self._file, self._position + count, self._position, "bytes")
            self._position += len(data)
            count -= len(data)

    def rows(self) -> Codes:
        count = self._block_bytes if self._stop is None else min(self._block_bytes, self._stop - self._position)
        data = self._file.read_at(self._position, count) if count else b""
        if not data and count:
            self._file.check()
        self._position += len(data)
        return np.frombuffer(data, np.uint8)

    def close(self) -> None:
        self._file.close()


class CharacterUnits:
    """The characters of a text, as code points or as a vocabulary has them; see `Units`.

    Args:
        blocks: The text.
        table: The number of each code point, and of all that are larger in its last place; -1 for those that are
            an error. None for the code points themselves.
        refused: Why a character with a -1 is an error.
        marks: Marks of texts read before.
        key: What the text is found by among them; None to leave them alone.
    """

    def __init__(
        self, blocks: TextBlocks, table: Codes | None, refused: str, marks: Marks, key: tuple[Any, ...] | None
    ) -> None:
        self._blocks = blocks
        self._table = table
        self._refused = refused
        self._marks = marks
        self._key = key
        self._ready: Codes = NOTHING
        self._error: ValueError | None = None

    def skip(self, count: int) -> None:
        blocks, file = self._blocks, self._blocks.file
        if blocks.encoding.is_fixed and (stop := blocks.stop) is not None:
            if count > stop - blocks.begin:
                raise _beyond(file, count, stop - blocks.begin, "characters")
            blocks.offset += count
            return
        marks = self._marks.until(self._key, count)
        done, blocks.offset = marks[-1] if marks else (0, blocks.offset)
        while done < count:
            first = blocks.offset
            if not marks or first - marks[-1][1] >= MARK_BYTES:
                marks.append((done, first))
            data = blocks.read()
            if not data:
                raise _beyond(file, count, done, "characters")
            # Blocks before the start are only counted. The one that holds it is decoded, so that invalid bytes in it
            # are found, also if the start is that block's end.
            if not isinstance(blocks, ForwardBlocks) and done + (characters := blocks.encoding.count(data)) < count:
                done += characters
                continue
            rows = self._rows(first, data)
            if self._error is not None and done + len(rows) < count:
                raise self._error
            self._ready = rows[count - done :]
            done += len(rows)
        if self._key is not None:
            self._marks.keep(self._key, marks)

    def rows(self) -> Codes:
        rows, self._ready = self._ready, NOTHING
        while not len(rows):
            if self._error is not None:
                raise self._error
            first = self._blocks.offset
            data = self._blocks.read()
            if not data:
                return NOTHING
            rows = self._rows(first, data)
        return rows

    def _rows(self, first: int, data: bytes) -> Codes:
        data, codes = self._blocks.codes(data)
        if self._table is None:
            return codes
        rows: Codes = self._table[np.minimum(codes, len(self._table) - 1)]
        if len(rows) and rows.min() < 0:
            index = int(np.argmax(rows < 0))
            self._error = ValueError(
                f"{self._blocks.file.name} has {chr(codes[index])!r} (U+{codes[index]:04X}) at "
                f"{self._blocks.place(first, data, index)}, {self._refused}"
            )
            return rows[:index]
        return rows

    def close(self) -> None:
        self._blocks.file.close()


class TokenUnits:
    """The tokens of a text; see `Units`.

    Args:
        blocks: The whole text, from the block on in which the section begins.
        tokenize: The tokens of a piece of it.
        start: Pieces that begin before this byte are left out.
        stop: As are those that begin here or later; None for the end.
        marks: Marks of texts read before.
        key: What the text is found by among them; None to leave them alone.
    """

    def __init__(
        self,
        blocks: TextBlocks,
        tokenize: Callable[[str], Codes],
        start: int,
        stop: int | None,
        marks: Marks,
        key: tuple[Any, ...] | None,
    ) -> None:
        self._blocks = blocks
        self._tokenize = tokenize
        self._marks = marks
        self._key = key
        self._start = blocks.boundary(start) if start else blocks.begin
        self._stop = None if stop is None else blocks.boundary(stop)
        self._from = -1  # the place in the first block at which the marked piece begins; -1 without a mark
        self._piece: list[str] | None = None  # the text so far of the piece that has begun
        self._where = (0, b"", 0)  # where that piece began: its block's offset and bytes, and the character in it
        self._line_begins = self._begins_line(blocks.begin)
        self._done = 0  # tokens before the ones in `_tokens`
        self._tokens: list[Codes] = []
        self._known: list[tuple[int, ...]] = []
        self._ready: Codes = NOTHING
        self._error: ValueError | None = None
        self._ended = False

    def _begins_line(self, offset: int) -> bool:
        blocks = self._blocks
        width = blocks.encoding.width
        if offset <= blocks.encoding.mark_bytes:
            return True
        return blocks.encoding.ends_line(blocks.file.read_at(offset - width, width))

    def skip(self, count: int) -> None:
        if self._key is not None and count:
            self._known = self._marks.until(self._key, count)
            if self._known:
                self._done, self._blocks.offset, self._from = self._known[-1]
                self._line_begins = self._begins_line(self._blocks.offset)
        done = self._done
        while done < count:
            rows = self.rows()
            if not len(rows):
                raise _beyond(self._blocks.file, count, done, "tokens")
            done += len(rows)
            self._ready = rows[len(rows) - max(done - count, 0) :]

    def rows(self) -> Codes:
        rows, self._ready = self._ready, NOTHING
        while not len(rows):
            if self._error is not None:
                raise self._error
            if self._ended:
                return NOTHING
            self._read_block()
            if self._tokens:
                rows = self._tokens[0] if len(self._tokens) == 1 else np.concatenate(self._tokens)
            self._tokens = []
            self._done += len(rows)
        return rows

    def _read_block(self) -> None:
        """Add the tokens of all pieces that end in the next block."""
        blocks, first = self._blocks, self._blocks.offset
        data = blocks.read()
        if not data:
            self._ended = True
            self._end_piece()
            return
        data, text = blocks.text(data)
        begin = self._from if self._from >= 0 else self._index(first, data, self._start)
        end = len(text) if self._stop is None else self._index(first, data, self._stop)
        self._from = -1
        marked, done = not self._may_mark(first), 0
        for cut in self._cuts(text):
            if self._piece is not None:
                self._piece.append(text[done:cut])
                if not self._end_piece():
                    return
            if self._stop is not None and cut >= end:
                self._ended = True
                return
            if cut >= begin:
                self._piece, self._where, done = [], (first, data, cut), cut
                if not marked:
                    self._known.append((self._done + sum(map(len, self._tokens)), first, cut))
                    marked = True
        if self._piece is not None:
            self._piece.append(text[done:])

    def _may_mark(self, first: int) -> bool:
        return self._key is not None and (not self._known or first - self._known[-1][1] >= MARK_BYTES)

    def _index(self, first: int, data: bytes, offset: int) -> int:
        """The first of a block's characters that begins at or behind an offset."""
        if offset <= first:
            return 0
        return len(self._blocks.encoding.decode(data[: offset - first]))

    def _cuts(self, text: str) -> list[int]:
        """Where pieces begin in the text of a block."""
        cuts, place = [0] if self._line_begins else [], text.find("\n") + 1
        while 0 < place < len(text):
            cuts.append(place)
            place = text.find("\n", place) + 1
        self._line_begins = text.endswith("\n")
        if text and not cuts and not self._blocks.failed:
            cuts.append(max(text.find(" "), 0))
        return cuts

    def _end_piece(self) -> bool:
        """Add the tokens of the piece that has begun; False if there is something wrong with them."""
        if self._piece is None:
            return True
        piece, self._piece = "".join(self._piece), None
        try:
            tokens = self._tokenize(piece) if piece else NOTHING
        except Exception as error:
            first, data, cut = self._where
            self._error = ValueError(
                f"{self._blocks.file.name}: the tokenizer failed on the {len(piece)} characters from "
                f"{self._blocks.place(first, data, cut)} on: {error}"
            )
            self._error.__cause__ = error
            return False
        if len(tokens):
            self._tokens.append(tokens)
        return True

    def close(self) -> None:
        if self._key is not None:
            self._marks.keep(self._key, self._known)
        self._blocks.file.close()


def _beyond(file: TextBytes, start: int, count: int, what: str) -> ValueError:
    return ValueError(f"{file.name} has {count} {what} here, and start is {start}; give at most as many")
