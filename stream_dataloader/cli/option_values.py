"""Options by `NAME=VALUE`: how a value is written, and who takes it.

Guarantee: a value means the same for every option of every command, and one that is refused is named with its option.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

_Made = TypeVar("_Made")

_HOW = (
    "VALUE is true, false, none, a number, a [list] or {dict} as Python or JSON writes it, 'text' in quotes, or else "
    "text as it stands; may be given again"
)
_WORDS = {"true": True, "false": False, "none": None, "null": None}
_WORD = re.compile(r"""("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|\b(?:true|false|null)\b""")  # or a text, left as it is


def add_options(parser: argparse.ArgumentParser, name: str, what: str, dest: str = "option") -> None:
    """Add an argument that takes `NAME=VALUE`, any number of times; it comes as a dict.

    Args:
        name: Of the argument.
        what: Whose options they are, for the help.
        dest: Where they are found; several arguments may share it.
    """
    how = f"an option of {what}. {_HOW}"
    parser.add_argument(name, dest=dest, metavar="NAME=VALUE", type=option, action=_Collect, default={}, help=how)


class _Collect(argparse.Action):
    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        del parser, option_string
        name, value = values
        setattr(namespace, self.dest, {**getattr(namespace, self.dest), name: value})


def option(text: str) -> tuple[str, Any]:
    """Name and value of `name=value`."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text} is no NAME=VALUE; write size_limit=1000000, say")
    if value.lower() in _WORDS:
        return name, _WORDS[value.lower()]
    try:
        return name, ast.literal_eval(_WORD.sub(_as_python, value))
    except (ValueError, SyntaxError):
        if value[:1] in ("[", "{", "(", "'", '"'):
            raise argparse.ArgumentTypeError(
                f"{text} begins as a list, a dict or a quoted text, and is none; put texts in it in quotes"
            ) from None
        return name, value


def _as_python(found: re.Match[str]) -> str:
    return found[1] or str(_WORDS[found[0]])


def with_options(given: Mapping[str, Any], make: Callable[..., _Made], *arguments: Any, **others: Any) -> _Made:
    """What `make` returns for the options that were given, and others; the given ones count.

    Args:
        given: Their values by name.
        make: Takes them as keywords.
        arguments: What it takes before them.
        others: What it takes beside them.

    Raises:
        TypeError: It refuses one; the message names those given.
        ValueError: As `TypeError`.
    """
    try:
        return make(*arguments, **{**others, **given})
    except (TypeError, ValueError) as error:
        if not given or type(error) not in (TypeError, ValueError):  # a store that is damaged, say
            raise
        told = " ".join(f"{name}={value}" for name, value in given.items())
        raise type(error)(f"option {told}: {error}") from None
