"""Draw which stream lies in which lane when.

As text, a letter a stream (the 27th is a again), its first time step in
capitals, padding as dots, or as a picture, by matplotlib. Streams are read only
if nothing else tells how long they are.

Examples:
  stream-dataloader timeline videos/ --batch-size 8
  stream-dataloader timeline clips.store --windows packed --steps 20
  stream-dataloader timeline videos/ --workers 2 --output timeline.svg --theme dark
"""

from __future__ import annotations

import argparse
import shutil

from stream_dataloader.cli.arguments import DONE, PROBLEM, positive, print_json
from stream_dataloader.cli.target import add_lanes, add_target, find_target, reading
from stream_dataloader.visualize import timeline

_SUFFIXES = (".png", ".svg", ".pdf")


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_target(parser)
    add_lanes(parser)
    parser.add_argument("--steps", type=positive, metavar="N", help="draw N batches at most")
    parser.add_argument("--output", metavar="FILE", help=f"draw a picture: {', '.join(_SUFFIXES)}")
    parser.add_argument("--theme", choices=["light", "dark"], default="light", help="of the picture")


def run(options: argparse.Namespace) -> int:
    """Draw."""
    output = options.output
    if output is not None and not output.endswith(_SUFFIXES):
        raise ValueError(f"--output is {output}; name a file that ends in {', '.join(_SUFFIXES)}")
    target = find_target(options)
    with reading(target, options, target.lengths(skip=options.on_error == "skip")) as loader:
        drawn = timeline(loader, steps=options.steps, num_workers=options.workers)
    if output is not None:
        names = [target.name(number) for number in range(len(target.sources))]
        drawn.save(output, theme=options.theme, sources=names)
    if options.json:
        segments = [segment._asdict() | {"name": target.name(segment.source)} for segment in drawn.segments]
        about = {name: getattr(drawn, name) for name in ("lanes", "steps", "time_steps", "padding_share")}
        alternatives = [one._asdict() for one in drawn.alternatives]
        print_json(about | {"segments": segments, "alternatives": alternatives})
    elif output is None:
        print(drawn.text(shutil.get_terminal_size((100, 24)).columns))
    else:
        print(f"written {output}")
    return PROBLEM if target.skipped else DONE
