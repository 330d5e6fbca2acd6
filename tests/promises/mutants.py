"""Plants plausible mistakes of a maintainer, one at a time, in a copy of the package, and says which tests notice.

`mutants/ROOM.txt` has the mistakes of a room: its tests first, as pytest takes them, in the order that notices soonest;
then, for each, a file and what is wrong, the lines that stand there once (`- `), and those that are put there (`+ `).
A line `= why` says that nobody can notice: such a mistake is checked to fit the code, and not counted.

A first run without a mistake notes which functions each test reaches, also in workers that are forked. For a mistake
only the tests run that reach its function, and those that start programs, of which that is not known.

Guarantee: the package itself is not touched; a mistake that does not fit the code any more is an error; and without a
mistake, the tests pass. Run it as `make mutants ROOM=schedule`, or `python tests/promises/mutants.py ROOM [WORDS]` for
those that have the words in their names. It exits with status 1 if less than 85 % of a room are noticed.
"""

import ast
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).with_suffix("")
LEAST_SHARE = 0.85
LEAST_LIMIT_SECONDS = 120
LEAST_TEST_SECONDS, MOST_TEST_SECONDS = 40, 150  # a test that hangs has noticed the mistake, and says so soon

#: A failure that is found needs not be made short, and few tests need the package in the forkserver.
CONFTEST = """
from hypothesis import Phase

settings.register_profile("mutants", settings.get_profile("default"), phases=[Phase.generate], database=None)
settings.load_profile("mutants")
PRELOADED.clear()  # the package takes seconds to come


import mmap, re, zlib

REACHED, SLOTS, FILES = mmap.mmap(-1, 1 << 18), {}, set()  # shared with workers that are forked


def note(frame, event, _):
    code = frame.f_code
    if id(code) not in SLOTS:
        path = code.co_filename.partition("/stream_dataloader/")[2]
        place = zlib.crc32(f"{path}:{code.co_firstlineno}".encode()) % len(REACHED) if path else None
        SLOTS[id(code)] = place, code  # kept, so that its id is not used again
    if (place := SLOTS[id(code)][0]) is not None:
        REACHED[place] = 1


def taken():
    found = [match.start() for match in re.finditer(b"\\x01", REACHED)]
    REACHED[:] = bytes(len(REACHED))
    return found


if os.path.exists("reach"):
    sys.settrace(note)


def pytest_collection_finish(session):
    if os.path.exists("reach"):
        with open("reach", "a") as file:
            print(json.dumps(["", 0, False, False, taken()]), file=file)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    if not os.path.exists("reach"):
        return (yield)
    begun = time.monotonic()
    threading.settrace(note), sys.settrace(note), taken()
    result = yield
    sys.settrace(None), threading.settrace(None)
    text = item.path.read_text()
    unknown = any(word in text for word in ("subprocess.", "settrace", "run_program", "run_trainer", "rank_processes"))
    unknown |= any(word in item.nodeid for word in ("spawn", "forkserver")) or "programs" in item.fixturenames
    first = item.path not in FILES
    FILES.add(item.path)
    with open("reach", "a") as file:
        print(json.dumps([item.nodeid, time.monotonic() - begun, unknown, first, taken()]), file=file)
    return result
"""

#: Each run begins in a process that has imported what takes long, and is not the package; with -c, so that no process
#: that is spawned imports it again.
RUN = """
import json, os, sys, traceback
import hypothesis, numpy, pytest, torch
for line in sys.stdin:
    log, *arguments = json.loads(line)
    if (child := os.fork()) == 0:
        os.setpgid(0, 0)
        for to in (1, 2):
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), to)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        code = 3
        try:
            code = int(pytest.main(arguments))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Mutant(NamedTuple):
    """One mistake: in a file below the package, what stands there once, and what is put there."""

    file: str
    name: str
    old: str
    new: str
    equivalent: str

    def planted(self, text: str) -> str:
        times = text.count(self.old)
        assert times == 1, f"{self.file} has this {times} times, and {self.name!r} changes it:\n{self.old}"
        return text.replace(self.old, self.new)


def mutants_of(room):
    """A room's tests and its mistakes."""
    tests, *blocks = (FOLDER / f"{room}.txt").read_text(encoding="utf-8").strip().split("\n\n")
    found = []
    for block in blocks:
        head, *lines = block.split("\n")
        file, _, name = head.partition(": ")
        parts = {sign: "\n".join(line[2:] for line in lines if line[:1] == sign) for sign in "-+="}
        found.append(Mutant(file, name, *parts.values()))
    return tests.split(), found


def functions_of(mutant):
    """Where the functions begin that a mistake is in, as `FILE:LINE`; None if some of it is in none."""
    text = (ROOT / "stream_dataloader" / mutant.file).read_text(encoding="utf-8")
    first = text[: text.index(mutant.old)].count("\n") + 1
    lines, found = mutant.old.split("\n"), set()
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    for number, line in enumerate(lines, first):
        inside = [node for node in functions if node.body[0].lineno <= number <= node.end_lineno]
        if inside:
            inner = max(inside, key=lambda node: node.lineno)
            found.add(min([inner.lineno, *(one.lineno for one in inner.decorator_list)]))
        elif line.strip():
            return None
    return {f"{mutant.file}:{line}" for line in found}


