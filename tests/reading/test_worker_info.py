"""torch's `get_worker_info` in streams: one worker reads a source, so code that shards itself must read all of it."""

import threading
from collections import Counter

import pytest
from helpers import START_METHODS, loader_of
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from stream_dataloader import Sections, StreamDataLoader, StreamDataset, get_stream_info, streams

LENGTHS = [6, 4, 0, 5, 3, 7, 1, 8]


class Recording(IterableDataset):
    """The pattern of torch's documentation of `IterableDataset`."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter(range(first, self.length, step))


class OpensEarly:
    open_early = True

    def __call__(self, length):
        return Recording(length)


def in_a_thread(length):
    """A stream whose own thread reads ahead."""
    items = []
    thread = threading.Thread(target=lambda: items.extend(Recording(length)))
    thread.start()
    thread.join()
    yield from items


LOADERS = {
    "workers": {},
    "kept": {"persistent_workers": True},
    "queue": {"messages": True},
    "threads": {"worker_method": "thread"},
    "live": {},
}


@pytest.mark.one_of_each
@pytest.mark.parametrize("factory", [Recording, OpensEarly(), in_a_thread], ids=["plain", "early", "thread"])
@pytest.mark.parametrize("kind", LOADERS)
def test_streams_that_shard_themselves_lose_nothing(kind, factory):
    factory = streams.live(factory, 1.0) if kind == "live" else factory
    dataset = StreamDataset(LENGTHS, factory, 4, time_steps=2, seed=0, shuffle=True, deterministic=kind != "live")
    loader = loader_of(dataset, 2, **LOADERS[kind])
    for _ in range(2):
        check_whole(loader)


@pytest.mark.parametrize("factory", [Recording, OpensEarly()], ids=["plain", "early"])
@pytest.mark.parametrize("persistent", [False, True])
def test_they_lose_nothing_with_torchs_own_loader(factory, persistent):
    dataset = StreamDataset(LENGTHS, factory, 4, time_steps=2, seed=0, padding_mode="zeros")
    loader = DataLoader(dataset, batch_size=None, num_workers=2, persistent_workers=persistent)
    for _ in range(2):
        check_whole(loader)


def check_whole(loader):
    read = Counter()
    for batch in loader:
        read.update(zip(batch.source_index[batch.mask].tolist(), batch.data[batch.mask].tolist(), strict=True))
    assert read == Counter((source, item) for source, length in enumerate(LENGTHS) for item in range(length))


class Hooks:
    """A factory and its streams; each method of theirs notes whether it sees torch's worker info."""

    open_early = True

    def __init__(self, path):
        self._path = path

    def note(self, name):
        with self._path.open("a") as file:
            file.write(f"{name} {'sees it' if get_worker_info() is not None else 'None'}\n")

    def noted(self):
        return set(self._path.read_text().splitlines())

    def __call__(self, length):
        self.note("factory")
        return HookedStream(self, length)


class HookedStream:
    def __init__(self, hooks, length):
        self._hooks, self._length, self._next = hooks, length, 0

    def __iter__(self):
        self._hooks.note("iter")
        return self

    def __next__(self):
        self._hooks.note("next")
        if self._next == self._length:
            raise StopIteration
        self._next += 1
        return self._next

    def state_dict(self):
        self._hooks.note("state_dict")
        return self._next

    def load_state_dict(self, state):
        self._hooks.note("load_state_dict")
        self._next = state

    def starts_within(self, start, stop):
        self._hooks.note("starts_within")
        return []

    def close(self):
        self._hooks.note("close")


class Seeking(HookedStream):
    def seek_item(self, item):
        self._hooks.note("seek_item")
        self._next = item


class SeekingHooks(Hooks):
    open_early = True  # a class that overrides `__call__` must declare it again

    def __call__(self, length):
        return Seeking(self, length)


class Init:
    def __init__(self, hooks):
        self.hooks = hooks

    def __call__(self, worker_id):
        worker = get_worker_info()
        self.hooks.note(f"worker_init_fn of {worker_id} of {worker.num_workers}: {worker.id}")


@pytest.mark.parametrize("method", START_METHODS)
def test_no_method_of_a_stream_sees_it_and_worker_init_fn_does(method, tmp_path):
    hooks = Hooks(tmp_path / "noted")
    options = {"multiprocessing_context": method, "worker_init_fn": Init(hooks), "max_restarts": 1}
    loader = StreamDataLoader(StreamDataset(LENGTHS, hooks, 4, time_steps=2, seed=0, lookahead=2), 2, **options)
    states = [batch.state_dict() for batch in loader]
    loader.load_state_dict(states[1])
    list(loader)
    names = ("factory", "iter", "next", "state_dict", "load_state_dict", "starts_within", "close")
    inits = [f"worker_init_fn of {number} of 2: {number} sees it" for number in range(2)]
    assert hooks.noted() == {*(f"{name} None" for name in names), *inits}


def test_sections_that_are_sought_do_not_see_it(tmp_path):
    hooks = SeekingHooks(tmp_path / "noted")
    dataset = StreamDataset(
        [9, 8],
        hooks,
        2,
        time_steps=2,
        seed=0,
        lengths=[9, 8],
        sections=Sections(3, jitter=True),
        lookahead=1,
        mark_ends=True,
    )
    list(StreamDataLoader(dataset, 2))
    assert "seek_item None" in hooks.noted()
    assert not [note for note in hooks.noted() if note.endswith("sees it")]


def worker_of(part):
    worker = get_worker_info()
    return worker.id, worker.num_workers, part.worker_id.tolist()


def test_torchs_own_loader_shows_it_to_its_other_code(tmp_path):
    hooks = Hooks(tmp_path / "noted")
    dataset = StreamDataset(LENGTHS, Recording, 4, time_steps=2, seed=0)
    parts = DataLoader(dataset, batch_size=None, num_workers=2, collate_fn=worker_of, worker_init_fn=Init(hooks))
    assert {(number, count, own[0]) for number, count, own in parts} == {(0, 2, 0), (1, 2, 1)}
    assert len(hooks.noted()) == 2


def own_worker(length):
    for _ in range(length):
        yield get_stream_info().worker_id


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_stream_info_has_the_workers_id(workers):
    dataset = StreamDataset(LENGTHS, own_worker, 4, time_steps=2, seed=0)
    for batch in StreamDataLoader(dataset, workers):
        assert (batch.data == batch.worker_id)[batch.mask].all()
