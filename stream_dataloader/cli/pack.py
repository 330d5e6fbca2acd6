"""`stream-dataloader pack SOURCE OUT`: decodes media once, into a store, or converts a store."""

from __future__ import annotations

import argparse

from stream_dataloader import stores
from stream_dataloader._advice import available_cores
from stream_dataloader.cli.arguments import DONE, PROBLEM, natural, say
from stream_dataloader.cli.option_values import add_options, with_options
from stream_dataloader.cli.target import add_source, find_target
from stream_dataloader.stores._base.formats import FORMATS

HELP = "decode media once, into a store"

DESCRIPTION = """\
Reads media once and keeps their time steps in a store, from which they are
streamed without decoding. SOURCE is a folder of media, a list of paths (.txt,
one a line), or a store, which is converted. Called again after an interrupt
with the same arguments, it goes on where it stopped."""

EXAMPLES = """\
  stream-dataloader pack videos/ clips.store --size 360x240
  stream-dataloader pack music/ music.store --stream-option window=1600 --stream-option rate=16000
  stream-dataloader pack list.txt out.store --kind images --on-error skip
  stream-dataloader pack clips.store clips.mds --format mds --option compression=zstd"""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_source(parser, "SOURCE", "a folder of media, a list of paths, or a store", "--from-format")
    parser.add_argument("out", metavar="OUT", help="where the store will be; there must be nothing")
    written = [name for name, one in FORMATS.items() if one.packer is not None]
    parser.add_argument("--format", dest="out_format", choices=written, default="memmap", help="(default: memmap)")
    add_options(parser, "--option", "the store's format", dest="out_option")
    parser.add_argument(
        "--workers", type=natural, default=available_cores(), help="processes (default: one a core); 0: none"
    )
    parser.add_argument("--verify", action="store_true", help="read the store again and compare checksums")
    parser.add_argument("--quiet", action="store_true", help="show no progress")


def run(options: argparse.Namespace) -> int:
    """Pack."""
    target = find_target(options, media=["npy"])
    is_store = target.kind == "store"  # which has names of its own
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
        keys=None if is_store else [target.name(number) for number in range(len(target.sources))],
    )
    say(str(report))
    return PROBLEM if report.skipped else DONE
