"""Common parts of `stores.py`: rows, rates, and the check whether a peer is installed."""

from __future__ import annotations

import importlib.util
import itertools
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from interleaved import LeftOut, Outcome, Result, Rounds, ratio, run_in_turns

__all__ = ["SECTION", "bytes_of", "in_turns", "rate_of", "row_of", "without"]

SECTION = "stores: ours / the usual way to read the same data"


def row_of(
    name: str, rounds: Rounds, above: str, below: str, target: float | None, disk_bytes: int, note: str = ""
) -> Result:
    """The median over rounds of one contender's figure divided by another's; a target is a lower limit."""
    note = "; ".join(filter(None, (f"{disk_bytes / 1e6:,.0f} MB on disk", note)))
    return ratio(SECTION, name, rounds, above, below, target, at_most=False, note=note)


def in_turns(contenders: Mapping[str, Callable[[], Outcome]], what: str, quick: bool) -> dict[str, list[Outcome]]:
    """Run all contenders, five times after a round that does not count, or if quick twice."""
    return run_in_turns(contenders, 2 if quick else 5, what, warm_up=not quick)


def rate_of(batches: Iterable[Any], count: Callable[[Any], int], first: int = 1, most: int | None = None) -> float:
    """Return the content of batches per second, without the start of workers.

    Args:
        batches: A loader.
        count: How much a batch holds.
        first: Batches that are not counted, as workers start meanwhile.
        most: How many are counted, at most.
    """
    iterator = iter(batches)
    for _ in range(first):
        next(iterator)
    begun = time.perf_counter()
    total = sum(count(batch) for batch in itertools.islice(iterator, most))
    return total / (time.perf_counter() - begun)


def bytes_of(path: str | os.PathLike[str]) -> int:
    """Return the bytes of a file, or of all files below a folder."""
    path = Path(path)
    files = (file for file in path.rglob("*") if file.is_file()) if path.is_dir() else iter([path])
    return sum(file.stat().st_size for file in files)


def without(package: str, name: str) -> LeftOut | None:
    """Return the text of a row whose peer is not installed."""
    if importlib.util.find_spec(package) is not None:
        return None
    return LeftOut(SECTION, name, f"the package {package} is not installed")
