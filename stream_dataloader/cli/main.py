"""The command line: `stream-dataloader demo [FOLDER]`, also `python -m stream_dataloader demo [FOLDER]`.

Guarantee: what a user can put right is one line on stderr that says how, and exit status 2.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stream_dataloader import __version__

if TYPE_CHECKING:
    from stream_dataloader.cli.demo import DemoReport

__all__ = ["main"]

_SMALLEST, _LARGEST = 32, 4096  # pixels


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status.

    Args:
        arguments: Without the program's name; None takes those of the process.
    """
    options = _parser().parse_args(arguments)
    try:
        return _demo(options)
    except KeyboardInterrupt:
        return 130  # as a shell reports SIGINT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="stream-dataloader", description="Temporally coherent batches for PyTorch.")
    parser.add_argument("--version", action="version", version=f"stream-dataloader {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser(
        "demo",
        help="stream a folder of videos and film the batches",
        description="Streams each video of a folder once and films what the loader delivers: grid.mp4 shows all lanes "
        "side by side, grid.png six consecutive batches.",
    )

    def option(name: str, type_: Callable[[str], Any], default: Any, help_: str) -> None:
        demo.add_argument(name, type=type_, default=default, help=f"{help_} (default: {default})")

    demo.add_argument(
        "folder", metavar="FOLDER", type=Path, nargs="?", help="videos, also in folders below (default: clips it draws)"
    )
    option("--output-dir", Path, Path(), "where grid.mp4 and grid.png are written")
    option("--lanes", _positive, 4, "videos read side by side: the batch size")
    option("--time-steps", _positive, 8, "frames of each video in a batch")
    option("--workers", _natural, 2, "worker processes, at most one a lane; 0: none")
    option("--size", _size, "240x180", "width x height of a lane's picture, in pixels")
    return parser


def _positive(text: str) -> int:
    if not re.fullmatch(r"\d+", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number of at least 1")
    return int(text)


def _natural(text: str) -> int:
    return 0 if text == "0" else _positive(text)


def _size(text: str) -> tuple[int, int]:
    numbers = re.fullmatch(r"(\d+)x(\d+)", text)
    size = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    if not all(_SMALLEST <= length <= _LARGEST for length in size):
        raise argparse.ArgumentTypeError(
            f"{text} is no WIDTHxHEIGHT of {_SMALLEST} to {_LARGEST} pixels each; write 240x180, say"
        )
    return size


def _demo(options: argparse.Namespace) -> int:
    try:
        from stream_dataloader.cli.demo import DemoError, default_clips, find_clips, run_demo
    except ImportError as error:  # OpenCV, which is not everywhere
        print(f"stream-dataloader: {error}", file=sys.stderr)
        return 2
    try:
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
    except DemoError as error:
        print(f"stream-dataloader: {error}", file=sys.stderr)
        return 2
    _print_table(report, len(clips))
    return 0


def _print_table(report: DemoReport, videos: int) -> None:
    rows = [
        ("videos", f"{videos}", f"{len(report.skipped)} skipped" if report.skipped else ""),
        ("batches", f"{report.batches}", ""),
        ("items", f"{report.items}", "frames read, each once"),
        ("padding", f"{1 - report.items / report.cells:.1%}", "of all cells of the batches"),
        ("resets", f"{report.resets}", "videos that started in a lane"),
        ("frames/s", f"{report.items / report.seconds:.0f}", "with drawing and encoding"),
    ]
    print()
    for name, value, note in rows:
        print(f"{name:<9} {value:>8}  {note}".rstrip())
    print()
    for name, reason in report.skipped:
        _print(f"skipped   {name}: {reason}")
    for path in report.files:
        _print(f"written   {path}")


def _print(text: str) -> None:
    """Print what may hold characters that stdout cannot encode, as names of files do."""
    encoding = sys.stdout.encoding or "ascii"
    print(text.encode(encoding, "backslashreplace").decode(encoding))
