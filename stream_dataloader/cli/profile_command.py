"""`stream-dataloader profile TARGET`: reads some batches, tells where the time goes, and gives advice."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

from stream_dataloader.cli.arguments import DONE, errors_told, natural, positive, say, say_json
from stream_dataloader.cli.target import add_lanes, add_target, dataset_of, find_target
from stream_dataloader.dataloader import StreamDataLoader
from stream_dataloader.stats import LoaderStats

__all__ = ["DESCRIPTION", "EXAMPLES", "add", "run"]

DESCRIPTION = """\
Reads some batches, and prints what the loader counted and a sentence of advice
that follows from it. TARGET is a folder of media, a list of paths, a store, or
MODULE:FUNCTION, a function without arguments that returns a loader; then the
options about lanes are the loader's own. The first batch, for which workers
start, is told apart. Batches are taken as fast as they come, so that the
"trainer" waits most of the time; --train-ms pretends that it trains."""

EXAMPLES = """\
  stream-dataloader profile videos/ --size 360x240 --batch-size 8 --workers 2
  stream-dataloader profile clips.store --batches 500 --trace trace.json
  stream-dataloader profile training:make_loader --train-ms 40"""

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_target(parser, also=", or MODULE:FUNCTION")
    add_lanes(parser)
    parser.add_argument("--batches", type=positive, default=100, help="how many to read, at most (default: 100)")
    parser.add_argument(
        "--train-ms", type=natural, default=0, help="milliseconds that training takes between two batches (default: 0)"
    )
    parser.add_argument("--trace", metavar="FILE", help="write what took time, for https://ui.perfetto.dev")


@errors_told
def run(options: argparse.Namespace) -> int:
    """Profile."""
    if options.trace is not None:
        _check_writable(options.trace)
    loader, padding_share = _loader(options)
    stats, first_seconds = _measured(loader, options.batches, options.train_ms / 1000)
    if options.trace is not None:
        stats.save_trace(options.trace)
    advice = stats.advice(padding_share=padding_share)
    if options.json:
        found = stats.as_dict() | {"first_batch_seconds": first_seconds}
        say_json(found | {"padding_share_of_epoch": padding_share, "advice": advice._asdict()})
        return DONE
    say(f"the first batch came after {first_seconds:.2f} s; since then:")
    say(str(stats))
    say()
    say(str(advice))
    return DONE


def _check_writable(path: str) -> None:
    """Say now, not after all was read, that a file cannot be written."""
    folder = os.path.dirname(path) or os.curdir
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"there is no folder {folder} for {path}")


def _loader(options: argparse.Namespace) -> tuple[Any, float | None]:
    """The loader, and the padding share of an epoch, where an index tells it."""
    if _FUNCTION.fullmatch(options.target) and not os.path.exists(options.target):
        return _made_by(options.target), None
    target = find_target(options)
    lengths = target.lengths() if target.kind == "store" else None
    dataset = dataset_of(target, options, lengths)
    loader = StreamDataLoader(dataset, min(options.workers, options.batch_size))
    if lengths is None or not (steps := len(loader)):
        return loader, None
    return loader, 1 - sum(lengths) / (steps * options.batch_size * options.time_steps)


def _made_by(name: str) -> Any:
    """What a function returns."""
    module, _, function = name.partition(":")
    sys.path.insert(0, os.getcwd())  # as `python -m` has it
    try:
        found: Any = importlib.import_module(module)
    finally:
        sys.path.remove(os.getcwd())
    for part in function.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{name}: {module} has no {function}")
        found = getattr(found, part)
    if not callable(found):
        raise TypeError(f"{name} is a {type(found).__name__}; name a function that returns a StreamDataLoader")
    loader = found()
    if not (isinstance(loader, Iterable) and callable(getattr(loader, "stats", None))):
        raise TypeError(f"{name} returned a {type(loader).__name__}; have it return a StreamDataLoader")
    return loader


def _measured(loader: Any, batches: int, train_seconds: float) -> tuple[LoaderStats, float]:
    """What the loader counted behind the first batch, and how long that one took."""
    begin = time.perf_counter()
    reading = iter(loader)
    with ExitStack() as stack:
        if callable(close := getattr(reading, "close", None)):
            stack.callback(close)
        if next(reading, None) is None:
            raise ValueError("there is no batch: all sources are empty")
        first_seconds = time.perf_counter() - begin
        earlier = loader.stats()
        time.sleep(train_seconds)
        for _ in range(batches - 1):
            if next(reading, None) is None:
                break
            time.sleep(train_seconds)
        now: LoaderStats = loader.stats()
    return (now if now.batches < 2 else now - earlier), first_seconds
