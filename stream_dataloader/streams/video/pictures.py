"""Pictures in a packet, and whether decoding may begin at it, read from its bits.

A packet is not a picture: H.264 and MPEG-2 may have a packet for each field, VP8 and MPEG-4 have packets that show
nothing, and a packet that the container marks as a key frame may not be one.

Guarantee: a returned number is certain. `Shown(None, ...)` means that only decoding would tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from stream_dataloader.streams.video.h264 import H264Packets, nal_units

__all__ = ["NO_PICTURE", "Inspector", "Shown", "inspector"]


class Shown(NamedTuple):
    """Number of frames of a packet (None if unsure), and whether decoding may begin there.

    If no picture is found, the packet is of another kind, or damaged.
    """

    frames: int | None
    key: bool = False
    found: bool = True


NO_PICTURE = Shown(None, found=False)


class Inspector:
    """Inspector of the packets of a track, in order."""

    def __init__(self, look: Callable[[Any], Shown]) -> None:
        self.look = look

    @property
    def waits(self) -> bool:
        """Whether the last packet was a first field without its second. A single field may not be shown."""
        return False


def inspector(stream: Any) -> Inspector | None:
    """Return the inspector of a track's packets, or None if its codec is not supported here."""
    context = stream.codec_context
    extradata = bytes(context.extradata or b"")
    if context.codec.intra_only or context.name in _WHOLE:
        return Inspector(_every_packet)
    made = _INSPECTORS.get(_NAMES.get(context.name, context.name))
    return None if made is None else made(extradata)


def _every_packet(packet: Any) -> Shown:
    return Shown(1, packet.is_keyframe)


#: Codecs whose every packet is a frame, beside those with single pictures only. Their decoders report key frames.
_WHOLE = ("ffv1", "png", "apng", "qtrle", "cinepak", "gif")


class _H264(Inspector):
    def __init__(self, extradata: bytes) -> None:
        self._packets = H264Packets(extradata)
        super().__init__(self._look)

    def _look(self, packet: Any) -> Shown:
        told = self._packets.look(packet)
        return NO_PICTURE if told is None else Shown(*told)

    @property
    def waits(self) -> bool:
        return self._packets.waits


class _Hevc(Inspector):
    """HEVC (ITU-T H.265): leading pictures that refer to pictures before a broken place are not shown."""

    _BROKEN, _FIRST_KEY, _LAST_KEY, _SKIPPED, _END = (16, 17, 18), 16, 21, (8, 9), (36, 37)  # nal_unit_type

    def __init__(self, extradata: bytes) -> None:
        self._length = 1 + (extradata[21] & 3) if extradata[:1] == b"\1" and len(extradata) > 21 else 0
        self._begins = self._broken = True
        super().__init__(self._look)

    def _look(self, packet: Any) -> Shown:
        if not (packet.is_keyframe or self._broken or self._begins):
            return Shown(1, False)
        for unit in nal_units(packet, self._length):
            kind = unit[0] >> 1 & 63
            if kind in self._END:
                self._begins = True
            elif self._FIRST_KEY <= kind <= self._LAST_KEY:
                self._broken = self._begins or kind in self._BROKEN
                self._begins = False
                return Shown(1, True)
            elif kind < self._FIRST_KEY:
                return Shown(0 if self._broken and kind in self._SKIPPED else 1, False)
        return NO_PICTURE


def _vp8(_: bytes) -> Inspector:
    """Return the inspector of VP8 (RFC 6386, 9.1): a bit for inter frames, three of version, one for shown frames."""
    return Inspector(lambda packet: Shown(memoryview(packet)[0] >> 4 & 1, not memoryview(packet)[0] & 1))


def _vp9(_: bytes) -> Inspector:
    """Return the inspector of VP9 (bitstream specification, 6.2 and annex B): frames, joined in a superframe."""

    def look(packet: Any) -> Shown:
        data = memoryview(packet)
        frames = [_vp9_header(data[begin : begin + 2]) for begin in _vp9_frames(data)]
        return Shown(sum(shown for shown, _ in frames), frames[0][1])

    return Inspector(look)


