"""Runs all programs of this folder, one after another, and gives one table, compared with what was saved.

Each runs in a process of its own with a time limit. One that fails, takes too long or lacks a package is told in the
table, and the others run all the same. The figures are kept in `benchmarks/results`, those of quick runs and of full
ones apart, and the next run is compared with them, or with the file that `--against` names; `comparison` says when a
ratio has changed. A program that was not run, or failed, keeps the figures that were saved. Ends with status 1 if one
failed. Run it as `python benchmarks/all.py [--quick] [--only PROGRAM ...] [--json PATH] [--against PATH]`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import live
from comparison import RATIOS, Comparison, Key, by_key, compare
from interleaved import Result, Row, line_of, rows_of

HERE = Path(__file__).resolve().parent
LIMITS = {True: 300, False: 10_800}  # seconds; on a quiet machine a quick run takes less than sixty
QUICK_SECONDS = 480  # of all programs together, on a quiet machine
_GRACE_SECONDS = 10  # to write what was measured
_MISSING = re.compile(r"ModuleNotFoundError: No module named '(?!stream_dataloader)(\w+)")


@dataclass
class Outcome:
    """Result of a program.

    Attributes:
        written: Its file; empty if there is none.
        seconds: How long it took.
        busy_seconds: Of processors, all of its processes together.
        left_out: Why it measured nothing, which is no fault of its own.
        problem: Why it failed.
        told: The last lines on stderr.
    """

    written: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    busy_seconds: float = 0.0
    left_out: str = ""
    problem: str = ""
    told: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        if self.left_out:
            return f"left out: {self.left_out}"
        took = f"{self.seconds:.0f} s, {self.busy_seconds:.0f} s of processors"
        return f"FAILED: {self.problem} ({took})" if self.problem else took


# programs -------------------------------------------------------------------------------------------------------------


def programs_in(folder: Path) -> dict[str, Path]:
    """The programs of a folder by name; other modules are parts of them."""
    files = [path for path in sorted(folder.glob("[!_]*.py")) if path.resolve() != Path(__file__).resolve()]
    return {path.stem: path for path in files if '\nif __name__ == "__main__":\n' in path.read_text()}


def outcome_of(name: str, program: Path, quick: bool, limit: float) -> Outcome:
    """Run a program; its lines on stderr are shown as they come."""
    outcome, begun, busy = Outcome(), time.monotonic(), _busy_seconds()
    told: deque[str] = deque(maxlen=20)
    live.show(f"{name}: begins")
    with tempfile.TemporaryDirectory() as folder:
        path, printed = Path(folder, "results.json"), Path(folder, "printed")
        command = [sys.executable, str(program), "--json", str(path), *["--quick"] * quick]
        with printed.open("w") as stdout:
            process = subprocess.Popen(
                command, stdout=stdout, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True
            )
        assert process.stderr is not None
        listener = threading.Thread(target=_listen, args=(name, process.stderr, told))
        listener.start()
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            outcome.problem = f"it was stopped at the limit of {limit:g} s"
            _stop(process)
        finally:
            _kill_all(process)
            listener.join()
            process.stderr.close()
        outcome.written = json.loads(path.read_text()) | {"quick": quick} if path.exists() else {}
        lines = printed.read_text(errors="replace").splitlines()
    outcome.seconds, outcome.busy_seconds = time.monotonic() - begun, _busy_seconds() - busy
    outcome.told = list(told)
    if not outcome.problem and process.returncode:
        last = outcome.told[-1] if outcome.told else f"status {process.returncode}"
        missing = _MISSING.match(last)
        outcome.left_out = f"the package {missing[1]} is not installed" if missing else ""
        outcome.problem = "" if missing else last
    elif not outcome.problem and not outcome.written:
        outcome.left_out = lines[-1] if lines else "it said nothing"
    return outcome


def _busy_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _listen(name: str, lines: IO[str], told: deque[str]) -> None:
    for line in lines:
        if text := line.strip():
            told.append(text)
            live.show(f"{name}: {text}")


def _stop(process: subprocess.Popen[str]) -> None:
    """As Ctrl-C would, so that what was measured is written."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


