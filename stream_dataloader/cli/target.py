"""What a command reads: a store, or media in a folder or a list, and the loader over it.

Guarantees: finding it reads no stream. Files come in the order of their names, numbers as numbers.
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stream_dataloader import stores, streams
from stream_dataloader.cli.arguments import FoundWrong, add_options, natural, positive, size, warn, with_options
from stream_dataloader.dataloader import StreamDataLoader
from stream_dataloader.dataset import StreamDataset
from stream_dataloader.errors import ItemError, StoreError
from stream_dataloader.stores._base.formats import format_of
from stream_dataloader.streams._media.section import natural_order
from stream_dataloader.streams.images import SUFFIXES as IMAGE_SUFFIXES

#: What can be read, and what its files end in.
KINDS = {
    "video": (
        *(".avi", ".flv", ".m2ts", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg"),
        *(".mpg", ".mts", ".ogv", ".ts", ".webm", ".wmv"),
    ),
    "audio": (*(".aac", ".aif", ".aiff", ".flac", ".m4a", ".mp3", ".oga"), *(".ogg", ".opus", ".wav", ".wma")),
    "text": (".txt", ".md", ".gz", ".zst"),
    "array": (".npy", ".h5", ".hdf5"),
    "images": tuple(sorted(IMAGE_SUFFIXES)),
}
_FACTORIES = {
    "video": "VideoStream",
    "audio": "AudioStream",
    "text": "TextStream",
    "array": "ArrayStream",
    "images": "ImageFolderStream",
}
#: Those of which a size may be asked for.
PICTURES = ("video", "images")
_LIST_SUFFIXES = (".txt", ".lst", ".list")


@dataclass(frozen=True)
class Target:
    """What is to be read."""

    kind: str
    sources: Sequence[Any]
    open_stream: Any
    name: Callable[[int], str]
    skipped: list[Exception] = field(default_factory=list)

    def lengths(self, *, skip: bool = False) -> list[int] | None:
        """How many items each source has; None if only reading tells that of some."""
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


def add_target(parser: argparse.ArgumentParser, also: str = "", json: bool = True) -> None:
    """Add the arguments of a command that reads media or a store."""
    add_source(parser, "TARGET", also)
    add_options(parser, "--option", "the store's format, as stores.open takes it")
    if json:
        parser.add_argument("--json", action="store_true", help="print JSON")


def add_source(parser: argparse.ArgumentParser, name: str, also: str = "", format_argument: str = "--format") -> None:
    """Add the arguments that say what is read, under the name that it has in the help."""
    add = parser.add_argument
    add("target", metavar=name, help=f"a folder of media, a list of paths, or a store{also}")
    kinds = [*KINDS, "store"]
    add("--kind", choices=kinds, help=f"what {name} is (default: found by names and suffixes)")
    add(format_argument, dest="format", help="the format of a store (default: found)")
    add("--size", type=size, metavar="WxH", help="of pictures, in pixels (default: as they are)")
    on_error = "about a source that is broken (default: %(default)s)"
    add("--on-error", choices=["raise", "skip"], default="raise", help=on_error)
    add_options(parser, "--stream-option", "what opens media, such as VideoStream's fps=10")


def add_lanes(parser: argparse._ActionsContainer, **defaults: Any) -> None:
    """Add the arguments about lanes; `defaults` are those that differ."""
    add = parser.add_argument
    lanes = defaults.get("batch_size", 4)
    steps = defaults.get("time_steps", 16)
    workers = defaults.get("workers", 0)
    shown = " (default: %(default)s)"
    add("--batch-size", "--lanes", type=positive, default=lanes, metavar="B", help="lanes" + shown)
    add("--time-steps", type=positive, default=steps, metavar="T", help="of a window" + shown)
    add("--workers", type=natural, default=workers, help="processes; 0: none" + shown)
    add("--windows", choices=["aligned", "packed"], default="aligned")
    add("--schedule", choices=["listed", "balanced", "longest_first"], default="listed")
    add("--shuffle", action="store_true", help="read in a random order")
    add("--seed", type=natural, default=0, help="of that order" + shown)


def find_target(options: argparse.Namespace, media: Collection[str] = ()) -> Target:
    """What the arguments of `add_source` name."""
    is_store = options.kind == "store" or options.format is not None
    if options.kind is None and not is_store:
        is_store = _store_at(options.target) not in (None, *media)
    if not is_store:
        return find_media(Path(options.target), options.kind, options.size, options.option)
    if options.size is not None:
        raise ValueError("--size is for videos and images; a store is read as it is")
    path, named = options.target, options.format
    sources, store = with_options(options.option, stores.open, path, format=named)
    return Target("store", sources, store, store.key)


def _store_at(path: str) -> str | None:
    """The format of the store that lies at a path; None if it is no store."""
    try:
        return format_of(path)
    except (StoreError, FileNotFoundError, NotADirectoryError):
        return None


def find_media(
    path: Path,
    kind: str | None,
    size: tuple[int, int] | None = None,
    given: Sequence[tuple[str, Any]] = (),
    without: Path | None = None,
) -> Target:
    """The media in a folder, in a list of paths, one a line, or one file."""
    files = _files(path, kind)
    kind = kind or _kind_of(path, files)
    if size is not None and kind not in PICTURES:
        raise ValueError(f"--size is for videos and images, and this is {kind}; leave it out")
    found = {}
    for file, name in files.items():
        if kind == "images" and os.path.isdir(file):
            found[file] = name
        elif file.lower().endswith(KINDS[kind]):
            if kind == "images":
                found[os.path.dirname(file)] = os.path.dirname(name) or path.name
            else:
                found[file] = name
    if without is not None:
        found.pop(str(without), None)
    if not found:
        raise ValueError(f"{path} has no {kind} in it ({' '.join(KINDS[kind])})")
    defaults: dict[str, Any] = {"window": 1024} if kind == "audio" else {}
    if size is not None:
        defaults["size"] = size[::-1]
    factory = with_options(given, getattr(streams, _FACTORIES[kind]), **defaults)
    return Target(kind, list(found), factory, list(found.values()).__getitem__)


def _files(path: Path, kind: str | None) -> dict[str, str]:
    """All files, or paths of a list, and what they are called."""
    if path.is_dir():
        files = sorted(filter(Path.is_file, path.rglob("*")), key=lambda f: natural_order(str(f)))
        return {str(file): str(file.relative_to(path)) for file in files}
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; give a folder of media, a list of paths, or a store")
    if kind == "text" or path.suffix.lower() not in _LIST_SUFFIXES:
        return {str(path): path.name}
    lines = map(str.strip, path.read_text(encoding="utf-8").splitlines())
    listed = {str(path.parent / line): line for line in lines if line and line[0] != "#"}
    if missing := [file for file in listed if not os.path.exists(file)]:
        raise FileNotFoundError(f"{path} lists {missing[0]}, which does not exist, and {len(missing) - 1} more")
    return listed


def _kind_of(path: Path, files: Iterable[str]) -> str:
    counts = Counter(kind for file in files for kind, suffixes in KINDS.items() if file.lower().endswith(suffixes))
    if not counts and any(map(os.path.isdir, files)):  # a list of folders
        return "images"
    if not counts:
        raise ValueError(f"{path} has no media in it; say what it is by --kind, one of {', '.join(KINDS)}")
    if len(counts) > 1:
        told = ", ".join(f"{count} of {name}" for name, count in counts.most_common())
        raise ValueError(f"{path} has files of several kinds ({told}); choose one by --kind")
    return next(iter(counts))


@contextmanager
def reading(
    target: Target, options: argparse.Namespace, lengths: Sequence[int] | None = None
) -> Iterator[StreamDataLoader]:
    """A loader as the arguments describe it; what it skips is printed at the end."""
    names = ("batch_size", "time_steps", "windows", "schedule", "shuffle", "seed", "on_error")
    how = {name: getattr(options, name) for name in names}
    with warnings.catch_warnings():  # padding is told anyhow
        warnings.filterwarnings("ignore", "batch_size is .*, and there are sources for", UserWarning)
        dataset = StreamDataset(target.sources, target.open_stream, lengths=lengths, **how)
        loader = StreamDataLoader(dataset, min(options.workers, options.batch_size))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "skipped the rest of a stream", RuntimeWarning)
            yield loader
    except ItemError as error:
        if target.kind not in PICTURES or options.size is not None:
            raise
        remedy = "--size WxH gives all pictures one size, --size 360x240, say"
        raise FoundWrong(f"{error}; {remedy}") from error
    finally:
        for failure in loader.failures:
            warn(f"skipped: {failure}")
        target.skipped.extend(loader.failures)
