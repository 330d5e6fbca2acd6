"""Stream a folder of videos and film the batches.

Writes grid.mp4, which shows all lanes side by side, and grid.png, which shows
six batches. Without a folder, it draws its own clips and keeps them in the
cache. A video that cannot be decoded is skipped and reported.

Examples:
  stream-dataloader demo
  stream-dataloader demo videos/ --lanes 9 --output-dir out/
"""

from __future__ import annotations

import os
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from stream_dataloader.cli.arguments import FoundWrong, add_lanes, add_size, find_target

# name, frames, corners (0: a circle, 10: a star), number of swings in x and y
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


def add(parser: ArgumentParser) -> None:
    add, shown = parser.add_argument, "(default: %(default)s)"
    add("target", metavar="FOLDER", nargs="?", help="folder of videos (default: generated clips)")
    add("--output-dir", type=Path, default=Path(), help=f"for grid.mp4 and grid.png {shown}")
    add_size(parser, "240x180")
    add_lanes(parser)
    parser.set_defaults(kind="video", format=None, option=[], on_error="skip")
    parser.set_defaults(time_steps=8, workers=2)


def run(options: Namespace) -> bool:
    from stream_dataloader.cli.film import Filmstrip, grid_pictures, write_video

    folder = options.output_dir
    film_path, strip_path = folder / "grid.mp4", folder / "grid.png"
    folder.mkdir(parents=True, exist_ok=True)
    options.target = options.target or str(default_clips()[0].parent)
    target = find_target(options, fitted=True, without=film_path)
    videos = len(target.sources)
    strip = Filmstrip(target.name)

    def pictures(batches: Iterable[Any]) -> Iterator[Any]:
        for batch in batches:
            strip.add(batch)
            yield from grid_pictures(batch, target.name)

    with target.reading(options) as loader:
        batches = loader.progress(desc="streaming", unit="video", disable=False)
        write_video(film_path, pictures(batches))
        stats = loader.stats()
    if not stats.batches:
        raise FoundWrong(f"none of {videos} videos can be decoded; pass another folder")
    strip.save(strip_path)
    print(f"{videos} videos\n{stats}\nwritten {film_path}\nwritten {strip_path}")
    return bool(target.skipped)


def default_clips() -> list[Path]:
    """Return a dozen short clips of moving shapes, which are drawn once and kept in the cache."""
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    cache = (xdg if xdg.is_absolute() else Path.home() / ".cache") / "stream_dataloader"
    folder = cache / _CLIPS_FOLDER
    if not any(folder.glob("*.mp4")):
        try:
            _make_clips(folder)
        except OSError as error:
            what = f"cannot write the demo's clips to {cache} ({error.strerror})"
            raise ValueError(f"{what}; set XDG_CACHE_HOME, or pass a folder of videos") from error
    return sorted(folder.glob("*.mp4"))


def _make_clips(folder: Path) -> None:
    """Write the clips to a new folder and rename it. If several processes do this, the first one wins."""
    from stream_dataloader.cli.film import CLIP_RATE, clip_pictures, write_video

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as unfinished:
        for number, (name, *clip) in enumerate(tqdm(_CLIPS, desc="drawing clips", unit="clip")):
            path = Path(unfinished, f"{number:02d}-{name}.mp4")
            write_video(path, clip_pictures(number, *clip), CLIP_RATE)
        try:
            os.rename(unfinished, folder)
        except OSError:
            if not folder.exists():
                raise
