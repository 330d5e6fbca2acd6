"""`stream-dataloader demo [FOLDER]`: streams a folder of videos and films the batches."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stream_dataloader.cli.arguments import DONE, PROBLEM, natural, positive, say, size

if TYPE_CHECKING:
    from stream_dataloader.cli.demo import DemoReport

__all__ = ["EXAMPLES", "add", "run"]

EXAMPLES = """\
  stream-dataloader demo
  stream-dataloader demo videos/ --lanes 9 --output-dir out/"""

_SMALLEST, _LARGEST = 32, 4096  # pixels


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""

    def option(name: str, type_: Callable[[str], Any], default: Any, help_: str) -> None:
        parser.add_argument(name, type=type_, default=default, help=f"{help_} (default: {default})")

    parser.add_argument(
        "folder", metavar="FOLDER", type=Path, nargs="?", help="videos, also in folders below (default: clips it draws)"
    )
    option("--output-dir", Path, Path(), "where grid.mp4 and grid.png are written")
    option("--lanes", positive, 4, "videos read side by side: the batch size")
    option("--time-steps", positive, 8, "frames of each video in a batch")
    option("--workers", natural, 2, "worker processes, at most one a lane; 0: none")
    pixels = partial(size, smallest=_SMALLEST, largest=_LARGEST)
    option("--size", pixels, "240x180", "width x height of a lane's picture, in pixels")


def run(options: argparse.Namespace) -> int:
    """Run the demo."""
    from stream_dataloader.cli.demo import default_clips, find_clips, run_demo  # needs OpenCV, which is not everywhere

    film = options.output_dir / "grid.mp4"
    clips = default_clips() if options.folder is None else find_clips(options.folder, leave_out=film)
    report = run_demo(
        clips,
        options.output_dir,
        lanes=options.lanes,
        time_steps=options.time_steps,
        workers=options.workers,
        size=options.size,
    )
    _print_table(report, len(clips))
    return PROBLEM if report.skipped else DONE


def _print_table(report: DemoReport, videos: int) -> None:
    rows = [
        ("videos", f"{videos}", f"{len(report.skipped)} skipped" if report.skipped else ""),
        ("batches", f"{report.batches}", ""),
        ("items", f"{report.items}", "frames read, each once"),
        ("padding", f"{1 - report.items / report.cells:.1%}", "of all cells of the batches"),
        ("resets", f"{report.resets}", "videos that started in a lane"),
        ("frames/s", f"{report.items / report.seconds:.0f}", "with drawing and encoding"),
    ]
    say()
    for name, value, note in rows:
        say(f"{name:<9} {value:>8}  {note}".rstrip())
    say()
    for name, reason in report.skipped:
        say(f"skipped   {name}: {reason}")
    for path in report.files:
        say(f"written   {path}")
