"""Draw the streams of each lane over time.

Prints text with a letter for each stream, a capital at its first time step, and
dots for padding; or draws a picture. Streams are read only if their lengths are
not known otherwise.

Examples:
  stream-dataloader timeline videos/ --batch-size 8
  stream-dataloader timeline clips.store --windows packed --batches 20
  stream-dataloader timeline videos/ --workers 2 --output timeline.svg --theme dark
"""

from __future__ import annotations

import shutil
from argparse import ArgumentParser, Namespace

from stream_dataloader.cli.arguments import (
    add_lanes,
    add_target,
    find_target,
    positive,
    print_json,
)
from stream_dataloader.visualize import timeline

_SUFFIXES = (".png", ".svg", ".pdf")


def add(parser: ArgumentParser) -> None:
    add_target(parser)
    add_lanes(parser)
    add, suffixes = parser.add_argument, ", ".join(_SUFFIXES)
    add("--json", action="store_true", help="print JSON")
    add("--batches", type=positive, metavar="N", help="draw at most N batches")
    add("--output", metavar="FILE", help=f"draw a picture: {suffixes}")
    add("--theme", choices=["light", "dark"], default="light", help="of the picture")


def run(options: Namespace) -> bool:
    output = options.output
    if output is not None and not output.endswith(_SUFFIXES):
        raise ValueError(f"--output is {output}; it must end in {', '.join(_SUFFIXES)}")
    target = find_target(options)
    with target.reading(options, target.lengths(options)) as loader:
        drawn = timeline(loader, batches=options.batches, num_workers=options.workers)
    names = {segment.source: target.name(segment.source) for segment in drawn.segments}
    if output is not None:
        drawn.save(output, theme=options.theme, sources=names)
    if options.json:
        about = {
            "lanes": drawn.lanes,
            "batches": drawn.batches,
            "time_steps": drawn.time_steps,
            "padding_share": drawn.padding_share,
            "segments": [one._asdict() | {"name": names[one.source]} for one in drawn.segments],
            "alternatives": [one._asdict() for one in drawn.alternatives],
        }
        print_json(about)
    elif output is None:
        print(drawn.text(shutil.get_terminal_size((100, 24)).columns))
    else:
        print(f"written {output}")
    return bool(target.skipped)
