r"""What a text is made of: its bytes, its characters or its tokens, as arrays of numbers, a block at a time.

Tokens are made of pieces of text, which must be the same wherever reading begins and however much is read at a
time. So where a piece ends depends on the text around it alone::

    blocks of the file     |            |            |            |            |
    "ab..\ncd..\n" lines   ^   ^    ^     ^                   ^        ^            a piece begins with each line
    and in a long line                                ^                             and in each block without one,
                                                                                    at its first space

Guarantee: units come in order, each once, and those before an error come before it; the error comes again with each
call after that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from stream_dataloader.streams.text.blocks import NOTHING, Codes, TextBlocks

__all__ = ["TextItems", "TokenUnits", "Units"]


class Units:
    """The bytes or the characters of a text.

    Args:
        blocks: The text; its bytes are the units if it is not decoded.
        what: What they are called.
        table: The number of each code point, and of all that are larger in its last place; -1 for those that are
            an error. None for the code points themselves.
        refused: Why a character with a -1 is an error.
    """

    def __init__(self, blocks: TextBlocks, what: str, table: Codes | None = None, refused: str = "") -> None:
        self._blocks = blocks
        self._what = what
        self._table, self._refused = table, refused
        self._ended = False

    def read(self, start: int) -> Iterator[Codes]:
        """Units from number `start` on; the first array, which may be empty, comes as soon as that is reached.

        Raises:
            ValueError: There are not as many, or some are invalid.
            OSError: The file cannot be read.
        """
        blocks, done = self._blocks, 0
        if not blocks.decoded and blocks.stop is not None:  # where each byte is, is known
            done = min(start, blocks.stop - blocks.begin)
            blocks.offset += done
        while not self._ended:
            first = blocks.offset
            data = blocks.read()
            self._ended = not data
            # The block that holds the start is decoded in any case, so that invalid bytes in it are found.
            if done < start and (count := self._count(data)) is not None and done + count < start:
                done += count
                continue
            for rows in self._made(first, data):
                before, done = done, done + len(rows)
                if done >= start:
                    yield rows[max(start - before, 0) :]
        if done < start:
            name = blocks.file.name
            raise ValueError(f"{name} has {done} {self._what} here, and start is {start}; give at most as many")

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
        self._blocks.file.close()


class TokenUnits(Units):
    """The tokens of a text.

    Args:
        blocks: The whole text, from the block on in which the section begins.
        tokenize: The tokens of a piece of it.
        start: Pieces that begin before this byte are left out.
        stop: As are those that begin here or later; None for the end.
    """

    def __init__(
        self, blocks: TextBlocks, tokenize: Callable[[str], Codes], start: int = 0, stop: int | None = None
    ) -> None:
        super().__init__(blocks, "tokens")
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
        done = 0
        try:
            for cut in self._cuts(data) if data else [0]:
                if self._piece is not None:
                    self._piece.append(data[done:cut])
                    found.append(self._end_piece())
                if not data or (self._stop is not None and first + cut >= self._stop):
                    self._ended = True
                    break
                if first + cut >= self._start:
                    self._piece, self._where, done = [], first + cut, cut
        except ValueError:
            yield np.concatenate([NOTHING, *found])
            raise
        if self._piece is not None:
            self._piece.append(data[done:])
        yield found[0] if len(found) == 1 else np.concatenate([NOTHING, *found])

    def _cuts(self, data: bytes) -> list[int]:
        """Where pieces begin in a block."""
        cuts = [0] if self._begins else []
        cuts += self._blocks.lines(data)
        self._begins = self._blocks.ends_line(data)
        if not cuts and self._blocks.file.error is None:
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


class TextItems:
    """Units from number `start` on, or pairs of a unit and the next; a `protocols.ReadsInto`."""

    def __init__(self, units: Units, start: int, dtype: np.dtype[Any], targets: bool) -> None:
        self.close = units.close
        self._dtype = dtype
        self._targets = targets  # each item needs the unit behind its own
        self._arrays = units.read(start)
        self._error: Exception | None = None
        self._rows: Codes = next(self._arrays, NOTHING) if start else NOTHING
        self._position = 0  # in `_rows`

    def _available(self) -> int:
        """How many items can be made of what was read; reads on if there are none."""
        while len(self._rows) - self._position <= self._targets:
            if self._error is not None:
                raise self._error
            try:
                more = next(self._arrays, None)
            except Exception as error:
                self._error = error
                raise
            if more is None:
                return 0
            rest = self._rows[self._position :]
            self._rows = np.concatenate([rest, more]) if len(rest) else more
            self._position = 0
        return len(self._rows) - self._position - self._targets

    def at_end(self) -> bool:
        """Whether no unit is left, not even a last one that only serves as a target."""
        return not self._available() and self._position == len(self._rows)

    def __iter__(self) -> Iterator[Any]:
        unit = functools.partial(np.array, dtype=self._dtype)
        while self._available():
            rows, position = self._rows, self._position
            self._position += 1
            if self._targets:
                yield {"input": unit(rows[position]), "target": unit(rows[position + 1])}
            else:
                yield unit(rows[position])

    def read_into(self, out: Any) -> int:
        """Write the next items to `out`; see `protocols.ReadsInto`."""
        leaves = [out["input"], out["target"]] if self._targets else [out]
        done, room = 0, len(leaves[0])
        while done < room:
            try:
                count = min(self._available(), room - done)
            except Exception:
                if done:  # the next call raises it again
                    break
                raise
            if not count:
                break
            for first, leaf in enumerate(leaves, self._position):
                leaf[done : done + count] = self._rows[first : first + count]
            self._position += count
            done += count
        return done
