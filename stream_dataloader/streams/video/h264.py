"""Packets of H.264 (ITU-T H.264): their frames and fields, and the pictures at which exact decoding may begin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

__all__ = ["H264Packets", "nal_units"]

_SLICES, _IDR, _SEI, _SPS, _PPS = (1, 2, 5), 5, 6, 7, 8  # nal_unit_type (table 7-1)
_RECOVERY_POINT = 6  # payloadType (annex D.1.1)
_CHROMA_PROFILES = (100, 110, 122, 244, 44, 83, 86, 118, 128, 138, 139, 134, 135)  # 7.3.2.1.1


class _Sequence(NamedTuple):
    """Fields of a sequence parameter set that a slice's header depends on."""

    frames_only: bool
    number_bits: int
    separate_planes: bool


class _Field(NamedTuple):
    """Picture of a slice: its number, and 0 for a frame, 1 for a top field, 2 for a bottom field."""

    number: int
    parity: int


class H264Packets:
    """Inspector of packets in order: the number of frames that begin in each, and whether decoding may begin there.

    Two fields make one frame (7.4.1.2.4), whether each has a packet or both share one.
    """

    def __init__(self, extradata: bytes) -> None:
        self._length = 1 + (extradata[4] & 3) if extradata[:1] == b"\1" and len(extradata) > 6 else 0
        self._sequences: set[_Sequence] = set()
        self._first: _Field | None = None  # a first field that waits for its second
        for unit in _parameter_sets(extradata) if self._length else nal_units(extradata, 0):
            self._read_sequence(unit)

    def look(self, packet: Any) -> tuple[int | None, bool] | None:
        """Return the number of frames that begin in a packet, and whether it is certainly a key frame.

        The number is None if unsure. The result is None if the packet has no picture.
        """
        if not packet.is_keyframe and self._frames_only:
            return 1, False
        key, begun, refreshed, found = False, 0, None, False
        for unit in nal_units(packet, self._length):
            kind = unit[0] & 31
            if kind == _SPS:
                self._read_sequence(unit)
            elif kind == _SEI:
                refreshed = _is_exact(bytes(unit)) if refreshed is None else refreshed
            elif kind in _SLICES:
                found = True
                key = key or (not begun and (kind == _IDR or bool(refreshed)))
                if self._frames_only:
                    return 1, key
                if len(self._sequences) != 1:  # it is not known which sequence is used
                    return None, False
                if (begins := self._begins_frame(bytes(unit[:64]))) is None:
                    return None, False
                begun += begins
        if not found:
            return None
        return (begun, key and begun == 1) if begun < 2 else (None, False)

    @property
    def waits(self) -> bool:
        """Whether the last picture was a first field, which waits for its second."""
        return self._first is not None

    @property
    def _frames_only(self) -> bool:
        return bool(self._sequences) and all(sequence.frames_only for sequence in self._sequences)

    def _begins_frame(self, unit: bytes) -> bool | None:
        """Return True for the first slice of a frame; None after a single field, which decoders may not show."""
        (sequence,) = self._sequences
        bits = _Bits(unit[1:])
        if bits.code():  # first_mb_in_slice: a further slice of the same picture
            return False
        bits.code(), bits.code()  # slice_type, pic_parameter_set_id
        bits.take(2 * sequence.separate_planes)
        number = bits.take(sequence.number_bits)
        parity = 1 + bits.take(1) if bits.take(1) else 0
        before, self._first = self._first, None
        if parity and before is not None and before == _Field(number, 3 - parity) and unit[0] & 31 != _IDR:
            return False
        self._first = _Field(number, parity) if parity else None
        return True if before is None else None

    def _read_sequence(self, unit: Any) -> None:
        if unit[0] & 31 != _SPS:
            return
        bits = _Bits(bytes(unit[1:]))
        profile, planes = bits.take(24) >> 16, False
        bits.code()
        if profile in _CHROMA_PROFILES:
            if (chroma := bits.code()) == 3:
                planes = bool(bits.take(1))
            bits.code(), bits.code(), bits.take(1)
            if bits.take(1):
                for size in [16] * 6 + [64] * (2 if chroma != 3 else 6):
                    if bits.take(1):
                        bits.skip_scaling_list(size)
        number_bits = bits.code() + 4
        if (order := bits.code()) == 0:
            bits.code()
        elif order == 1:
            bits.take(1), bits.code(), bits.code()
            for _ in range(min(bits.code(), 255)):
                bits.code()
        bits.code(), bits.take(1), bits.code(), bits.code()  # reference frames, gaps, width, height
        self._sequences.add(_Sequence(bool(bits.take(1)), number_bits, planes))


