"""`stream-dataloader verify STORE`: reads all of a store and compares checksums."""

from __future__ import annotations

import argparse

from stream_dataloader import stores
from stream_dataloader.cli.arguments import DONE, PROBLEM, say, say_json
from stream_dataloader.cli.option_values import with_options
from stream_dataloader.cli.target import add_output
from stream_dataloader.stores._packing.report import Bar

HELP = "read all of a store and compare checksums"

DESCRIPTION = """\
Reads all of a store and compares it with the checksums that its format has. The
exit status is 1 if something is wrong."""

EXAMPLES = """\
  stream-dataloader verify clips.store
  stream-dataloader verify shards/ --format mds --json"""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("store", metavar="STORE", help="a folder, a file, or a URL where the format allows")
    parser.add_argument("--format", help="the store's format (default: found by the names of its files)")
    add_output(parser)


def run(options: argparse.Namespace) -> int:
    """Verify a store."""
    store = with_options(options.option, stores.open, options.store, format=options.format).open_stream
    with Bar(desc="verifying", total=len(store), unit="stream", disable=None) as bar:
        problems = store.verify(lambda *_: bar.update())
    if options.json:
        say_json({"path": store.path, "streams": len(store), "problems": problems})
    else:
        for problem in problems:
            say(problem)
        say(f"{len(store):,} streams of {store.path} were read, {len(problems) or 'no'} problem(s) found")
    return PROBLEM if problems else DONE
