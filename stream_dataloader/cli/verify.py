"""Read all of a store and compare checksums.

Examples:
  stream-dataloader verify clips.store
  stream-dataloader verify shards/ --format mds --json
"""

from __future__ import annotations

import argparse

from stream_dataloader import stores
from stream_dataloader.cli.arguments import DONE, PROBLEM, add_options, print_json, with_options
from stream_dataloader.stores._packing.report import Bar


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("store", metavar="STORE", help="a folder, a file, or a URL")
    parser.add_argument("--format", help="the store's format (default: found)")
    add_options(parser, "--option", "the store's format, as stores.open takes it")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Verify a store."""
    _, store = with_options(options.option, stores.open, options.store, format=options.format)
    with Bar(desc="verifying", total=len(store), unit="stream", disable=None) as bar:
        problems = store.verify(lambda *_: bar.update())
    if options.json:
        print_json({"path": store.path, "streams": len(store), "problems": problems})
    else:
        found = len(problems) or "no"
        for problem in problems:
            print(problem)
        print(f"{len(store):,} streams of {store.path} were read, {found} problem(s) found")
    return PROBLEM if problems else DONE
