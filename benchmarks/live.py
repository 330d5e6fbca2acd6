"""Says on stderr what is being measured, as it goes: one line that is written over on a terminal, else a line a round.

Guarantee: stdout has the figures alone, each as soon as it is there, and never in the middle of such a line.
"""

from __future__ import annotations

import shutil
import sys
import time

__all__ = ["begin", "doing", "done", "say", "show"]

_ERASE = "\r\x1b[K"
_begun = time.monotonic()
_section = ""


def begin(section: str) -> None:
    """Begin a section, whose time starts now."""
    global _begun, _section
    _begun, _section = time.monotonic(), section


def doing(what: str) -> None:
    """Something begins: told on a terminal only."""
    if sys.stderr.isatty():
        _write_over(_line(what))


def done(what: str) -> None:
    """Something is done, a round, say."""
    show(_line(what))


def show(line: str) -> None:
    """Told on a terminal until the next line comes, or else as a line that stays."""
    if sys.stderr.isatty():
        _write_over(line)
    else:
        print(line, file=sys.stderr, flush=True)


def say(text: str = "") -> None:
    """Print to stdout, in place of what is shown on the terminal."""
    if sys.stderr.isatty():
        print(_ERASE, end="", file=sys.stderr, flush=True)
    print(text, flush=True)


def _line(what: str) -> str:
    since = f"{time.monotonic() - _begun:.0f} s"
    return f"{', '.join(filter(None, (_section, since)))}: {what}"


def _write_over(line: str) -> None:
    width = shutil.get_terminal_size().columns
    print(_ERASE + line[: width - 1], end="", file=sys.stderr, flush=True)
