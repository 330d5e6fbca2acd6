r"""Units of a text as items: its bytes, its characters, or the tokens of its pieces.

Blocks end where a character begins; "\r\n" is one character if newlines are universal. Tokens are made from pieces of
text, which must be the same wherever reading begins::

    blocks of the file     |            |            |            |            |
    "ab..\ncd..\n" lines   ^   ^    ^     ^                   ^        ^            a piece begins with each line
    and in a long line                                ^                             and in each block without one,
                                                                                    at its first space

Guarantee: decoding block by block gives the same text as decoding the whole. All items before an error are delivered
first. Each later call raises the error again.
"""

from __future__ import annotations

import bisect
import codecs
from collections.abc import Iterator
from typing import Any

import numpy as np

from stream_dataloader.streams._media.targets import TARGET_DTYPE, put_targets
from stream_dataloader.streams.text.bytes import TextBytes, invalid
from stream_dataloader.streams.text.numbers import NOTHING, Codes

__all__ = ["TextReader", "TokenReader"]

#: Number of bytes before and after an offset that are enough to find the start of a character.
_AROUND = 4


class TextReader:
    """Stream of the bytes or characters that begin in `[first, stop)`; a `protocols.ReadsInto`."""

    def __init__(self, options: Any, file: TextBytes, first: int = 0, stop: int | None = None) -> None:
        self._options, self._file = options, file
        self._targets: bool = options.targets  # each item but the last needs the unit after its own
        self._block_bytes = options.block_bytes
        self._decoded, self._universal = options.units != "bytes", options.newlines == "universal"
        self._errors = "surrogatepass" if options.of == "strings" else options._codec_errors
        mark = codecs.BOM_UTF8 if self._decoded and options.of == "files" else b""
        self.mark_bytes = len(mark) if file.read_at(0, len(mark)) == mark else 0  # left out
        self._offset = self._boundary(first)  # start of the next block
        self._stop = file.size if stop is None else self._boundary(stop)
        self._cut_short = False  # an error follows the block
        self._ended = False
        self._rows, self._position = NOTHING, 0  # units read so far, and the index of the next item in them
        self._units = self._read_units(0)
        self._error: Exception | None = None

    def begin_at(self, start: int) -> None:
        """Skip the first items, before any is read."""
        self._units = self._read_units(start)
        if start:
            self._rows = next(self._units, NOTHING)

    def length(self) -> int | None:
        if not self._decoded and self._stop is not None:
            return self._stop - self._offset
        if self._options.of == "strings" and self._stop is not None:
            return self._count(self._file.read_at(0, self._stop))
        return None

    def __iter__(self) -> Iterator[Any]:
        while self._available():
            room = np.empty(1, self._options.dtype)
            out: Any = {"input": room, "target": np.empty(1, TARGET_DTYPE)} if self._targets else room
            self._put(out, 0, 1)
            yield {name: found.reshape(()) for name, found in out.items()} if self._targets else room.reshape(())

    def read_into(self, out: Any) -> int:
        done, room = 0, len(out["input"] if self._targets else out)
        while done < room and (held := self._available(raises=not done)):
            count = min(held, room - done)
            self._put(out, done, count)
            done += count
        return done

    def _put(self, out: Any, done: int, count: int) -> None:
        """Write the next items, which `_available` has counted, to rows of `out`."""
        first, stop = self._position, self._position + count
        (out["input"] if self._targets else out)[done : done + count] = self._rows[first:stop]
        if self._targets:
            after = self._rows[first + 1 : stop + 1]
            put_targets(out["target"][done : done + count], after, self._options.ignore_index)
        self._position = stop

    def close(self) -> None:
        self._file.close()

    def _available(self, *, raises: bool = True) -> int:
        """Return the number of items that are ready; read more if there are none."""
        while (held := len(self._rows) - self._position - self._targets) <= 0:
            try:
                more = None if self._error is not None else next(self._units, None)
            except Exception as error:
                self._error, more = error, None
            if more is None:
                if self._error is None:
                    return len(self._rows) - self._position  # the last unit, with no target
                if raises:
                    raise self._error
                return 0
            rest = self._rows[self._position :]
            self._rows, self._position = np.concatenate([rest, more]) if len(rest) else more, 0
        return held

    def _read_units(self, start: int) -> Iterator[Codes]:
        """Yield the units from number `start` on; the first array may be empty."""
        done = 0
        if not self._decoded and self._stop is not None:  # the place of each byte is known
            done = min(start, self._stop - self._offset)
            self._offset += done
        while not self._ended:
            first = self._offset
            data = self._read_block()
            self._ended = not data
            if done < start and (count := self._count(data)) is not None and done + count < start:
                done += count
                continue
            for rows in self._made(first, data):
                before, done = done, done + len(rows)
                if done >= start:
                    yield rows[max(start - before, 0) :]
        if done < start:
            name, units = self._file.name, self._options.units
            raise ValueError(f"{name} has {done} {units} here, and start is {start}")

    def _made(self, first: int, data: bytes) -> Iterator[Codes]:
        error: Exception | None = None
        try:
            rows = codes = self._codes(data)
        except UnicodeDecodeError as problem:
            error = invalid(self._file, "utf-8", problem, first)
            data = data[: problem.start]
            rows = codes = self._codes(data)
        table, refused = self._options._table
        if table is not None:
            rows = table[np.minimum(codes, len(table) - 1)]
            if len(rows) and rows.min() < 0:
                index = int(np.argmax(rows < 0))
                where = self._file.place.format(first + self._place(data, index))
                code = codes[index]
                error = ValueError(f"{self._file.name} has {chr(code)!r} (U+{code:04X}) at {where}, {refused}")
                rows = rows[:index]
        yield rows
        if error is not None:
            raise error

    def _boundary(self, offset: int) -> int:
        """Return the offset of the first character at or after a byte of the file, or the end."""
        if offset <= self.mark_bytes or not self._decoded:
            return max(offset, self.mark_bytes)
        begin = max(0, offset - _AROUND)
        return begin + self._cut(self._file.read_at(begin, 2 * _AROUND + offset - begin), offset - begin)

    def _cut(self, data: bytes, place: int) -> int:
        """Return the index of the first character at or after an index of some bytes."""
        # A character has at most three continuation bytes.
        while _continues(data, place) and not all(_continues(data, place - i) for i in range(1, _AROUND + 1)):
            place += 1
        if self._universal and place and data[place - 1 : place + 1] == b"\r\n":
            place += 1
        return min(place, len(data))

    def _read_block(self) -> bytes:
        """Return the next block's bytes, or none at the end."""
        first = self._offset
        wanted = self._block_bytes - first % self._block_bytes
        if self._stop is not None:
            wanted = min(wanted, self._stop - first)
        if not self._decoded or first + wanted == self._stop:
            data = self._file.read_at(first, wanted)
        else:
            data = self._file.read_at(first, wanted + 2 * _AROUND)
            data = data[: self._cut(data, wanted)]
        self._offset += len(data)
        self._cut_short = self._file.error is not None and not self._file.read_at(self._offset, 1)
        if not data:
            self._file.check()
        return data

    def _decode(self, data: bytes, *, final: bool = True) -> str:
        text, _ = codecs.utf_8_decode(data, self._errors, final and not self._cut_short)
        if self._universal and "\r" in text:
            text = text.replace("\r\n", "\n").replace("\r", "\n")
        return text

    def _codes(self, data: bytes) -> Codes:
        """Return the code points of bytes between two boundaries, or the bytes themselves."""
        if self._decoded and not data.isascii():
            return np.frombuffer(self._decode(data).encode("utf-32-le", "surrogatepass"), "<u4")
        if self._universal and b"\r" in data:
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        return np.frombuffer(data, np.uint8)

    def _count(self, data: bytes) -> int | None:
        """Return the number of units of a block, or None if only making them would tell."""
        if self._errors == "replace" and not data.isascii():
            return len(self._decode(data))
        pairs = data.count(b"\r\n") if self._universal and b"\r" in data else 0
        if not self._decoded or data.isascii():
            return len(data) - pairs
        return int(np.count_nonzero(np.frombuffer(data, np.int8) >= -64)) - pairs  # all but 10xxxxxx

    def _place(self, data: bytes, index: int) -> int:
        """Return the start of character `index` in bytes between two boundaries."""

        def complete(count: int) -> int:
            return len(self._decode(data[:count], final=False))

        return self._cut(data, bisect.bisect_left(range(len(data) + 1), index, key=complete))


