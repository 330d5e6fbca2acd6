"""Videos in which a packet is no frame, or a key frame is none, or time stamps mislead; some made bit by bit."""

from fractions import Fraction
from pathlib import Path

import av
import clips
import numpy as np

FRAMES, GOP = 40, 12


def moving(i, size=(48, 64)):
    """Noise that moves down, so that a frame decoded without those before it looks otherwise."""
    noise = np.random.default_rng(0).integers(0, 255, (size[0] // 4 + FRAMES + 40, size[1] // 4), np.uint8)
    return np.tile(noise[i : i + size[0] // 4].repeat(4, 0).repeat(4, 1)[..., None], 3)


def encoded(path, encoder, pixel_format="yuv420p", *, key=False, rate=25, size=(48, 64), muxer=None, **options):
    """Write a clip; with `key`, each packet is marked as a key frame."""
    with av.open(str(path), "w", options=muxer or {}) as out:
        stream = out.add_stream(encoder, rate, options={"g": str(GOP), **options})
        stream.height, stream.width = size
        stream.pix_fmt, stream.codec_context.thread_count = pixel_format, 1
        for i in range(FRAMES + 1):
            picture = None if i == FRAMES else av.VideoFrame.from_ndarray(moving(i, size), "rgb24")
            for packet in stream.encode(picture):
                packet.is_keyframe = packet.is_keyframe or key
                out.mux(packet)
    return path


def remuxed(source, path, change):
    """Copy a clip's packets; `change(number, packet)` returns a packet's data, or None to leave it out."""
    with av.open(str(source)) as old, av.open(str(path), "w") as out:
        stream = out.add_stream_from_template(old.streams.video[0])
        for number, packet in enumerate(packet for packet in old.demux(video=0) if packet.size):
            if (data := change(number, packet)) is None:
                continue
            copy = av.Packet(data)
            copy.stream, copy.time_base, copy.is_keyframe = stream, packet.time_base, packet.is_keyframe
            copy.pts, copy.dts, copy.duration = packet.pts, packet.dts, packet.duration
            out.mux(copy)
    return path


def _bits(value, count):
    return f"{value:0{count}b}"


def _codes(*values):
    """Exp-Golomb codes."""
    return "".join("0" * ((value + 1).bit_length() - 1) + f"{value + 1:b}" for value in values)


def _unit(kind, bits):
    bits += "0" * (-len(bits) % 8)
    out = bytearray()
    for byte in int(bits, 2).to_bytes(len(bits) // 8, "big"):
        out += (b"\3" if out[-2:] == b"\0\0" and byte < 4 else b"") + bytes([byte])
    return b"\0\0\0\1" + bytes([96 | kind]) + bytes(out)


# 64x64, baseline but for fields
SETS = _unit(7, _bits(77 << 16 | 30, 24) + _codes(0, 0, 2, 1) + "0" + _codes(3, 1) + "00100" + "1") + _unit(
    8, _codes(0, 0) + "00" + _codes(0, 0, 0) + "000" + _codes(0, 0, 0) + "000" + "1"
)


def field(bottom, first, luma, number, gop):
    """A field of H.264, of macroblocks that are not compressed."""
    bits = _codes(0, 7, 0) + _bits(number, 4) + "1" + str(bottom)
    bits += (_codes(gop % 2) + "00" if first else "0") + _codes(0)
    for _ in range(8):
        bits += _codes(25)
        bits += "0" * (-len(bits) % 8) + _bits(luma, 8) * 256 + _bits(128, 8) * 128
    return (SETS if first else b"") + _unit(5 if first else 1, bits + "1")


def fields(folder, name, *, together=False, alone=()):
    """Fields, two packets a frame, or `together` in one; some frames have a single field."""
    bare = folder / "fields.h264"
    bare.write_bytes(b"".join(field(0, True, 50, 0, i) + field(1, False, 50, 0, i) for i in range(9)))
    with av.open(str(bare)) as template, av.open(str(folder / name), "w") as out:
        stream = out.add_stream_from_template(template.streams.video[0])
        for i in range(FRAMES):
            key, number, gop = i % 10 == 0, i % 10, i // 10
            parts = [field(0, key, 20 + 4 * i, number, gop), field(1, False, 22 + 4 * i, number, gop)]
            parts = parts[:1] if i in alone else parts
            for part, data in enumerate([b"".join(parts)] if together else parts):
                packet = av.Packet(data)
                packet.stream, packet.time_base = stream, Fraction(1, 50)
                packet.pts = packet.dts = 2 * i + part
                packet.is_keyframe = key and not part
                out.mux(packet)
    return folder / name


def not_coded(number, packet):
    """Make a VOP of FFmpeg's encoder one that is not coded, as where nothing moves (ISO/IEC 14496-2, 6.2.5)."""
    data = bytes(packet)
    begin = data.find(b"\0\0\1\xb6") + 4
    is_intra = data[begin] >> 6 == 0
    return data if number not in (5, 6, 17, 30) or is_intra else data[:begin] + _nothing(data[begin : begin + 6])


def _nothing(head):
    """A P-VOP that is not coded, of the time of another VOP, from what follows that one's start code."""
    bits = "".join(f"{byte:08b}" for byte in head)
    bits = bits[:2].replace("00", "01") + bits[2 : bits.index("0", 2) + 1 + 1 + 5 + 1] + "00"
    bits += "1" * (-len(bits) % 8)
    return int(bits, 2).to_bytes(len(bits) // 8, "big")


def packed(folder, name, tag="DX50"):
    """A packed bitstream, as of DivX and Xvid: a P and its B picture in one packet, then one that is not coded.

    ::

        encoded   I0  P2      B1  P4      B3
        packed    I0  P2 B1   N   P4 B3   N
    """
    whole = encoded(folder / "whole.avi", "mpeg4", bf="1", b_strategy="0")
    with av.open(str(whole)) as old, av.open(str(folder / name), "w") as out:
        stream = out.add_stream_from_template(old.streams.video[0])
        stream.codec_context.codec_tag = tag
        pictures = [bytes(packet) for packet in old.demux(video=0) if packet.size]
        packets, last = [], None
        for data in pictures:
            begin = data.find(b"\0\0\1\xb6")
            kind = data[begin + 4] >> 6
            if kind == 2:
                packets[-1] = (packets[-1][0] + data, packets[-1][1])
                packets.append((b"\0\0\1\xb6" + _nothing(last), False))
            else:
                head = data[:begin] + b"\0\0\1\xb2DivX503b1393p" if kind == 0 else data[:begin]
                packets.append((head + data[begin:], kind == 0))
                last = data[begin + 4 : begin + 10]
        for number, (data, is_key) in enumerate(packets):
            packet = av.Packet(data)
            packet.stream, packet.time_base, packet.is_keyframe = stream, Fraction(1, 25), is_key
            packet.pts = packet.dts = number
            out.mux(packet)
    return folder / name


def unmarked(folder, name, encoder, *, whole=None, first_only=False, **options):
    """A clip that marks no packet as a key frame, or not the first one."""

    def change(_, packet):
        packet.is_keyframe = packet.is_keyframe and first_only and packet.pts > 0
        return bytes(packet)

    return remuxed(encoded(folder / (whole or f"whole.{name}"), encoder, **options), folder / name, change)


def hidden(number, packet):
    """Frames of VP8 that are only referred to, as alternate references are (RFC 6386, 9.1)."""
    data = bytearray(packet)
    data[0] &= 0xFF if number not in (5, 17, 30) else ~0x10
    return bytes(data)


def joined(folder, encoder, second, **options):
    """Two transport streams, the second of a clock of its own, whose times begin at `second` in 1/90000 s."""
    parts = []
    for name, begin in (("first", 900_000), ("second", second)):
        whole = encoded(folder / f"{name}-0.ts", encoder, **options)
        with av.open(str(whole)) as container:
            offset = begin - next(container.demux(video=0)).pts

        def change(_, packet, offset=offset):
            packet.pts, packet.dts = packet.pts + offset, packet.dts + offset
            return bytes(packet)

        parts.append(remuxed(whole, folder / f"{name}.ts", change).read_bytes())
    (folder / "joined.ts").write_bytes(b"".join(parts))
    return folder / "joined.ts"


def later(number, packet):
    """Let the clock jump, between a key frame and the B pictures before it."""
    if number > 11:
        packet.pts, packet.dts = packet.pts + 9_000_000, packet.dts + 9_000_000
    return bytes(packet)


def from_second_key(folder, suffix, encoder, **options):
    """A clip cut where a group begins, whose first B pictures refer to the group before."""
    keys = []

    def change(number, packet):
        keys.extend([number] if packet.is_keyframe else [])
        return bytes(packet) if len(keys) > 1 else None

    return remuxed(encoded(folder / f"whole.{suffix}", encoder, **options), folder / f"a.{suffix}", change)


def with_repeats(folder, encoder):
    """AVI with B pictures in which every frame is shown four times, by empty packets."""

    def change(_, packet):
        packet.dts *= 4
        packet.pts = packet.dts
        return bytes(packet)

    return remuxed(encoded(folder / "whole.avi", encoder, bf="2"), folder / "a.avi", change)


def shifted(folder, name, ticks):
    """A clip of MP4 whose first frames an edit list cuts off, as their times are below 0."""

    def change(_, packet):
        packet.pts, packet.dts = packet.pts - ticks, packet.dts - ticks
        return bytes(packet)

    return remuxed(encoded(folder / "whole.mp4", "libx264", bf="2"), folder / name, change)


MPEG2 = {"bf": "2"}
REFRESH = {"x264-params": "intra-refresh=1:keyint=12:bframes=0:scenecut=0"}
X265 = {"x265-params": "keyint=12:log-level=none"}
#: Makers of clips, each of which takes a folder.
MAKERS = {
    "fields": lambda f: fields(f, "a.mkv"),
    "fields-mp4": lambda f: fields(f, "a.mp4"),
    "fields-together": lambda f: fields(f, "a.mkv", together=True),
    "fields-alone": lambda f: fields(f, "a.mkv", alone=(3, 4, 15, 29)),
    "fields-alone-at-end": lambda f: fields(f, "a.mkv", alone=(39,)),
    "interlaced": lambda f: encoded(f / "a.mkv", "libx264", **{"x264-params": "tff=1", "bf": "2"}, size=(96, 64)),
    "interlaced-ts": lambda f: encoded(f / "a.ts", "libx264", **{"x264-params": "tff=1:open-gop=1"}, size=(96, 64)),
    "not-coded": lambda f: remuxed(encoded(f / "whole.avi", "mpeg4"), f / "a.avi", not_coded),
    "not-coded-b": lambda f: remuxed(encoded(f / "whole.avi", "mpeg4", bf="2"), f / "a.avi", not_coded),
    "not-coded-mkv": lambda f: remuxed(encoded(f / "whole.mkv", "mpeg4", bf="2"), f / "a.mkv", not_coded),
    "keys-mpeg4": lambda f: encoded(f / "a.mp4", "mpeg4", key=True),
    "keys-flv": lambda f: encoded(f / "a.flv", "flv", key=True),
    "keys-h264": lambda f: encoded(f / "a.mp4", "libx264", key=True, bf="2"),
    "keys-h265": lambda f: encoded(f / "a.mkv", "libx265", key=True, **{"x265-params": "keyint=12:log-level=none"}),
    "keys-mpeg2": lambda f: encoded(f / "a.mkv", "mpeg2video", key=True, **MPEG2),
    "keys-vp8": lambda f: encoded(f / "a.webm", "libvpx", key=True),
    "keys-vp9": lambda f: encoded(f / "a.webm", "libvpx-vp9", key=True, **{"cpu-used": "8", "lag-in-frames": "8"}),
    "keys-ffv1": lambda f: encoded(f / "a.mkv", "ffv1", key=True, level="1"),
    "keys-msmpeg4": lambda f: encoded(f / "a.avi", "msmpeg4", key=True),
    "packed": lambda f: packed(f, "a.avi"),
    "packed-mkv": lambda f: packed(f, "a.mkv"),
    "hidden-vp8": lambda f: remuxed(encoded(f / "whole.webm", "libvpx"), f / "a.webm", hidden),
    "wmv": lambda f: encoded(f / "a.asf", "wmv2"),
    "joined-sooner": lambda f: joined(f, "mpeg2video", 90_000),
    "joined-later": lambda f: joined(f, "mpeg2video", 946_000),
    "joined-h264": lambda f: joined(f, "libx264", 90_000, bf="2"),
    "empty": lambda f: remuxed(
        encoded(f / "whole.avi", "mpeg4"), f / "a.avi", lambda i, packet: None if i in (9, 10) else bytes(packet)
    ),
    "edit-list-3": lambda f: shifted(f, "a.mp4", 3 * 512),
    "edit-list-10": lambda f: shifted(f, "a.mp4", 10 * 512),
    "open-gop": lambda f: encoded(f / "a.mkv", "libx264", bf="3", **{"x264-params": "open-gop=1"}),
    "refreshed": lambda f: encoded(f / "a.mkv", "libx264", **REFRESH, size=(96, 128)),
    "refreshed-mp4": lambda f: encoded(f / "a.mp4", "libx264", **REFRESH, size=(96, 128)),
    "unmarked-flv": lambda f: unmarked(f, "a.flv", "flv"),
    "unmarked-first-flv": lambda f: unmarked(f, "a.flv", "flv", first_only=True),
    "unmarked-h265": lambda f: unmarked(f, "a.mkv", "libx265", **X265),
    "unmarked-first-h265": lambda f: unmarked(f, "a.mkv", "libx265", first_only=True, **X265),
    "unmarked-first-h265-mp4": lambda f: unmarked(f, "a.mp4", "libx265", whole="w.mkv", first_only=True, **X265),
    "unmarked-swf": lambda f: encoded(f / "a.swf", "flv"),
    "jump": lambda f: remuxed(encoded(f / "whole.ts", "mpeg2video", **MPEG2), f / "a.ts", later),
    "leading-avi": lambda f: from_second_key(f, "avi", "mpeg4", bf="2"),
    "leading-asf": lambda f: from_second_key(f, "asf", "mpeg2video", bf="2"),
    "leading-bare-mpeg1": lambda f: from_second_key(f, "m1v", "mpeg1video", bf="2"),
    "leading-bare-mpeg4": lambda f: from_second_key(f, "m4v", "mpeg4", bf="2"),
    "program-small": lambda f: encoded(f / "a.mpg", "mpeg2video", **MPEG2),
    "program": lambda f: encoded(f / "a.vob", "mpeg2video", **MPEG2, size=(96, 128)),
    "program-keys": lambda f: encoded(f / "a.mpg", "mpeg2video", g="1"),
    "uneven": lambda f: Path(
        clips.write_clip(f / "a.mkv", FRAMES, "h264-mkv", times=[40 * i + 7 * (i % 5) for i in range(FRAMES)])
    ),
}  # fmt: skip
