"""What commands share: how arguments are read, how things are said, and what ends a command.

Guarantee: what a user can put right is one line on stderr that says how.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from stream_dataloader.errors import StoreError, StreamError, WorkerError

__all__ = [
    "DONE",
    "INTERRUPTED",
    "MISTAKE",
    "PROBLEM",
    "USER_ERRORS",
    "add_format",
    "add_store",
    "errors_told",
    "natural",
    "option",
    "options_of",
    "positive",
    "say",
    "say_json",
    "size",
    "table",
    "warn",
]

#: Exit statuses: all is well; something was found to be wrong; the command was given something wrong; Ctrl-C.
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


def option(text: str) -> tuple[str, Any]:
    """`name=value`; the value is a number, a list and so on, as Python writes it, or else a string."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text} is no NAME=VALUE; write size_limit=1000000, say")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def options_of(given: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The options that were given by `name=value`, as keywords."""
    return dict(given)


def add_store(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a command that opens a store."""
    parser.add_argument("store", metavar="STORE", help="a folder, a file, or a URL where the format allows")
    add_format(parser)


def add_format(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say how a store is opened, and `--json`."""
    parser.add_argument("--format", help="the store's format (default: found by the names of its files)")
    parser.add_argument(
        "--option",
        metavar="NAME=VALUE",
        type=option,
        action="append",
        default=[],
        help="an option of the format, as stores.open takes it; may be given again",
    )
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


def errors_told(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """A command that prints its errors in one line, and returns the exit status that belongs to them.

    A stream, a worker or a store that is broken is a problem that was found, and so is a full disk; what else a user
    can put right is a mistake.
    """

    @functools.wraps(run)
    def told(options: argparse.Namespace) -> int:
        try:
            return run(options)
        except BrokenPipeError:  # who reads stdout has enough
            raise
        except (StreamError, WorkerError, StoreError) as error:
            warn(error)
            return PROBLEM
        except USER_ERRORS as error:
            warn(error)
            return MISTAKE
        except OSError as error:  # a full disk
            warn(error)
            return PROBLEM

    return told
