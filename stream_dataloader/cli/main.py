"""Command line: `stream-dataloader COMMAND`.

Each command is a module: its docstring is the help text, and `run` returns whether something was wrong.

Guarantee: an error that a user can correct is one line on stderr, with the remedy.
"""

from __future__ import annotations

import io
import os
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence

from stream_dataloader import __version__
from stream_dataloader.cli import audit, demo, inspect, join, pack, play, profile, timeline, verify
from stream_dataloader.cli.arguments import FoundWrong, warn
from stream_dataloader.errors import StreamDataLoaderError

#: Exit statuses, as the page on monitoring explains them.
_DONE, _PROBLEM, _MISTAKE, _INTERRUPTED = 0, 1, 2, 130

#: Exceptions that a wrong argument raises.
_WRONG_PATH = FileNotFoundError, FileExistsError, NotADirectoryError, PermissionError
_USER_ERRORS = *_WRONG_PATH, ImportError, TypeError, ValueError

_COMMANDS = (demo, pack, join, inspect, timeline, profile, audit, play, verify)

_EXAMPLES = """\
Examples:
  stream-dataloader demo
  stream-dataloader inspect videos/ --batch-size 8
  stream-dataloader profile videos/ --size 360x240 --workers 2
  stream-dataloader COMMAND --help"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command with the given arguments, or those of the command line; return the exit status."""
    options = _parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):  # names may have any characters
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return _PROBLEM if options.run(options) else _DONE
    except KeyboardInterrupt as interrupt:
        if str(interrupt):
            warn(interrupt)
        return _INTERRUPTED  # as a shell reports SIGINT
    except BrokenPipeError:  # the reader of stdout, `head` for example, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _DONE
    except (FoundWrong, StreamDataLoaderError, OSError, *_USER_ERRORS) as error:
        warn(error)
        if isinstance(error, StreamDataLoaderError):
            return _PROBLEM
        return _MISTAKE if isinstance(error, _USER_ERRORS) else _PROBLEM


def _parser() -> ArgumentParser:
    how = RawDescriptionHelpFormatter
    parser = ArgumentParser(
        prog="stream-dataloader",
        description="Temporally coherent batches for PyTorch.",
        epilog=_EXAMPLES,
        formatter_class=how,
    )
    parser.add_argument("--version", action="version", version=f"stream-dataloader {__version__}")
    commands = parser.add_subparsers(required=True)
    for command in _COMMANDS:
        text = command.__doc__ or ""  # `python -OO` removes docstrings
        name = command.__name__.rpartition(".")[2]
        summary = text.partition("\n")[0]
        added = commands.add_parser(name, help=summary, description=text, formatter_class=how)
        command.add(added)
        added.set_defaults(run=command.run)
    return parser
