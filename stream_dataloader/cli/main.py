"""The command line: `stream-dataloader COMMAND`, also `python -m stream_dataloader COMMAND`.

Each command is a module. Its docstring is the help, `add` adds its arguments, and `run` returns the
exit status (`arguments`). What it raises ends in one of them too.

Guarantee: what a user can put right is one line on stderr that says how.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import traceback
from collections.abc import Sequence

from stream_dataloader import __version__
from stream_dataloader.cli import demo, inspect, pack, play, profile, timeline, verify
from stream_dataloader.cli.arguments import (
    DONE,
    INTERRUPTED,
    MISTAKE,
    PROBLEM,
    USER_ERRORS,
    FoundWrong,
    UserCodeError,
    warn,
)
from stream_dataloader.errors import StreamDataLoaderError

_COMMANDS = (demo, pack, inspect, timeline, profile, play, verify)

_EXAMPLES = """\
Examples:
  stream-dataloader demo
  stream-dataloader inspect videos/ --batch-size 8
  stream-dataloader profile videos/ --size 360x240 --workers 2
  stream-dataloader COMMAND --help"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, or other arguments than the process has; returns the exit status."""
    options = _parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):  # names of files may have any characters
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status: int = options.run(options)
        return status
    except KeyboardInterrupt as interrupt:
        if str(interrupt):
            warn(interrupt)
        return INTERRUPTED  # as a shell reports SIGINT
    except BrokenPipeError:  # who reads stdout, `head` say, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is flushed at the end
        return DONE
    except UserCodeError as error:
        traceback.print_exception(error.__cause__)
        return PROBLEM
    except (FoundWrong, StreamDataLoaderError, OSError, *USER_ERRORS) as error:
        warn(error)
        is_wrong = isinstance(error, (FoundWrong, StreamDataLoaderError))
        return MISTAKE if isinstance(error, USER_ERRORS) and not is_wrong else PROBLEM


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stream-dataloader",
        description="Temporally coherent batches for PyTorch.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"stream-dataloader {__version__}")
    commands = parser.add_subparsers(required=True)
    for command in _COMMANDS:
        text = command.__doc__ or ""  # which `python -OO` leaves out
        added = commands.add_parser(
            command.__name__.rpartition(".")[2],
            help=text.partition("\n")[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add(added)
        added.set_defaults(run=command.run)
    return parser
