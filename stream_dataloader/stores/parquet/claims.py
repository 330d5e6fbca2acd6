"""Number of rows and bytes that a table unpacks to, read from its headers before memory is allocated.

- Parquet: the footer has the number of values of each column of a row group. A run of one value takes a few bytes in
  the file, but memory for all its values. Texts that a dictionary repeats are not counted, because only reading tells
  their lengths.
- Arrow IPC: compressed buffers begin with their unpacked size. pyarrow allocates this size, and then unpacks.

An Arrow IPC file ends with a footer, which lists its messages; a stream is one message after another. A message is ::

    FF FF FF FF | size of the header, int32 | header, a flatbuffer | body: the buffers

Source: `format/Message.fbs` and `File.fbs` of Apache Arrow.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from stream_dataloader.streams._media.limits import Limits, may_unpack

__all__ = [
    "Leaves",
    "Message",
    "check_group",
    "check_messages",
    "leaves_of",
    "messages_of_file",
    "messages_of_stream",
]

_BYTES = {"BOOLEAN": 1 / 8, "INT32": 4, "INT64": 8, "INT96": 8, "FLOAT": 4, "DOUBLE": 8, "BYTE_ARRAY": 4}

_MARK, _TAIL = b"\xff\xff\xff\xff", b"ARROW1"
_DICTIONARY, _RECORDS = 2, 3  # kinds of messages

_byte, _unsigned16, _int32, _int64 = (struct.Struct(kind).unpack_from for kind in ("<B", "<H", "<i", "<q"))
_pair, _block = struct.Struct("<qq").unpack_from, struct.Struct("<qixxxxq").unpack_from


class Leaves(NamedTuple):
    """Columns of numbers and texts in a file of Parquet; structs and lists consist of several.

    Attributes:
        row_bytes: Bytes of a row, in columns with one value for each row.
        repeated: Columns of lists, and the bytes of a value.
        all: Numbers of all columns that are read.
    """

    row_bytes: float
    repeated: dict[int, float]
    all: list[int]


def leaves_of(schema: Any, columns: Collection[str]) -> Leaves:
    """Return the leaf columns of some columns."""
    found = Leaves(0.0, {}, [])
    for number in range(len(schema)):
        leaf = schema.column(number)
        if not {leaf.path, leaf.path.partition(".")[0]}.isdisjoint(columns):
            found.all.append(number)
            size = _BYTES.get(leaf.physical_type, max(1, leaf.length))
            if leaf.max_repetition_level:
                found.repeated[number] = size
            else:
                found = found._replace(row_bytes=found.row_bytes + size)
    return found


def check_group(group: Any, leaves: Leaves, file_bytes: int, limits: Limits, name: str) -> None:
    """Raise a StoreError if some columns of a row group of Parquet have too many values.

    Args:
        group: The group's metadata.
        leaves: The columns.
        file_bytes: Size of the file.
    """
    values = group.num_rows * leaves.row_bytes
    values += sum(group.column(number).num_values * size for number, size in leaves.repeated.items())
    encoded = group.total_byte_size  # of all columns; this is enough in most cases
    if not may_unpack(limits, file_bytes, values + encoded):
        encoded = sum(group.column(number).total_uncompressed_size for number in leaves.all)
        limits.check_unpacked(file_bytes, int(max(values, encoded)), name)


class Message(NamedTuple):
    """A batch of rows, or a dictionary of values.

    Attributes:
        is_rows: Whether it is a batch of rows.
        rows: Number of rows, or of values.
        packed: Size of the compressed buffers; 0 if they are not compressed.
        unpacked: Unpacked size of the buffers.
    """

    is_rows: bool
    rows: int
    packed: int
    unpacked: int


def check_messages(messages: Sequence[Message], limits: Limits, name: str) -> list[int]:
    """Return the number of rows of each batch; raise a StoreError if one batch, or all together, are too large."""
    for one in messages:
        limits.check_unpacked(one.packed, one.unpacked, name)
    return [one.rows for one in messages if one.is_rows]


def messages_of_file(data: Any) -> Iterator[Message]:
    """Yield the messages of an IPC file: dictionaries, then batches, in the order of its footer."""
    if bytes(data[-6:]) != _TAIL:
        raise ValueError("it has no footer: it is unfinished or cut off")
    footer = _Table.at(data, len(data) - 10 - _int32(data, len(data) - 10)[0])
    for field in (2, 3):
        for place in footer.structs(field, 24):
            if (found := _message(data, _block(data, place)[0])[0]) is not None:
                yield found


def messages_of_stream(data: Any) -> Iterator[Message]:
    """Yield the messages of an IPC stream."""
    place, total = 0, len(data)
    while place + 8 <= total and _int32(data, place + 4)[0]:
        found, place = _message(data, place)
        if found is not None:
            yield found


def _message(data: Any, place: int) -> tuple[Message | None, int]:
    """Return a message, or None if it is of another kind, and the start of the next one."""
    if not 0 <= place < len(data):
        raise ValueError(f"no message begins at byte {place:,}")
    start = place + (8 if data[place : place + 4] == _MARK else 4)  # files older than Arrow 0.15 have no mark
    size = _int32(data, start - 4)[0]
    header, body = _Table.at(data, start), start + size
    if size <= 0 or (length := header.number(3, _int64)) < 0:
        raise ValueError(f"the message at byte {place:,} has no header")
    kind = header.number(1, _byte)
    inner = header.table(2)
    if kind == _DICTIONARY and inner is not None:
        inner = inner.table(1)
    if kind not in (_DICTIONARY, _RECORDS) or inner is None:
        return None, body + length
    packed = unpacked = 0
    if inner.table(3) is not None:
        for buffer in inner.structs(2, 16):
            start, count = _pair(data, buffer)
            if count:
                size = _int64(data, body + start)[0]
                packed, unpacked = packed + count, unpacked + (count - 8 if size == -1 else size)
    return Message(kind == _RECORDS, inner.number(0, _int64), packed, unpacked), body + length


class _Table:
    """Table of a flatbuffer: fields by number. Any field may be missing."""

    def __init__(self, data: Any, place: int) -> None:
        self._data, self._place = data, place
        self._fields = place - _int32(data, place)[0]

    @classmethod
    def at(cls, data: Any, place: int) -> _Table:
        """Return the table that the offset at a place leads to."""
        return cls(data, place + _int32(data, place)[0])

    def _field(self, number: int) -> int:
        """Return the place of a field, or 0 if it is missing."""
        at = 4 + 2 * number
        if at >= _unsigned16(self._data, self._fields)[0]:
            return 0
        offset: int = _unsigned16(self._data, self._fields + at)[0]
        return offset and self._place + offset

    def number(self, field: int, unpack: Any) -> int:
        place = self._field(field)
        return int(unpack(self._data, place)[0]) if place else 0

    def table(self, field: int) -> _Table | None:
        place = self._field(field)
        return _Table.at(self._data, place) if place else None

    def structs(self, field: int, size: int) -> range:
        """Return the places of the structs of a vector."""
        place = self._field(field)
        if not place:
            return range(0)
        place += _int32(self._data, place)[0]
        count = _int32(self._data, place)[0]
        if not 0 <= count * size <= len(self._data):
            raise ValueError(f"a header has {count:,} entries")
        return range(place + 4, place + 4 + count * size, size)
