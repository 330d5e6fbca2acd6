"""Checks of the faults of `reliability_faults`, and of states, iterators and processes.

Guarantee: what is returned was seen; what should not be raises an AssertionError that says what was seen instead.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from reliability_faults import BAD, ITEMS, SOURCES, Fault, item, kinds, raising, reading
from reliability_runs import Finding, counting_restarts

from stream_dataloader import StateError, StreamBatch, StreamDataLoader, StreamDataset, StreamError
from stream_dataloader._engine.reading.plan import OnError
from stream_dataloader.errors import FailureLimitError, IteratorError

_MOST_SECONDS = 10
_MOST_SHOWN = 120
Cells = list[tuple[int, int]]


def sound(source: int) -> Any:
    """A stream that has nothing wrong."""
    return (item(source, position) for position in range(ITEMS))


def cells(batch: Any) -> Cells:
    """The items that a batch brings for the first time: source and position."""
    if not isinstance(batch, StreamBatch):
        return []
    real = batch.mask
    if getattr(batch.data, "ndim", 0) == 3:
        assert (batch.data[real][:, 0] == batch.source_index[real]).all(), "an item is of another stream"
        assert (batch.data[real][:, 1] == batch.position[real]).all(), "an item is of another place"
    return list(zip(batch.source_index[real].tolist(), batch.position[real].tolist(), strict=True))


def read(fault: Fault, on_error: OnError) -> tuple[list[Cells], Exception | None, list[StreamError]]:
    """Read an epoch: what came, the error at its end, what was skipped."""
    begin, found, failures, error = time.monotonic(), list[Cells](), list[StreamError](), None
    options = fault.loader | (fault.skip_loader if on_error == "skip" else {})
    try:
        dataset = StreamDataset(
            fault.sources, fault.open_stream, 2, on_error=on_error, **{"time_steps": 2, **fault.options}
        )
        loader = StreamDataLoader(dataset, 2, **options)
        failures = loader.failures
        for batch in loader:
            found.append(cells(batch))
    except AssertionError:
        raise
    except Exception as raised:
        error = raised
    seconds = time.monotonic() - begin
    assert seconds < _MOST_SECONDS, f"on_error={on_error!r}: took {seconds:.1f} s, and ended with {error!r}"
    return found, error, failures


def check_error(fault: Fault, on_error: OnError, expected: list[Cells]) -> str:
    """Read, check that the fault is told of in its place, and return what is told."""
    found, error, _ = read(fault, on_error)
    told = f"on_error={on_error!r}: {error!r}, after {len(found)} batches"
    assert fault.error is not None
    assert isinstance(error, fault.error), f"{told}; it should be a {fault.error.__name__}"
    assert re.search(fault.says, str(error), re.DOTALL), f"{told}; it should say {fault.says!r}"
    assert found == expected[: len(found)], f"{told}; the batches before it differ"
    if isinstance(error, StreamError) and error.source_index == BAD:
        first = next(i for i, batch in enumerate(expected) if (BAD, min(fault.kept, ITEMS - 1)) in batch)
        assert len(found) == first, f"{told}; it should come after {first}"
    return f"`{type(error).__name__}` {_shown(str(error))}"


def check_rest(fault: Fault, on_error: OnError) -> str:
    """Read, check that nothing is missing but what is listed, and return what is told."""
    found, error, failures = read(fault, on_error)
    told = f"on_error={on_error!r}: {error!r}, after {len(found)} batches; skipped {failures}"
    assert error is None, told
    counts = {source: fault.kept if source == BAD else ITEMS for source in range(SOURCES)}
    wanted = [(source, position) for source, count in counts.items() for position in range(count)]
    assert sorted(itertools.chain.from_iterable(found)) == wanted, told
    left_out = [(failure.source_index, failure.position) for failure in failures]
    assert left_out == [(BAD, fault.kept)] if fault.error else not left_out, told
    return "left out and listed" if failures else "all items come"


def _shown(message: str) -> str:
    line = re.sub(r"/\S*/", "…/", message.strip().splitlines()[-1] if message.strip() else "")
    return line if len(line) <= _MOST_SHOWN else f"{line[:_MOST_SHOWN]} …"


def check_fault(name: str, folder: Path) -> dict[str, str]:
    """Meet a fault both ways, and return what the user sees."""
    fault = kinds(folder)[name]
    dataset = StreamDataset(range(SOURCES), sound, 2, time_steps=2)
    expected = [cells(batch) for batch in StreamDataLoader(dataset)]
    raised = check_rest(fault, "raise") if fault.error is None else check_error(fault, "raise", expected)
    if fault.error is None:
        other = "the same"
    elif fault.skips:
        other = check_rest(fault, "skip")
    else:
        check_error(fault, "skip", expected)
        other = "raised all the same"
    return {"what the user sees": raised, 'with on_error="skip"': other}


# faults that are no stream's ------------------------------------------------------------------------------------------


def _raised(kind: type[Exception], says: str, call: Callable[[], Any]) -> dict[str, str]:
    try:
        call()
    except kind as error:
        told = str(error)
    else:
        raise AssertionError(f"no {kind.__name__}")
    assert re.search(says, told), f"{told!r} should say {says!r}"
    return {"what the user sees": f"`{kind.__name__}` {_shown(told)}", 'with on_error="skip"': "—"}


def plain_loader(sources: Any = range(SOURCES), **options: Any) -> StreamDataLoader:
    """A loader that has nothing wrong."""
    return StreamDataLoader(StreamDataset(sources, sound, 2, time_steps=2, **options), 2)


def bad_state(change: Callable[[dict[str, Any]], Any], says: str, **options: Any) -> Callable[[Path], dict[str, str]]:
    """Loads a state that is changed, or is loaded into a dataset that differs."""

    def check(_folder: Path) -> dict[str, str]:
        loader = plain_loader()
        for batch in loader:
            if batch.batch_index == 2:
                break
        state = change(json.loads(json.dumps(loader.state_dict())))
        return _raised(StateError, says, lambda: plain_loader(**options).load_state_dict(state))

    return check


def too_many_failures(_folder: Path) -> dict[str, str]:
    """One more source is skipped than `max_failures` allows."""
    dataset = StreamDataset(
        range(SOURCES), reading(raising(OSError("broken"))), 2, time_steps=2, on_error="skip", max_failures=0
    )
    return _raised(
        FailureLimitError, "1 source was skipped, and max_failures is 0", lambda: list(StreamDataLoader(dataset, 2))
    )


def old_iterator(_folder: Path) -> dict[str, str]:
    """An iterator is used when a newer one has begun."""
    loader = plain_loader()
    old = iter(loader)
    next(old)
    newer = iter(loader)
    first = next(newer)
    seen = _raised(IteratorError, "newer iter", lambda: next(old))
    came = itertools.chain.from_iterable(map(cells, itertools.chain([first], newer)))
    assert sorted(came) == list(itertools.product(range(SOURCES), range(ITEMS)))
    return seen


def killed_between_epochs(_folder: Path) -> dict[str, str]:
    """A worker that is kept dies while nobody reads."""
    dataset = StreamDataset(range(SOURCES), sound, 2, time_steps=2)
    loader = StreamDataLoader(dataset, 2, persistent_workers=True)
    expected = [cells(batch) for batch in loader]
    for worker in psutil.Process().children():
        worker.kill()
        with contextlib.suppress(ChildProcessError):  # the loader has seen it
            os.waitid(
                os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT
            )  # all of its threads; those who started it wait too
    assert [cells(batch) for batch in loader] == expected
    return {"what the user sees": "a warning; all items come", 'with on_error="skip"': "—"}


def stuck(_source: int) -> Any:
    """A factory that never comes to an end."""
    time.sleep(600)


def main_killed(start: str) -> Callable[[Path], dict[str, str]]:
    """The main process is killed while its workers are stuck in their streams."""

    def check(folder: Path) -> dict[str, str]:
        def come(_worker: int) -> None:
            (folder / str(os.getpid())).touch()

        if not (main := os.fork()):
            with contextlib.suppress(BaseException):
                dataset = StreamDataset(range(SOURCES), stuck, 2, time_steps=2)
                list(StreamDataLoader(dataset, 2, multiprocessing_context=start, worker_init_fn=come))
            os._exit(1)
        while len(workers := [int(path.name) for path in folder.iterdir()]) < 2:
            time.sleep(0.01)
        begin = time.monotonic()
        os.kill(main, signal.SIGKILL)
        os.waitpid(main, 0)
        while alive := [pid for pid in workers if _runs(pid)]:
            assert time.monotonic() - begin < _MOST_SECONDS, f"{len(alive)} workers still run"
            time.sleep(0.01)
        return {
            "what the user sees": f"the workers are gone after {time.monotonic() - begin:.1f} s",
            'with on_error="skip"': "—",
        }

    return check


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


OTHERS: dict[str, Callable[[Path], dict[str, str]]] = {
    "a kept worker dies between two epochs": killed_between_epochs,
    "the main process is killed, forked workers": main_killed("fork"),
    "the main process is killed, spawned workers": main_killed("spawn"),
    "more failures than max_failures=0": too_many_failures,
    "an old iterator is used": old_iterator,
    "the state of other sources": bad_state(dict, "other sources", sources=range(1, SOURCES + 1)),
    "the state of other options": bad_state(
        dict, "padding_mode 'zeros', and the dataset has 'drop'", padding_mode="drop"
    ),
    "a state of another version": bad_state(lambda state: {**state, "version": 99}, "version 99"),
    "half a state": bad_state(lambda state: {"version": state["version"]}, "state"),
    "no state at all": bad_state(list, "no state"),
}

#: The names of all faults.
FAULTS = [*kinds(Path()), *OTHERS]


def run_fault(name: str) -> Finding:
    """Meet one of `FAULTS`."""
    with tempfile.TemporaryDirectory() as folder, counting_restarts():
        if name in OTHERS:
            return Finding(OTHERS[name](Path(folder)))
        return Finding(check_fault(name, Path(folder)))
