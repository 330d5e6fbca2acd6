"""Decode media once, into a store.

Reads media once and keeps their time steps in a store, from which they are
streamed without decoding. SOURCE is a folder of media, a list of paths (.txt,
one a line), or a store, which is converted. Called again after an interrupt
with the same arguments, it goes on where it stopped.

Examples:
  stream-dataloader pack videos/ clips.store --size 360x240
  stream-dataloader pack music/ music.store --stream-option window=1600
  stream-dataloader pack list.txt out.store --kind images --on-error skip
  stream-dataloader pack clips.store clips.mds --format mds --option compression=zstd
"""

from __future__ import annotations

import argparse

from stream_dataloader import stores
from stream_dataloader._advice import available_cores
from stream_dataloader.cli.arguments import DONE, PROBLEM, add_options, natural, with_options
from stream_dataloader.cli.target import add_source, find_target
from stream_dataloader.stores._base.formats import FORMATS


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_source(parser, "SOURCE", format_argument="--from-format")
    add = parser.add_argument
    add("out", metavar="OUT", help="where the store will be; there must be nothing")
    formats = [name for name, one in FORMATS.items() if one.packer is not None]
    shown = "(default: %(default)s)"
    add("--format", dest="out_format", choices=formats, default="memmap", help=shown)
    add_options(parser, "--option", "the store's format", dest="out_option")
    add("--workers", type=natural, default=available_cores(), help=f"processes; 0: none {shown}")
    add("--verify", action="store_true", help="read the store again and compare checksums")
    add("--quiet", action="store_true", help="show no progress")


def run(options: argparse.Namespace) -> int:
    """Pack."""
    target = find_target(options, media=["npy"])
    names = None
    if target.kind != "store":  # which has names of its own
        names = [target.name(number) for number in range(len(target.sources))]
    report = with_options(
        options.out_option,
        stores.pack,
        (target.sources, target.open_stream),
        options.out,
        format=options.out_format,
        num_workers=options.workers,
        on_error=options.on_error,
        progress=False if options.quiet else None,
        verify=options.verify,
        keys=names,
    )
    print(report)
    return PROBLEM if report.skipped else DONE
