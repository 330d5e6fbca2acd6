"""Does what the README says hold when things break? Makes the tables of its page on failures.

- `kills`: a random worker is killed (SIGKILL) at a random step or moment; the batches must be those of a run without.
- `restores`: stopped at a random step and gone on with another number of workers; the same.
- `faults`: bad input and faults of all kinds; each must be told of, or be handled as asked, within 10 seconds.
- `epochs`: a short list, left after its second batch again and again; nothing may be left behind.
- `interrupts`: signals whose handler raises, at random moments; what it raises must arrive.

Guarantee: a run that takes longer than 60 seconds is counted as a hang and shown with the stacks of all its
processes; it stops nothing else. Each run is repeated by its name:
`python benchmarks/reliability.py [--quick] [--only SECTION [--run NAME]] [--json PATH]`.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import live
import psutil
from interleaved import Result, figure, write_json
from reliability_checks import FAULTS, run_fault
from reliability_epochs import EPOCHS, leave_early
from reliability_interrupts import INTERRUPTS, interrupt
from reliability_runs import Finding, run_kill, run_restore
from together import failing_threads

HANG_SECONDS = 60
_RUNS_A_PROCESS = 25  # few enough for a failure to depend on little but the seed


class Outcome(NamedTuple):
    """Result of one run.

    Attributes:
        run: Its name within the section.
        seconds: How long it took.
        problem: What should not be, with the traceback or stacks; empty if nothing.
        hang: It did not end.
        finding: What it found.
    """

    run: str
    seconds: float
    problem: str
    hang: bool
    finding: Finding


def runs_of(section: str, *, quick: bool) -> list[str]:
    """The names of a section's runs."""
    if section == "kills":
        return [str(seed) for seed in range(3 if quick else 300)]
    if section == "restores":
        return [str(seed) for seed in range(3 if quick else 1000)]
    if section == "faults":
        return list(FAULTS)[:: 4 if quick else 1]
    counts = EPOCHS if section == "epochs" else INTERRUPTS
    chosen = list(counts.items())[:: 3 if quick else 1]
    return [f"{how} {max(count // (50 if quick else 1), 1)}" for how, count in chosen]


SECTIONS = ("kills", "restores", "faults", "epochs", "interrupts")


def perform(section: str, run: str) -> Outcome:
    """Do one run, here."""
    begin = time.monotonic()
    problem, finding = "", Finding()
    try:
        with failing_threads():
            finding = _finding(section, run)
    except BaseException:
        problem = traceback.format_exc()
    return Outcome(run, time.monotonic() - begin, problem, hang=False, finding=finding)


def _finding(section: str, run: str) -> Finding:
    if section == "kills":
        return run_kill(int(run))
    if section == "restores":
        return run_restore(int(run))
    if section == "faults":
        return run_fault(run)
    how, count = run.rsplit(maxsplit=1)
    return (leave_early if section == "epochs" else interrupt)(how, int(count), alive=_say_alive)


def _say_alive() -> None:
    print(flush=True)


def plain(outcome: Outcome) -> dict[str, Any]:
    """An outcome for json."""
    return {**outcome._asdict(), "finding": asdict(outcome.finding)}


def serve(section: str, runs: Sequence[str]) -> None:
    """Do some runs, and print a line of json for each."""
    faulthandler.register(signal.SIGUSR1)  # inherited by workers
    warnings.simplefilter("ignore")
    for run in runs:
        outcome = perform(section, run)
        print(json.dumps(plain(outcome)), flush=True)


def watched(section: str, runs: Sequence[str]) -> Iterator[Outcome]:
    """Do some runs in a process of their own; what hangs or ends it is an outcome too, and the others go on."""
    left = list(runs)
    while left:
        with tempfile.TemporaryDirectory() as folder:
            said, told = Path(folder, "said"), Path(folder, "told")
            with said.open("w") as stdout, told.open("w") as stderr:
                command = [sys.executable, __file__, "--only", section, "--serve", *left]
                process = subprocess.Popen(command, stdout=stdout, stderr=stderr, start_new_session=True)
            try:
                hang = not _wait(process, said)
                if hang:
                    _have_stacks_written(process.pid)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            for line in said.read_text().splitlines():
                if line:
                    fields = json.loads(line)
                    left.remove(fields["run"])
                    yield Outcome(**{**fields, "finding": Finding(**fields["finding"])})
            if left:
                what = "hangs" if hang else f"ended its process with status {process.returncode}"
                problem = f"{what}\n{told.read_text()[-20_000:]}"
                yield Outcome(left.pop(0), float(hang * HANG_SECONDS), problem, hang, Finding())


def _wait(process: subprocess.Popen[bytes], said: Path) -> bool:
    """Wait for a process to end; False if it has not said a word for too long."""
    size, since = 0, time.monotonic()
    while process.poll() is None:
        time.sleep(0.05)
        if (now := said.stat().st_size) != size:
            size, since = now, time.monotonic()
        if time.monotonic() - since > HANG_SECONDS:
            return False
    return True


