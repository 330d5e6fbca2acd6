"""Comparison with saved figures: only ratios, as machines differ, and only changes beyond their spread.

A ratio has changed if the spreads of its rounds, then and now, are apart by more than half of the wider one. Of two
runs of the same code, with three rounds each, one ratio in forty would; that the spreads do not overlap is so for one
in ten.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from interleaved import Result, rows_of

__all__ = ["Comparison", "Key", "by_key", "compare", "verdict"]

#: Units of figures that are the same on every machine.
RATIOS = ("x", "of 1")

#: Program, section and name of a row.
Key = tuple[str, str, str]


@dataclass
class Comparison:
    """Differences between two runs.

    Attributes:
        judged: How many ratios were compared.
        changed: Ratios that are better or worse, with what they were.
        only_now: What was not there.
        only_saved: What is not there any more.
    """

    judged: int = 0
    changed: dict[Key, tuple[str, Result]] = field(default_factory=dict)
    only_now: list[Key] = field(default_factory=list)
    only_saved: list[Key] = field(default_factory=list)


def verdict(now: Result, saved: Result) -> str:
    """`"better"`, `"worse"`, or nothing where the difference may be chance."""
    gap = max(now.spread[0] - saved.spread[1], saved.spread[0] - now.spread[1])
    wider = max(high - low for low, high in (now.spread, saved.spread))
    if wider == 0 or gap <= wider / 2:  # of a single round each, nothing is known
        return ""
    return "better" if (now.value < saved.value) == now.at_most else "worse"


def by_key(programs: Mapping[str, Mapping[str, Any]]) -> dict[Key, Result]:
    """The results of programs' files."""
    found = ((program, row) for program, written in programs.items() for row in rows_of(written))
    return {(program, row.section, row.name): row for program, row in found if isinstance(row, Result)}


def compare(now: Mapping[Key, Result], saved: Mapping[Key, Result], complete: Iterable[str]) -> Comparison:
    """Compare rows of programs, of which some have measured all they can: what these lack is gone."""
    found = Comparison()
    complete = set(complete)
    known = {program for program, _, _ in saved}
    for key, result in now.items():
        if key not in saved:
            found.only_now += [key] * (key[0] in known)
        elif result.unit in RATIOS:
            found.judged += 1
            if said := verdict(result, saved[key]):
                found.changed[key] = said, saved[key]
    found.only_saved = [key for key in saved if key[0] in complete and key not in now]
    return found
