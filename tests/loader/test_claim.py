"""An iterator claims epoch, loaded state and workers with its first `next`; one thread reads it at a time."""

import copy
import itertools
import multiprocessing
import pickle
import threading
import time

import pytest
from cases import key, keys
from helpers import make_loader
from kinds_of_loaders import KINDS, plain
from torch.utils.data import DataLoader

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader.errors import IteratorError, StateError

LENGTHS = [5, 3, 6, 2, 4]
SETUPS = [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}]


def loader_of(workers=0):
    return StreamDataLoader(StreamDataset(LENGTHS, range, 2, time_steps=2, shuffle=True, seed=0), workers)


def after_one_batch():
    """A state, and the batches behind it."""
    loader = loader_of()
    batches = iter(loader)
    next(batches)
    return loader.state_dict(), keys(batches)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterator_that_nothing_was_read_from_takes_no_epoch_and_no_worker(workers):
    expected = loader_of()
    epochs = [keys(expected) for _ in range(2)]
    loader = loader_of(workers)
    for epoch in range(2):
        unread, parts = iter(loader), loader.parts()
        assert not multiprocessing.active_children()
        assert keys(loader) == epochs[epoch]
        for older in (unread, parts):
            with pytest.raises(IteratorError):
                next(older)


def test_nor_does_it_take_a_loaded_state_or_end_the_one_that_is_read():
    state, rest = after_one_batch()
    loader = loader_of()
    batches = iter(loader)  # claims what is loaded later
    loader.load_state_dict(state)
    iter(loader)
    loader.parts()
    assert loader.state_dict() == state
    first = key(next(batches))
    iter(loader)
    assert [first, *(key(batch) for batch in batches)] == rest


def test_nor_where_no_loader_of_ours_is():
    dataset = StreamDataset(LENGTHS, range, 2, time_steps=2, seed=0)
    iter(dataset)
    assert {batch.epoch for batch in dataset} == {0}
    loader = DataLoader(dataset, batch_size=None)
    iter(loader)
    assert {batch.epoch for batch in loader} == {1}


def test_an_iterator_that_could_not_begin_has_claimed_nothing(monkeypatch):
    def fail(*_, **__):
        raise OSError("no more processes")

    state, _ = after_one_batch()
    loader = loader_of()
    loader.load_state_dict(state)
    batches = iter(loader)
    with monkeypatch.context() as patch:
        patch.setattr("stream_dataloader._engine.loader.starter.read_here", fail)
        with pytest.raises(OSError, match="no more"):
            next(batches)
    assert loader.state_dict() == state
    assert next(batches).batch_index == 1


def test_who_looks_at_a_batch_of_a_loaded_state_hears_that_it_is_used_up():
    state, rest = after_one_batch()
    loader = loader_of()
    loader.load_state_dict(state)
    assert key(next(iter(loader))) == rest[0]
    with pytest.warns(RuntimeWarning, match="left after 1 batch of epoch 0, and this one reads epoch 1"):
        next(iter(loader))
    loader.load_state_dict(state)  # the remedy
    next(iter(loader))
    loader.load_state_dict(state)
    assert keys(loader) == rest  # from here on no warning, which would be an error
    next(iter(loader))
    loader.set_epoch(5)
    next(iter(loader))


@pytest.mark.parametrize("options", SETUPS, ids=str)
@pytest.mark.parametrize("length", [None, 3])
def test_a_newer_iterator_ends_the_older_which_leaves_it_as_it_is(options, length):
    loader = make_loader(LENGTHS, range, 2, "cycle", time_steps=2, seed=0, batches_per_epoch=length, **options)
    old, new = iter(loader), iter(loader)
    next(old)
    first = next(new).batch_index
    with pytest.raises(IteratorError):
        next(old)
    old.close()
    assert list(old) == []
    assert [batch.batch_index for batch in itertools.islice(new, 2)] == [first + 1, first + 2]
    assert loader.epoch == 1
    new.close()
    assert list(new) == []


@pytest.mark.parametrize("options", SETUPS[::2], ids=str)
@pytest.mark.parametrize("length", [None, 3])
def test_a_loaded_state_ends_the_iteration_that_is_read_and_a_refused_one_does_not(options, length):
    loader = make_loader(LENGTHS, range, 2, "cycle", time_steps=2, seed=0, batches_per_epoch=length, **options)
    old = iter(loader)
    next(old)
    state = loader.state_dict()
    with pytest.raises(StateError):
        loader.load_state_dict(state | {"step": -1})
    assert next(old).batch_index == 1
    loader.load_state_dict(state)
    with pytest.raises(IteratorError, match="a state was loaded"):
        next(old)
    assert loader.state_dict() == state
    assert next(iter(loader)).batch_index == 1


@pytest.mark.parametrize("length", [None, 2])
def test_an_iterator_that_has_ended_stays_so_when_a_newer_one_begins(length):
    loader = make_loader(LENGTHS, range, 2, "cycle" if length else "zeros", time_steps=2, batches_per_epoch=length)
    ended = iter(loader)
    list(ended)
    next(iter(loader))
    assert list(ended) == []