def _vp9_header(data: Any) -> tuple[bool, bool]:
    """Return whether a frame is shown, and whether it is a key frame."""
    bits = int.from_bytes(bytes(data).ljust(2, b"\0"), "big") << 2 & 0xFFFF
    profile_is_3, bits = bits >> 14 == 3, bits << 2 & 0xFFFF
    bits = bits << profile_is_3 & 0xFFFF
    if bits >> 15:  # show_existing_frame
        return True, False
    return bool(bits >> 13 & 1), not bits >> 14 & 1


def _vp9_frames(data: Any) -> Iterator[int]:
    last = data[-1]
    count, width = (last & 7) + 1, (last >> 3 & 3) + 1
    index = 2 + count * width
    begin = 0
    if last & 0xE0 != 0xC0 or len(data) < index or data[-index] != last:
        yield begin
        return
    sizes = bytes(data[len(data) - index + 1 : -1])
    for i in range(count):
        if size := int.from_bytes(sizes[i * width : (i + 1) * width], "little"):
            yield begin
        begin += size


def _av1(_: bytes) -> Inspector:
    """Return the inspector of AV1 (bitstream specification, 5.3 to 5.9): a temporal unit shows one frame."""

    def look(packet: Any) -> Shown:
        if not packet.is_keyframe:
            return Shown(1, False)
        data, position, has_sequence = memoryview(packet), 0, False
        while position + 2 < len(data):
            header = data[position]
            kind, has_size = header >> 3 & 15, header >> 1 & 1
            position += 1 + (header >> 2 & 1)
            size, shift = 0, 0
            while has_size and position < len(data):
                byte = data[position]
                size, shift, position = size | (byte & 127) << shift, shift + 7, position + 1
                if not byte & 128:
                    break
            has_sequence = has_sequence or kind == 1
            if kind in (3, 6) and position < len(data):  # a frame's header, or a frame
                # show_existing_frame is 0, frame_type is KEY_FRAME, show_frame is 1
                return Shown(1, has_sequence and data[position] & 0xF0 == 0x10)
            if not has_size:
                break
            position += size
        return Shown(1, False)

    return Inspector(look)


class _Leading:
    """Detector of B pictures that need a picture before the first key frame; decoders leave them out."""

    def __init__(self) -> None:
        self._references = 0  # number of pictures so far that B pictures may refer to

    def is_shown(self, *, is_b: bool) -> bool:
        self._references += not is_b
        return not is_b or self._references > 1


class _Mpeg2(Inspector):
    """MPEG-1 and MPEG-2 (ITU-T H.262, 6.2): a picture may be a frame or a field."""

    _PICTURE, _SEQUENCE, _GROUP = b"\0\0\1\0", b"\0\0\1\xb3", b"\0\0\1\xb8"
    _EXTENSION, _SLICE = 0xB5, range(1, 0xB0)

    def __init__(self, _: bytes) -> None:
        self._open_field = 0  # structure of a first field that waits for its second
        self._leading = _Leading()
        self._closed = False  # whether B pictures after the first key frame refer to it alone
        super().__init__(self._look)

    @property
    def waits(self) -> bool:
        return bool(self._open_field)

    def _look(self, packet: Any) -> Shown:
        data = bytes(packet)
        begun, key, position = 0, False, data.find(self._PICTURE)
        if position < 0:
            return NO_PICTURE
        if packet.is_keyframe:
            intra = data[position + 5] >> 3 & 7 == 1 if position + 5 < len(data) else False
            key = intra and data.find(self._SEQUENCE, 0, position) >= 0
        if (group := data.find(self._GROUP, 0, position)) >= 0:
            self._closed = bool(data[group + 7 : group + 8]) and data[group + 7] & 0x40 != 0
        while position >= 0:
            structure = self._structure(data, position + 4)
            if structure == 3 or self._open_field != 3 - structure:
                is_b = position + 5 < len(data) and data[position + 5] >> 3 & 7 == 3
                begun += self._leading.is_shown(is_b=is_b) or self._closed
                self._open_field = 0 if structure == 3 else structure
            else:
                self._open_field = 0
            position = data.find(self._PICTURE, position + 4)
        return Shown(begun if begun < 2 else None, key and begun == 1)

    def _structure(self, data: bytes, position: int) -> int:
        """Return 1 or 2 for a field, 3 for a frame, from the picture coding extension (6.3.10)."""
        while (position := data.find(b"\0\0\1", position)) >= 0 and position + 6 < len(data):
            code = data[position + 3]
            if code in self._SLICE:
                break
            if code == self._EXTENSION and data[position + 4] >> 4 == 8:
                return data[position + 6] & 3 or 3
            position += 4
        return 3


