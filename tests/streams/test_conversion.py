"""`conversion="swscale"` gives PyAV's pixels; `"accurate"` those nearest to exact arithmetic."""

import av
import helpers
import numpy as np
import pytest

from stream_dataloader.streams import VideoStream

pytestmark = pytest.mark.usefixtures("own_cache")

# name: encoder, pixel format, matrix (1 is BT.709), range (2 is full)
KINDS = {
    "yuv420p": ("libx264", "yuv420p", 2, 0),
    "yuvj420p": ("mjpeg", "yuvj420p", 5, 2),
    "bt709": ("libx264", "yuv420p", 1, 1),
    "bt709-full": ("libx264", "yuv420p", 1, 2),
    "10-bit": ("libx264", "yuv420p10le", 1, 1),
    "yuv422p": ("ffv1", "yuv422p", 2, 0),
    "yuv444p": ("ffv1", "yuv444p", 5, 1),
    "rgb": ("ffv1", "bgr0", 0, 2),
    "gray": ("ffv1", "gray", 2, 0),
}  # fmt: skip


def made(path, encoder, pixel_format, matrix, full, size=(46, 66)):
    with av.open(str(path), "w") as out:
        stream = out.add_stream(encoder, 25)
        stream.height, stream.width = size
        stream.pix_fmt, stream.codec_context.thread_count = pixel_format, 1
        stream.codec_context.colorspace, stream.codec_context.color_range = matrix, full
        rng = np.random.default_rng(0)
        for _ in range(3):
            small = rng.integers(0, 256, (size[0] // 2, size[1] // 2, 3), np.uint8)
            frame = av.VideoFrame.from_ndarray(small.repeat(2, 0).repeat(2, 1), "rgb24")
            options = {} if pixel_format == "bgr0" else {"dst_colorspace": 1 if matrix == 1 else 5}
            frame = frame.reformat(format=pixel_format, dst_color_range=full or 1, **options)
            frame.pts = None
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    return str(path)


@pytest.mark.one_of_each
@pytest.mark.parametrize("size", [None, (30, 50), (92, 130)])
@pytest.mark.parametrize("kind", KINDS)
def test_swscale_gives_the_pixels_of_pyav(tmp_path, kind, size):
    path = made(tmp_path / "clip.mkv", *KINDS[kind])
    height, width = size or (46, 66)
    with av.open(path) as container:
        decoded = list(container.decode(video=0))
        expected = [frame.to_ndarray(format="rgb24", width=width, height=height) for frame in decoded]
        grays = [frame.to_ndarray(format="gray", width=width, height=height) for frame in decoded]
    for layout in ("HWC", "CHW"):
        found = helpers.read(VideoStream(conversion="swscale", layout=layout, size=size)(path))
        found = [frame.transpose(1, 2, 0) if layout == "CHW" else frame for frame in found]
        assert len(found) == len(expected) == 3
        assert all(map(np.array_equal, found, expected))
    gray = helpers.read(VideoStream(conversion="swscale", color="gray", size=size)(path))
    assert all(np.array_equal(found[0], expected) for found, expected in zip(gray, grays, strict=True))
    scaled = helpers.read(VideoStream(conversion="swscale", layout="HWC", size=size, dtype="float32")(path))
    assert np.allclose(scaled[0], expected[0] / np.float32(255), atol=1e-7)


def exact(frame):
    """RGB of a frame of 8 bits by float64, chroma interpolated linearly, as it lies (MPEG-2)."""
    planes = [np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size) for plane in frame.planes]
    luma, *chroma = (plane[: p.height, : p.width].astype(float) for plane, p in zip(planes, frame.planes, strict=True))
    rows, columns = np.arange(frame.height) / 2 - 0.25, np.arange(frame.width) / 2
    for axis, places in ((0, rows), (1, columns)):
        low = np.floor(places).astype(int)
        weight = np.expand_dims(places - low, 1 - axis)
        most = chroma[0].shape[axis] - 1
        low, high = (np.clip(at, 0, most) for at in (low, low + 1))
        chroma = [c.take(low, axis) * (1 - weight) + c.take(high, axis) * weight for c in chroma]
    full = frame.color_range == 2
    luma = luma if full else (luma - 16) * 255 / 219
    blue, red = ((c - 128) * (1 if full else 255 / 224) for c in chroma)
    kr, kb = (0.2126, 0.0722) if frame.colorspace == 1 else (0.299, 0.114)
    rgb = luma + 2 * (1 - kr) * red, None, luma + 2 * (1 - kb) * blue
    green = (luma - kr * rgb[0] - kb * rgb[2]) / (1 - kr - kb)
    return np.clip(np.stack([rgb[0], green, rgb[2]], -1), 0, 255)


@pytest.mark.parametrize("kind", ["yuv420p", "bt709", "bt709-full"])
def test_accurate_is_nearest_to_exact_arithmetic(tmp_path, kind):
    path = made(tmp_path / "clip.mkv", *KINDS[kind])
    with av.open(path) as container:
        expected = [exact(frame) for frame in container.decode(video=0)]
    off = {}
    for conversion in ("accurate", "swscale"):
        found = helpers.read(VideoStream(conversion=conversion, layout="HWC")(path))
        off[conversion] = np.stack(found)[:, 2:-2, 2:-2] - np.stack(expected)[:, 2:-2, 2:-2]
    assert np.abs(off["accurate"]).max() < 3
    assert np.abs(off["accurate"]).mean() < 0.5
    assert abs(off["accurate"].mean()) < 0.2 < -off["swscale"].mean()
