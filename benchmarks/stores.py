"""Stores against the usual ways to read the same data: a row a comparison, with its target and the bytes on disk.

The rows are those of the modules `_stores_*.py`, which say what is compared with what. A part whose peers are not
installed runs in the environment that `.ci/store_peers` makes; the first time that takes some minutes. Without it what
cannot run is left out, and a line says so. Each ratio is the median over rounds in which contenders take turns, see
`interleaved`. A quick run reads a few batches a contender, once: it shows that all works, and its ratios say little.
Run it as `python benchmarks/stores.py [--quick] [--only PART ...] [--json PATH]`.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import multiprocessing
import os
import subprocess
import tempfile
from pathlib import Path

import torch
from interleaved import Result, write_json
from store_rows import Row

HERE = Path(__file__).resolve().parent
PARTS = sorted(path.stem.removeprefix("_stores_") for path in HERE.glob("_stores_*.py"))

#: What parts need besides the extra `stores`.
PEERS = {"mds": ["streaming"], "memmap": ["tensordict"], "tar_parquet": ["webdataset"]}
SHIMS = HERE.parent / "tests" / "stores" / "peers" / "shims"  # stand-ins for what mosaicml-streaming imports


def missing(part: str) -> list[str]:
    """The peers of a part that are not installed."""
    return [package for package in PEERS.get(part, []) if importlib.util.find_spec(package) is None]


def show(row: Row) -> None:
    """Print one row."""
    name, value, target, note = row
    wanted = "" if target is None else f"at least {target:g}: {'met' if value >= target else 'MISSED'}"
    print(f"{name:<68} {value:>7.3g} x  {wanted:<20} {note}", flush=True)


def measure(part: str, quick: bool) -> list[Row]:
    """Run a part here, and print its rows."""
    try:
        module = importlib.import_module(f"_stores_{part}")
    except ImportError as error:
        print(f"left out, as it cannot be imported: {part} ({error})", flush=True)
        return []
    found: list[Row] = []
    for row in module.rows(quick):
        show(row)
        found.append(row)
    return found


def peer_python() -> str | None:
    """The interpreter of the environment with all peers; None if there is none."""
    command = HERE.parent / ".ci" / "store_peers"
    if not command.exists():  # in a source distribution
        return None
    done = subprocess.run([command, "python"], capture_output=True, text=True, check=False)
    python = done.stdout.strip()
    return python if done.returncode == 0 and os.path.exists(python) else None


def measure_elsewhere(parts: list[str], python: str, quick: bool) -> list[Row]:
    """Run parts with another interpreter, which prints their rows."""
    paths = [HERE.parent, SHIMS, os.environ.get("PYTHONPATH", "")]
    paths_text = os.pathsep.join(str(path) for path in paths if str(path))
    environment = os.environ | {"PYTHONPATH": paths_text, "PYTHONWARNINGS": "ignore"}  # of peers
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.json")
        command = [python, __file__, "--here", "--json", str(path), "--only", *parts, *["--quick"] * quick]
        subprocess.run(command, env=environment, check=True)
        results = json.loads(path.read_text())["results"]
    return [(one["name"], one["value"], one["target"], one["section"]) for one in results]


def main() -> None:
    """Measure, print rows as they come, and write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="less data and one round: about a minute")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--here", action="store_true", help="leave out what needs another environment")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the rows here")
    arguments = parser.parse_args()
    multiprocessing.set_start_method("fork")
    torch.set_num_threads(1)
    away = [] if arguments.here else [part for part in arguments.only if missing(part)]
    python = peer_python() if away else None
    here = [part for part in arguments.only if python is None or part not in away]
    found = [row for part in here for row in measure(part, arguments.quick)]
    if python is not None:
        found += measure_elsewhere(away, python, arguments.quick)
    if arguments.json:
        results = [Result(note, name, value, "x", (value, value), target, False) for name, value, target, note in found]
        write_json(arguments.json, results)


if __name__ == "__main__":
    main()
