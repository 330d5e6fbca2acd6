"""Stream a folder of videos and film the batches.

Streams each video of a folder once and films what the loader delivers: grid.mp4
shows all lanes side by side, grid.png six consecutive batches. Without a folder
it draws clips, and keeps them in the cache. A video that cannot be decoded is
skipped and reported.

Examples:
  stream-dataloader demo
  stream-dataloader demo videos/ --lanes 9 --output-dir out/
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from stream_dataloader.cli.arguments import DONE, PROBLEM, FoundWrong, size
from stream_dataloader.cli.target import add_lanes, find_media, reading

if TYPE_CHECKING:
    from stream_dataloader.batch import StreamBatch
    from stream_dataloader.cli.film import Image

# name, number of frames, corners (0: a circle, 10: a star), how often it goes to and fro in x and y
_CLIPS = [
    ("red-circle", 64, 0, (1, 2)),
    ("blue-star", 80, 10, (2, 1)),
    ("lime-triangle", 44, 3, (1, 3)),
    ("magenta-square", 110, 4, (3, 2)),
    ("teal-circle", 100, 0, (2, 3)),
    ("orange-pentagon", 28, 5, (1, 1)),
    ("violet-star", 96, 10, (3, 1)),
    ("green-square", 120, 4, (1, 2)),
    ("rose-triangle", 36, 3, (2, 1)),
    ("sky-pentagon", 60, 5, (1, 3)),
    ("yellow-circle", 72, 0, (3, 2)),
    ("purple-star", 52, 10, (2, 3)),
]
_CLIPS_FOLDER = "clips-1"  # raise the number when the clips change
_CLIP_WIDTH, _CLIP_HEIGHT, _CLIP_RATE = 320, 240, 25


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add, shown = parser.add_argument, "(default: %(default)s)"
    add("folder", metavar="FOLDER", type=Path, nargs="?", help="videos (default: clips it draws)")
    add("--output-dir", type=Path, default=Path(), help=f"for grid.mp4 and grid.png {shown}")
    add("--size", type=size, default="240x180", help=f"of a lane's picture, in pixels {shown}")
    add_lanes(parser, time_steps=8, workers=2)
    parser.set_defaults(on_error="skip")


def run(options: argparse.Namespace) -> int:
    """Run the demo."""
    from stream_dataloader.cli.film import Filmstrip, grid_pictures, write_video

    film_path, strip_path = (options.output_dir / name for name in ("grid.mp4", "grid.png"))
    options.output_dir.mkdir(parents=True, exist_ok=True)
    folder = options.folder or default_clips()[0].parent
    target = find_media(folder, "video", options.size, [("fit", "letterbox")], without=film_path)
    videos = len(target.sources)
    strip = Filmstrip(target.name)

    def pictures(batches: Iterable[StreamBatch]) -> Iterator[Image]:
        for batch in batches:
            strip.add(batch)
            yield from grid_pictures(batch, target.name)

    with reading(target, options) as loader:
        batches = loader.progress(desc="streaming", unit="video", disable=False)
        write_video(film_path, pictures(batches))
        stats = loader.stats()
    if not stats.batches:
        raise FoundWrong(
            f"none of {videos} videos can be decoded; pass a folder of other videos, or none to "
            "stream clips made for the demo"
        )
    strip.save(strip_path)
    print(f"{videos} videos\n{stats}")
    for path in (film_path, strip_path):
        print(f"written {path}")
    return PROBLEM if target.skipped else DONE


def default_clips() -> list[Path]:
    """A dozen short clips of moving shapes, which are kept in the cache."""
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    cache = (xdg if xdg.is_absolute() else Path.home() / ".cache") / "stream_dataloader"
    folder = cache / _CLIPS_FOLDER
    if not any(folder.glob("*.mp4")):
        try:
            cache.mkdir(parents=True, exist_ok=True)
            _make_clips(folder)
        except OSError as error:
            raise ValueError(
                f"cannot write the demo's clips to {cache} ({error.strerror}); set XDG_CACHE_HOME "
                "to a folder that can be written to, or pass a folder of videos"
            ) from error
    return sorted(folder.glob("*.mp4"))


def _make_clips(folder: Path) -> None:
    """Fill a folder of another name, and rename it: of several processes the first wins."""
    from stream_dataloader.cli.film import cv2, source_colour, write_video

    unfinished = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".tmp", dir=folder.parent))
    try:
        for number, clip in enumerate(tqdm(_CLIPS, desc="drawing clips", unit="clip")):
            name, frames, corners, turns = clip
            colour = source_colour(number)
            drawn = (_shape(cv2, corners, colour, turns, i / _CLIP_RATE) for i in range(frames))
            write_video(unfinished / f"{number:02d}-{name}.mp4", drawn, _CLIP_RATE)
        unfinished.rename(folder)
    except OSError:
        if not any(folder.glob("*.mp4")):
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _shape(cv2: Any, corners: int, colour: tuple[int, int, int], turns: tuple[int, int], seconds: float) -> Image:
    """A picture of a shape that turns on a closed curve, with the way it came fading behind it."""
    shade = np.linspace(0.10, 0.26, _CLIP_HEIGHT)[:, None, None] * np.array(colour)
    image = np.repeat(shade, _CLIP_WIDTH, axis=1).astype(np.uint8)
    for age in range(8, -1, -1):
        phase = 2 * math.pi * (seconds - 0.06 * age) / 8
        x, y = math.sin(turns[0] * phase + 0.4), math.sin(turns[1] * phase + 1.1)
        centre = (0.36 * x + 0.5) * _CLIP_WIDTH, (0.28 * y + 0.44) * _CLIP_HEIGHT
        angles = 4 * phase + 2 * math.pi * np.arange(corners or 64) / (corners or 64)
        radii = np.full((len(angles), 1), 34.0)
        if corners == 10:
            radii[::2], radii[1::2] = 42.0, 18.0
        outline = centre + radii * np.stack([np.sin(angles), -np.cos(angles)], axis=1)
        before, layer = image, image.copy()
        points = np.round(16 * outline).astype(np.int32)
        cv2.fillPoly(layer, [points], colour, cv2.LINE_AA, shift=4)
        image = layer
        if age:
            image = np.asarray(cv2.addWeighted(layer, 0.14, before, 0.86, 0), np.uint8)
    return image
