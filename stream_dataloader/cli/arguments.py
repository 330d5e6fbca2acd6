"""Arguments of commands, and the store, media and loader that they describe.

Guarantees: a value means the same for every option, and an error names a refused value.
Files are sorted by name, with numbers in names sorted as numbers.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import sys
import warnings
from argparse import ArgumentParser, ArgumentTypeError, Namespace, _ActionsContainer
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from stream_dataloader import stores, streams
from stream_dataloader.dataloader import StreamDataLoader
from stream_dataloader.dataset import StreamDataset
from stream_dataloader.errors import GapError, ItemError, StoreError, shown
from stream_dataloader.stores._base.formats import format_of
from stream_dataloader.streams._media.listing import files_below
from stream_dataloader.streams.images import SUFFIXES

#: Kinds of data: the class that opens it, and the endings of its files.
KINDS = {
    "video": (
        "VideoStream",
        ".avi .flv .m2ts .m4v .mkv .mov .mp4 .mpeg .mpg .mts .ogv .ts .webm .wmv",
    ),
    "audio": ("AudioStream", ".aac .aif .aiff .flac .m4a .mp3 .oga .ogg .opus .wav .wma"),
    "text": ("TextStream", ".txt .md .gz .zst"),
    "array": ("ArrayStream", ".npy .h5 .hdf5"),
    "images": ("ImageFolderStream", " ".join(sorted(SUFFIXES))),
}
_KIND_OF = {suffix: kind for kind, (_, suffixes) in KINDS.items() for suffix in suffixes.split()}
_LIST_SUFFIXES = (".txt", ".lst", ".list")

_HOW = (
    "VALUE is true, false, none, a number, a [list] or {dict} of Python or JSON, "
    "'text' in quotes, or else text as it stands; may be given again"
)
_WORDS = {"true": "True", "false": "False", "none": "None", "null": "None"}
_Made = TypeVar("_Made")


class FoundWrong(Exception):
    """The data that were read are wrong; the message says what to do about it."""


def natural(text: str, least: int = 0) -> int:
    """Parse a whole number of at least `least`."""
    if not text.isdecimal() or int(text) < least:
        raise ArgumentTypeError(f"{text} is not a whole number of at least {least}")
    return int(text)


def positive(text: str) -> int:
    """Parse a whole number of at least 1."""
    return natural(text, 1)


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    if all(side.isdecimal() and 8 <= int(side) <= 8192 for side in (width, height)):
        return int(width), int(height)
    raise ArgumentTypeError(f"{text} is not a WIDTHxHEIGHT of 8 to 8192 pixels")


def option(text: str) -> tuple[str, Any]:
    """Parse `name=value` into a name and a value."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ArgumentTypeError(f"{text} is not NAME=VALUE")
    with contextlib.suppress(ValueError, SyntaxError):
        return name, ast.literal_eval(_WORDS.get(value.lower(), value))
    if not value.startswith(("[", "{", "(", "'", '"')):
        return name, value
    with contextlib.suppress(ValueError):
        return name, json.loads(value)
    raise ArgumentTypeError(f"{text} is not a list, dict or quoted text; quote texts in it")


def add_options(parser: ArgumentParser, *names: str, of: str, dest: str = "option") -> None:
    """Add an argument that takes `NAME=VALUE`, any number of times."""
    how: dict[str, Any] = {"metavar": "NAME=VALUE", "type": option, "default": []}
    text = f"an option of {of}. {_HOW}"
    parser.add_argument(*names, dest=dest, action="append", help=text, **how)


def with_options(given: Sequence[tuple[str, Any]], make: Callable[..., _Made]) -> _Made:
    """Call `make` with the options; an error names them."""
    try:
        return make(**dict(given))
    except (TypeError, ValueError) as error:
        if not given or type(error) not in (TypeError, ValueError):
            raise
        told = " ".join(f"{name}={value}" for name, value in given)
        raise type(error)(f"option {told}: {error}") from None


def add_size(parser: ArgumentParser, otherwise: str = "as they are") -> None:
    """Add the argument for the size of pictures."""
    shown = f"of pictures: width x height, where size= of a stream is (height, width) (default: {otherwise})"
    parser.add_argument("--size", type=_size, metavar="WxH", help=shown)


def add_target(
    parser: ArgumentParser,
    name: str = "TARGET",
    *,
    option_argument: str = "--option",
    also: str = "",
    format_argument: str = "--format",
) -> None:
    """Add the arguments that name the data to read."""
    add = parser.add_argument
    add("target", metavar=name, help=f"media, a list of paths, or a store{also}")
    kinds = [*KINDS, "store"]
    add("--kind", choices=kinds, help=f"what {name} is (default: found)")
    add(format_argument, dest="format", help="the format of a store (default: found)")
    add_size(parser)
    broken = "what a broken source does (default: %(default)s)"
    add("--on-error", choices=["raise", "skip"], default="raise", help=broken)
    what = "what opens media (VideoStream's fps=10, say) or of a store's format"
    add_options(parser, option_argument, of=what)


def add_lanes(parser: _ActionsContainer) -> None:
    """Add the arguments for lanes."""
    add, shown = parser.add_argument, "(default: %(default)s)"
    add("--batch-size", "--lanes", type=positive, default=4, metavar="B", help=f"lanes {shown}")
    add("--time-steps", type=positive, default=16, metavar="T", help=f"of a window {shown}")
    add("--workers", "--num-workers", type=natural, default=0, help=f"processes; 0: none {shown}")
    add("--windows", choices=["aligned", "packed"], default="aligned")
    add("--schedule", choices=["balanced", "longest_first"], help="long ones early; balanced needs --shuffle")
    add("--shuffle", action="store_true", help="read in a random order")
    add("--seed", type=natural, default=0, help=f"of that order {shown}")


