"""`stream-dataloader inspect TARGET`: tells what a store or media hold, and how lanes would read them."""

from __future__ import annotations

import argparse
import dataclasses
from collections import Counter
from typing import Any

from stream_dataloader.cli.arguments import DONE, PROBLEM, natural, say, say_json, table, warn
from stream_dataloader.cli.probe import Probe, probe
from stream_dataloader.cli.target import Target, add_lanes, add_target, dataset_of, find_target
from stream_dataloader.stores import Store, StoreInfo
from stream_dataloader.stores._packing.report import Bar, size_text
from stream_dataloader.visualize import timeline

HELP = "tell what a store or a folder of media holds"

DESCRIPTION = """\
Tells a store's format, streams, time steps, leaves and size. Of media, a row a
source: codec, size, rate, frames (~: estimated), duration, frames from one key
frame to the next, bytes; and what is wrong with a file. Nothing is decoded.
With --batch-size: how many batches lanes make of it, how much of them is
padding, and the longest lane. The exit status is 1 if something is wrong."""

EXAMPLES = """\
  stream-dataloader inspect videos/
  stream-dataloader inspect videos/ --batch-size 8 --time-steps 16 --workers 4
  stream-dataloader inspect list.txt --kind audio --json
  stream-dataloader inspect clips.store --streams 20
  stream-dataloader inspect recordings.h5 --format hdf5 --json"""

_HEADS = ("source", "codec", "size", "rate", "frames", "duration", "keys", "bytes", "")


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_target(parser)
    parser.add_argument("--streams", type=natural, default=0, metavar="N", help="list the first N streams of a store")
    add_lanes(parser.add_argument_group("how lanes would read it"), batch_size=None, time_steps=None)


def run(options: argparse.Namespace) -> int:
    """Inspect a store or media."""
    if options.batch_size is None and (options.time_steps is not None or options.workers):
        raise ValueError("--time-steps and --workers are about lanes; say how many by --batch-size")
    target = find_target(options)
    if target.kind == "store":
        return _inspect_store(target, options)
    return _inspect_media(target, options)


def _inspect_store(target: Target, options: argparse.Namespace) -> int:
    store: Store = target.open_stream
    info = store.info()
    streams = [(store.key(number), store.length(number)) for number in range(min(options.streams, len(store)))]
    lanes = _lanes(target, options)
    if options.json:
        listed = [{"key": key, "steps": steps} for key, steps in streams]
        say_json(dataclasses.asdict(info) | ({"first_streams": listed} if options.streams else {}) | lanes)
    else:
        _print_store(info, streams)
        _print_lanes(lanes)
    return DONE


def _print_store(info: StoreInfo, streams: list[tuple[str, int | None]]) -> None:
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


def _inspect_media(target: Target, options: argparse.Namespace) -> int:
    found = [
        probe(target.kind, source, target.name(number), target.open_stream)
        for number, source in enumerate(Bar(target.sources, desc="inspecting", unit="source", disable=None))
    ]
    broken = sum(bool(row.problems) for row in found)
    totals = {
        "sources": len(found),
        "frames": sum(row.frames or 0 for row in found),
        "duration_seconds": sum(row.duration_seconds or 0 for row in found),
        "disk_bytes": sum(row.disk_bytes for row in found),
        "with_problems": broken,
    }
    sizes = Counter(row.size for row in found if row.size)
    untold = broken and options.batch_size is not None and options.on_error == "raise"
    lanes = {} if untold else _lanes(target, options)
    if options.json:
        rows = [dataclasses.asdict(row) for row in found]
        say_json({"path": options.target, "kind": target.kind, "sources": rows, "totals": totals} | lanes)
    else:
        _print_media(target.kind, found, totals)
        if len(sizes) > 1:
            say(f"sizes differ ({', '.join(sizes)}): streams of one batch have one size, see {_remedy(target.kind)}")
        _print_lanes(lanes)
    if untold:
        warn("lanes are not told, as some sources have problems; --on-error skip leaves them out")
    return PROBLEM if broken else DONE


def _remedy(kind: str) -> str:
    return "--size" if kind in ("video", "images") else "--stream-option"


def _print_media(kind: str, found: list[Probe], totals: dict[str, Any]) -> None:
    rows = [
        (
            row.key,
            row.codec,
            row.size,
            "" if row.rate is None else f"{row.rate:g}",
            _count(row),
            _clock(row.duration_seconds),
            "" if row.keyframe_interval is None else f"{row.keyframe_interval}",
            size_text(row.disk_bytes),
            "problem" if row.problems else "",
        )
        for row in found
    ]
    counted = (f"{totals['frames']:,}" if totals["frames"] else "", _clock(totals["duration_seconds"] or None), "")
    last = (f"{len(rows):,} sources, {kind}", "", "", "", *counted, size_text(totals["disk_bytes"]), "")
    say(table(_HEADS, [*rows, last]))
    for row in found:
        for problem in row.problems:
            say(f"problem: {row.key}: {problem}")


def _count(row: Probe) -> str:
    return "" if row.frames is None else f"{'' if row.exact else '~'}{row.frames:,}"


def _clock(seconds: float | None) -> str:
    """A duration as people write it: 1:02:03.5."""
    if seconds is None:
        return ""
    tenths = round(10 * seconds)
    hours, minutes = divmod(tenths // 600, 60)
    return f"{f'{hours}:{minutes:02d}' if hours else minutes}:{tenths // 10 % 60:02d}.{tenths % 10}"


def _lanes(target: Target, options: argparse.Namespace) -> dict[str, Any]:
    """How lanes would read it, as plain data; empty if that is not asked for."""
    if options.batch_size is None:
        return {}
    if (lengths := target.lengths(skip=options.on_error == "skip")) is None:
        raise ValueError(f"{options.target}: only reading tells how long some streams are, so lanes are not told")
    drawn = timeline(dataset_of(target, options, lengths), num_workers=options.workers)
    busy = [0] * drawn.lanes
    for segment in drawn.segments:
        busy[segment.lane] += segment.stop - segment.begin
    longest = max(range(drawn.lanes), key=busy.__getitem__)
    return {
        "lanes": {
            "batches": drawn.steps,
            "batch_size": drawn.lanes,
            "time_steps": drawn.time_steps,
            "padding_share": drawn.padding_share,
            "longest_lane": longest,
            "items_of_lanes": busy,
            "items_of_workers": [sum(busy[lane] for lane in lanes) for lanes in drawn.workers],
        }
    }


def _print_lanes(told: dict[str, Any]) -> None:
    if not told:
        return
    lanes = told["lanes"]
    busy, longest = lanes["items_of_lanes"], lanes["longest_lane"]
    say()
    say(
        f"{lanes['batches']:,} batches of {lanes['time_steps']} time steps, {lanes['batch_size']} lanes: padding "
        f"{lanes['padding_share']:.1%}, longest lane {longest} with {busy[longest]:,} items, shortest "
        f"{min(busy):,}"
    )
    if len(lanes["items_of_workers"]) > 1:
        say(f"items of each worker: {', '.join(f'{count:,}' for count in lanes['items_of_workers'])}")
