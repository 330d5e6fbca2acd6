"""Clips that the tests make themselves: each frame shows its number in black and white stripes."""

from fractions import Fraction
from pathlib import Path

import av
import numpy as np

MILLISECOND = Fraction(1, 1000)
BITS, STRIPE = 8, 8
WIDTH, HEIGHT = BITS * STRIPE, 48

# name: suffix, encoder, pixel format, options
CODECS = {
    "h264": ("mp4", "libx264", "yuv420p", {"g": "12", "bf": "2", "sc_threshold": "0"}),
    "h264-open-gop": ("mp4", "libx264", "yuv420p", {"g": "12", "bf": "3", "x264-params": "open-gop=1:b-pyramid=none"}),
    "h264-mkv": ("mkv", "libx264", "yuv420p", {"g": "12", "bf": "2"}),
    "h264-ts": ("ts", "libx264", "yuv420p", {"g": "12", "bf": "2"}),
    "h264-avi": ("avi", "libx264", "yuv420p", {"g": "12", "bf": "2"}),
    "h264-10bit": ("mp4", "libx264", "yuv420p10le", {"g": "12", "bf": "2"}),
    "h265": ("mp4", "libx265", "yuv420p", {"g": "12", "x265-params": "keyint=12:log-level=none"}),
    "mpeg4-avi": ("avi", "mpeg4", "yuv420p", {"g": "12"}),
    "mpeg2-ts": ("ts", "mpeg2video", "yuv420p", {"g": "12", "bf": "2"}),
    "mpeg2-mpg": ("mpg", "mpeg2video", "yuv420p", {"g": "12", "bf": "2"}),
    "vp9-webm": ("webm", "libvpx-vp9", "yuv420p", {"g": "12", "lag-in-frames": "8", "cpu-used": "8"}),
    "vp8-webm": ("webm", "libvpx", "yuv420p", {"g": "12", "cpu-used": "8"}),
    "mjpeg-mov": ("mov", "mjpeg", "yuvj420p", {}),
    "ffv1-mkv": ("mkv", "ffv1", "yuv444p", {}),
}  # fmt: skip


def picture(number, width=WIDTH, height=HEIGHT):
    """Frame `number`: stripes for its bits, the lowest at the left; gray below."""
    image = np.full((height, width, 3), 128, np.uint8)
    stripe = width // BITS
    for bit in range(BITS):
        image[: height // 2, bit * stripe : (bit + 1) * stripe] = 255 * (number >> bit & 1)
    return image


def number_of(frame):
    frame = np.asarray(frame, np.float32)
    frame = frame / (255 if frame.max() > 1.5 else 1)
    height, width = frame.shape[1:]
    stripe = width // BITS
    row = frame[:, height // 8 : height // 4].mean(axis=(0, 1))
    return sum(
        int(row[bit * stripe + stripe // 4 : (bit + 1) * stripe - stripe // 4].mean() > 0.5) << bit
        for bit in range(BITS)
    )


def write_clip(
    path, frames=60, codec="h264", *, rate=25, times=None, first=0, size=(HEIGHT, WIDTH), offset=0, streams=1, **options
):
    """Write a clip; `times` are the frames' time stamps in 1/1000 s, instead of a steady rate."""
    _, encoder, pixel_format, encoding = CODECS[codec]
    with av.open(str(path), "w", options=options) as container:
        tracks = []
        for _ in range(streams):
            track = container.add_stream(encoder, rate, options=encoding)
            track.height, track.width = size
            track.pix_fmt = pixel_format
            track.codec_context.thread_count = 1
            if times is not None or offset:
                track.codec_context.time_base = MILLISECOND
            tracks.append(track)
        for i in range(frames):
            for k, track in enumerate(tracks):
                image = picture(first + i + 100 * k, size[1], size[0])
                frame = av.VideoFrame.from_ndarray(image, "rgb24")
                if times is not None:
                    frame.pts, frame.time_base = times[i] + offset, MILLISECOND
                elif offset:
                    frame.pts, frame.time_base = i * 1000 // rate + offset, MILLISECOND
                container.mux(track.encode(frame))
        for track in tracks:
            container.mux(track.encode(None))
    return str(path)


def made(folder, codec="h264", frames=60, **options):
    name = "-".join([codec, str(frames), *(f"{k}{hash(str(v))}" for k, v in options.items())])
    path = folder / f"{name}.{CODECS[codec][0]}"
    return str(path) if path.exists() else write_clip(path, frames, codec, **options)


def write_two_sizes(folder):
    """A transport stream of 20 frames and of 20 larger ones."""
    one = write_clip(folder / "one.ts", 20, "h264-ts", offset=1000)
    two = write_clip(folder / "two.ts", 20, "h264-ts", offset=1800, first=20, size=(96, 256))
    both = folder / "both.ts"
    both.write_bytes(Path(one).read_bytes() + Path(two).read_bytes())
    return str(both)