class _Mpeg4(Inspector):
    """MPEG-4 Visual (ISO/IEC 14496-2, 6.2): a VOP may be "not coded"; a packet may hold two VOPs, and the next none."""

    _VOP, _VOL = b"\0\0\1\xb6", tuple(b"\0\0\1" + bytes([0x20 + i]) for i in range(16))

    def __init__(self, extradata: bytes) -> None:
        self._time_bits = 0
        self._leading = _Leading()
        super().__init__(self._look)
        self._read_layer(extradata)

    def _look(self, packet: Any) -> Shown:
        data = bytes(packet)
        position = data.find(self._VOP)
        if len(data) == 1:  # DivX and XviD write a repeated frame like this
            return Shown(0)
        if position > 0:
            self._read_layer(data[:position])
        if position < 0:
            return NO_PICTURE
        if not self._time_bits:
            return Shown(None)
        intra, coded = data[position + 4 : position + 5] < b"\x40", 0
        key = intra
        while position >= 0:
            is_coded = self._is_coded(data[position + 4 : position + 16])
            is_b = b"\x80" <= data[position + 4 : position + 5] < b"\xc0"
            coded += is_coded and self._leading.is_shown(is_b=is_b)
            key = key and is_coded
            position = data.find(self._VOP, position + 4)
        return Shown(coded, key and coded == 1)

    def _is_coded(self, data: bytes) -> bool:
        bits = f"{int.from_bytes(data, 'big'):0{8 * len(data)}b}"
        end = bits.find("0", 2) + 2 + self._time_bits + 1  # whole seconds, marker, time, marker
        return bits[end : end + 1] == "1"

    def _read_layer(self, data: bytes) -> None:
        for code in self._VOL:
            if (position := data.find(code)) >= 0:
                break
        else:
            return
        tail = data[position + 4 : position + 44]
        bits, at = f"{int.from_bytes(tail, 'big'):0{8 * len(tail)}b}", 9
        at += 8 if bits[at : at + 1] == "1" else 1  # version and priority
        at += 20 if bits[at : at + 4] == "1111" else 4  # the pixels' shape
        if bits[at : at + 1] == "1":
            at += 4  # chroma format, low delay
            at += 80 if bits[at : at + 1] == "1" else 1  # the buffer
        else:
            at += 1
        shape, resolution = bits[at : at + 2], bits[at + 3 : at + 19]
        if shape == "00" and len(resolution) == 16:
            self._time_bits = max(1, (int(resolution, 2) - 1).bit_length())


_NAMES = {"libdav1d": "av1", "libaom-av1": "av1", "libvpx": "vp8", "libvpx-vp9": "vp9", "mpeg1video": "mpeg2video"}
_INSPECTORS: dict[str, Callable[[bytes], Inspector]] = {
    "h264": _H264,
    "hevc": _Hevc,
    "vp8": _vp8,
    "vp9": _vp9,
    "av1": _av1,
    "mpeg2video": _Mpeg2,
    "mpeg4": _Mpeg4,
}
