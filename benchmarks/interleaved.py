"""Measures contenders against each other on a machine that does other things too.

Guarantee: contenders take turns, round by round, each round starting with another one, and a ratio is the
median of the rounds' own ratios; what slows the machine down for a while slows all of them down. Each round that
ends is told, see `live`.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import live

Outcome = TypeVar("Outcome")

#: Seconds, or another figure, of each contender, one entry a round.
Rounds = Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Result:
    """One line of the table.

    Attributes:
        section: What it belongs to.
        name: What was measured.
        value: The figure, in `unit`.
        unit: `"x"` for a ratio.
        spread: The smallest and the largest figure of all rounds.
        target: The limit, or None where there is none.
        at_most: Whether less is better, so that the target is an upper limit, or more.
        note: What else there is to say.
    """

    section: str
    name: str
    value: float
    unit: str
    spread: tuple[float, float]
    target: float | None = None
    at_most: bool = True
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one."""
        if self.target is None:
            return None
        return self.value <= self.target if self.at_most else self.value >= self.target


class LeftOut(NamedTuple):
    """A measurement that was left out.

    Attributes:
        section: What it belongs to.
        name: What would have been measured.
        why: A few words.
    """

    section: str
    name: str
    why: str


#: What a program tells.
Row = Result | LeftOut


def take_turns(
    contenders: Mapping[str, Callable[[], float]], rounds: int, what: str | None = None, warm_up: bool = True
) -> dict[str, list[float]]:
    """Run all contenders once a round, after a round that does not count.

    Args:
        contenders: Each returns the figure of one run.
        rounds: How many rounds count.
        what: What is measured, for those who watch; by default some of the contenders' names.
        warm_up: Whether there is a round that does not count; contenders that warm up by themselves need none.

    Returns:
        The figures of each contender, one a round.
    """
    return run_in_turns(contenders, rounds, what, warm_up)


def run_in_turns(
    contenders: Mapping[str, Callable[[], Outcome]], rounds: int, what: str | None = None, warm_up: bool = True
) -> dict[str, list[Outcome]]:
    """The same for contenders that return anything: several figures, say."""
    names = list(contenders)
    what = what or ", ".join([*names[:2], *["..."] * (len(names) > 2)])
    outcomes: dict[str, list[Outcome]] = {name: [] for name in names}
    for turn in range(-1 if warm_up else 0, rounds):
        now = f"round {turn + 1} of {rounds}" if turn >= 0 else "a first round"
        for i in range(len(names)):
            name = names[(turn + i) % len(names)]
            gc.collect()
            live.doing(f"{now}: {what}: {name}")
            outcome = contenders[name]()
            if turn >= 0:
                outcomes[name].append(outcome)
        live.done(f"{now}: {what}")
    return outcomes


def figure(
    section: str, name: str, values: Sequence[float], unit: str, target: float | None = None, at_most: bool = True
) -> Result:
    """The median of one contender's figures."""
    return Result(section, name, statistics.median(values), unit, (min(values), max(values)), target, at_most)


def ratio(
    section: str,
    name: str,
    rounds: Rounds,
    above: str,
    below: str,
    target: float | None = None,
    at_most: bool = True,
    note: str = "",
) -> Result:
    """The median over rounds of one contender's figure divided by another's."""
    ratios = [a / b for a, b in zip(rounds[above], rounds[below], strict=True)]
    return Result(section, name, statistics.median(ratios), "x", (min(ratios), max(ratios)), target, at_most, note)


def print_table(rows: Sequence[Row]) -> None:
    """Print rows, a section at a time."""
    width = max((len(row.name) for row in rows), default=0)
    section = None
    for row in rows:
        if row.section != section:
            section = row.section
            live.say(f"\n{section}")
        live.say(line_of(row, width))


def line_of(row: Row, width: int, beside: str = "") -> str:
    """A line of a table whose names are so wide; `beside` stands before the note."""
    if isinstance(row, LeftOut):
        return f"  {row.name:{width}} left out: {row.why}"
    low, high = row.spread
    line = f"  {row.name:{width}} {row.value:>10,.4g} {row.unit:5} {low:>9,.4g} to {high:<9,.4g}"
    if row.target is not None:
        limit = "at most" if row.at_most else "at least"
        line += f"  {limit} {row.target:<7,.3g} {'met' if row.met else 'MISSED'}"
    elif row.unit == "x":  # other figures are only what a ratio is made of
        line += "  no target"
    return "  ".join(filter(None, (line.rstrip(), beside, row.note)))


def write_json(path: Path, rows: Sequence[Row], **more: Any) -> None:
    """Write rows, what they were measured with, and whatever else there is."""
    machine = {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": version("torch"),
    }
    results = [{**asdict(row), "met": row.met} for row in rows if isinstance(row, Result)]
    left_out = [row._asdict() for row in rows if isinstance(row, LeftOut)]
    path.write_text(json.dumps({"machine": machine, **more, "results": results, "left_out": left_out}, indent=2) + "\n")


def rows_of(written: Mapping[str, Any]) -> list[Row]:
    """The rows of a file that was written."""
    results = [{name: value for name, value in row.items() if name != "met"} for row in written["results"]]
    left_out = written.get("left_out", [])
    return [
        *(Result(**row | {"spread": tuple(row["spread"])}) for row in results),
        *(LeftOut(**row) for row in left_out),
    ]


def draw(
    path: Path, title: str, unit: str, sizes: Sequence[int], lines: Mapping[str, tuple[str, list[Result]]]
) -> None:
    """Draw medians against the size of a batch in bytes, and the span of all rounds, on logarithmic axes.

    Args:
        lines: Style and results, one a size, by name.
    """
    from matplotlib.figure import Figure  # needed only here

    image = Figure(figsize=(8, 4.67), dpi=150, layout="constrained")
    axes = image.add_subplot(xscale="log", yscale="log")
    for name, (style, results) in lines.items():
        (line,) = axes.plot(sizes, [result.value for result in results], style, markersize=5, label=name)
        low, high = zip(*(result.spread for result in results), strict=True)
        axes.fill_between(sizes, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    axes.set_xticks(sizes, [f"{size >> 10} KiB" if size < 1 << 20 else f"{size >> 20} MiB" for size in sizes])
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("size of a batch (bytes)")
    axes.set_ylabel(f"throughput ({unit})")
    axes.set_title(title, fontsize=11)
    axes.grid(color="0.9")
    axes.legend(loc="lower right", frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.savefig(path)
