"""The demo: streams a folder of videos, or clips it draws itself, and films what the loader delivers.

Guarantees: memory stays bounded however long the videos are; a video that cannot be decoded is skipped and
reported; the drawn clips are made once, and are either all in the cache or not at all.
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from stream_dataloader.batch import StreamBatch
from stream_dataloader.cli.arguments import FoundWrong
from stream_dataloader.cli.film import Filmstrip, GridVideo, VideoWriter, source_colour
from stream_dataloader.cli.media import VIDEO_SUFFIXES
from stream_dataloader.dataloader import StreamDataLoader
from stream_dataloader.dataset import StreamDataset
from stream_dataloader.errors import StreamError
from stream_dataloader.streams import VideoStream
from stream_dataloader.streams._media.opencv import import_opencv

__all__ = ["DemoError", "DemoReport", "default_clips", "find_clips", "run_demo"]

cv2 = import_opencv("The demo, which draws,")

Image = NDArray[np.uint8]

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


class DemoError(ValueError):
    """The demo cannot run; the message says why, and what to do about it."""


def find_clips(folder: Path, leave_out: Path | None = None) -> list[Path]:
    """The videos in a folder and those below it, by name, in order.

    Args:
        leave_out: A file that is not to be read: the film about to be written.

    Raises:
        DemoError: There is no such folder, or no video in it.
    """
    remedy = "; pass a folder of videos, or none to stream clips made for the demo"
    if not folder.is_dir():
        raise DemoError(f"{folder} {'is no folder' if folder.exists() else 'does not exist'}{remedy}")
    clips = sorted(path for path in folder.rglob("*") if path.suffix.lower() in VIDEO_SUFFIXES and path.is_file())
    clips = [clip for clip in clips if leave_out is None or clip.resolve() != leave_out.resolve()]
    if not clips:
        raise DemoError(f"{folder} has no video in it ({' '.join(VIDEO_SUFFIXES)}){remedy}")
    return clips


def default_clips() -> list[Path]:
    """A dozen short clips of moving shapes, of different lengths; made at the first call, then kept in the cache.

    Raises:
        DemoError: The cache cannot be written to.
    """
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    cache = (xdg if xdg.is_absolute() else Path.home() / ".cache") / "stream_dataloader"
    folder = cache / _CLIPS_FOLDER
    if not any(folder.glob("*.mp4")):
        try:
            cache.mkdir(parents=True, exist_ok=True)
            _make_clips(folder)
        except OSError as error:
            raise DemoError(
                f"cannot write the demo's clips to {cache} ({error.strerror}); set XDG_CACHE_HOME to a folder that can "
                "be written to, or pass a folder of videos"
            ) from error
    return find_clips(folder)


def _make_clips(folder: Path) -> None:
    """Fill a folder of another name, and rename it: of several processes that do so at once the first wins."""
    unfinished = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".tmp", dir=folder.parent))
    try:
        for number, (name, frames, corners, turns) in enumerate(tqdm(_CLIPS, desc="drawing clips", unit="clip")):
            with VideoWriter(unfinished / f"{number:02d}-{name}.mp4", _CLIP_RATE) as clip:
                for i in range(frames):
                    clip.write(draw_shape(corners, source_colour(number), turns, i / _CLIP_RATE))
        unfinished.rename(folder)
    except OSError:
        if not any(folder.glob("*.mp4")):
            raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def draw_shape(corners: int, colour: tuple[int, int, int], turns: tuple[int, int], seconds: float) -> Image:
    """One picture of a shape that turns and moves on a closed curve, with the way it came fading behind it.

    Args:
        corners: 0 for a circle, 10 for a star, else a polygon.
        turns: How often it goes to and fro in x and y within eight seconds.
    """
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


@dataclass
class DemoReport:
    """What was streamed.

    Attributes:
        cells: Time steps of all lanes, padding included.
        items: Time steps that hold a frame.
        resets: Streams that started.
        seconds: From the first batch asked for to the last frame written.
        skipped: The videos that could not be decoded to their end, and why.
        files: What was written.
    """

    batches: int = 0
    cells: int = 0
    items: int = 0
    resets: int = 0
    seconds: float = 0.0
    skipped: Sequence[tuple[str, str]] = ()
    files: Sequence[Path] = ()

    def count(self, batch: StreamBatch) -> None:
        """Take in one batch."""
        self.batches += 1
        self.cells += batch.mask.numel()
        self.items += int(batch.mask.sum())
        self.resets += int(batch.is_start.sum())


def run_demo(
    clips: Sequence[Path], output_dir: Path, *, lanes: int, time_steps: int, workers: int, size: tuple[int, int]
) -> DemoReport:
    """Stream the clips once, and write `grid.mp4` and `grid.png`.

    Args:
        size: Width and height of a lane's picture, in pixels.

    Raises:
        DemoError: The output cannot be written.
        FoundWrong: No clip can be decoded.
    """
    _check_writable(output_dir)
    film_path, strip_path = output_dir / "grid.mp4", output_dir / "grid.png"
    dataset = StreamDataset(
        [str(clip) for clip in clips],
        VideoStream(size=size[::-1], fit="letterbox"),
        lanes,
        time_steps=time_steps,
        seed=0,
        on_error="skip",
    )
    with warnings.catch_warnings():  # a film of few videos may have dark lanes
        warnings.filterwarnings("ignore", "batch_size is .*, and there are sources for", UserWarning)
        loader = StreamDataLoader(dataset, num_workers=min(workers, lanes))

    def name(source: int) -> str:
        return Path(dataset.sources[source]).name

    report, strip, begin = DemoReport(), Filmstrip(name), time.perf_counter()
    seen: set[int] = set()
    with (
        warnings.catch_warnings(),
        tqdm(total=len(clips), desc="streaming", unit="video") as progress,
        GridVideo(film_path, name) as film,
    ):
        warnings.filterwarnings("ignore", "skipped the rest of a stream", RuntimeWarning)  # the report says it
        for batch in loader:
            report.count(batch)
            film.add(batch)
            strip.add(batch)
            # a source is done once its lane has gone on to another, or the last step is padding
            broken = {error.source_index for error in _failures(loader)}
            seen.update(batch.source.flatten().tolist())
            progress.update(len((seen | broken) - set(batch.source[-1].tolist()) - {-1}) - progress.n)
        progress.update(len(clips) - progress.n)
    report.seconds = time.perf_counter() - begin
    report.skipped = [(name(error.source_index), _reason(error)) for error in _failures(loader)]
    if not report.batches:
        example, reason = report.skipped[0]
        raise FoundWrong(
            f"none of {len(clips)} videos can be decoded, {example} for one ({reason}); pass a folder of other videos, "
            "or none to stream clips made for the demo"
        )
    strip.save(strip_path)
    report.files = [film_path, strip_path]
    return report


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise DemoError(f"cannot write to {folder} ({error.strerror}); pass another --output-dir") from error


def _failures(loader: StreamDataLoader) -> list[StreamError]:
    return sorted(loader.failures, key=lambda error: error.source_index)


def _reason(error: StreamError) -> str:
    """Why a stream failed, in the decoder's words, and how far it came."""
    cause = error.__cause__
    reason = getattr(cause, "strerror", None) or str(cause or error)
    return f"{reason} (after {error.position} frames)" if error.position > 0 else reason