def place_of(loader):
    state = loader.state_dict()
    state = state["members"][0] if "members" in state else state
    return state["epoch"], state["step"]


LOADERS = [kind for kind in KINDS if "sampler" not in kind]


@pytest.mark.parametrize(
    ("kind", "options"),
    [*((kind, {}) for kind in LOADERS), *(("in mid-epoch of n batches", way) for way in SETUPS[1:])],
)
def test_a_copy_goes_on_where_the_loader_stands(kind, options):
    loader, left = KINDS[kind](**options), KINDS[kind]()
    batches, rest = iter(loader), iter(left)
    next(batches)
    next(rest)
    copied = pickle.loads(pickle.dumps(loader))
    again = copy.deepcopy(copied)
    expected = [plain(batch) for batch in itertools.islice(rest, 2)]
    for own in (copied, again, copy.deepcopy(loader)):
        assert place_of(own) == place_of(loader)
        assert [plain(batch) for batch in itertools.islice(own, 2)] == expected
    assert next(batches).batch_index == 1, "it is still being read"
    loader.set_epoch(7)
    assert pickle.loads(pickle.dumps(loader)).epoch == copy.deepcopy(loader).epoch == 7
    if "n batches" in kind:
        loader.set_epoch(0)
        assert next(iter(pickle.loads(pickle.dumps(loader)))).batch_index == 0


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda one: pickle.loads(pickle.dumps(one))}


@pytest.mark.one_of_each
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("kind", LOADERS)
def test_the_state_of_a_copy_is_that_of_the_loader(kind, how):
    loader = KINDS[kind]()
    batches = iter(loader)
    for _ in range(3):
        assert COPIES[how](loader).state_dict() == loader.state_dict()
        assert COPIES[how](COPIES[how](loader)).state_dict() == loader.state_dict()
        next(batches)


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_copy_of_a_rank_goes_on_as_that_rank(rank, how):
    place = {"rank": rank, "world_size": 2}
    loaders = [KINDS["known lengths"](**place) for _ in range(2)]
    batches, rest = map(iter, loaders)
    next(batches)
    next(rest)
    copied = COPIES[how](loaders[0])
    assert copied.state_dict() == loaders[1].state_dict()
    assert [plain(batch) for batch in copied] == [plain(batch) for batch in rest]


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("seed", [3, None])
def test_a_copy_of_a_dataset_is_read_in_the_same_order_from_its_beginning(seed, how):
    dataset = StreamDataset(LENGTHS, range, 2, time_steps=2, shuffle=True, seed=seed)
    batches = iter(StreamDataLoader(dataset))
    expected = [plain(next(batches))]
    copied = COPIES[how](dataset)
    assert copied.fingerprint == dataset.fingerprint
    expected += map(plain, batches)
    assert [plain(batch) for batch in StreamDataLoader(copied)] == expected


class Gated:
    """Opens streams; waits in the factory, or while the main process prepares it for a worker."""

    def __init__(self, where):
        self.where, self.inside, self.go_on = where, multiprocessing.Event(), multiprocessing.Event()

    def wait(self, where):
        if where == self.where:
            self.inside.set()
            assert self.go_on.wait(60)

    def __call__(self, length):
        self.wait("factory")
        return range(length)

    def __getstate__(self):
        self.wait("pickle")
        return {"where": "elsewhere"}


@pytest.mark.parametrize(
    ("workers", "where", "method"),
    [
        (0, "factory", None),
        (2, "factory", "fork"),
        pytest.param(1, "pickle", "forkserver", marks=pytest.mark.any_start_method),
    ],
)
def test_a_thread_that_reads_where_another_is_reading_hears_so(workers, where, method):
    gated, found = Gated(where), []
    batches = iter(make_loader([4, 4], gated, 2, time_steps=2, num_workers=workers, multiprocessing_context=method))
    reader = threading.Thread(target=lambda: found.extend(batch.batch_index for batch in batches))
    reader.start()
    assert gated.inside.wait(60)
    with pytest.raises(RuntimeError, match="another thread is reading from this iterator"):
        next(batches)
    gated.go_on.set()
    reader.join()
    assert found == [0, 1]  # it lost nothing
    assert list(batches) == []  # one after the other may read


def test_a_newer_iterator_waits_for_the_batch_that_another_thread_reads():
    def slowly(length):
        for i in range(length):
            time.sleep(0.01)
            yield i

    loader = StreamDataLoader(StreamDataset([30, 30], slowly, 2, time_steps=3), 2)
    begun, found = threading.Event(), []

    def read():
        try:
            for batch in loader:
                found.append(batch.batch_index)
                begun.set()
        except (IteratorError, RuntimeError) as error:
            found.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(60)
    assert [batch.batch_index for batch in loader] == list(range(10))
    reader.join()
    assert "newer" in str(found[-1])
    assert found[:-1] == list(range(len(found) - 1))
