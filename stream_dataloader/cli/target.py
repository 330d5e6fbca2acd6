"""What a command reads: a store, or media in a folder or a list, and the dataset of lanes over it.

Guarantee: finding it reads no stream; lengths come from a store's index, from headers, or from packets.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stream_dataloader import stores
from stream_dataloader.cli.arguments import FoundWrong, natural, positive, size, warn
from stream_dataloader.cli.media import KINDS, factory_of, find_media
from stream_dataloader.cli.option_values import add_options, with_options
from stream_dataloader.dataloader import StreamDataLoader
from stream_dataloader.dataset import StreamDataset
from stream_dataloader.errors import ItemError, StoreError
from stream_dataloader.stores._base.formats import format_of


@dataclass(frozen=True)
class Target:
    """What is to be read.

    Attributes:
        kind: `"store"`, or one of `KINDS`.
        sources: Of a dataset.
        open_stream: Of a dataset.
        name: What a source is called, given its index.
        skipped: Errors of sources that were left out.
    """

    kind: str
    sources: Sequence[Any]
    open_stream: Any
    name: Callable[[int], str]
    skipped: list[Exception] = field(default_factory=list)

    def lengths(self, *, skip: bool = False) -> list[int] | None:
        """How many items each source has; None if only reading tells that of some.

        Args:
            skip: A source that is broken counts as empty, and is printed.

        Raises:
            FoundWrong: A file cannot be read, is damaged, or is something else.
        """
        lengths = []
        for source in self.sources:
            try:
                length = self.open_stream.length(source)
            except (OSError, ValueError) as error:
                if not skip:
                    raise FoundWrong(f"{error}; --on-error skip leaves it out") from error
                warn(f"skipped: {error}")
                self.skipped.append(error)
                length = 0
            if length is None:
                return None
            lengths.append(length)
        return lengths


def add_source(parser: argparse.ArgumentParser, metavar: str, what: str, format_argument: str = "--format") -> None:
    """Add the arguments that say what is read.

    Args:
        parser: The command's.
        metavar: What it is called in the help.
        what: What it may be.
        format_argument: Says the format, if it is a store.
    """
    parser.add_argument("target", metavar=metavar, help=what)
    parser.add_argument(
        "--kind", choices=[*KINDS, "store"], help=f"what {metavar} is (default: found by names and suffixes)"
    )
    parser.add_argument(
        format_argument, dest="format", help=f"the format of {metavar}, if it is a store (default: found)"
    )
    parser.add_argument("--size", type=size, metavar="WxH", help="of pictures, in pixels (default: as they are)")
    parser.add_argument(
        "--on-error", choices=["raise", "skip"], default="raise", help="about a source that is broken (default: raise)"
    )
    add_options(parser, "--stream-option", f"what opens {metavar}, such as VideoStream's fps=10")


def add_target(parser: argparse.ArgumentParser, *, also: str = "") -> None:
    """Add the arguments of a command that reads media or a store, and prints what it finds.

    Args:
        parser: The command's.
        also: What else may be read.
    """
    add_source(parser, "TARGET", f"a folder of media, a list of paths, or a store{also}")
    add_output(parser)


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add the arguments about a store's options and JSON."""
    add_options(parser, "--option", "the store's format, as stores.open takes it")
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_lanes(parser: argparse._ActionsContainer, batch_size: int | None = 4, time_steps: int | None = 16) -> None:
    """Add the arguments about lanes.

    Args:
        batch_size: The number of lanes if none is given.
        time_steps: Those of a window, if none are given.
    """
    defaults = "" if batch_size is None else f" (default: {batch_size})", f" (default: {time_steps or 16})"
    parser.add_argument("--batch-size", type=positive, default=batch_size, metavar="B", help=f"lanes{defaults[0]}")
    parser.add_argument(
        "--time-steps", type=positive, default=time_steps, metavar="T", help=f"of a window{defaults[1]}"
    )
    parser.add_argument("--workers", type=natural, default=0, help="processes, at most one a lane (default: 0, none)")
    parser.add_argument("--windows", choices=["aligned", "packed"], default="aligned")
    parser.add_argument("--schedule", choices=["listed", "balanced", "longest_first"], default="listed")
    parser.add_argument("--shuffle", action="store_true", help="read in a random order")
    parser.add_argument("--seed", type=natural, default=0, help="of that order (default: 0)")


def find_target(options: argparse.Namespace, media: Collection[str] = ()) -> Target:
    """What the arguments of `add_source` name.

    Args:
        options: The arguments.
        media: Formats of stores that are read as media, unless they are asked for.

    Raises:
        OSError: There is nothing, or it cannot be read.
        ValueError: There is no medium, or there are several kinds.
        TypeError: It has no such option.
        StoreError: The store is damaged.
    """
    is_store = options.kind == "store" or options.format is not None
    if is_store or (options.kind is None and _store_at(options.target) not in (None, *media)):
        if options.size is not None:
            raise ValueError("--size is for videos and images; a store is read as it is")
        sources, store = with_options(options.option, stores.open, options.target, format=options.format)
        return Target("store", sources, store, store.key)
    kind, found = find_media(Path(options.target), options.kind)
    names = list(found.values())
    return Target(kind, list(found), factory_of(kind, options.size, options.option), names.__getitem__)


def _store_at(path: str) -> str | None:
    """The format of the store that lies at a path; None if it is no store. A folder may be named as a store is."""
    try:
        return format_of(path)
    except (StoreError, FileNotFoundError, NotADirectoryError):
        return None


def dataset_of(target: Target, options: argparse.Namespace, lengths: Sequence[int] | None) -> StreamDataset:
    """The dataset that the arguments about lanes describe."""
    return StreamDataset(
        target.sources,
        target.open_stream,
        options.batch_size,
        time_steps=options.time_steps or 16,
        windows=options.windows,
        schedule=options.schedule,
        shuffle=options.shuffle,
        seed=options.seed,
        lengths=lengths,
        on_error=options.on_error,
    )


@contextmanager
def reading(
    target: Target, options: argparse.Namespace, lengths: Sequence[int] | None = None
) -> Iterator[StreamDataLoader]:
    """A loader of the dataset that the arguments describe; what it skips is printed at the end, in `target.skipped`.

    Raises:
        FoundWrong: Pictures differ in size, and no size was given.
    """
    with warnings.catch_warnings():  # padding is told anyhow
        warnings.filterwarnings("ignore", "batch_size is .*, and there are sources for", UserWarning)
        loader = StreamDataLoader(dataset_of(target, options, lengths), min(options.workers, options.batch_size))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "skipped the rest of a stream", RuntimeWarning)
            yield loader
    except ItemError as error:
        if target.kind not in ("video", "images") or options.size is not None:
            raise
        raise FoundWrong(f"{error}; --size WxH gives all pictures one size, --size 360x240, say") from error
    finally:
        for failure in loader.failures:
            warn(f"skipped: {failure}")
        target.skipped.extend(loader.failures)