def reaching(reached, mutant):
    """Tests that may notice a mistake, file by file: files first that are named as a part of its path, then short ones.

    The first test of a file may prepare something for all of them; what is made while files are read may be for any.
    """
    functions = functions_of(mutant)
    places = None if functions is None else {zlib.crc32(one.encode()) % (1 << 18) for one in functions}
    while_read, *reached = reached
    if places is not None and not places.isdisjoint(while_read[-1]):
        places = None
    names = {part.strip("_") for part in Path(mutant.file).with_suffix("").parts[1:]}
    whole, files = set(), {}
    for test, seconds, is_unknown, is_first, found in reached:
        file = test.partition("::")[0]
        hit = places is None or not places.isdisjoint(found)
        whole |= {file} if is_first and hit else set()
        if hit or file in whole or is_unknown:
            files.setdefault(file, []).append((hit or file in whole, seconds, test))

    def order(file):
        hits = [seconds for hit, seconds, _ in files[file] if hit]
        return not hits, not any(name in file for name in names), sum(hits)

    return [test for file in sorted(files, key=order) for _, _, test in files[file]]


ROOMS = sorted(path.stem for path in FOLDER.glob("*.txt"))


class Copy:
    """A copy of the package and its tests, in which pytest runs."""

    def __init__(self, folder):
        self.folder = folder
        ignored = shutil.ignore_patterns("__pycache__", ".hypothesis")
        for name in ("stream_dataloader", "tests", "docs", "examples", "benchmarks", ".ci"):
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        for path in ROOT.glob("*.*"):
            if path.is_file():
                shutil.copy(path, folder)
        with (folder / "tests" / "conftest.py").open("a") as conftest:
            conftest.write(CONFTEST)
        environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": ""}  # compiled once
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        self.server = subprocess.Popen([sys.executable, "-c", RUN], cwd=folder, env=environment, **pipes)

    def run(self, tests, seconds, mutant=None, a_test=900):
        """Whether tests fail, what they say last, and how long they took; the run and each test have a limit."""
        begun = time.monotonic()
        if mutant is not None:
            path = self.folder / "stream_dataloader" / mutant.file
            text = path.read_text(encoding="utf-8")
            path.write_text(mutant.planted(text), encoding="utf-8")
        log = self.folder / f"log-{time.monotonic_ns()}"
        options = [
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-W",
            "ignore::pytest.PytestAssertRewriteWarning",
            "--tb=line",
            "-o",
            f"timeout={a_test:.0f}",
            *tests,
        ]
        print(json.dumps([str(log), *options]), file=self.server.stdin)
        child = int(self.server.stdout.readline())
        ended = subprocess.Popen(["sleep", str(seconds)])
        try:
            code = self._wait(child, ended)
        finally:
            ended.kill()
            ended.wait()
            if mutant is not None:
                path.write_text(text, encoding="utf-8")
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        assert code in (0, 1, 2) or code < 0 or mutant, f"pytest did not run ({code}): {lines[-5:]}"
        return code != 0, [*failed, *lines[-1:], "it hangs"][0], time.monotonic() - begun

    def _wait(self, child, deadline):
        poll = select.poll()
        poll.register(self.server.stdout, select.POLLIN)
        while not poll.poll(200):
            if deadline.poll() is not None:
                os.killpg(child, signal.SIGKILL)
        return int(self.server.stdout.readline())

    def close(self):
        self.server.stdin.close()
        self.server.wait()


def say(text):
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def score(room, words):
    """Plant a room's mistakes; the share that is noticed."""
    tests, mutants = mutants_of(room)
    chosen = [mutant for mutant in mutants if all(word in mutant.name for word in words) and not mutant.equivalent]
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder))
        (reach := copy.folder / "reach").touch()
        failed, said, seconds = copy.run(tests, 3600)
        assert not failed, f"without a mistake: {said}"
        say(f"{room}: without a mistake: {seconds:.0f} s: {said}")
        reached = [json.loads(line) for line in reach.read_text().splitlines()]
        reach.unlink()
        longest = max(seconds for _, seconds, *_ in reached)
        a_test = min(max(LEAST_TEST_SECONDS, 5 * longest), MOST_TEST_SECONDS)
        for mutant in chosen:
            near = reaching(reached, mutant)
            near = [*near, *(option for option in tests if option == "--full")] if near else near
            limit = max(LEAST_LIMIT_SECONDS, 3 * seconds)
            noticed, said, took = copy.run(near, limit, mutant, a_test) if near else (False, "no test reaches it", 0)
            missed += [] if noticed else [mutant.name]
            say(f"{mutant.file}: {mutant.name}: {'noticed' if noticed else 'MISSED'}, {took:.0f} s: {said}")
        copy.close()
    count = len(chosen) - len(missed)
    say(f"{room}: {count} of {len(chosen)} noticed, {count / max(len(chosen), 1):.0%}")
    for name in missed:
        say(f"  not noticed: {name}")
    return count / max(len(chosen), 1)


def main():
    room, *words = sys.argv[1:] or ["all"]
    rooms = ROOMS if room == "all" else [room]
    shares = [score(one, words) for one in rooms]
    sys.exit(min(shares) < LEAST_SHARE)


if __name__ == "__main__":
    main()
