"""`stream-dataloader profile TARGET`: reads some batches, tells where the time goes, and gives advice."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from stream_dataloader.cli.arguments import DONE, PROBLEM, FoundWrong, UserCodeError, natural, positive, say, say_json
from stream_dataloader.cli.target import add_lanes, add_target, find_target, reading
from stream_dataloader.stats import LoaderStats

HELP = "tell where the time goes, and what would help"

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


def run(options: argparse.Namespace) -> int:
    """Profile."""
    if options.trace is not None:
        _check_writable(options.trace)
    skipped: list[Exception] = []
    padding_share = None
    if _FUNCTION.fullmatch(options.target) and not os.path.exists(options.target):
        loader = _loader_of(options.target)
        with _user_code():
            stats, first_seconds = _measured(loader, options.batches, options.train_ms / 1000)
    else:
        target = find_target(options)
        lengths, skipped = target.lengths() if target.kind == "store" else None, target.skipped
        with reading(target, options, lengths) as loader:
            if lengths is not None and (steps := len(loader)):
                padding_share = 1 - sum(lengths) / (steps * options.batch_size * options.time_steps)
            stats, first_seconds = _measured(loader, options.batches, options.train_ms / 1000)
    if options.trace is not None:
        stats.save_trace(options.trace)
    advice = stats.advice(padding_share=padding_share)
    if options.json:
        found = stats.as_dict() | {"first_batch_seconds": first_seconds}
        say_json(found | {"padding_share_of_epoch": padding_share, "advice": advice._asdict()})
        return PROBLEM if skipped else DONE
    say(f"the first batch came after {first_seconds:.2f} s; since then:")
    say(str(stats))
    say()
    say(str(advice))
    return PROBLEM if skipped else DONE


def _check_writable(path: str) -> None:
    """Say now, not after all was read, that a file cannot be written."""
    folder = os.path.dirname(path) or os.curdir
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"there is no folder {folder} for {path}")


@contextlib.contextmanager
def _user_code() -> Iterator[None]:
    """Runs code of the user: what it raises is shown with its traceback."""
    try:
        yield
    except FoundWrong:
        raise
    except Exception as error:
        raise UserCodeError from error


def _loader_of(name: str) -> Any:
    """What the function returns that MODULE:FUNCTION names."""
    module, _, function = name.partition(":")
    sys.path.insert(0, os.getcwd())  # as `python -m` has it
    try:
        with _user_code():
            found: Any = importlib.import_module(module)
    except UserCodeError as failed:
        error = failed.__cause__
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise error from None
        raise
    finally:
        sys.path.remove(os.getcwd())
    for part in function.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{name}: {module} has no {function}")
        found = getattr(found, part)
    if not callable(found):
        raise TypeError(f"{name} is a {type(found).__name__}; name a function that returns a StreamDataLoader")
    with _user_code():
        loader = found()
    if not (isinstance(loader, Iterable) and callable(getattr(loader, "stats", None))):
        raise TypeError(f"{name} returned a {type(loader).__name__}; have it return a StreamDataLoader")
    return loader


def _measured(loader: Any, batches: int, train_seconds: float) -> tuple[LoaderStats, float]:
    """What the loader counted behind the first batch, and how long that one took."""
    begin = time.perf_counter()
    batches_read = iter(loader)
    with contextlib.closing(batches_read) if hasattr(batches_read, "close") else contextlib.nullcontext():
        if next(batches_read, None) is None:
            raise FoundWrong("there is no batch: all sources are empty")
        first_seconds = time.perf_counter() - begin
        earlier = loader.stats()
        time.sleep(train_seconds)
        for _ in itertools.islice(batches_read, batches - 1):
            time.sleep(train_seconds)
        now: LoaderStats = loader.stats()
    return (now if now.batches < 2 else now - earlier), first_seconds
