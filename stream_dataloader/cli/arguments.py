"""What commands share: how arguments are read, how things are printed, and the exit statuses."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from stream_dataloader.cli.option_values import add_options

__all__ = [
    "DONE",
    "INTERRUPTED",
    "MISTAKE",
    "PROBLEM",
    "USER_ERRORS",
    "FoundWrong",
    "UserCodeError",
    "add_format",
    "add_store",
    "natural",
    "positive",
    "say",
    "say_json",
    "size",
    "table",
    "warn",
]

#: Exit statuses, the same for all commands. 0: done, and nothing was found to be wrong. 1: something is wrong with what
#: was read (also if it was skipped), with the user's own code, or with the machine, such as a full disk. 2: the command
#: was called wrongly: an argument, a path that does not exist, a package that is missing. 130: Ctrl-C.
DONE, PROBLEM, MISTAKE, INTERRUPTED = 0, 1, 2, 130

#: What a wrong argument raises.
USER_ERRORS = (
    FileNotFoundError,
    FileExistsError,
    NotADirectoryError,
    PermissionError,
    ImportError,
    TypeError,
    ValueError,
)

_SMALLEST, _LARGEST = 8, 8192  # pixels


class FoundWrong(Exception):
    """What was read is wrong; the message says what, and what to do about it."""


class UserCodeError(Exception):
    """The user's own code raised the cause."""


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not re.fullmatch(r"\d+", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number of at least 1")
    return int(text)


def natural(text: str) -> int:
    """A whole number of at least 0."""
    return 0 if text == "0" else positive(text)


def size(text: str, smallest: int = _SMALLEST, largest: int = _LARGEST) -> tuple[int, int]:
    """Width and height."""
    numbers = re.fullmatch(r"(\d+)x(\d+)", text)
    found = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    if not all(smallest <= length <= largest for length in found):
        raise argparse.ArgumentTypeError(
            f"{text} is no WIDTHxHEIGHT of {smallest} to {largest} pixels each; write 240x180, say"
        )
    return found


def add_store(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a command that opens a store."""
    parser.add_argument("store", metavar="STORE", help="a folder, a file, or a URL where the format allows")
    add_format(parser)


def add_format(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say how a store is opened, and `--json`."""
    parser.add_argument("--format", help="the store's format (default: found by the names of its files)")
    add_options(parser, "--option", "the store's format, as stores.open takes it")
    parser.add_argument("--json", action="store_true", help="print JSON")


def say(text: str = "") -> None:
    """Print what may hold characters that stdout cannot encode, as names of files do."""
    encoding = sys.stdout.encoding or "ascii"
    print(text.encode(encoding, "backslashreplace").decode(encoding))


def say_json(content: Any) -> None:
    """Print JSON."""
    print(json.dumps(content, indent=2, default=str))


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table as text, columns as wide as they must be; the first `left` are flush left."""
    lines = [heads, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if number < left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def warn(error: BaseException | str) -> None:
    """Print an error on stderr, in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    encoding = sys.stderr.encoding or "ascii"
    print(f"stream-dataloader: {text}".encode(encoding, "backslashreplace").decode(encoding), file=sys.stderr)