def _kill_all(process: subprocess.Popen[str]) -> None:
    """The program, if it still runs, and whatever it leaves behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# table ----------------------------------------------------------------------------------------------------------------


def print_all(outcomes: Mapping[str, Outcome], found: Comparison, saved: Mapping[Key, Result]) -> None:
    """The table: programs, their sections, and rows with what they were."""
    tables: dict[str, list[Row]] = {name: rows_of(one.written) if one.written else [] for name, one in outcomes.items()}
    width = max((len(row.name) for rows in tables.values() for row in rows), default=0)
    for name, rows in tables.items():
        section = None
        live.say(f"\n{name}: {outcomes[name]}")
        for row in rows:
            if row.section != section:
                section = row.section
                live.say(f" {section}")
            key = name, row.section, row.name
            before = saved.get(key) if isinstance(row, Result) and row.unit in RATIOS else None
            said = f": {found.changed[key][0].upper()}" if key in found.changed else ""
            live.say(line_of(row, width, f"was {before.value:.4g}{said}" if before else ""))


def print_summary(outcomes: Mapping[str, Outcome], found: Comparison, now: Mapping[Key, Result]) -> None:
    """Print the results to look at."""

    def listed(title: str, lines: Sequence[str]) -> None:
        live.say(f"\n{title}: {len(lines) or 'none'}")
        for line in lines:
            live.say(f"  {line}")

    for what in ("better", "worse"):
        pairs = [(key, was) for key, (said, was) in found.changed.items() if said == what]
        lines = [f"{_named(key)}: {_told(now[key])}, was {_told(was)}" for key, was in pairs]
        listed(f"{what} beyond the spread", lines)
    for title, keys in (("not in what was saved", found.only_now), ("only in what was saved", found.only_saved)):
        listed(title, [_named(key) for key in keys])
    judged = {key: one for key, one in now.items() if one.met is not None}
    missed = [f"{_named(key)}: {_told(one)}, {_target(one)}" for key, one in judged.items() if not one.met]
    live.say(f"\ntargets met: {len(judged) - len(missed)} of {len(judged)}")
    listed("targets missed", missed)
    listed("programs left out", [f"{name}: {one.left_out}" for name, one in outcomes.items() if one.left_out])
    failed = {name: one for name, one in outcomes.items() if one.problem}
    listed("programs that failed", [f"{name}: {one.problem}" for name, one in failed.items()])
    for name, one in failed.items():
        live.say("\n".join([f"\nthe last lines of {name}", *(f"  {line}" for line in one.told)]))


def _named(key: Key) -> str:
    return ": ".join(key)


def _told(result: Result) -> str:
    low, high = result.spread
    return f"{result.value:.4g} ({low:.4g} to {high:.4g})"


def _target(result: Result) -> str:
    return f"{'at most' if result.at_most else 'at least'} {result.target:.3g}"


def machines_of(programs: Iterable[Mapping[str, Any]]) -> str:
    """Return the machines that figures were measured on."""
    found = set()
    for one in programs:
        machine = [f"{name} {value}" for name, value in one["machine"].items()]
        found.add(", ".join(["quick" if one.get("quick") else "in full", *machine]))
    return "; ".join(sorted(found))


# command --------------------------------------------------------------------------------------------------------------


def main() -> None:
    """Run, compare, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="quick runs: under a minute each on a quiet machine")
    parser.add_argument("--only", nargs="+", metavar="PROGRAM", help="some programs")
    parser.add_argument("--json", type=Path, metavar="PATH", help="save here (results/quick.json or results/full.json)")
    parser.add_argument("--against", type=Path, metavar="PATH", help="compare with this (the same)")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="of each program (300 if quick, else 10800)")
    parser.add_argument("--folder", type=Path, default=HERE, help="where the programs are (here)")
    options = parser.parse_args()
    programs = programs_in(options.folder)
    if unknown := set(options.only or []) - set(programs):
        parser.error(f"no programs: {', '.join(sorted(unknown))}; there are {', '.join(programs)}")
    if options.against and not options.against.exists():
        parser.error(f"there is no file {options.against}")
    kept = options.folder / "results" / f"{'quick' if options.quick else 'full'}.json"
    against, path = options.against or kept, options.json or kept
    before: dict[str, Any] = json.loads(against.read_text()) if against.exists() else {}

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background has it ignored, by programs too
    outcomes: dict[str, Outcome] = {}
    with contextlib.suppress(KeyboardInterrupt):  # what was measured before Ctrl-C is not lost
        for name in options.only or programs:
            outcomes[name] = outcome_of(name, programs[name], options.quick, options.limit or LIMITS[options.quick])
            live.show(f"{name}: {outcomes[name]}")

    good = {name: one.written for name, one in outcomes.items() if one.written and not one.problem}
    now = by_key({name: one.written for name, one in outcomes.items() if one.written})
    saved = by_key(before)
    found = compare(now, saved, {*good, *(set(before) - set(programs))})
    print_all(outcomes, found, saved)
    print_summary(outcomes, found, now)
    seconds = sum(one.seconds for one in outcomes.values())
    verdict = f", at most {QUICK_SECONDS} {'met' if seconds <= QUICK_SECONDS else 'MISSED'}" if options.quick else ""
    live.say(f"\nall programs took {seconds:.0f} s{verdict}")
    if before:
        live.say(f"\n{found.judged} ratios were compared with {against}: {machines_of(before.values())}")
    if good:
        live.say(f"measured with {machines_of(good.values())}; saved in {path}")
        path.parent.mkdir(parents=True, exist_ok=True)
        old = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(old | good, indent=1) + "\n")
    sys.exit(any(one.problem for one in outcomes.values()) or len(outcomes) < len(options.only or programs))


if __name__ == "__main__":
    main()
