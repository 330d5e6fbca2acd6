"""Stores against the usual ways to read the same data: a row a comparison, with its target and the bytes on disk.

The rows are those of the modules `_stores_*.py`, which say what is compared with what. A part whose peers are not
installed runs in the environment that `.ci/store_peers` makes; the first time that takes some minutes, so that a quick
run uses it only if it is there. Without it what cannot run is left out, and a line says so. Each ratio is the median
over rounds in which contenders take turns, see `interleaved`. A quick run reads a few batches a contender: it shows
that all works, and its ratios say little.
Run it as `python benchmarks/stores.py [--quick] [--only PART ...] [--json PATH]`.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import multiprocessing
import os
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path

import torch
from interleaved import LeftOut, Row, rows_of
from program import measure, parser_of
from store_rows import SECTION

HERE = Path(__file__).resolve().parent
PARTS = sorted(path.stem.removeprefix("_stores_") for path in HERE.glob("_stores_*.py"))

#: What parts need besides the extra `stores`.
PEERS = {"mds": ["streaming"], "memmap": ["tensordict"], "tar_parquet": ["webdataset"]}
SHIMS = HERE.parent / "tests" / "stores" / "peers" / "shims"  # stand-ins for what mosaicml-streaming imports


def missing(part: str) -> list[str]:
    """The peers of a part that are not installed."""
    return [package for package in PEERS.get(part, []) if importlib.util.find_spec(package) is None]


def measure_part(part: str, quick: bool, *, here: bool) -> Iterator[Row]:
    """The rows of a part, as they come."""
    python = None if here or not missing(part) else peer_python(quick)
    if python is not None:
        yield from measured_by(python, part, quick)
        return
    try:
        module = importlib.import_module(f"_stores_{part}")
    except ModuleNotFoundError as error:
        if (HERE / f"{error.name}.py").exists() or str(error.name).startswith("stream_dataloader"):
            raise  # a module of ours is broken, not missing
        yield LeftOut(SECTION, part, f"it cannot be imported: {error}")
        return
    yield from module.rows(quick)


@cache
def peer_python(quick: bool) -> str | None:
    """The interpreter of the environment with all peers; None if there is none. A quick run does not make it."""
    command = HERE.parent / ".ci" / "store_peers"
    if not command.exists():  # in a source distribution
        return None
    done = subprocess.run([command, "made" if quick else "python"], capture_output=True, text=True, check=False)
    python = done.stdout.strip()
    return python if done.returncode == 0 and os.path.exists(python) else None


def measured_by(python: str, part: str, quick: bool) -> list[Row]:
    """Run a part with another interpreter."""
    paths = [HERE.parent, SHIMS, os.environ.get("PYTHONPATH", "")]
    paths_text = os.pathsep.join(str(path) for path in paths if str(path))
    environment = os.environ | {"PYTHONPATH": paths_text, "PYTHONWARNINGS": "ignore"}  # of peers
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.json")
        command = [python, __file__, "--here", "--json", str(path), "--only", part, *["--quick"] * quick]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        return rows_of(json.loads(path.read_text()))


def main() -> None:
    """Measure all parts, or some."""
    parser = parser_of(__doc__, PARTS)
    parser.add_argument("--here", action="store_true", help="leave out what needs another environment")
    options = parser.parse_args()
    multiprocessing.set_start_method("fork")
    torch.set_num_threads(1)
    measure({part: partial(measure_part, part, here=options.here) for part in PARTS}, options)


if __name__ == "__main__":
    main()
