"""Changes one decision of the engine at a time, in a copy of the package, and says which tests notice.

Guarantee: the package itself is not touched, and a change that does not fit the code any more is an error. Run it as
`python tests/promises/mutants.py [NAME ...]`: half a minute each, some minutes for one that only the last tests notice.
Ends with status 1 if one is not noticed.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 300  # a mutant that hangs is noticed


#: A failure that is found needs not be made short.
NO_SHRINKING = """
from hypothesis import Phase

settings.register_profile("mutants", settings.get_profile("default"), phases=[Phase.generate])
settings.load_profile("mutants")
"""


class Mutant(NamedTuple):
    """One changed decision: in a file below the package, what stands there once, what is put there, who notices."""

    file: str
    old: str
    new: str
    tests: str = "tests/promises/test_model.py"


MUTANTS = {
    "tickets are decided lane by lane, not by time": Mutant(
        "_schedule/tickets.py", "ticket, lane = heads[0]", "ticket, lane = min(heads, key=lambda head: head[1])"
    ),
    "grants that are to be given again are not saved": Mutant(
        "_schedule/snapshot.py",
        "returned = tuple(self._cursors), tuple(self._missing)",
        "returned = tuple(self._cursors), ()",
    ),
    "parts of dead workers are kept after a restart": Mutant(
        "_loader/collector.py",
        "        self._fifos: list[deque[Part]] = [deque() for _ in self.readers]\n",
        "        self._fifos: list[deque[Part]] = getattr(self, '_fifos', None) or [deque() for _ in self.readers]\n",
    ),
    "tickets are decided one moment too early": Mutant(
        "_schedule/tickets.py", "behind = 2 * min(horizon, NEVER - 1) + 2", "behind = 2 * min(horizon, NEVER - 1) + 4"
    ),
    "tickets ahead are granted in the tail": Mutant(
        "_schedule/rules.py", "left <= TAIL_SOURCES_PER_LANE * self.lanes_of_a_group", "left <= 0"
    ),
    "a lane uses its first ticket ahead again": Mutant(
        "_schedule/tickets.py",
        "map(take, itertools.repeat(True, lookahead + 1 - len(held)))",
        "map(lambda ahead, ticket=take(True): ticket, range(lookahead + 1 - len(held)))",
    ),
    "a refused ticket ahead makes a lane idle": Mutant(
        "_schedule/tickets.py", "now = take(False)", "now = NONE if held else take(False)"
    ),
    "the second pass of a cycle is the last new one": Mutant(
        "_schedule/order.py", "self.epoch + turn if self._cycles", "self.epoch + min(turn, 1) if self._cycles"
    ),
    "what is read again counts as new": Mutant(
        "_schedule/order.py", "fresh = self._cycles or turn == 0", "fresh = self._cycles or turn <= 1"
    ),
    "the first grant that is to be given again is lost": Mutant(
        "_schedule/tickets.py", "if 0 <= place < len(again)", "if 0 < place < len(again)"
    ),
    "a state has lanes as they were a step before": Mutant(
        "_schedule/snapshot.py",
        "            self._lanes[i] = report.progress\n",
        "            late = self.__dict__.setdefault('late', {})\n"
        "            self._lanes[i], late[i] = late.get(i, self._lanes[i]), report.progress\n",
    ),
    "cursors are forgotten on resume": Mutant(
        "_schedule/tickets.py", "self._cursors[hosted] = cursor", "self._cursors[hosted] = 0"
    ),
    "reservations are not restored": Mutant(
        "_reading/opener.py",
        "= resume.lanes[lane].reserved\n",
        "= resume.lanes[lane].reserved and ()\n",
    ),
    "a worker resumes the first lanes, not its own": Mutant(
        "_reading/reader.py",
        "None if resume is None else resume.lanes[lane] for lane",
        "None if resume is None else resume.lanes[lane - self.opener.lanes.start] for lane",
    ),
    "drop delivers a step with an idle lane": Mutant(
        "_assembly/part.py", "return lanes_read == lanes if", "return lanes_read >= lanes - 1 if"
    ),
    "a stream that starts in mid-window is not marked": Mutant(
        "_reading/lane.py", "position == current.begin\n", "position == current.begin and t == 0\n"
    ),
    "padding has a position": Mutant(
        "_assembly/bookkeeping.py",
        "np.full(self._shape, -1), np.full(self._shape, -1)",
        "np.full(self._shape, -1), np.full(self._shape, 0)",
    ),
    "the error of the highest lane is raised": Mutant(
        "_loader/iteration.py", "raise min(errors, key", "raise max(errors, key"
    ),
    "the last group gets the rest of the sources": Mutant(
        "_schedule/rules.py",
        "(sources - group + self.total - 1) // self.total",
        "(sources + group) // self.total",
        "tests/ranks/test_groups.py",
    ),
    "ranks end with the first, not the last": Mutant(
        "_ranks/agreement.py", "last = max(map(int, ends))", "last = min(map(int, ends))", "tests/ranks/test_ranks.py"
    ),
    "a slot is free while its batch is held": Mutant(
        "_assembly/slot_pool.py",
        "slot_states[slot] = _LEASED",
        "slot_states[slot] = _FREE",
        "tests/assembly/test_shared_memory_batches.py",
    ),
}


def mutate(package, mutant):
    path = package / mutant.file
    text = path.read_text()
    assert text.count(mutant.old) == 1, f"{mutant.file} has this {text.count(mutant.old)} times: {mutant.old}"
    path.write_text(text.replace(mutant.old, mutant.new))


def notices(folder, tests):
    """Whether tests fail in a folder; what they say last."""
    limit = ["timeout", "-k", "5", str(LIMIT_SECONDS)]  # ends all that the tests have started, too
    pytest = [sys.executable, "-m", "pytest", "-q", "-x", "--full", "-p", "no:cacheprovider", "--tb=line", tests]
    environment = os.environ | {"PYTHONPATH": str(folder), "STREAM_DATALOADER_CASES": "1"}
    done = subprocess.run(limit + pytest, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1, 124, 137), done.stdout + done.stderr
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return done.returncode != 0, [*failed, *done.stdout.splitlines()[-1:], "it hangs"][0]


def copied(folder):
    ignored = shutil.ignore_patterns("__pycache__", ".hypothesis")
    for name in ("stream_dataloader", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)
    with (folder / "tests" / "conftest.py").open("a") as conftest:
        conftest.write(NO_SHRINKING)
    return folder / "stream_dataloader"


def main():
    names = sys.argv[1:] or [""]
    missed = []
    for name, mutant in MUTANTS.items():
        if not any(part in name for part in names):
            continue
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            mutate(copied(Path(folder)), mutant)
            noticed, said = notices(Path(folder), mutant.tests)
        missed += [] if noticed else [name]
        how = "noticed" if noticed else "MISSED"
        sys.stdout.write(f"{name}: {how}, {time.monotonic() - begun:.0f} s: {said}\n")
        sys.stdout.flush()
    sys.exit(f"not noticed: {', '.join(missed)}" if missed else 0)


if __name__ == "__main__":
    main()
