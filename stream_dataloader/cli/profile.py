"""Show where the time goes, and which options would help.

Reads some batches as fast as they arrive; --train-ms simulates training. Prints
the counts after the first batch, and a sentence of advice. TARGET may also be
MODULE:FUNCTION, which returns a loader with its own options.

Examples:
  stream-dataloader profile videos/ --size 360x240 --batch-size 8 --workers 2
  stream-dataloader profile training:make_loader --train-ms 40
"""

from __future__ import annotations

import contextlib
import itertools
import time
import traceback
from argparse import ArgumentParser, Namespace
from typing import Any

from stream_dataloader.cli import user_code
from stream_dataloader.cli.arguments import (
    FoundWrong,
    add_lanes,
    add_target,
    find_target,
    natural,
    positive,
    print_json,
)
from stream_dataloader.stats import LoaderStats


def add(parser: ArgumentParser) -> None:
    add_target(parser, also=", or MODULE:FUNCTION")
    add_lanes(parser)
    add, shown = parser.add_argument, "(default: %(default)s)"
    add("--json", action="store_true", help="print JSON")
    add("--batches", type=positive, default=100, help=f"largest number of batches to read {shown}")
    add("--train-ms", type=natural, default=0, help=f"milliseconds of training per batch {shown}")
    add("--trace", metavar="FILE", help="write a trace for https://ui.perfetto.dev")


def run(options: Namespace) -> bool:
    if options.trace is not None:
        open(options.trace, "a").close()  # a path that cannot be written fails now, not after reading
    skipped: list[Exception] = []
    if user_code.is_name(options.target):
        try:
            stats, first_seconds = _measured(_loader_of(options.target), options)
        except (FoundWrong, user_code.UserCodeError):
            raise
        except Exception:  # of the user's own code
            traceback.print_exc()
            return True
    else:
        target = find_target(options)
        with target.reading(options) as loader:
            stats, first_seconds = _measured(loader, options)
        skipped = target.skipped
    if options.trace is not None:
        stats.save_trace(options.trace)
    advice = stats.advice()
    forecast = None if stats.setup is None else stats.setup.forecast
    if options.json:
        about = {
            "first_batch_seconds": first_seconds,
            "padding_share_of_epoch": None if forecast is None else forecast.padding_share,
            "advice": advice._asdict(),
        }
        print_json(stats.as_dict() | about)
    else:
        print(f"the first batch came after {first_seconds:.2f} s; since then:")
        print(f"{stats}\n\n{advice}")
    return bool(skipped)


def _loader_of(name: str) -> Any:
    """Return the loader that MODULE:FUNCTION returns, or is."""
    loader = user_code.call(name)
    if not callable(getattr(loader, "stats", None)):
        kind = type(loader).__name__
        raise user_code.UserCodeError(f"{name} gives a {kind}; have it return a StreamDataLoader")
    return loader


def _measured(loader: Any, options: Namespace) -> tuple[LoaderStats, float]:
    """Return the counts after the first batch, and the seconds until the first batch."""
    train_seconds = options.train_ms / 1000
    begin = time.perf_counter()
    with contextlib.closing(iter(loader)) as batches:
        if next(batches, None) is None:
            raise FoundWrong("no batch, because all sources are empty")
        first_seconds = time.perf_counter() - begin
        earlier = loader.stats()
        time.sleep(train_seconds)
        for _ in itertools.islice(batches, options.batches - 1):
            time.sleep(train_seconds)
        now: LoaderStats = loader.stats()
    return (now if now.batches < 2 else now - earlier), first_seconds
