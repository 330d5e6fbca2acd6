"""`stream-dataloader pack SOURCE OUT`: decodes media once, into a store, or converts a store."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from stream_dataloader import stores
from stream_dataloader._advice import available_cores
from stream_dataloader.cli.arguments import DONE, PROBLEM, natural, say, size
from stream_dataloader.cli.media import KINDS, find_media
from stream_dataloader.cli.option_values import add_options, with_options
from stream_dataloader.cli.target import store_at
from stream_dataloader.stores._base.formats import FORMATS

__all__ = ["DESCRIPTION", "EXAMPLES", "add", "run"]

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

_WRITTEN = [name for name, one in FORMATS.items() if one.packer is not None]


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("source", metavar="SOURCE", help="a folder of media, a list of paths, or a store")
    parser.add_argument("out", metavar="OUT", help="where the store will be; there must be nothing")
    parser.add_argument("--format", choices=_WRITTEN, default="memmap", help="of the store (default: memmap)")
    parser.add_argument(
        "--kind", choices=[*KINDS, "store"], help="what SOURCE is (default: found by names and suffixes)"
    )
    parser.add_argument("--from-format", help="the format of SOURCE, if that is a store (default: found)")
    parser.add_argument(
        "--workers", type=natural, default=available_cores(), help="processes (default: one a core); 0: none"
    )
    parser.add_argument("--size", type=size, metavar="WxH", help="of pictures, in pixels (default: as they are)")
    parser.add_argument("--on-error", choices=["raise", "skip"], default="raise", help="about a medium that is broken")
    parser.add_argument("--verify", action="store_true", help="read the store again and compare checksums")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    add_options(parser, "--stream-option", "what opens SOURCE, such as VideoStream's fps=10")
    add_options(parser, "--option", "the store's format")


def run(options: argparse.Namespace) -> int:
    """Pack."""
    streams, keys = _streams(options)
    report = with_options(
        "--option",
        options.option,
        stores.pack,
        streams,
        options.out,
        format=options.format,
        num_workers=options.workers,
        on_error=options.on_error,
        progress=False if options.quiet else None,
        verify=options.verify,
        keys=keys,
    )
    say(str(report))
    return PROBLEM if report.skipped else DONE


def _streams(options: argparse.Namespace) -> tuple[Any, list[str] | None]:
    """What to pack, and the streams' names; a folder of `.npy` files may be read as either, and is media."""
    if (
        options.from_format is not None
        or options.kind == "store"
        or (options.kind is None and store_at(options.source) not in (None, "npy"))
    ):
        if options.size is not None:
            raise ValueError("--size is for videos and images; a store is converted as it is")
        opened = with_options(
            "--stream-option", options.stream_option, stores.open, options.source, format=options.from_format
        )
        return opened, None
    media = find_media(Path(options.source), options.kind)
    return (media.sources, media.factory(options.size, options.stream_option)), media.keys
