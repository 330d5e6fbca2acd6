"""`stream-dataloader timeline TARGET`: draws which stream lies in which lane when."""

from __future__ import annotations

import argparse
import shutil

from stream_dataloader.cli.arguments import DONE, PROBLEM, positive, say, say_json
from stream_dataloader.cli.target import add_lanes, add_target, find_target, reading
from stream_dataloader.visualize import timeline

HELP = "draw which stream lies in which lane when"

DESCRIPTION = """\
Draws which stream lies in which lane when: a letter a stream (the 27th is
a again), its first time step in capitals, padding as dots. Or a picture, by
matplotlib. Streams are counted by packets, headers or a store's index; they are
read only if nothing else tells how long they are."""

EXAMPLES = """\
  stream-dataloader timeline videos/ --batch-size 8
  stream-dataloader timeline clips.store --windows packed --steps 20
  stream-dataloader timeline videos/ --workers 2 --output timeline.svg --theme dark"""

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
    if options.output is not None and not options.output.endswith(_SUFFIXES):
        raise ValueError(f"--output is {options.output}; name a file that ends in {', '.join(_SUFFIXES)}")
    target = find_target(options)
    with reading(target, options, target.lengths(skip=options.on_error == "skip")) as loader:
        drawn = timeline(loader, steps=options.steps, num_workers=options.workers)
    if options.output is not None:
        names = [target.name(number) for number in range(len(target.sources))]
        drawn.save(options.output, theme=options.theme, sources=names)
    if options.json:
        segments = [segment._asdict() | {"name": target.name(segment.source)} for segment in drawn.segments]
        about = {"lanes": drawn.lanes, "steps": drawn.steps, "time_steps": drawn.time_steps}
        say_json(about | {"padding_share": drawn.padding_share, "segments": segments})
    elif options.output is None:
        say(drawn.text(shutil.get_terminal_size((100, 24)).columns))
    else:
        say(f"written {options.output}")
    return PROBLEM if target.skipped else DONE
