"""User code runs in one thread of a worker, unless its factory says that it may run in two."""

import collections
import functools
import os
import threading
import time
from collections.abc import Sequence

import pytest
from helpers import declared, soon

from stream_dataloader import StreamDataLoader, StreamDataset, interleave
from stream_dataloader.streams import (
    ArrayStream,
    AudioStream,
    AudioVisualStream,
    CameraStream,
    ImageFolderStream,
    TextStream,
    VideoStream,
)

WORKERS = pytest.mark.parametrize("workers", [0, 2])
LANES, SOURCES, ITEMS = 4, 24, 6


def read(open_stream, workers, sources=range(SOURCES), **options):
    loader = StreamDataLoader(StreamDataset(sources, open_stream, LANES, time_steps=2, **options), workers)
    found = collections.defaultdict(list)
    for batch in loader:
        for t, lane in batch.mask.nonzero().tolist():
            found[int(batch.source_index[t, lane])].append(batch.data[t, lane].tolist())
    assert list(map(len, found.values())) == [ITEMS] * SOURCES
    return found


class Noting:
    """Notes who enters its code, and raises where somebody is in it already; as a library that is not thread-safe."""

    def __init__(self, folder):
        self.folder = folder
        self.inside = []

    def enter(self):
        assert not self.inside, "entered by two threads at once"
        self.inside.append(1)
        time.sleep(0.0005)  # lets others run
        self.inside.pop()
        (self.folder / f"{os.getpid()}-{threading.get_native_id()}").touch()

    def threads(self):
        return sorted(collections.Counter(path.name.split("-")[0] for path in self.folder.iterdir()).values())

    def __call__(self, source):
        self.enter()
        return Noted(self, source)


class Noted:
    def __init__(self, factory, source):
        self.factory, self.source, self.position = factory, source, 0

    def __iter__(self):
        self.factory.enter()
        return self

    def __next__(self):
        self.factory.enter()
        self.position += 1
        if self.position > ITEMS:
            raise StopIteration
        return self.source * 100 + self.position - 1

    def state_dict(self):
        self.factory.enter()
        return {"at": self.position}

    def load_state_dict(self, state):
        self.factory.enter()
        self.position = state["at"]

    def close(self):
        self.factory.enter()


EXPECTED = {source: [source * 100 + i for i in range(ITEMS)] for source in range(SOURCES)}


@WORKERS
@pytest.mark.parametrize("lookahead", [1, 3])
def test_all_code_of_a_factory_runs_in_one_thread(workers, lookahead, tmp_path):
    noting = Noting(tmp_path)
    assert read(noting, workers, lookahead=lookahead) == EXPECTED
    assert noting.threads() == [1] * max(workers, 1)


SEEN = threading.Event()  # a background thread has opened a stream, in this process


class Opening:
    """Streams that tell whether a background thread opened them; the first ones wait a little for one that was."""

    def __init__(self, *, expected):
        self.expected = expected
        SEEN.clear()

    def __call__(self, source):
        early = threading.current_thread() is not threading.main_thread()
        if early:
            SEEN.set()
        return self._items(early)

    def _items(self, early):
        for i in range(ITEMS):
            if i == 1:
                time.sleep(0.001)
                if self.expected:
                    SEEN.wait(0.2)
            yield int(early)


class Declared(Opening):
    open_early = True

    def __call__(self, source):
        return super().__call__(source)


class Heir(Declared):
    """Its own code, which has declared nothing."""

    def __call__(self, source):
        return super().__call__(source)


class Configured(Declared):
    """Inherits code and declaration."""


class Proxy(Opening):
    """Has any attribute that it is asked for."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return print


def opened_early(factory, workers, sources=range(SOURCES), **options):
    found = read(factory, workers, sources, **options)
    return {source for source, items in found.items() if any(items)}


@pytest.mark.parametrize(
    ("factory", "workers", "early"),
    [
        (Opening, 2, False),
        (Declared, 2, True),
        (Declared, 0, False),
        (Configured, 2, True),
        (Heir, 2, False),
        (Proxy, 2, False),
    ],
)
def test_a_thread_opens_early_what_is_declared_safe(factory, workers, early):
    assert bool(opened_early(factory(expected=early), workers)) == early


@pytest.mark.parametrize("early", [True, False])
def test_an_object_may_say_it_otherwise_than_its_class(early):
    kind = Opening if early else Declared
    assert bool(opened_early(declared(kind(expected=early), early=early), 2)) == early


def test_a_function_or_a_partial_of_a_declared_one_may_be_opened_early_with_a_lookahead():
    opening = Opening(expected=True)

    def open_stream(source, _more=None):
        return opening(source)

    open_stream.open_early = True
    assert opened_early(open_stream, 1)
    assert opened_early(functools.partial(open_stream, _more=1), 1)
    assert not opened_early(Declared(expected=False), 1, lookahead=0)


def test_a_stream_that_is_being_opened_early_when_the_epoch_is_left_is_closed():
    begun, opened, closed = threading.Event(), [], []

    def open_stream(source):
        if source in (2, 3):  # reserved ones
            begun.set()
            time.sleep(0.1)
        opened.append(source)
        try:
            yield from range(ITEMS)
        finally:
            closed.append(source)

    dataset = StreamDataset(range(40), declared(open_stream), 2, time_steps=1)
    batches = iter(StreamDataLoader(dataset, 1, worker_method="thread"))
    next(batches)
    assert begun.wait(60)
    batches.close()
    assert soon(lambda: sorted(closed) == sorted(opened))


class Listed(Sequence):
    """Makes sources by code of the user's."""

    def __init__(self, noting):
        self.noting = noting

    def __len__(self):
        return SOURCES

    def __getitem__(self, index):
        self.noting.enter()
        return index


class DeclaredList(Listed):
    open_early = True

    def __getitem__(self, index):
        return index


@WORKERS
def test_a_sequence_that_makes_sources_does_so_in_one_thread(workers, tmp_path):
    noting = Noting(tmp_path)
    assert not opened_early(Declared(expected=False), workers, Listed(noting))
    assert noting.threads() == [1] * max(workers, 1)
    assert opened_early(Declared(expected=True), workers or 1, DeclaredList(Noting(tmp_path)))


@WORKERS
def test_each_dataset_of_several_has_its_own_say(workers, tmp_path):
    noting, early = Noting(tmp_path), [set(), set(), set()]
    datasets = [
        StreamDataset(range(SOURCES), Declared(expected=workers > 0), LANES, time_steps=2),
        StreamDataset(range(SOURCES), noting, LANES, time_steps=2),
        StreamDataset(range(SOURCES), Opening(expected=False), LANES, time_steps=2),
    ]
    for batch in StreamDataLoader(interleave(datasets, seed=0), workers):
        for t, lane in batch.mask.nonzero().tolist():
            dataset, source = divmod(int(batch.source_index[t, lane]), SOURCES)
            if dataset != 1 and batch.data[t, lane]:
                early[dataset].add(source)
    assert bool(early[0]) == (workers > 0)
    assert not early[2]
    assert noting.threads() == [1] * max(workers, 1)


def test_the_librarys_own_factories_say_what_they_are():
    kinds = ArrayStream(), AudioStream(window=8), AudioVisualStream(), ImageFolderStream(), TextStream(), VideoStream()
    assert all(factory.open_early is True for factory in kinds)
    assert TextStream(tokenizer=list).open_early is False  # the user's code
    assert getattr(CameraStream(), "open_early", False) is False  # its frames would be old
