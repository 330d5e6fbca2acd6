"""The clips of the video benchmark, and what a picture of theirs should look like."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import av
import cv2
import numpy as np
import torch
from torch.nn.functional import grid_sample, interpolate
from tqdm import tqdm

__all__ = ["decibels", "long_clip", "make_clips", "reference", "shown_number"]

Array = np.ndarray[Any, Any]

SIZE, RATE = (360, 640), 30
_BITS = 16
_FOLDER = Path(tempfile.gettempdir()) / "stream_dataloader_benchmark_clips"


def make_clips(count: int, frames: int, key_interval: int = 60) -> list[str]:
    """H.264 clips of 640x360 at about 1.5 Mb/s, with B-frames and evenly spaced key frames; made once."""
    name = f"{frames}-key-{key_interval}.mp4"
    paths = [_FOLDER / f"{number:02d}-{name}" for number in range(count)]
    missing = [path for path in paths if not path.exists()]
    for path in tqdm(missing, desc="making clips", unit="clip", disable=not missing, mininterval=5):
        _write(path, frames, paths.index(path), key_interval)
    return [str(path) for path in paths]


def long_clip(minutes: float) -> str:
    """One long clip, whose frames show their numbers."""
    path = _FOLDER / f"long-{minutes:g}-min.mp4"
    if not path.exists():
        _write(path, round(minutes * 60 * RATE), 99, 60)
    return str(path)


def _write(path: Path, frames: int, seed: int, key_interval: int) -> None:
    """A camera that wanders over a landscape of noise, with some grain; the frame's number in the upper corner."""
    rng = np.random.default_rng(seed)
    height, width = SIZE
    land: Array = np.zeros((2 * height, 2 * width, 3), np.float32)
    for cells in (4, 16, 64, 256):
        noise = rng.standard_normal((cells, cells, 3)).astype(np.float32)
        land += 40 / cells**0.3 * np.asarray(cv2.resize(noise, (2 * width, 2 * height), None, 0, 0, cv2.INTER_CUBIC))
    grain = rng.normal(0, 1, (8, height, width, 1)).astype(np.float32)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part.mp4")
    # What is measured is decoding, so that encoding need not be thorough.
    options = {"g": str(key_interval), "bf": "2", "preset": "veryfast"}
    with av.open(str(unfinished), "w") as container:
        video: Any = container.add_stream("libx264", RATE, options=options)
        video.height, video.width, video.pix_fmt, video.bit_rate = height, width, "yuv420p", 1_500_000
        for i in range(frames):
            y, x = int((1 + np.sin(i / 97)) * height / 2), int((1 + np.cos(i / 131)) * width / 2)
            image = np.clip(land[y : y + height, x : x + width] + 128 + grain[i % 8], 0, 255).astype(np.uint8)
            for bit in range(_BITS):
                image[:24, bit * 24 : (bit + 1) * 24] = 255 * (i >> bit & 1)
            container.mux(video.encode(av.VideoFrame.from_ndarray(image, "rgb24")))
        container.mux(video.encode(None))
    unfinished.rename(path)


def shown_number(picture: Array) -> int:
    """The number that a frame `(3, 360, 640)` shows."""
    bits = [picture[:, 6:18, bit * 24 + 6 : bit * 24 + 18].mean() > 128 for bit in range(_BITS)]
    return sum(int(bit) << place for place, bit in enumerate(bits))


def reference(frame: av.VideoFrame, size: tuple[int, int]) -> Array:
    """A frame in RGB, `(3, height, width)`, computed in double precision; for 8-bit yuv420p, limited range, BT.601.

    Chroma is interpolated where it lies (left, as in H.264), then the matrix of ITU-R BT.601 applied, then the
    picture scaled with a triangle filter over all pixels that a smaller one stands for.
    """
    width, height = frame.width, frame.height

    def plane(index: int, rows: int, columns: int) -> torch.Tensor:
        data: Any = frame.planes[index]
        view = np.frombuffer(data, np.uint8).reshape(-1, data.line_size)[:rows, :columns]
        return torch.from_numpy(view.astype(np.float64))

    rows, columns = height // 2, width // 2
    y_places = 2 * (((torch.arange(height, dtype=torch.float64) + 0.5) / 2 - 0.5) + 0.5) / rows - 1
    x_places = 2 * (torch.arange(width, dtype=torch.float64) / 2 + 0.5) / columns - 1
    grid = torch.stack(torch.meshgrid(y_places, x_places, indexing="ij")[::-1], -1)[None]
    luma = (plane(0, height, width) - 16) / 219
    blue, red = (
        (grid_sample(plane(i, rows, columns)[None, None], grid, padding_mode="border", align_corners=False)[0, 0] - 128)
        / 224
        for i in (1, 2)
    )
    kr, kb = 0.299, 0.114
    r, b = luma + 2 * (1 - kr) * red, luma + 2 * (1 - kb) * blue
    g = (luma - kr * r - kb * b) / (1 - kr - kb)
    scaled = interpolate(torch.stack([r, g, b])[None], size=size, mode="bilinear", antialias=True)[0]
    picture: Array = (scaled * 255).clamp(0, 255).numpy()
    return picture


def decibels(found: Array, expected: Array) -> float:
    """Peak signal-to-noise ratio of 8-bit pictures."""
    return float(10 * np.log10(255**2 / np.square(found - expected).mean()))