@dataclass
class Target:
    """Data to read: their kind, sources, and the function that opens a stream."""

    kind: str
    sources: Sequence[Any]
    open_stream: Any
    name: Callable[[int], str]
    skipped: list[Exception] = field(default_factory=list)

    def lengths(self, options: Namespace) -> list[int] | None:
        """Return the number of items of each source, or None if only reading would tell."""
        lengths = []
        for source in self.sources:
            try:
                length = self.open_stream.length(source)
            except (OSError, ValueError) as error:
                if options.on_error == "raise":
                    raise FoundWrong(f"{error}; --on-error skip leaves it out") from error
                self._skip(error)
                length = 0
            if length is None:
                return None
            lengths.append(length)
        return lengths

    @contextlib.contextmanager
    def reading(self, options: Namespace, lengths: list[int] | None = None) -> Iterator[StreamDataLoader]:
        """Yield a loader with the options of the arguments; print what it skipped at the end."""
        names = "batch_size time_steps windows schedule shuffle seed on_error"
        how = {name: getattr(options, name) for name in names.split()}
        with warnings.catch_warnings():  # the command itself reports these
            warnings.filterwarnings("ignore", "batch_size is .*, and there are sources for")
            warnings.filterwarnings("ignore", "skipped the rest of a stream")
            dataset = StreamDataset(self.sources, self.open_stream, lengths=lengths, **how)
            loader = StreamDataLoader(dataset, min(options.workers, options.batch_size))
            try:
                yield loader
            except ItemError as error:
                if getattr(self.open_stream, "size", ()) is not None:
                    raise
                raise FoundWrong(f"{error}; --size gives all one size") from error
            finally:
                for failure in loader.failures:
                    self._skip(failure)

    def _skip(self, error: Exception) -> None:
        warn(f"{'gap' if isinstance(error, GapError) else 'skipped'}: {error}")
        self.skipped.append(error)


def find_target(
    options: Namespace, *, packing: bool = False, fitted: bool = False, without: Path | None = None
) -> Target:
    """Return the data that the arguments of `add_target` name. With `packing`, `.npy` files are arrays, not a store."""
    path, kind, found = options.target, options.kind, dict[str, str]()
    others = (None, "npy") if packing else (None,)
    if options.format is not None or (kind is None and _format_of(path) not in others):
        kind = "store"
    if kind != "store":
        kind, found = _media(Path(path), kind, without)
    defaults: dict[str, Any] = {"window": 1024} if kind == "audio" else {}
    if fitted and kind in ("video", "images"):
        defaults = {"size": (180, 240), "fit": "letterbox"}
    if options.size is not None:
        if kind not in ("video", "images"):
            raise ValueError(f"--size is for videos and images, but {path} is {kind}")
        defaults["size"] = options.size[::-1]
    if kind == "store":
        open_store = partial(stores.open, path, format=options.format)
        sources, store = with_options(options.option, open_store)
        return Target(kind, sources, store, store.key)
    factory = partial(getattr(streams, KINDS[kind][0]), **defaults)
    open_stream, names = with_options(options.option, factory), list(found.values())
    return Target(kind, list(found), open_stream, names.__getitem__)


def _format_of(path: str) -> str | None:
    try:
        return format_of(path)
    except (StoreError, FileNotFoundError, NotADirectoryError):
        return None


def _media(path: Path, kind: str | None, without: Path | None) -> tuple[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for file, name in _files(path, kind).items():
        suffix = os.path.splitext(file)[1].lower()
        if os.path.isdir(file):
            found["images"][file] = name
        elif (of := _KIND_OF.get(suffix)) == "images":
            found[of][os.path.dirname(file)] = os.path.dirname(name) or path.name
        elif of is not None and file != str(without):
            found[of][file] = name
    if kind is not None and kind not in found:
        raise ValueError(f"{path} has no {kind} in it ({KINDS[kind][1]})")
    if kind is None and len(found) != 1:
        told = [f"{len(files)} of {name}" for name, files in found.items()]
        raise ValueError(f"{path} has no media of one kind ({', '.join(told) or 'none'}); see --kind")
    kind = kind or next(iter(found))
    return kind, found[kind]


def _files(path: Path, kind: str | None) -> dict[str, str]:
    if path.is_dir():
        return {str(Path(file)): os.path.relpath(file, path) for file in files_below(str(path))}
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; give media, a list, or a store")
    if kind == "text" or path.suffix.lower() not in _LIST_SUFFIXES:
        return {str(path): path.name}
    lines = map(str.strip, path.read_text(encoding="utf-8").splitlines())
    listed = {str(path.parent / line): line for line in lines if line and line[0] != "#"}
    if missing := [file for file in listed if not os.path.exists(file)]:
        more = len(missing) - 1
        raise FileNotFoundError(f"{path} lists {missing[0]}, which does not exist, and {more} more")
    return listed


def print_json(content: Any) -> None:
    """Print content as JSON; what JSON does not know is printed as text."""
    print(json.dumps(content, indent=2, default=str))


def warn(error: BaseException | str) -> None:
    """Print an error on stderr as one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    print(f"stream-dataloader: {shown(text)}", file=sys.stderr)
