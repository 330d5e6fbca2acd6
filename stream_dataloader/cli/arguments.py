"""What commands share: arguments, how they print, and the exit statuses.

Guarantee: a value means the same for every option, and one that is refused is named with it.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

#: Exit statuses, as the page on monitoring explains them.
DONE, PROBLEM, MISTAKE, INTERRUPTED = 0, 1, 2, 130

#: What a wrong argument raises.
USER_ERRORS = (
    *(FileNotFoundError, FileExistsError, NotADirectoryError, PermissionError),
    *(ImportError, TypeError, ValueError),
)

_HOW = (
    "VALUE is true, false, none, a number, a [list] or {dict} as Python or JSON writes it, "
    "'text' in quotes, or else text as it stands; may be given again"
)
_WORDS = {"true": True, "false": False, "none": None, "null": None}
_Made = TypeVar("_Made")


class FoundWrong(Exception):
    """What was read is wrong; the message says what, and what to do about it."""


class UserCodeError(Exception):
    """The user's own code raised the cause."""


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number of at least 1")
    return int(text)


def natural(text: str) -> int:
    """A whole number of at least 0."""
    return 0 if text == "0" else positive(text)


def size(text: str) -> tuple[int, int]:
    """Width and height, in pixels."""
    width, _, height = text.partition("x")
    if all(length.isdecimal() and 8 <= int(length) <= 8192 for length in (width, height)):
        return int(width), int(height)
    raise argparse.ArgumentTypeError(f"{text} is no WIDTHxHEIGHT of 8 to 8192 pixels each; write 240x180, say")


def option(text: str) -> tuple[str, Any]:
    """Name and value of `name=value`."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text} is no NAME=VALUE; write size_limit=1000000, say")
    if value.lower() in _WORDS:
        return name, _WORDS[value.lower()]
    with contextlib.suppress(ValueError, SyntaxError):
        return name, ast.literal_eval(value)
    if not value.startswith(("[", "{", "(", "'", '"')):
        return name, value
    with contextlib.suppress(ValueError):
        return name, json.loads(value)
    raise argparse.ArgumentTypeError(
        f"{text} begins as a list, a dict or a quoted text, and is none; put texts in it in quotes"
    )


def add_options(parser: argparse.ArgumentParser, name: str, what: str, dest: str = "option") -> None:
    """Add an argument that takes `NAME=VALUE`, any number of times."""
    parser.add_argument(
        name,
        dest=dest,
        metavar="NAME=VALUE",
        type=option,
        action="append",
        default=[],
        help=f"an option of {what}. {_HOW}",
    )


def with_options(given: Sequence[tuple[str, Any]], make: Callable[..., _Made], *arguments: Any, **others: Any) -> _Made:
    """What `make` returns for options; an error names those that were given."""
    try:
        return make(*arguments, **{**others, **dict(given)})
    except (TypeError, ValueError) as error:
        if not given or type(error) not in (TypeError, ValueError):  # a store that is damaged, say
            raise
        told = " ".join(f"{name}={value}" for name, value in given)
        raise type(error)(f"option {told}: {error}") from None


def print_json(content: Any) -> None:
    """Print JSON."""
    print(json.dumps(content, indent=2, default=str))


def table(rows: Iterable[Sequence[str]]) -> str:
    """A table as text, without columns that have only a head."""
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    padded = []
    for number, column in enumerate(columns):
        width = max(map(len, column))
        pad = str.rjust if number else str.ljust
        padded.append([pad(cell, width) for cell in column])
    return "\n".join("  ".join(row).rstrip() for row in zip(*padded, strict=True))


def warn(error: BaseException | str) -> None:
    """Print an error on stderr, in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    print(f"stream-dataloader: {text}", file=sys.stderr)
