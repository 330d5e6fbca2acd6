"""Common parts of the programs' commands: options, and printing results as soon as they are there.

Guarantee: what was measured before a program failed or was stopped is printed, and written where `--json` says. A
program fails if a thread that it started fails, if a section has no row, and if a time or a rate is 0 or no number.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import live
from interleaved import LeftOut, Row, line_of, write_json
from together import failing_threads

__all__ = ["Section", "measure", "parser_of", "run"]

#: Measures; told whether to be quick. Rows that are yielded are printed at once.
Section = Callable[[bool], Iterable[Row]]

_WIDTH = 66
#: Units of which 0 says that nothing was measured.
_NEVER_ZERO = {"s", "ms", "us", "1/s", "b/s", "f/s", "it/s", "GB/s", "x"}


def parser_of(description: str | None, sections: Iterable[str]) -> argparse.ArgumentParser:
    """The options that all programs have; some add more."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds: under a minute")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the results here")
    parser.add_argument("--only", nargs="+", choices=[*sections], metavar="SECTION", help=", ".join(sections))
    return parser


def measure(sections: Mapping[str, Section], options: argparse.Namespace) -> list[Row]:
    """Measure what the options ask for, print it as it comes, and write it."""
    rows: list[Row] = []
    headline = None
    try:
        for name in options.only or sections:
            live.begin(name)
            for row in _checked(name, sections[name], options.quick):
                if row.section != headline:
                    headline = row.section
                    live.say(f"\n{headline}")
                live.say(line_of(row, _WIDTH))
                rows.append(row)
    finally:
        if options.json:
            write_json(options.json, rows, quick=options.quick)
    return rows


def _checked(name: str, section: Section, quick: bool) -> Iterator[Row]:
    """The rows of a section; raises where what should have been measured did not run."""
    row: Row | None = None
    with failing_threads():
        for row in section(quick):
            if not isinstance(row, LeftOut) and row.unit in _NEVER_ZERO and not row.value > 0:
                raise RuntimeError(f"{row.section}: {row.name}: {row.value} {row.unit}: nothing was measured")
            yield row
    if row is None:
        raise RuntimeError(f"section {name} measured nothing")


def run(description: str | None, sections: Mapping[str, Section]) -> None:
    """All that the command of a program does that has no options of its own."""
    measure(sections, parser_of(description, sections).parse_args())
