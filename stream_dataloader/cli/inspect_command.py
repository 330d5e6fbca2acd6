"""`stream-dataloader inspect STORE`: tells what a store holds."""

from __future__ import annotations

import argparse
import dataclasses

from stream_dataloader import stores
from stream_dataloader.cli.arguments import (
    DONE,
    USER_ERRORS,
    add_store,
    natural,
    options_of,
    say,
    say_json,
    status_of,
    warn,
)
from stream_dataloader.stores import Store, StoreInfo
from stream_dataloader.stores._packing.report import size_text

__all__ = ["EXAMPLES", "add", "run"]

EXAMPLES = """\
  stream-dataloader inspect clips.store
  stream-dataloader inspect clips.store --streams 20
  stream-dataloader inspect recordings.h5 --format hdf5 --json"""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_store(parser)
    parser.add_argument("--streams", type=natural, default=0, metavar="N", help="list the first N streams")


def run(options: argparse.Namespace) -> int:
    """Inspect a store."""
    try:
        store = stores.open(options.store, format=options.format, **options_of(options.option)).open_stream
        info = store.info()
        streams = _streams(store, options.streams)
    except USER_ERRORS as error:
        warn(error)
        return status_of(error)
    if options.json:
        listed = [{"key": key, "steps": steps} for key, steps in streams]
        say_json(dataclasses.asdict(info) | ({"first_streams": listed} if options.streams else {}))
    else:
        _print(info, streams)
    return DONE


def _streams(store: Store, count: int) -> list[tuple[str, int | None]]:
    return [(store.key(number), store.length(number)) for number in range(min(count, len(store)))]


def _print(info: StoreInfo, streams: list[tuple[str, int | None]]) -> None:
    rows = [
        ("store", info.path),
        ("format", f"{info.format} {info.version}".strip()),
        ("streams", f"{info.streams:,}"),
        ("steps", "known by reading only" if info.steps is None else f"{info.steps:,}"),
        ("on disk", "remote" if info.disk_bytes is None else size_text(info.disk_bytes)),
        *((f"leaf {name}", leaf) for name, leaf in info.leaves.items()),
        *((f"metadata {name}", str(value)) for name, value in info.metadata.items()),
    ]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        say(f"{name:<{width}}  {value}")
    if streams:
        say()
        for key, steps in streams:
            say(f"{'?' if steps is None else steps:>10}  {key}")
