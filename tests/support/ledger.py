"""Counts what a test's own factory opened, yielded and closed, in whatever process or thread: `ledger` of `conftest`.

Each event is a line that is written to a file in one piece, so that the events of all workers stand in order.
"""

import gc
import os
import threading
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from stream_dataloader import get_stream_info

ITEM_BYTES = 2 * 8 + 4


class Event(NamedTuple):
    """What happened to an object that was opened, and in which thread."""

    what: str  # open, item, raise or close
    name: str  # of the object; of a stream that is no iterator itself, that of the iterator ends with +
    source: int
    worker: int
    thread: str


class Ledger:
    """Events of all streams that factories with this ledger opened."""

    def __init__(self, path):
        self.path = Path(path)
        self.path.touch()

    def note(self, what, name, info):
        event = Event(what, name, info.source_index, info.worker_id, f"{os.getpid()}/{threading.get_ident()}")
        with open(self.path, "ab", buffering=0) as file:
            file.write(" ".join(map(str, event)).encode() + b"\n")

    def of(self, *what):
        lines = map(str.split, self.path.read_text().splitlines())
        events = (Event(kind, name, int(source), int(worker), thread) for kind, name, source, worker, thread in lines)
        return [event for event in events if event.what in what or not what]

    def problems(self):
        """What was not closed exactly once, by its user or as garbage."""
        gc.collect()
        events = self.of("open", "close")
        closed = Counter(event.name for event in events if event.what == "close")
        opened = {event.name: event for event in events if event.what == "open"}
        wrong = [event for event in opened.values() if closed[event.name] != 1]
        return [
            f"the {'iterator' if event.name.endswith('+') else 'stream'} of source {event.source}, opened by worker "
            f"{event.worker} in {event.thread}, was closed {closed[event.name]} times"
            for event in wrong
        ]

    def most_open(self):
        """How many streams were open at once, at most."""
        opened, most = set(), 0
        for event in self.of("open", "close"):
            (opened.add if event.what == "open" else opened.discard)(event.name.rstrip("+"))
            most = max(most, len(opened))
        return most


@dataclass
class Counted:
    """Streams of `(source, length)`, with items `{"at": [source, position], "x": position}`; a ledger counts them.

    They are of three kinds, by source: generators, iterators with `close`, and objects whose iterator has one, too.
    `broken`: by source the item that raises, and in how many of the openings.
    """

    ledger: Ledger
    broken: dict = field(default_factory=dict)

    def __call__(self, source):
        return (self.generated, Items, Opened)[source[0] % 3](self, source)

    @staticmethod
    def generated(counted, source):
        items = Items(counted, source)
        try:
            for item in items:  # noqa: UP028  `yield from` would close it, too
                yield item
        finally:
            items.close()


class Noted:
    """An object that is to be closed once."""

    def __init__(self, counted, source, name=None):
        self.counted, self.source, self.name = counted, source, name or uuid.uuid4().hex
        self.info = get_stream_info()
        self.note("open")

    def note(self, what):
        self.counted.ledger.note(what, self.name, self.info)

    def close(self):
        self.note("close")


class Items(Noted):
    """The items of a source."""

    position = 0

    def __iter__(self):
        return self

    def __next__(self):
        index, length = self.source
        if self.position == length:
            raise StopIteration
        at, times = self.counted.broken.get(index, (-1, 0))
        if self.position == at and sum(event.source == index for event in self.counted.ledger.of("raise")) < times:
            self.note("raise")
            raise OSError("the disk is broken")
        self.note("item")
        self.position += 1
        return {"at": np.array([index, self.position - 1]), "x": np.float32(self.position - 1)}


class Opened(Noted):
    """A stream whose iterator is another object."""

    def __iter__(self):
        return Items(self.counted, self.source, f"{self.name}+")
