"""`stream-dataloader play TARGET`: shows what lanes read, pictures as a grid, text in the terminal."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from stream_dataloader.batch import StreamBatch
from stream_dataloader.cli.arguments import DONE, PROBLEM, FoundWrong, positive, say
from stream_dataloader.cli.target import Target, add_lanes, add_target, find_target, reading

HELP = "show what lanes read"

DESCRIPTION = """\
Shows what lanes read. Pictures are shown side by side, in a window if there is
a display, else in a video file; q closes the window. Characters and bytes run
in the terminal, a line a lane; | marks where a stream starts."""

EXAMPLES = """\
  stream-dataloader play videos/ --batch-size 9
  stream-dataloader play clips.store --output grid.mp4 --batches 50
  stream-dataloader play books/ --batch-size 8 --rate 20"""

_START = "|"
_PICTURE_SIZE = 240, 180  # pixels, where sizes may differ


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_target(parser)
    add_lanes(parser)
    parser.add_argument("--batches", type=positive, help="how many to show (default: all)")
    parser.add_argument("--rate", type=positive, default=25, help="time steps a second (default: 25)")
    parser.add_argument("--output", type=Path, metavar="FILE.mp4", help="write pictures to this file, show no window")


def run(options: argparse.Namespace) -> int:
    """Play."""
    if options.json:
        raise ValueError("--json is for tables, and play prints none")
    target = _target(options)
    with reading(target, options) as loader:
        batches = itertools.islice(loader, options.batches)
        if (first := next(batches, None)) is None:
            raise FoundWrong(f"{options.target}: there is no batch: all sources are empty")
        _play(first, itertools.chain([first], batches), target, options)
    return PROBLEM if target.skipped else DONE


def _target(options: argparse.Namespace) -> Target:
    """What is shown; pictures of one size, as those of one batch have it."""
    target = find_target(options)
    if target.kind not in ("video", "images"):
        return target
    fit = {"fit": "letterbox"} | options.option
    sized = {"size": options.size or _PICTURE_SIZE, "option": fit, "kind": target.kind}
    return find_target(argparse.Namespace(**vars(options) | sized))


def _play(first: StreamBatch, batches: Iterator[StreamBatch], target: Target, options: argparse.Namespace) -> None:
    def name(source: int) -> str:
        return os.path.basename(target.name(source)) or target.name(source)

    leaves = [(n, leaf) for n, leaf in enumerate(tree_leaves(first.data)) if isinstance(leaf, torch.Tensor)]
    pictures = [n for n, leaf in leaves if leaf.dtype == torch.uint8 and leaf.dim() == 5 and leaf.shape[2] in (1, 3)]
    codes = [n for n, leaf in leaves if leaf.dim() == 2 and not leaf.is_floating_point()]
    if pictures:
        _show_pictures((_with_leaf(batch, pictures[0]) for batch in batches), name, options)
    elif codes and target.kind in ("text", "store"):
        _show_text((_with_leaf(batch, codes[0]) for batch in batches), options)
    else:
        raise ValueError(
            f"{options.target} has neither pictures, uint8 (3 or 1, height, width), nor characters; inspect tells what "
            "it holds"
        )


def _with_leaf(batch: StreamBatch, number: int) -> StreamBatch:
    """The batch with one leaf as its data; gray pictures are made RGB."""
    leaf = tree_leaves(batch.data)[number]
    if leaf.dim() == 5:
        leaf = leaf.expand(-1, -1, 3, -1, -1)
    return dataclasses.replace(batch, data=leaf)


def _show_pictures(batches: Iterator[StreamBatch], name: Callable[[int], str], options: argparse.Namespace) -> None:
    from stream_dataloader.cli.film import cv2, grid_pictures, write_video

    pictures = (picture for batch in batches for picture in grid_pictures(batch, name))
    if options.output is None and _has_display():
        try:
            cv2.namedWindow("stream-dataloader")
        except cv2.error:  # an OpenCV without windows
            pass
        else:
            _show_window(cv2, pictures, options.rate)
            return
    path = options.output or Path("play.mp4")
    write_video(path, pictures, options.rate)
    say(f"written {path}")


def _has_display() -> bool:
    if sys.platform in ("win32", "darwin"):
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _show_window(cv2: Any, pictures: Iterator[Any], rate: int) -> None:
    try:
        for picture in pictures:
            cv2.imshow("stream-dataloader", picture[:, :, ::-1])
            if cv2.waitKey(max(1, round(1000 / rate))) & 0xFF in (ord("q"), 27):
                break
    finally:
        cv2.destroyAllWindows()


def _show_text(batches: Iterator[StreamBatch], options: argparse.Namespace) -> None:
    """Lines that grow at the right; where stdout is no terminal, the lines of each batch."""
    live = sys.stdout.isatty()
    width = shutil.get_terminal_size((100, 24)).columns - 10
    lanes: list[str] = []
    for batch in batches:
        windows = [_window(batch, lane) for lane in range(len(batch))]
        if not live:
            lanes = windows
            say(f"batch {batch.step}")
        else:
            if lanes:
                sys.stdout.write(f"\x1b[{len(lanes)}A")  # up again
            lanes = [(before + new)[-width:] for before, new in zip(lanes or [""] * len(windows), windows, strict=True)]
        for lane, text in enumerate(lanes):
            say(f"lane {lane:<3} {text}" + "\x1b[K" * live)
        if live:
            sys.stdout.flush()
            time.sleep(batch.time_steps / options.rate)


def _window(batch: StreamBatch, lane: int) -> str:
    """A lane's window as text, in which only what can be printed is printed."""
    columns = (batch.data[:, lane], batch.mask[:, lane], batch.is_start[:, lane])
    found = ""
    for code, there, starts in zip(*(column.tolist() for column in columns), strict=True):
        sign = chr(code) if there and 0 <= code < 0x110000 else "·"
        found += (_START if starts else "") + (sign if sign.isprintable() else " ")
    return found