class _Bits:
    """Reader of the bits of a NAL unit, with zeros after its end."""

    def __init__(self, data: bytes) -> None:
        data = data.replace(b"\0\0\3", b"\0\0")  # the third byte only prevents a false start code (7.4.1)
        self._value, self._left = int.from_bytes(data, "big"), 8 * len(data)

    def take(self, count: int) -> int:
        self._left -= count
        value = self._value >> self._left if self._left >= 0 else self._value << -self._left
        return value & ((1 << count) - 1)

    def code(self) -> int:
        """Read an Exp-Golomb code (9.1)."""
        zeros = 0
        while self._left > 0 and not self.take(1):
            zeros += 1
        return (1 << zeros) - 1 + self.take(zeros)

    def skip_scaling_list(self, size: int) -> None:
        last = following = 8
        for _ in range(size):  # 7.3.2.1.1.1
            if following:
                code = self.code()
                following = (last + ((code + 1) // 2 if code & 1 else -(code // 2))) % 256
            last = following or last


def nal_units(packet: Any, length: int) -> Iterator[Any]:
    """Yield the NAL units of a packet: each after a start code, or after its length in `length` bytes."""
    if not length:
        data = bytes(packet)
        begin = data.find(b"\0\0\1")
        while begin >= 0:
            end = data.find(b"\0\0\1", begin + 3)
            if len(unit := data[begin + 3 : end if end >= 0 else len(data)]):
                yield unit
            begin = end
        return
    view, position = memoryview(packet), 0
    while position + length < len(view):
        size = int.from_bytes(view[position : position + length], "big")
        position += length
        if not 0 < size <= len(view) - position:
            return
        yield view[position : position + size]
        position += size


def _parameter_sets(extradata: bytes) -> Iterator[bytes]:
    """Yield the parameter sets of an `avcC` box (ISO/IEC 14496-15, 5.3.3.1): sequences, then pictures."""
    position = 5
    for mask in (31, 255):
        count, position = extradata[position] & mask if position < len(extradata) else 0, position + 1
        for _ in range(count):
            size = int.from_bytes(extradata[position : position + 2], "big")
            if unit := extradata[position + 2 : position + 2 + size]:
                yield unit
            position += 2 + size


def _is_exact(unit: bytes) -> bool | None:
    """Return whether a unit has a recovery point at which decoding is exact at once, or None without such a point.

    With gradual refresh, decoding becomes exact some frames later (7.3.2.3.1 and D.1.8).
    """
    payload = unit.replace(b"\0\0\3", b"\0\0")[1:]
    while len(payload) > 2:
        kind, payload = _number(payload)
        size, payload = _number(payload)
        if kind == _RECOVERY_POINT and payload:
            # recovery_frame_cnt is an Exp-Golomb code, in which the single bit 1 stands for 0; then exact_match_flag.
            return payload[0] & 0xC0 == 0xC0
        payload = payload[size:]
    return None


def _number(data: bytes) -> tuple[int, bytes]:
    """Return the sum of leading bytes of 255 and of the byte after them, and the remaining bytes."""
    full = len(data) - len(data.lstrip(b"\xff"))
    return 255 * full + sum(data[full : full + 1]), data[full + 1 :]
