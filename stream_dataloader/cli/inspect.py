"""Tell what a store or a folder of media holds.

Tells a store's format, streams, time steps, leaves and size. Of media, a row a
source: codec, size, rate, frames (~: estimated), duration, frames from one key
frame to the next, bytes; and what is wrong with a file. Nothing is decoded.
With --batch-size: how many batches lanes make of it, how much of them is
padding, and the longest lane. The exit status is 1 if something is wrong.

Examples:
  stream-dataloader inspect videos/
  stream-dataloader inspect videos/ --batch-size 8 --time-steps 16 --workers 4
  stream-dataloader inspect list.txt --kind audio --json
  stream-dataloader inspect clips.store --streams 20
  stream-dataloader inspect recordings.h5 --format hdf5 --json
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from stream_dataloader.cli.arguments import DONE, PROBLEM, natural, print_json, table, warn
from stream_dataloader.cli.probe import Probe, probe
from stream_dataloader.cli.target import PICTURES, Target, add_lanes, add_target, find_target, reading
from stream_dataloader.stores._packing.report import Bar, size_text
from stream_dataloader.visualize import timeline

_HEADS = ("source", "codec", "size", "rate", "frames", "duration", "keys", "bytes", "")


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_target(parser)
    parser.add_argument("--streams", type=natural, default=0, metavar="N", help="list the first N streams of a store")
    add_lanes(parser.add_argument_group("how lanes would read it"), batch_size=None)


def run(options: argparse.Namespace) -> int:
    """Inspect a store or media."""
    if options.batch_size is None and options.workers:
        raise ValueError("--workers is about lanes; say how many by --batch-size")
    target = find_target(options)
    found, lines = _store(target, options) if target.kind == "store" else _media(target, options)
    broken = found.get("totals", {}).get("with_problems", 0)
    if options.batch_size is not None:
        if broken and options.on_error == "raise":
            warn("lanes are not told, as some sources have problems; --on-error skip leaves them out")
        else:
            found["lanes"] = _lanes(target, options)
            lines += ["", *_lines_of_lanes(found["lanes"])]
    if options.json:
        print_json(found)
    else:
        print(*lines, sep="\n")
    return PROBLEM if broken else DONE


def _store(target: Target, options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """What a store holds, as plain data and as text."""
    store = target.open_stream
    info = store.info()
    numbers = range(min(options.streams, len(store)))
    first = [{"key": store.key(number), "steps": store.length(number)} for number in numbers]
    rows = {
        "store": info.path,
        "format": f"{info.format} {info.version}".strip(),
        "streams": f"{info.streams:,}",
        "steps": "known by reading only" if info.steps is None else f"{info.steps:,}",
        "on disk": "remote" if info.disk_bytes is None else size_text(info.disk_bytes),
        **{f"leaf {name}": leaf for name, leaf in info.leaves.items()},
        **{f"metadata {name}": value for name, value in info.metadata.items()},
    }
    width = max(map(len, rows))
    lines = [f"{name:<{width}}  {value}" for name, value in rows.items()]
    if first:
        lines.append("")
    for stream in first:
        steps = "?" if stream["steps"] is None else stream["steps"]
        lines.append(f"{steps:>10}  {stream['key']}")
    found = dataclasses.asdict(info)
    if first:
        found["first_streams"] = first
    return found, lines


def _media(target: Target, options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """What media hold, as plain data and as text."""
    bar = Bar(target.sources, desc="inspecting", unit="source", disable=None)
    found = [probe(target.kind, source, target.name(number), target.open_stream) for number, source in enumerate(bar)]
    total = Probe(f"{len(found):,} sources, {target.kind}", target.kind)
    total.frames = sum(row.frames or 0 for row in found) or None
    total.duration_seconds = sum(row.duration_seconds or 0 for row in found) or None
    total.disk_bytes = sum(row.disk_bytes for row in found)
    lines = [table([_HEADS, *map(_row, found), _row(total)])]
    for row in found:
        lines += [f"problem: {row.key}: {problem}" for problem in row.problems]
    sizes = list(dict.fromkeys(row.size for row in found if row.size))
    if len(sizes) > 1:
        remedy = "--size" if target.kind in PICTURES else "--stream-option"
        told = ", ".join(sizes)
        lines.append(f"sizes differ ({told}): streams of one batch have one size, see {remedy}")
    totals = {
        "sources": len(found),
        "frames": total.frames or 0,
        "duration_seconds": total.duration_seconds or 0,
        "disk_bytes": total.disk_bytes,
        "with_problems": sum(bool(row.problems) for row in found),
    }
    rows = [dataclasses.asdict(row) for row in found]
    about = {"path": options.target, "kind": target.kind, "sources": rows, "totals": totals}
    return about, lines


def _row(found: Probe) -> list[str]:
    frames = "" if found.frames is None else f"{'' if found.exact else '~'}{found.frames:,}"
    duration = ""
    if found.duration_seconds is not None:  # as people write it: 1:02:03.5
        minutes, seconds = divmod(round(found.duration_seconds, 1), 60)
        hours, minutes = divmod(int(minutes), 60)
        duration = f"{hours}:{minutes:02}" if hours else f"{minutes}"
        duration += f":{seconds:04.1f}"
    return [
        found.key,
        found.codec,
        found.size,
        "" if found.rate is None else f"{found.rate:g}",
        frames,
        duration,
        str(found.keyframe_interval or ""),
        size_text(found.disk_bytes),
        "problem" if found.problems else "",
    ]


def _lanes(target: Target, options: argparse.Namespace) -> dict[str, Any]:
    """How lanes would read it."""
    lengths = target.lengths(skip=options.on_error == "skip")
    if lengths is None:
        raise ValueError(f"{options.target}: only reading tells how long some streams are, so lanes are not told")
    with reading(target, options, lengths) as loader:
        drawn = timeline(loader)
    busy = [0] * drawn.lanes
    for segment in drawn.segments:
        busy[segment.lane] += segment.stop - segment.begin
    return {
        "batches": drawn.steps,
        "batch_size": drawn.lanes,
        "time_steps": drawn.time_steps,
        "padding_share": drawn.padding_share,
        "longest_lane": busy.index(max(busy)),
        "items_of_lanes": busy,
        "items_of_workers": [sum(busy[lane] for lane in lanes) for lanes in drawn.workers],
    }


def _lines_of_lanes(lanes: dict[str, Any]) -> list[str]:
    busy, longest = lanes["items_of_lanes"], lanes["longest_lane"]
    lines = [
        f"{lanes['batches']:,} batches of {lanes['time_steps']} time steps, "
        f"{lanes['batch_size']} lanes: padding {lanes['padding_share']:.1%}, "
        f"longest lane {longest} with {busy[longest]:,} items, shortest {min(busy):,}"
    ]
    if len(lanes["items_of_workers"]) > 1:
        told = ", ".join(f"{count:,}" for count in lanes["items_of_workers"])
        lines.append(f"items of each worker: {told}")
    return lines
