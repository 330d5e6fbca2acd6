"""`store.item(source, position)`: one item by its place; what stays open, and for how long."""

import os
import pickle
import threading

import numpy as np
import pytest
from packed import STREAMS, memory_mapped

from stream_dataloader import stores
from stream_dataloader.testing._items import assert_same


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return memory_mapped(tmp_path_factory.mktemp("store"))


@pytest.fixture
def store(path):
    """A store that notes what it opens and closes."""
    store = stores.open(path).open_stream
    store.opened, store.closed = [], []
    open_steps = store._open_steps

    def opened(number):
        steps = open_steps(number)
        close = steps.close
        steps.close = lambda: (store.closed.append(number), close())
        store.opened.append(number)
        return steps

    store._open_steps = opened
    yield store
    store.close()


def is_item(found, number, position):
    assert_same([found], [STREAMS[number][position]], number, f"read at {position}")
    return True


def test_places_of_one_source_open_it_once_and_one_stream_is_kept(store):
    for position in (3, 4, 0, 2, 8, 8):
        assert is_item(store.item(2, position), 2, position)
    assert (store.opened, store.closed) == ([2], [])
    assert is_item(store.item((2, 4, 7), 1), 2, 5)
    assert is_item(store.item(0, np.int64(1)), 0, 1)
    assert (store.opened, store.closed) == ([2, 2, 0], [2, 2])
    for _ in range(3):
        for number in (0, 2, 3):
            assert is_item(store.item(number, 2), number, 2)
    assert len(store.opened) - len(store.closed) == 1
    store.close()
    assert len(store.opened) == len(store.closed)
    assert is_item(store.item(3, 0), 3, 0)


@pytest.mark.parametrize(
    ("source", "position", "error", "told"),
    [
        (2, 9, IndexError, r"position is 9, and .*, stream 2 \(stream/2\) has 9 steps, 0 to 8$"),
        (2, -1, IndexError, r"is -1, and .*, stream 2 \(stream/2\) has 9 steps, 0 to 8; -1 in batch.pos.* is padding"),
        (1, 0, IndexError, r"position is 0, and .*, stream 1 \(stream/1\) has no steps"),
        ((2, 4, 7), 3, IndexError, r"position is 3, and .*, stream 2 \(stream/2\), section 4 to 7 has 3 steps"),
        ((2, 4, None), 5, IndexError, r"section 4 to its end has 5 steps, 0 to 4"),
        (4, 0, ValueError, "4"),
        (2, 1.0, TypeError, "float"),
    ],
)
def test_a_place_that_is_none_says_which_there_are(store, source, position, error, told):
    with pytest.raises(error, match=told):
        store.item(source, position)
    assert is_item(store.item(2, 0), 2, 0)


def test_what_breaks_is_opened_again(store):
    store.item(2, 0)
    steps = store._item.stream._steps
    steps.item = lambda index: (_ for _ in ()).throw(OSError(f"the disk is gone at {index}"))
    with pytest.raises(OSError, match="the disk is gone at 1"):
        store.item(2, 1)
    assert is_item(store.item(2, 1), 2, 1)
    assert (store.opened, store.closed) == ([2, 2], [2])


def test_copies_and_threads_have_what_they_need(path, store):
    plain = stores.open(path).open_stream
    plain.item(2, 3)
    copy = pickle.loads(pickle.dumps(plain))
    assert copy._item is None
    assert is_item(copy.item(2, 4), 2, 4)
    wrong = []

    def read(number):
        for position in range(3):
            for _ in range(30):
                wrong.extend([] if is_item(store.item(number, position), number, position) else [number])

    threads = [threading.Thread(target=read, args=(number,)) for number in (0, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(store.opened) - len(store.closed) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_opens_its_own_stream(store):
    store.item(2, 3)
    if (child := os.fork()) == 0:
        found = is_item(store.item(2, 5), 2, 5) and (store.opened, store.closed) == ([2, 2], [])
        os._exit(0 if found else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert is_item(store.item(2, 4), 2, 4)
    assert store.opened == [2]


def test_windows_of_deltas_are_part_of_the_item(path):
    name = next(iter(STREAMS[2][0]))
    opened = stores.open(path, deltas={name: (-1, 0)}).open_stream
    item = opened.item(2, 0)
    assert item[f"{name}_is_pad"].tolist() == [True, False]
    assert (opened.item(2, 4)[name][0] == STREAMS[2][3][name]).all()
