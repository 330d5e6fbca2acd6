"""Decode media once, into a store.

SOURCE is a folder of media, a list of paths (.txt, one per line), or a store
to convert. After an interrupt, call it again: it continues where it stopped.

Examples:
  stream-dataloader pack videos/ clips.store --size 360x240
  stream-dataloader pack list.txt out.store --kind images --on-error skip
  stream-dataloader pack clips.store clips.mds --format mds --option compression=zstd
  stream-dataloader pack videos/ clips.store --part $SLURM_ARRAY_TASK_ID/100
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from functools import partial

from stream_dataloader import stores
from stream_dataloader._engine.advice import available_cores
from stream_dataloader.cli.arguments import (
    add_options,
    add_target,
    find_target,
    natural,
    with_options,
)
from stream_dataloader.stores._base.formats import FORMATS


def add(parser: ArgumentParser) -> None:
    add_target(parser, "SOURCE", format_argument="--from-format", option_argument="--stream-option")
    add = parser.add_argument
    add("out", metavar="OUT", help="path of the new store; nothing may exist there")
    formats = [name for name, one in FORMATS.items() if one.packer is not None]
    shown = "(default: %(default)s)"
    add("--format", dest="out_format", choices=formats, default="memmap", help=shown)
    add_options(parser, "--option", of="the store's format", dest="out_option")
    more = "stores.pack has 0"
    add(
        *("--workers", "--num-workers"),
        type=natural,
        default=available_cores(),
        help=f"processes; 0: none (default: as many as cores, %(default)s; {more})",
    )
    add(
        "--part",
        type=_part,
        metavar="I/N",
        help="pack part I of N, from 0 on; other machines pack the others, and `join` makes them one store",
    )
    add("--verify", action="store_true", help="read the store again and compare checksums")
    add("--quiet", action="store_true", help="show no progress")


def _part(text: str) -> tuple[int, int]:
    number, _, parts = text.partition("/")
    return int(number), int(parts)


def run(options: Namespace) -> bool:
    target = find_target(options, packing=True)
    own = target.kind == "store"  # names
    names = None if own else list(map(target.name, range(len(target.sources))))
    pack = partial(
        stores.pack,
        (target.sources, target.open_stream),
        options.out,
        format=options.out_format,
        num_workers=options.workers,
        on_error=options.on_error,
        progress=False if options.quiet else None,
        verify=options.verify,
        keys=names,
        part=options.part,
    )
    report = with_options(options.out_option, pack)
    print(report)
    return bool(report.skipped)
