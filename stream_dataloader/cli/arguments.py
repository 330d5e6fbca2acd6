"""What commands share: how arguments are read, how things are printed, and the exit statuses."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

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


def size(text: str, smallest: int = 8, largest: int = 8192) -> tuple[int, int]:
    """Width and height, in pixels."""
    numbers = re.fullmatch(r"(\d+)x(\d+)", text)
    found = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    if not all(smallest <= length <= largest for length in found):
        raise argparse.ArgumentTypeError(
            f"{text} is no WIDTHxHEIGHT of {smallest} to {largest} pixels each; write 240x180, say"
        )
    return found


def say(text: str = "") -> None:
    """Print what may hold characters that stdout cannot encode, as names of files do."""
    encoding = sys.stdout.encoding or "ascii"
    print(text.encode(encoding, "backslashreplace").decode(encoding))


def say_json(content: Any) -> None:
    """Print JSON."""
    print(json.dumps(content, indent=2, default=str))


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table as text, columns as wide as they must be, without those that are empty; the first is flush left."""
    lines = [heads, *rows]
    columns = [column for column in zip(*lines, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    told = []
    for first, *cells in zip(*columns, strict=True):
        padded = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        told.append("  ".join([first.ljust(widths[0]), *padded]).rstrip())
    return "\n".join(told)


def warn(error: BaseException | str) -> None:
    """Print an error on stderr, in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    encoding = sys.stderr.encoding or "ascii"
    print(f"stream-dataloader: {text}".encode(encoding, "backslashreplace").decode(encoding), file=sys.stderr)
