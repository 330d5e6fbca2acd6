"""Measures contenders against each other on a machine that does other things too.

Guarantee: contenders take turns, round by round, each round starting with another one, and a ratio is the
median of the rounds' own ratios; what slows the machine down for a while slows all of them down.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import torch

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
        at_most: Whether the target is an upper limit, or a lower one.
    """

    section: str
    name: str
    value: float
    unit: str
    spread: tuple[float, float]
    target: float | None = None
    at_most: bool = True

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one."""
        if self.target is None:
            return None
        return self.value <= self.target if self.at_most else self.value >= self.target


def take_turns(contenders: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run all contenders once a round, after a round that does not count.

    Args:
        contenders: Each returns the figure of one run.
        rounds: How many rounds count.

    Returns:
        The figures of each contender, one a round.
    """
    return run_in_turns(contenders, rounds)


def run_in_turns(contenders: Mapping[str, Callable[[], Outcome]], rounds: int) -> dict[str, list[Outcome]]:
    """The same for contenders that return anything: several figures, say."""
    names = list(contenders)
    outcomes: dict[str, list[Outcome]] = {name: [] for name in names}
    for turn in range(-1, rounds):
        for i in range(len(names)):
            name = names[(turn + i) % len(names)]
            gc.collect()
            outcome = contenders[name]()
            if turn >= 0:
                outcomes[name].append(outcome)
    return outcomes


def figure(section: str, name: str, values: Sequence[float], unit: str, target: float | None = None) -> Result:
    """The median of one contender's figures; a target is an upper limit."""
    return Result(section, name, statistics.median(values), unit, (min(values), max(values)), target)


def ratio(
    section: str, name: str, rounds: Rounds, above: str, below: str, target: float | None = None, at_most: bool = True
) -> Result:
    """The median over rounds of one contender's figure divided by another's."""
    ratios = [a / b for a, b in zip(rounds[above], rounds[below], strict=True)]
    return Result(section, name, statistics.median(ratios), "x", (min(ratios), max(ratios)), target, at_most)


def print_table(results: Sequence[Result]) -> None:
    """Print the results, a section at a time."""
    width = max(len(result.name) for result in results)
    section = None
    for result in results:
        if result.section != section:
            section = result.section
            print(f"\n{section}")
        low, high = result.spread
        line = f"  {result.name:{width}} {result.value:>10,.4g} {result.unit:5} {low:>9,.4g} to {high:<9,.4g}"
        if result.target is not None:
            limit = "at most" if result.at_most else "at least"
            line += f"  {limit} {result.target:<7,.3g} {'met' if result.met else 'MISSED'}"
        print(line.rstrip())


def write_json(path: Path, results: Sequence[Result]) -> None:
    """Write the results, and what they were measured with."""
    machine = {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    lines = [{**asdict(result), "met": result.met} for result in results]
    path.write_text(json.dumps({"machine": machine, "results": lines}, indent=2) + "\n")


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
