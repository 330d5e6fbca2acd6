"""Tell where the time goes, and what would help.

Reads some batches, and prints what the loader counted and a sentence of advice
that follows from it. TARGET is a folder of media, a list of paths, a store, or
MODULE:FUNCTION, a function without arguments that returns a loader; then the
options about lanes are the loader's own. The first batch, for which workers
start, is told apart. Batches are taken as fast as they come, so that the
"trainer" waits most of the time; --train-ms pretends that it trains.

Examples:
  stream-dataloader profile videos/ --size 360x240 --batch-size 8 --workers 2
  stream-dataloader profile clips.store --batches 500 --trace trace.json
  stream-dataloader profile training:make_loader --train-ms 40
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import itertools
import operator
import os
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

from stream_dataloader.cli.arguments import DONE, PROBLEM, FoundWrong, UserCodeError, natural, positive, print_json
from stream_dataloader.cli.target import add_lanes, add_target, find_target, reading
from stream_dataloader.stats import LoaderStats

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_target(parser, also=", or MODULE:FUNCTION")
    add_lanes(parser)
    add, shown = parser.add_argument, "(default: %(default)s)"
    add("--batches", type=positive, default=100, help=f"how many to read, at most {shown}")
    add("--train-ms", type=natural, default=0, help=f"that training takes a batch {shown}")
    add("--trace", metavar="FILE", help="write what took time, for https://ui.perfetto.dev")


def run(options: argparse.Namespace) -> int:
    """Profile."""
    if options.trace is not None:
        open(options.trace, "a").close()  # it fails now, not after all was read
    skipped: list[Exception] = []
    if _FUNCTION.fullmatch(options.target) and not os.path.exists(options.target):
        make = _function(options.target)
        with _user_code():
            loader = make() if callable(make) else make
        if not callable(getattr(loader, "stats", None)):
            raise TypeError(f"{options.target} gives a {type(loader).__name__}; have it return a StreamDataLoader")
        with _user_code():
            stats, first_seconds = _measured(loader, options)
    else:
        target = find_target(options)
        skipped = target.skipped
        lengths = target.lengths() if target.kind == "store" else None
        with reading(target, options, lengths) as loader:
            stats, first_seconds = _measured(loader, options)
    if options.trace is not None:
        stats.save_trace(options.trace)
    advice = stats.advice()
    outlook = None if stats.setup is None else stats.setup.outlook
    if options.json:
        print_json(
            stats.as_dict()
            | {
                "first_batch_seconds": first_seconds,
                "padding_share_of_epoch": None if outlook is None else outlook.padding_share,
                "advice": advice._asdict(),
            }
        )
    else:
        print(f"the first batch came after {first_seconds:.2f} s; since then:")
        print(f"{stats}\n\n{advice}")
    return PROBLEM if skipped else DONE


@contextlib.contextmanager
def _user_code() -> Iterator[None]:
    """Runs code of the user: what it raises is shown with its traceback."""
    try:
        yield
    except FoundWrong:
        raise
    except Exception as error:
        raise UserCodeError from error


def _function(name: str) -> Any:
    """What MODULE:FUNCTION names."""
    module, _, function = name.partition(":")
    sys.path.insert(0, os.getcwd())  # as `python -m` has it
    if importlib.util.find_spec(module) is None:
        raise ImportError(f"{name}: there is no module {module}")
    with _user_code():
        found = importlib.import_module(module)
    try:
        return operator.attrgetter(function)(found)
    except AttributeError as error:
        raise ValueError(f"{name}: {error}") from None


def _measured(loader: Any, options: argparse.Namespace) -> tuple[LoaderStats, float]:
    """What the loader counted behind the first batch, and how long that one took."""
    train_seconds = options.train_ms / 1000
    begin = time.perf_counter()
    with contextlib.closing(iter(loader)) as batches:
        if next(batches, None) is None:
            raise FoundWrong("there is no batch: all sources are empty")
        first_seconds = time.perf_counter() - begin
        earlier = loader.stats()
        time.sleep(train_seconds)
        for _ in itertools.islice(batches, options.batches - 1):
            time.sleep(train_seconds)
        now: LoaderStats = loader.stats()
    return (now if now.batches < 2 else now - earlier), first_seconds
