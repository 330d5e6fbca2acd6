"""The command line: `stream-dataloader COMMAND`, also `python -m stream_dataloader COMMAND`.

Each command is a module with `add`, which adds its arguments, and `run`, which returns the exit status: 0 if all is
well, 1 if something was found to be wrong, 2 if it was called wrongly, 130 after Ctrl-C (`arguments`). What it raises
ends in one of them too.

Guarantee: what a user can put right is one line on stderr that says how; what the user's own code raised comes with its
traceback.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple

from stream_dataloader import __version__
from stream_dataloader.cli import (
    demo_command,
    inspect_command,
    pack_command,
    play_command,
    profile_command,
    timeline_command,
    verify_command,
)
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

__all__ = ["main"]


class _Command(NamedTuple):
    add: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    help: str
    description: str
    examples: str = ""


_COMMANDS = {
    "demo": _Command(
        demo_command.add,
        demo_command.run,
        "stream a folder of videos and film the batches",
        "Streams each video of a folder once and films what the loader delivers: grid.mp4 shows all lanes side by "
        "side, grid.png six consecutive batches.",
        demo_command.EXAMPLES,
    ),
    "pack": _Command(
        pack_command.add,
        pack_command.run,
        "decode media once, into a store",
        pack_command.DESCRIPTION,
        pack_command.EXAMPLES,
    ),
    "inspect": _Command(
        inspect_command.add,
        inspect_command.run,
        "tell what a store or a folder of media holds",
        inspect_command.DESCRIPTION,
        inspect_command.EXAMPLES,
    ),
    "timeline": _Command(
        timeline_command.add,
        timeline_command.run,
        "draw which stream lies in which lane when",
        timeline_command.DESCRIPTION,
        timeline_command.EXAMPLES,
    ),
    "profile": _Command(
        profile_command.add,
        profile_command.run,
        "tell where the time goes, and what would help",
        profile_command.DESCRIPTION,
        profile_command.EXAMPLES,
    ),
    "play": _Command(
        play_command.add,
        play_command.run,
        "show what lanes read",
        play_command.DESCRIPTION,
        play_command.EXAMPLES,
    ),
    "verify": _Command(
        verify_command.add,
        verify_command.run,
        "read all of a store and compare checksums",
        "Reads all of a store and compares it with the checksums that its format has. The exit status is 1 if "
        "something is wrong.",
        verify_command.EXAMPLES,
    ),
}


_EXAMPLES = """\
examples:
  stream-dataloader demo
  stream-dataloader inspect videos/ --batch-size 8
  stream-dataloader profile videos/ --size 360x240 --workers 2
  stream-dataloader COMMAND --help"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status.

    Args:
        arguments: Without the program's name; None takes those of the process.
    """
    options = _parser().parse_args(arguments)
    try:
        return _COMMANDS[options.command].run(options)
    except KeyboardInterrupt as interrupt:
        if str(interrupt):
            warn(interrupt)
        return INTERRUPTED  # as a shell reports SIGINT
    except BrokenPipeError:  # who reads stdout, `head` say, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is flushed at the end goes there
        return DONE
    except UserCodeError as error:
        traceback.print_exception(error.__cause__)
        return PROBLEM
    except (FoundWrong, StreamDataLoaderError) as error:
        warn(error)
        return PROBLEM
    except USER_ERRORS as error:
        warn(error)
        return MISTAKE
    except OSError as error:  # a full disk
        warn(error)
        return PROBLEM


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stream-dataloader",
        description="Temporally coherent batches for PyTorch.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"stream-dataloader {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command in _COMMANDS.items():
        command.add(
            commands.add_parser(
                name,
                help=command.help,
                description=command.description,
                epilog=f"examples:\n{command.examples}" if command.examples else None,
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
        )
    return parser