def _have_stacks_written(pid: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        main = psutil.Process(pid)
        for process in (main, *main.children(recursive=True)):
            process.send_signal(signal.SIGUSR1)
            time.sleep(0.5)


def run_section(section: str, *, quick: bool) -> list[Outcome]:
    """Do all runs of a section, and tell of each that went wrong at once."""
    live.begin(section)
    runs, outcomes = runs_of(section, quick=quick), list[Outcome]()
    size = 1 if section in ("epochs", "interrupts") else _RUNS_A_PROCESS
    for first in range(0, len(runs), size):
        for outcome in watched(section, runs[first : first + size]):
            outcomes.append(outcome)
            live.doing(f"{len(outcomes)} of {len(runs)} runs: {outcome.run}")
            if outcome.problem:
                live.show(f"{section}, run {outcome.run!r}:\n{outcome.problem}\n")
        live.done(f"{len(outcomes)} of {len(runs)} runs")
    return outcomes


_TITLES = {
    "kills": "a random worker killed at a random step or moment",
    "restores": "restored at a random step, with another number of workers",
    "faults": "bad input and faults, see below",
    "epochs": "epochs left after the second batch, see below",
    "interrupts": "signals at random moments, see below",
}


def print_tables(outcomes: dict[str, list[Outcome]]) -> None:
    """Print what was found as tables in markdown."""
    print("\n| what was done | runs | wrong | hangs | longest run |\n|---|---|---|---|---|")
    for section, found in outcomes.items():
        counts: dict[str, int] = {}
        for outcome in found:
            for name, count in outcome.finding.counts.items():
                counts[name] = counts.get(name, 0) + count
        more = "".join(f"; {count:,} {name}" for name, count in counts.items())
        wrong, hangs = sum(bool(o.problem) for o in found), sum(o.hang for o in found)
        longest = max(o.seconds for o in found)
        print(f"| {_TITLES[section]}{more} | {len(found):,} | {wrong - hangs} | {hangs} | {longest:.1f} s |")
    for section in ("faults", "epochs", "interrupts"):
        heads = [outcome.finding.cells for outcome in outcomes.get(section, []) if outcome.finding.cells]
        if heads:
            print(f"\n| {' | '.join(['', *heads[0], 'time'])} |\n|{'---|' * (len(heads[0]) + 2)}")
        for outcome in outcomes.get(section, []):
            cells = outcome.finding.cells
            if outcome.problem:
                cells = {"": f"WRONG: {outcome.problem.splitlines()[-1][:200]}"}
            line = [outcome.run, *cells.values(), f"{outcome.seconds:.1f} s"]
            print(f"| {' | '.join(text.replace('|', chr(92) + '|') for text in line)} |")


def results_of(section: str, found: Sequence[Outcome]) -> list[Result]:
    """Return the failures and durations of runs, for the table of all programs."""
    wrong, hangs = sum(bool(outcome.problem) for outcome in found), sum(outcome.hang for outcome in found)
    seconds = [outcome.seconds for outcome in found]
    title = f"{section}: {_TITLES[section]}"
    counts = {"wrong": wrong - hangs, "hangs": hangs}
    return [
        *(Result(title, name, count, "runs", (count, count), 0) for name, count in counts.items()),
        figure(title, "a run", seconds, "s"),
    ]


def main() -> None:
    """Run the sections and print the tables; ends with status 1 if anything went wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few runs of each kind")
    parser.add_argument("--only", choices=SECTIONS, help="one section")
    parser.add_argument("--run", help="one run of the section, in this process")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write everything there")
    parser.add_argument("--serve", nargs="*", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve is not None:
        serve(given.only, given.serve)
        return
    outcomes: dict[str, list[Any]] = {}
    if given.run is not None:
        outcomes[given.only] = [outcome := perform(given.only, given.run)]
        print(outcome.problem, file=sys.stderr)
    else:
        for section in [given.only] if given.only else SECTIONS:
            outcomes[section] = run_section(section, quick=given.quick)
    live.say()
    print_tables(outcomes)
    if given.json:
        results = [result for section, found in outcomes.items() for result in results_of(section, found)]
        everything = {section: [plain(outcome) for outcome in found] for section, found in outcomes.items()}
        write_json(given.json, results, quick=given.quick, outcomes=everything)
    wrong = [f"{section}: {outcome.run}" for section, found in outcomes.items() for outcome in found if outcome.problem]
    killed = sum(outcome.finding.counts.get("killed", 0) for outcome in outcomes.get("kills", []))
    if given.run is None and "kills" in outcomes and not killed:
        wrong.append("kills: no worker was killed")
    sys.exit(f"went wrong: {'; '.join(wrong)}" if wrong else 0)


if __name__ == "__main__":
    main()
