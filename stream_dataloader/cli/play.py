"""Show the data that lanes read.

Pictures are shown side by side in a window (q closes it), or written to a
video file. Text runs in the terminal, one line for each lane; | marks the
start of a stream.

Examples:
  stream-dataloader play videos/ --batch-size 9
  stream-dataloader play books/ --batch-size 8 --rate 20
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import shutil
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils._pytree import tree_leaves

from stream_dataloader.batch import StreamBatch
from stream_dataloader.cli.arguments import (
    FoundWrong,
    Target,
    add_lanes,
    add_target,
    find_target,
    positive,
)

Leaves = Iterator[tuple[StreamBatch, torch.Tensor]]


def add(parser: ArgumentParser) -> None:
    add_target(parser)
    add_lanes(parser)
    add, shown = parser.add_argument, "(default: %(default)s)"
    add("--batches", type=positive, help="number of batches to show (default: all)")
    add("--rate", type=positive, default=25, help=f"time steps a second {shown}")
    add("--output", type=Path, metavar="FILE.mp4", help="write pictures to this file")


def run(options: Namespace) -> bool:
    target = find_target(options, fitted=True)
    with target.reading(options) as loader:
        _play(itertools.islice(loader, options.batches), target, options)
    return bool(target.skipped)


def _play(batches: Iterator[StreamBatch], target: Target, options: Namespace) -> None:
    if (first := next(batches, None)) is None:
        raise FoundWrong(f"{options.target}: no batch, because all sources are empty")
    for number, leaf in enumerate(tree_leaves(first.data)):
        if not isinstance(leaf, torch.Tensor):
            continue
        every = itertools.chain([first], batches)
        leaves = ((batch, tree_leaves(batch.data)[number]) for batch in every)
        if leaf.dtype == torch.uint8 and leaf.ndim == 5 and leaf.shape[2] in (1, 3):
            _show_pictures(leaves, target, options)
            return
        if leaf.ndim == 2 and not leaf.is_floating_point() and target.kind in ("text", "store"):
            _show_text(leaves, options.rate)
            return
    raise ValueError(f"{options.target} has neither uint8 pictures nor text")


def _show_pictures(leaves: Leaves, target: Target, options: Namespace) -> None:
    from stream_dataloader.cli.film import cv2, grid_pictures, write_video

    def name(source: int) -> str:
        return os.path.basename(target.name(source)) or target.name(source)

    coloured = (dataclasses.replace(batch, data=leaf.expand(-1, -1, 3, -1, -1)) for batch, leaf in leaves)
    pictures = (picture for batch in coloured for picture in grid_pictures(batch, name))
    displays = os.environ.get("DISPLAY"), os.environ.get("WAYLAND_DISPLAY")
    shows = sys.platform == "darwin" or any(displays)
    if options.output is None and shows:
        try:
            cv2.namedWindow("stream-dataloader")
        except cv2.error:  # this build of OpenCV has no windows
            shows = False
    if options.output is not None or not shows:
        path = options.output or Path("play.mp4")
        write_video(path, pictures, options.rate)
        print(f"written {path}")
        return
    try:
        for picture in pictures:
            cv2.imshow("stream-dataloader", picture[:, :, ::-1])
            if cv2.waitKey(max(1, round(1000 / options.rate))) & 0xFF in (ord("q"), 27):
                break
    finally:
        cv2.destroyAllWindows()


def _show_text(leaves: Leaves, rate: int) -> None:
    """Print a line for each lane that scrolls in a terminal; without a terminal, print the lines of each batch."""
    live = sys.stdout.isatty()
    width = shutil.get_terminal_size((100, 24)).columns - 10
    before: list[str] = []
    for batch, leaf in leaves:
        lanes = [_window(batch, leaf, lane) for lane in range(len(batch))]
        if not live:
            print(f"batch {batch.batch_index}")
        elif before:
            print(end=f"\x1b[{len(lanes)}A")  # up again
            lanes = [(old + new)[-width:] for old, new in zip(before, lanes, strict=True)]
        before = lanes
        for lane, text in enumerate(lanes):
            print(f"lane {lane:<3} {text}" + "\x1b[K" * live, flush=live)
        if live:
            time.sleep(batch.time_steps / rate)


def _window(batch: StreamBatch, leaf: torch.Tensor, lane: int) -> str:
    found = ""
    columns = (leaf[:, lane], batch.mask[:, lane], batch.is_first[:, lane])
    for code, there, starts in zip(*(column.tolist() for column in columns), strict=True):
        sign = chr(code) if there and 0 <= code < 0x110000 else "·"
        found += "|" * starts + (sign if sign.isprintable() else " ")
    return found
