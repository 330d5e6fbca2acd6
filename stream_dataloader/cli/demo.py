"""`stream-dataloader demo [FOLDER]`: streams a folder of videos, or clips it draws itself, and films the batches.

Guarantees: memory stays bounded however long the videos are; a video that cannot be decoded is skipped and
reported; the drawn clips are made once, and are either all in the cache or not at all.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from stream_dataloader.cli.arguments import DONE, PROBLEM, FoundWrong, natural, positive, say, size
from stream_dataloader.cli.media import factory_of, find_media
from stream_dataloader.cli.target import Target, reading

if TYPE_CHECKING:
    from stream_dataloader.batch import StreamBatch
    from stream_dataloader.cli.film import Image

HELP = "stream a folder of videos and film the batches"

DESCRIPTION = """\
Streams each video of a folder once and films what the loader delivers: grid.mp4
shows all lanes side by side, grid.png six consecutive batches."""

EXAMPLES = """\
  stream-dataloader demo
  stream-dataloader demo videos/ --lanes 9 --output-dir out/"""

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
    parser.add_argument(
        "folder", metavar="FOLDER", type=Path, nargs="?", help="videos, also in folders below (default: clips it draws)"
    )

    def option(name: str, type_: Callable[[str], Any], default: Any, help_: str, **others: Any) -> None:
        parser.add_argument(name, type=type_, default=default, help=f"{help_} (default: {default})", **others)

    option("--output-dir", Path, Path(), "where grid.mp4 and grid.png are written")
    option("--lanes", positive, 4, "videos read side by side: the batch size", dest="batch_size", metavar="LANES")
    option("--time-steps", positive, 8, "frames of each video in a batch")
    option("--workers", natural, 2, "worker processes, at most one a lane; 0: none")
    pixels = partial(size, smallest=32, largest=4096)
    option("--size", pixels, "240x180", "width x height of a lane's picture, in pixels")
    parser.set_defaults(windows="aligned", schedule="listed", shuffle=False, seed=0, on_error="skip")


def run(options: argparse.Namespace) -> int:
    """Run the demo."""
    from stream_dataloader.cli.film import Filmstrip, grid_pictures, write_video  # need OpenCV: not everywhere

    film_path, strip_path = options.output_dir / "grid.mp4", options.output_dir / "grid.png"
    clips = default_clips() if options.folder is None else list(map(Path, find_media(options.folder, "video")[1]))
    clips = [clip for clip in clips if clip.resolve() != film_path.resolve()]  # the film of the last time
    _check_writable(options.output_dir)
    letterboxed = factory_of("video", options.size, {"fit": "letterbox"})
    target = Target("video", list(map(str, clips)), letterboxed, lambda source: clips[source].name)
    strip, resets = Filmstrip(target.name), 0

    def pictures(batches: Iterable[StreamBatch]) -> Iterator[Image]:
        nonlocal resets
        for batch in batches:
            resets += int(batch.is_start.sum())
            strip.add(batch)
            yield from grid_pictures(batch, target.name)

    with reading(target, options) as loader:
        write_video(film_path, pictures(loader.progress(desc="streaming", unit="video", disable=False)))
        stats = loader.stats()
        if not stats.batches:
            raise FoundWrong(
                f"none of {len(clips)} videos can be decoded; pass a folder of other videos, or none to stream clips "
                "made for the demo"
            )
    strip.save(strip_path)
    rows = [
        ("videos", f"{len(clips)}", f"{len(target.skipped)} skipped" if target.skipped else ""),
        ("batches", f"{stats.batches}", ""),
        ("items", f"{stats.items}", "frames read, each once"),
        ("padding", f"{stats.padding_share:.1%}", "of all cells of the batches"),
        ("resets", f"{resets}", "videos that started in a lane"),
        ("frames/s", f"{stats.items_per_second:.0f}", "with drawing and encoding"),
    ]
    for name, value, note in rows:
        say(f"{name:<9} {value:>8}  {note}".rstrip())
    for path in (film_path, strip_path):
        say(f"written   {path}")
    return PROBLEM if target.skipped else DONE


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"cannot write to {folder} ({error.strerror}); pass another --output-dir") from error


# the clips that are drawn ---------------------------------------------------------------------------------------------


def default_clips() -> list[Path]:
    """A dozen short clips of moving shapes, of different lengths; made at the first call, then kept in the cache.

    Raises:
        ValueError: The cache cannot be written to.
    """
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    cache = (xdg if xdg.is_absolute() else Path.home() / ".cache") / "stream_dataloader"
    folder = cache / _CLIPS_FOLDER
    if not any(folder.glob("*.mp4")):
        try:
            cache.mkdir(parents=True, exist_ok=True)
            _make_clips(folder)
        except OSError as error:
            raise ValueError(
                f"cannot write the demo's clips to {cache} ({error.strerror}); set XDG_CACHE_HOME to a folder that can "
                "be written to, or pass a folder of videos"
            ) from error
    return sorted(folder.glob("*.mp4"))


def _make_clips(folder: Path) -> None:
    """Fill a folder of another name, and rename it: of several processes that do so at once the first wins."""
    from stream_dataloader.cli.film import cv2, source_colour, write_video

    unfinished = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".tmp", dir=folder.parent))
    try:
        for number, (name, frames, corners, turns) in enumerate(tqdm(_CLIPS, desc="drawing clips", unit="clip")):
            seconds, colour = (i / _CLIP_RATE for i in range(frames)), source_colour(number)
            drawn = (_draw_shape(cv2, corners, colour, turns, second) for second in seconds)
            write_video(unfinished / f"{number:02d}-{name}.mp4", drawn, _CLIP_RATE)
        unfinished.rename(folder)
    except OSError:
        if not any(folder.glob("*.mp4")):
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _draw_shape(cv2: Any, corners: int, colour: tuple[int, int, int], turns: tuple[int, int], seconds: float) -> Image:
    """One picture of a shape that turns and moves on a closed curve, with the way it came fading behind it."""
    shade = np.linspace(0.10, 0.26, _CLIP_HEIGHT)[:, None, None] * np.array(colour)
    image = np.repeat(shade, _CLIP_WIDTH, axis=1).astype(np.uint8)
    for age in range(8, -1, -1):
        phase = 2 * math.pi * (seconds - 0.06 * age) / 8
        centre = np.array([math.sin(turns[0] * phase + 0.4), math.sin(turns[1] * phase + 1.1)])
        centre = (centre * (0.36, 0.28) + (0.5, 0.44)) * (_CLIP_WIDTH, _CLIP_HEIGHT)
        angles = 4 * phase + 2 * math.pi * np.arange(corners or 64) / (corners or 64)
        radii = np.where(np.arange(len(angles)) % 2, 18.0, 42.0) if corners == 10 else np.full(len(angles), 34.0)
        outline = centre + radii[:, None] * np.stack([np.sin(angles), -np.cos(angles)], axis=1)
        layer = image.copy()
        cv2.fillPoly(layer, [np.round(16 * outline).astype(np.int32)], colour, cv2.LINE_AA, shift=4)
        image = layer if age == 0 else np.asarray(cv2.addWeighted(layer, 0.14, image, 0.86, 0), np.uint8)
    return image
