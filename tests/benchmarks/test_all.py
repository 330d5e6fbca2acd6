"""All programs by one command: a table of everything, what is wrong with some, and what has changed since."""

import json
import os
import subprocess
import sys

import pytest
from helpers import PATIENCE, ROOT

#: A program whose ratio is what a file says, in three rounds.
GOOD = """
from pathlib import Path
from interleaved import figure, ratio, take_turns
from program import run

def measure(quick):
    rates = iter(Path(__file__).with_name("rates").read_text().split())
    rounds = take_turns({"ours": lambda: float(next(rates)), "theirs": lambda: 1.0}, 3)
    yield figure("speed", "ours", rounds["ours"], "1/s")
    yield ratio("speed", "ours / theirs", rounds, "ours", "theirs", 3, at_most=False)
    yield ratio("time", "theirs / ours", rounds, "theirs", "ours")

if __name__ == "__main__":
    run(__doc__, {"speed": measure})
"""

MAIN = '\nif __name__ == "__main__":\n    '
PROGRAMS = {
    "good.py": GOOD,
    "broken.py": f'{MAIN}raise ValueError("no disk")\n',
    "lacking.py": f"import no_such_package\n{MAIN}pass\n",
    "without_device.py": f'{MAIN}print("there is no device")\n',
    "part_of_one.py": "",
    "_private.py": f"{MAIN}raise AssertionError\n",
}
#: One that measures something, and then does something else.
BEGUN = """
import os, signal, time
from interleaved import figure
from program import run

def measure(quick):
    yield figure("speed", "quick" if quick else "full", [1.0], "x")
    {}

if __name__ == "__main__":
    run(__doc__, {{"speed": measure}})
"""


@pytest.fixture
def folder(tmp_path):
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def run_all(folder, *options, rates="1 2 2.1 2.2"):
    """The command's status and what it prints to stdout, and to stderr."""
    (folder / "rates").write_text(rates)
    command = [sys.executable, ROOT / "benchmarks" / "all.py", "--quick", "--folder", folder, *options]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'benchmarks'}"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=PATIENCE)
    return done.returncode, [" ".join(line.split()) for line in done.stdout.splitlines()], done.stderr


def test_one_table_of_everything_tells_what_failed_and_what_was_left_out(folder):
    status, lines, said = run_all(folder)
    assert status == 1
    assert "ours / theirs 2.1 x 2 to 2.2 at least 3 MISSED" in lines
    assert {
        "lacking: left out: the package no_such_package is not installed",
        "without_device: left out: there is no device",
    } <= set(lines)
    assert any(line.startswith("broken: FAILED: ValueError: no disk") for line in lines)
    assert lines[lines.index("programs that failed: 1") + 1] == "broken: ValueError: no disk"
    assert "programs left out: 2" in lines
    assert lines[lines.index("targets missed: 1") + 1] == ("good: speed: ours / theirs: 2.1 (2 to 2.2), at least 3")
    assert "targets met: 0 of 1" in lines
    assert any(line.startswith("all programs took") and line.endswith("at most 480 met") for line in lines)
    assert any(line.startswith("theirs / ours") and line.endswith("no target") for line in lines)
    assert "good: speed, 0 s: round 3 of 3: ours, theirs\n" in said
    assert "\r" not in said
    assert not any("part_of_one" in line or "_private" in line for line in lines)
    assert list(json.loads((folder / "results" / "quick.json").read_text())) == ["good"]


def test_ratios_are_compared_with_what_was_saved(folder):
    options = ["--only", "good", "--json", folder / "first.json"]
    assert run_all(folder, *options)[0] == 0
    saved = json.loads((folder / "first.json").read_text())
    saved["good"]["results"][0]["name"] = "another name"
    (folder / "first.json").write_text(json.dumps(saved))

    status, lines, _ = run_all(folder, "--only", "good", "--against", folder / "first.json", rates="1 4 4.1 4.2")
    assert status == 0
    assert "ours / theirs 4.1 x 4 to 4.2 at least 3 met was 2.1: BETTER" in lines
    assert lines[lines.index("better beyond the spread: 2") + 1] == (
        "good: speed: ours / theirs: 4.1 (4 to 4.2), was 2.1 (2 to 2.2)"
    )
    assert "worse beyond the spread: none" in lines
    assert lines[lines.index("not in what was saved: 1") + 1] == "good: speed: ours"
    assert lines[lines.index("only in what was saved: 1") + 1] == "good: speed: another name"

    lines = run_all(folder, "--only", "good", rates="1 2 4.1 6")[1]  # against the run before
    assert "ours / theirs 4.1 x 2 to 6 at least 3 met was 4.1" in lines
    assert {"better beyond the spread: none", "worse beyond the spread: none"} <= set(lines)

    lines = run_all(folder, "--only", "good", "--against", folder / "first.json", rates="1 1 1.1 1.2")[1]
    assert "worse beyond the spread: 2" in lines


#: What a program does behind its first figure, and what is then said of it.
FAILING = {
    "thread": ("import threading; thread = threading.Thread(target=int, args=('x',)); thread.start()", ""),
    "threads": ("import together; together.in_threads([int, lambda: 1 / 0])", ""),
    "nan": ("yield figure('speed', 'nothing', [float('nan')], 'x')", ""),
    "exits": ("os._exit(1)", ""),
}


@pytest.mark.parametrize(
    ("failing", "options"),
    [(FAILING, ()), ({"slow": ("time.sleep(100_000)", "it was stopped at the limit of 4 s")}, ("--limit", "4"))],
)
def test_programs_that_fail_are_told_and_not_saved(folder, failing, options):
    for name, (does, _) in failing.items():
        (folder / f"{name}.py").write_text(BEGUN.format(does))
    status, lines, _ = run_all(folder, *options, "--only", *failing)
    assert status == 1
    assert f"programs that failed: {len(failing)}" in lines
    for name, (_, text) in failing.items():
        assert any(line.startswith(f"{name}: FAILED: {text}") for line in lines)
    assert "quick 1 x 1 to 1 no target" in lines, "what was measured before"
    assert not (folder / "results").exists()


def test_what_was_measured_before_ctrl_c_is_told_and_saved(folder):
    stop = "os.kill(os.getppid(), signal.SIGINT); time.sleep(100_000)"
    (folder / "interrupting.py").write_text(BEGUN.format(stop))
    status, lines, _ = run_all(folder, "--only", "good", "interrupting", "broken")
    assert status == 1
    assert "ours / theirs 2.1 x 2 to 2.2 at least 3 MISSED" in lines
    assert not any(line.startswith(("interrupting", "broken")) for line in lines)
    assert list(json.loads((folder / "results" / "quick.json").read_text())) == ["good"]


def test_all_programs_are_found():
    command = [sys.executable, ROOT / "benchmarks" / "all.py", "--only", "nothing"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 2
    found = {f"`{name}.py`" for name in done.stderr.split("there are ")[1].strip().split(", ")}
    table = (ROOT / "benchmarks" / "README.md").read_text().split("| File | What it measures | ")[1].split("\n\n")[0]
    assert found == {line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()[2:]} - {"`all.py`"}
