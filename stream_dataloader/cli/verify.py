"""Read all of a store and compare checksums.

Examples:
  stream-dataloader verify clips.store
  stream-dataloader verify shards/ --format mds --json
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from functools import partial

from stream_dataloader import stores
from stream_dataloader.cli.arguments import add_options, print_json, with_options
from stream_dataloader.errors import shown
from stream_dataloader.stores._packing.run import Bar


def add(parser: ArgumentParser) -> None:
    parser.add_argument("store", metavar="STORE", help="a folder, a file, or a URL")
    parser.add_argument("--format", help="the store's format (default: found)")
    add_options(parser, "--option", of="the store's format, as stores.open takes it")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: Namespace) -> bool:
    open_store = partial(stores.open, options.store, format=options.format)
    _, store = with_options(options.option, open_store)
    with Bar(desc="verifying", total=len(store), unit="stream", disable=None) as bar:
        problems = store.verify(lambda *_: bar.update())
    if options.json:
        print_json({"path": store.path, "streams": len(store), "problems": problems})
    else:
        found = f"{len(problems) or 'no'} problem(s) found"
        print(*map(shown, problems), f"{len(store):,} streams of {shown(store.path)} were read, {found}", sep="\n")
    return bool(problems)