class TokenReader(TextReader):
    """Stream of the tokens of the pieces that begin in `[first, stop)`."""

    def __init__(self, options: Any, file: TextBytes, first: int = 0, stop: int | None = None) -> None:
        size = options.longest_line_bytes
        super().__init__(options, file, first // size * size)
        self._block_bytes, self._tokenize = size, options._tokenize
        self._pieces_from = self._boundary(first)
        self._pieces_to = None if stop is None else self._boundary(stop)
        self._piece: list[bytes] | None = None  # bytes so far of the current piece
        self._where = 0  # offset of its start
        before = self._offset - 1
        self._line_begins = before < self.mark_bytes or self._ends_line(file.read_at(before, 1))

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
                if not data or (self._pieces_to is not None and first + cut >= self._pieces_to):
                    self._ended = True
                    break
                if first + cut >= self._pieces_from:
                    self._piece, self._where, done = [], first + cut, cut
        except ValueError:
            yield np.concatenate([NOTHING, *found])
            raise
        if self._piece is not None:
            self._piece.append(data[done:])
        yield found[0] if len(found) == 1 else np.concatenate([NOTHING, *found])

    def _ends_line(self, data: bytes) -> bool:
        return data.endswith(b"\n") or (self._universal and data.endswith(b"\r"))

    def _cuts(self, data: bytes) -> list[int]:
        """Return the indices at which pieces begin in a block."""
        cuts = [0] if self._line_begins else []
        self._line_begins = self._ends_line(data)
        text = data
        if self._universal and b"\r" in data:  # replace newlines by as many bytes
            text = data.replace(b"\r\n", b"-\n").replace(b"\r", b"\n")
        place = text.find(b"\n") + 1
        while 0 < place < len(text):
            cuts.append(place)
            place = text.find(b"\n", place) + 1
        if not cuts and self._file.error is None:
            cuts.append(max(data.find(b" "), 0))
        return cuts

    def _end_piece(self) -> Codes:
        """Return the tokens of the current piece."""
        assert self._piece is not None
        piece, self._piece, text = b"".join(self._piece), None, ""
        try:
            text = self._decode(piece)
            return self._tokenize(text) if text else NOTHING
        except UnicodeDecodeError as error:
            raise invalid(self._file, "utf-8", error, self._where) from None
        except Exception as error:
            where = self._file.place.format(self._where)
            what = f"the tokenizer failed on the {len(text)} characters from {where} on"
            raise ValueError(f"{self._file.name}: {what}: {error}") from error


def _continues(data: bytes, place: int) -> bool:
    """Return True if the byte at an index continues a character of UTF-8."""
    return 0 <= place < len(data) and data[place] & 0xC0 == 0x80
