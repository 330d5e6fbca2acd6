"""Check whether a state can be carried through a loader's rows.

MODULE:FUNCTION returns a StreamDataLoader. For any other loader it returns a
dict of arguments of stream_dataloader.testing.audit, such as ids= and
positions=; loader= is a list for several ranks. The exit status is 1 if the
report has a line to look at.

Examples:
  stream-dataloader audit training:make_loader
  stream-dataloader audit training:make_loader --epochs 3 --batches 500
"""

from __future__ import annotations

import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping

from stream_dataloader.cli import user_code
from stream_dataloader.cli.arguments import positive, print_json
from stream_dataloader.testing import audit


def add(parser: ArgumentParser) -> None:
    add, shown = parser.add_argument, "(default: %(default)s)"
    add("target", metavar="MODULE:FUNCTION", help="a function that returns the loader, or the arguments")
    add("--epochs", type=positive, default=2, help=f"number of epochs to read {shown}")
    add("--batches", type=positive, help="largest number of batches of an epoch to read (default: all)")
    add("--json", action="store_true", help="print JSON")


def run(options: Namespace) -> bool:
    if not user_code.is_name(options.target):
        raise user_code.UserCodeError(f"{options.target} is not MODULE:FUNCTION; give training:make_loader, say")
    try:
        given = user_code.call(options.target)
        arguments = {**given} if isinstance(given, Mapping) else {"loader": given}
        own = {"epochs": options.epochs, "batches": options.batches, "name": options.target}
        found = audit(**own | arguments)
    except user_code.UserCodeError:
        raise
    except Exception:  # of the user's own code
        traceback.print_exc()
        return True
    if options.json:
        print_json(found.as_dict())
    else:
        print(found)
    return bool(found.wrong)
