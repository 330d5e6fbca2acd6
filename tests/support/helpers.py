"""What many tests need: how many random cases to run, and the batches of a loader as plain lists."""

import dataclasses
import inspect
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import settings

from stream_dataloader import StreamDataLoader, StreamDataset

#: The repository.
ROOT = Path(__file__).parents[2]
#: Seconds that no test may take: for what is stuck, and must not be waited for. A test that does is ended as a hang.
FOREVER = 100_000
#: Ways to start a process. `spawn` imports torch in each worker anew, which takes seconds. The server of `forkserver`
#: has imported it, see conftest; what is sent, and how it comes, is alike.
START_METHODS = ["fork", "forkserver", pytest.param("spawn", marks=pytest.mark.slow)]
#: Seconds after which something hangs, on any machine.
PATIENCE = 600

#: Run slow tests, and random cases in full number; set by `--full`, see conftest.
FULL = os.environ.get("STREAM_DATALOADER_FULL") == "1"


#: How many of the random cases `--full` runs, 0 to 1: those that are checked each time need not be all of them.
SHARE = float(os.environ.get("STREAM_DATALOADER_CASES", "1"))


def random_cases(full, quick=None):
    """Settings of a test over random cases: `full` of them with `--full`, else `quick`, by default a twentieth."""
    return settings(max_examples=times(full, max(10, full // 20) if quick is None else quick))


def times(full, quick):
    """How often to try what is a matter of chance: `full` times with `--full`, or that share of them, else `quick`."""
    return max(quick, round(SHARE * full)) if FULL else quick


def seldom(cases, *quick):
    """Cases, tuples for several parameters, of which the quick run has those that are named, and `--full` all."""
    missing = [case for case in quick if case not in cases]
    assert not missing, f"no cases: {missing}"
    return [
        case if case in quick else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for case in cases
    ]


def make_loader(*args, **options):
    own = {name: value for name, value in options.items() if name not in inspect.signature(StreamDataset).parameters}
    dataset = StreamDataset(*args, **{name: value for name, value in options.items() if name not in own})
    return loader_of(dataset, **own)


def read(stream):
    try:
        return list(stream)
    finally:
        if callable(close := getattr(stream, "close", None)):
            close()


def loader_of(*args, messages=False, **options):
    """A loader. With `messages`, its workers send all data in messages, as where there is no shared memory."""
    loader = StreamDataLoader(*args, **options)
    if messages:
        starter = loader._starter
        starter.renew(dataclasses.replace(starter._work.settings, uses_slots=False))
    return loader


def declared(factory, *, early=True):
    """A factory that says whether a second thread may call it."""
    factory.open_early = early
    return factory


def batches(loader, steps=None):
    """The data of a loader's batches as lists `[lane][t]`, of `steps` of them, or of a whole epoch."""
    found = []
    for batch in loader:
        found.append(batch.data.transpose(0, 1).tolist())
        if len(found) == steps:
            break
    return found


def soon(happened, seconds=PATIENCE):
    deadline = time.monotonic() + seconds
    while not happened() and time.monotonic() < deadline:
        time.sleep(0.01)
    return happened()


def run_program(program, *arguments, ranks=1, flags=(), folder=None, **environment):
    """What a program prints, as one process or as so many ranks; it must end well."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks] if ranks > 1 else []
    done = subprocess.run(
        list(map(str, [sys.executable, *flags, *launcher, program, *arguments])),
        check=False,
        capture_output=True,
        encoding="utf-8",
        timeout=PATIENCE,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"} | environment,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_notebook(notebook, executed, folder):
    script = ROOT / "tests" / "notebooks" / "run_notebook.py"
    run_program(script, notebook, executed, PATIENCE, folder=folder, PYTHONPATH=str(ROOT))


def run_trainer(script, folder, *arguments, ranks=2):
    """What each rank of a program of `tests/trainers` wrote down."""
    run_program(ROOT / "tests" / "trainers" / script, folder / "seen", *arguments, ranks=ranks, folder=folder)
    return [json.loads((folder / f"seen.{rank}").read_text()) for rank in range(ranks)]
