"""Make one store of the parts that `pack --part` wrote.

Nothing is copied. Call it once, after all parts are packed.

Example:
  stream-dataloader join clips.store
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from stream_dataloader import stores
from stream_dataloader.errors import shown


def add(parser: ArgumentParser) -> None:
    parser.add_argument("store", metavar="STORE", help="the path that was given to pack")


def run(options: Namespace) -> bool:
    info = stores.join(options.store)
    print(f"{shown(info.path)} has {info.streams:,} streams, {info.steps:,} steps")
    return False
