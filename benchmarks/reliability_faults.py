"""Bad input and faults of all kinds, for `reliability`: what does the user see?

Two workers read two lanes, of six sources with seven items each. Source 3 is the bad one, from its item 3 on if the
kind of fault leaves a choice. It is read with `on_error="raise"` and then with `on_error="skip"`.

Guarantee: an error counts only if it is of the right type, says what is wrong and where, and comes after the
batches before it, each as it should be; going on counts only if all other items come, each once, and the loader
lists what it left out. All of it takes less than 10 seconds.
"""

from __future__ import annotations

import errno
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from stream_dataloader import StreamDataLoaderError
from stream_dataloader.errors import (
    EmptySourcesError,
    ItemError,
    LengthError,
    OpenError,
    ReadError,
    WorkerDeathError,
    WorkerTimeoutError,
)

SOURCES, ITEMS, BAD, AT = 6, 7, 3, 3
STARTED = AT - AT % 2  # the item with which the window begins that a worker did not live to finish
Action = Callable[[], Any]
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Attributes:
        open_stream: Where it is.
        error: What is raised; None if the fault is to have no effect.
        says: A regular expression for what the error says.
        kept: How many items of the bad source are read if it is skipped, or has no effect.
        skips: Whether `on_error="skip"` leaves the source out; the error is raised all the same if not.
        options: Of the dataset.
        loader: Options of the loader.
        skip_loader: Further ones if it is to be skipped.
        sources: The sources.
    """

    open_stream: Callable[[Any], Any]
    error: type[Exception] | None
    says: str = ""
    kept: int = AT
    skips: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    loader: dict[str, Any] = field(default_factory=dict)
    skip_loader: dict[str, Any] = field(default_factory=dict)
    sources: Any = range(SOURCES)


def item(source: int, position: int) -> Array:
    """Return the item that streams yield if nothing is wrong."""
    return np.array([source, position])


def reading(action: Action, sound: Callable[[int, int], Any] = item) -> Callable[[int], Iterator[Any]]:
    """Streams of which the bad one yields something else as its item 3."""

    def open_stream(source: int) -> Iterator[Any]:
        for position in range(ITEMS):
            yield action() if (source, position) == (BAD, AT) else sound(source, position)

    return open_stream


def opening(action: Action) -> Callable[[int], Any]:
    """A factory that does something else for the bad source."""
    sound = reading(partial(item, BAD, AT))
    return lambda source: action() if source == BAD else sound(source)


def raising(error: BaseException) -> Action:
    """Raises it."""

    def action() -> NoReturn:
        raise error

    return action


def once(mark: Path, action: Action) -> Action:
    """Does it the first time only, in whatever process; then yields what it should."""

    def first() -> Any:
        if mark.exists():
            return item(BAD, AT)
        mark.touch()
        return action()

    return first


def dying(number: int) -> Action:
    """Sends this process a signal."""

    def action() -> None:
        os.kill(os.getpid(), number)
        time.sleep(60)

    return action


def text(_source: int, position: int) -> str:
    """An item that is an object."""
    return str(position)


def number(_source: int, position: int) -> int:
    """An item that is a number."""
    return position


class CannotBeUnpickled:
    """Goes to another process, and does not arrive."""

    def __reduce__(self) -> Any:
        return _unpickle, ()


def _unpickle() -> NoReturn:
    raise ValueError("not to be unpickled")


class Unspeakable(Exception):
    """An error of which no text can be had."""

    def __repr__(self) -> str:
        raise ValueError("no text")


def with_files(folder: Path, spoil: Callable[[Path], None]) -> Callable[[int], Iterator[Any]]:
    """Streams that read a file each; the bad one's is spoiled before."""

    def open_stream(source: int) -> Iterator[Any]:
        path = folder / f"{source}.bin"
        if not path.exists():
            path.write_bytes(bytes(itertools.chain.from_iterable((source, position) for position in range(ITEMS))))
        if source == BAD and path.is_file():
            spoil(path)
        with path.open("rb") as file:
            while pair := file.read(2):
                yield np.frombuffer(pair, np.uint8).astype(np.int64)

    return open_stream


def no_file(path: Path) -> None:
    """Removes a file."""
    path.unlink()


def folder_instead(path: Path) -> None:
    """Puts a folder where the file should be."""
    path.unlink()
    path.mkdir()


def cut_off(folder: Path, source: int) -> Iterator[Any]:
    """Rows of a memory map, whose file is cut off meanwhile."""
    path = folder / f"{os.getpid()}-{source}.npy"
    np.save(path, np.broadcast_to(np.arange(ITEMS)[:, None], (ITEMS, 4096)))
    rows = np.load(path, mmap_mode="r")
    for position in range(ITEMS):
        if (source, position) == (BAD, AT):
            os.truncate(path, 4096)
        yield item(source, int(rows[position, -1]))


