"""Show the contents of a store or a folder of media.

For media, prints a row for each source: codec, size, rate, frames (~ if
estimated), duration, frames between key frames, bytes, and problems. Nothing is
decoded. With --batch-size, prints the number of batches and the padding too.

Examples:
  stream-dataloader inspect videos/
  stream-dataloader inspect videos/ --batch-size 8 --time-steps 16 --workers 4
  stream-dataloader inspect recordings.h5 --format hdf5 --json
"""

from __future__ import annotations

import dataclasses
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from typing import Any

from stream_dataloader.cli.arguments import (
    Target,
    add_lanes,
    add_target,
    find_target,
    natural,
    print_json,
    warn,
)
from stream_dataloader.errors import shown
from stream_dataloader.stores._packing.run import Bar, size_text
from stream_dataloader.visualize import timeline

#: Largest width that a column is padded to. Else one very long name would make every line as long.
_WIDEST = 100

_HEADS = ("source", "codec", "size", "rate", "frames", "duration", "keys", "bytes", "")


def add(parser: ArgumentParser) -> None:
    add_target(parser)
    add = parser.add_argument
    add("--json", action="store_true", help="print JSON")
    add("--streams", type=natural, default=0, metavar="N", help="list N streams of a store")
    add_lanes(parser.add_argument_group("lanes that would read the data"))
    parser.set_defaults(batch_size=None)


def run(options: Namespace) -> bool:
    if options.batch_size is None and options.workers:
        raise ValueError("--workers needs a number of lanes; add --batch-size")
    target = find_target(options)
    tell = _store if target.kind == "store" else _media
    found, lines = tell(target, options)  # as plain data, and as text
    broken = found.get("totals", {}).get("with_problems", 0)
    if options.batch_size is not None:
        if broken and options.on_error == "raise":
            warn("the lanes are left out because some sources have problems; see --on-error skip")
        else:
            found["lanes"], more = _lanes(target, options)
            lines += more
    if options.json:
        print_json(found)
    else:
        print(*map(shown, lines), sep="\n")
    return bool(broken)


def _store(target: Target, options: Namespace) -> tuple[dict[str, Any], list[str]]:
    store = target.open_stream
    info = store.info()
    rows = {
        "store": info.path,
        "format": f"{info.format} {info.version}".strip(),
        "streams": f"{info.streams:,}",
        "steps": "known by reading only" if info.steps is None else f"{info.steps:,}",
        "on disk": "remote" if info.disk_bytes is None else size_text(info.disk_bytes),
        **{f"leaf {name}": leaf for name, leaf in info.leaves.items()},
        **{f"metadata {name}": value for name, value in info.metadata.items()},
    }
    width = min(_WIDEST, max(map(len, rows)))
    lines = [f"{name:<{width}}  {value}" for name, value in rows.items()]
    found = dataclasses.asdict(info)
    numbers = range(min(options.streams, len(store)))
    if first := [{"key": store.key(number), "steps": store.length(number)} for number in numbers]:
        found["first_streams"] = first
        lines.append("")
    for stream in first:
        steps = "?" if stream["steps"] is None else stream["steps"]
        lines.append(f"{steps:>10}  {stream['key']}")
    return found, lines


def _media(target: Target, options: Namespace) -> tuple[dict[str, Any], list[str]]:
    from stream_dataloader.cli.probe import Probe, probe

    bar = Bar(target.sources, desc="inspecting", unit="source", disable=None)
    found = [probe(target, number) for number, _ in enumerate(bar)]
    totals = {
        "sources": len(found),
        "frames": (frames := sum(row.frames or 0 for row in found)),
        "duration_seconds": (seconds := sum(row.duration_seconds or 0 for row in found)),
        "disk_bytes": (disk_bytes := sum(row.disk_bytes for row in found)),
        "with_problems": sum(bool(row.problems) for row in found),
    }
    key = f"{len(found):,} sources, {target.kind}"
    total = Probe(key, target.kind, disk_bytes=disk_bytes)
    total.frames, total.duration_seconds = frames or None, seconds or None
    lines = _table([_HEADS, *(row.row() for row in [*found, total])])
    for row in found:
        lines += [f"problem: {row.key}: {problem}" for problem in row.problems]
    sizes = list(dict.fromkeys(row.size for row in found if row.size))
    if len(sizes) > 1:
        told = ", ".join(sizes)
        lines.append(f"sizes differ ({told}): see --size, --option")
    rows = [dataclasses.asdict(row) for row in found]
    about = {"path": options.target, "kind": target.kind, "sources": rows, "totals": totals}
    return about, lines


def _table(rows: list[Sequence[str]]) -> list[str]:
    """Return the lines of a table, without columns that are empty below their heading."""
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    padded = []
    for number, column in enumerate(columns):
        width = min(_WIDEST, max(map(len, column)))
        pad = str.rjust if number else str.ljust
        padded.append([pad(cell, width) for cell in column])
    return ["  ".join(row).rstrip() for row in zip(*padded, strict=True)]


def _lanes(target: Target, options: Namespace) -> tuple[dict[str, Any], list[str]]:
    lengths = target.lengths(options)
    if lengths is None:
        raise ValueError(f"{options.target}: the lengths of some streams are not known without reading them")
    with target.reading(options, lengths) as loader:
        drawn = timeline(loader)
    busy = [0] * drawn.lanes
    for segment in drawn.segments:
        busy[segment.lane] += segment.stop - segment.start
    longest = busy.index(max(busy))
    of_workers = [sum(busy[lane] for lane in lanes) for lanes in drawn.workers]
    lines = [
        "",
        f"{drawn.batches:,} batches of {drawn.time_steps} time steps, {drawn.lanes} lanes: "
        f"padding {drawn.padding_share:.1%}, "
        f"longest lane {longest} with {busy[longest]:,} items, shortest {min(busy):,}",
    ]
    if len(of_workers) > 1:
        counts = ", ".join(f"{count:,}" for count in of_workers)
        lines.append(f"items of each worker: {counts}")
    found = {
        "batches": drawn.batches,
        "batch_size": drawn.lanes,
        "time_steps": drawn.time_steps,
        "padding_share": drawn.padding_share,
        "longest_lane": longest,
        "items_of_lanes": busy,
        "items_of_workers": of_workers,
    }
    return found, lines