def kinds(folder: Path) -> dict[str, Fault]:
    """All of them, by name; each may use an empty folder."""
    restarts = {"max_restarts": 4}
    no_space, denied = OSError(errno.ENOSPC, "No space left on device"), PermissionError(errno.EACCES, "denied")
    at_item = "source 3 .*item 3, lane ., worker .*"
    dead = "worker . .*{} in lane .*source 3 "
    return {
        "a factory raises": Fault(opening(raising(ValueError("bad header"))), OpenError, "source 3 .*bad header", 0),
        "a factory returns None": Fault(opening(lambda: None), OpenError, "source 3 .*returned None", 0),
        "a factory returns a number": Fault(opening(lambda: 7), OpenError, "source 3 .*no iterable", 0),
        "a file is missing": Fault(with_files(folder, no_file), ReadError, "source 3 .*No such file", 0),
        "a file is a folder": Fault(with_files(folder, folder_instead), ReadError, "source 3 .*Is a directory", 0),
        "a file may not be read": Fault(opening(raising(denied)), OpenError, "source 3 .*denied", 0),
        "a source cannot be pickled": Fault(
            reading(partial(item, 3, 3)), TypeError, "source 3 .*pickled", 0, False, sources=[0, 1, 2, threading.Lock()]
        ),
        "a stream raises": Fault(reading(raising(ValueError("bad frame"))), ReadError, at_item + "bad frame"),
        "a generator raises StopIteration": Fault(reading(raising(StopIteration())), ReadError, at_item + "StopIter"),
        "a stream raises what has no text": Fault(reading(raising(Unspeakable())), ReadError, at_item),
        "out of memory (MemoryError)": Fault(reading(raising(MemoryError())), ReadError, at_item + "MemoryError"),
        "the disk is full": Fault(reading(raising(no_space)), ReadError, at_item + "No space"),
        "a file vanishes in mid-read": Fault(reading(Path("/no/such").read_bytes), ReadError, at_item + "No such"),
        "a connection drops and comes back, retries=2": Fault(
            reading(once(folder / "mark", raising(ConnectionError("reset")))), None, kept=ITEMS, options={"retries": 2}
        ),
        "a connection drops and stays away, retries=2": Fault(
            reading(raising(ConnectionError("reset"))), ReadError, at_item + "reset", options={"retries": 2}
        ),
        "lengths= is too small": Fault(
            reading(partial(item, 3, 3)), LengthError, r"lengths\[3\] is 3", options={"lengths": [7, 7, 7, 3, 7, 7]}
        ),
        "lengths= is too large": Fault(
            reading(partial(item, 3, 3)), LengthError, "only 7 items", ITEMS, options={"lengths": [7, 7, 7, 9, 7, 7]}
        ),
        "a stream is empty": Fault(opening(lambda: ()), None, kept=0),
        'all are empty, padding_mode="cycle"': Fault(
            lambda _: (), EmptySourcesError, "none yielded", 0, False, {"padding_mode": "cycle"}
        ),
        "another shape in a stream": Fault(reading(partial(np.zeros, 3, int)), ItemError, at_item + "and was"),
        "another dtype in a stream": Fault(reading(partial(np.zeros, 2)), ItemError, at_item + "float64"),
        "another structure in a stream": Fault(reading(lambda: {"x": item(3, 3)}), ItemError, at_item),
        "another shape in another stream": Fault(
            opening(lambda: iter(np.zeros((ITEMS, 3), int))),
            ItemError,
            "source 3 .*not fit beside",
            0,
            skips=False,
        ),
        "a number too large for its dtype": Fault(reading(lambda: 10**30, number), ItemError, at_item + "too large"),
        "an item cannot be pickled": Fault(reading(threading.Lock, text), ItemError, "cannot be pickled", skips=False),
        "an item cannot be unpickled": Fault(
            reading(CannotBeUnpickled, text), StreamDataLoaderError, "not to be unpickled", skips=False
        ),
        "fill_value does not fit": Fault(
            reading(partial(item, 3, 3)), ValueError, "fill_value=0.5 does not fit", 0, False, {"fill_value": 0.5}
        ),
        "collate_fn raises": Fault(
            reading(partial(item, 3, 3)), ZeroDivisionError, "", 0, False, loader={"collate_fn": lambda _: 1 / 0}
        ),
        "worker_init_fn raises": Fault(
            reading(partial(item, 3, 3)), ZeroDivisionError, "", 0, False, loader={"worker_init_fn": lambda _: 1 / 0}
        ),
        "a stream kills its worker (SIGKILL)": Fault(
            reading(dying(signal.SIGKILL)), WorkerDeathError, dead.format("SIGKILL"), STARTED, skip_loader=restarts
        ),
        "the same each time, max_restarts=4": Fault(
            reading(dying(signal.SIGKILL)),
            WorkerDeathError,
            "source 3 .*killed its worker 3 times",
            STARTED,
            loader=restarts,
        ),
        "the same once, max_restarts=4": Fault(
            reading(once(folder / "mark", dying(signal.SIGKILL))), None, kept=ITEMS, loader=restarts
        ),
        "a segmentation fault": Fault(
            reading(dying(signal.SIGSEGV)), WorkerDeathError, dead.format("SIGSEGV"), STARTED, skip_loader=restarts
        ),
        "a mapped file is cut off (SIGBUS)": Fault(
            partial(cut_off, folder), WorkerDeathError, dead.format("SIGBUS"), STARTED, skip_loader=restarts
        ),
        "a factory kills its worker": Fault(
            opening(dying(signal.SIGKILL)), WorkerDeathError, "SIGKILL .*opening source 3", 0, skip_loader=restarts
        ),
        "a stream calls os._exit(3)": Fault(
            reading(partial(os._exit, 3)), WorkerDeathError, dead.format("status 3"), STARTED, skip_loader=restarts
        ),
        "a stream calls os._exit(0)": Fault(
            reading(partial(os._exit, 0)), WorkerDeathError, dead.format("status 0"), STARTED, skip_loader=restarts
        ),
        "a stream calls sys.exit()": Fault(
            reading(sys.exit), StreamDataLoaderError, "source 3 ", STARTED, skip_loader=restarts
        ),
        "a stream hangs, timeout=1": Fault(
            reading(partial(time.sleep, 60)), WorkerTimeoutError, "source 3 ", skips=False, loader={"timeout": 1}
        ),
        "a worker is stopped (SIGSTOP), timeout=1": Fault(
            reading(dying(signal.SIGSTOP)), WorkerTimeoutError, "source 3 ", skips=False, loader={"timeout": 1}
        ),
    }
