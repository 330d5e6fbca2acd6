"""Folders of .npy files."""

import os

import numpy as np
import pytest
from helpers import FULL, read
from store_tests import StoreTests

from stream_dataloader import stores
from stream_dataloader.errors import StoreError
from stream_dataloader.stores import NpyStore

LENGTHS = (23, 0, 7, 31)
ARRAYS = [np.random.default_rng(n).integers(0, 99, (n, 3, 2)).astype(np.float32) for n in LENGTHS]
EPISODES = [
    [{"action": np.float64(step / 7), "state": np.arange(step, step + 4, dtype=np.int16)} for step in range(n)]
    for n in LENGTHS
]


def files_of_rows(folder):
    folder.mkdir()
    for number, array in enumerate(ARRAYS):
        np.save(folder / f"clip{9 + number}.npy", array)
    (folder / "readme.txt").write_text("other files are left alone")
    (folder / "plots").mkdir()
    return folder


def folders_of_leaves(folder):
    folder.mkdir()
    for number, items in enumerate(EPISODES):
        (folder / f"episode{8 + number}").mkdir()
        np.save(
            folder / f"episode{8 + number}" / "action.npy", np.array([item["action"] for item in items], np.float64)
        )
        states = np.array([item["state"] for item in items], ">i2").reshape(-1, 4)
        np.save(folder / f"episode{8 + number}" / "state.npy", np.asfortranarray(states))
    return folder


class OfArrays(StoreTests):
    damages = 500 if FULL else 12


class TestNpyFiles(OfArrays):
    def make(self, tmp_path):
        return NpyStore(files_of_rows(tmp_path / "clips"))

    streams = tuple(map(list, ARRAYS))


class TestNpyFolders(OfArrays):
    def make(self, tmp_path):
        return NpyStore(folders_of_leaves(tmp_path / "episodes"))

    streams = EPISODES


def test_streams_are_named_after_files_numbers_as_numbers(tmp_path):
    store = stores.open(files_of_rows(tmp_path / "a")).open_stream
    assert [store.key(number) for number in range(4)] == ["clip9", "clip10", "clip11", "clip12"]
    store = stores.open(folders_of_leaves(tmp_path / "b")).open_stream
    assert [store.key(number) for number in range(4)] == ["episode8", "episode9", "episode10", "episode11"]


def test_one_file_is_one_stream(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(5))
    sources, store = stores.open(tmp_path / "x.npy")
    assert (list(sources), store.key(0), [int(item) for item in read(store(0))]) == ([0], "x", [0, 1, 2, 3, 4])
    os.rename(tmp_path / "x.npy", tmp_path / "x.dat")
    for wrong in (tmp_path / "x.dat", tmp_path):
        with pytest.raises(StoreError, match=r"no .npy file"):
            stores.open(wrong, format="npy")


def test_some_leaves_can_be_read_alone(tmp_path):
    store = NpyStore(folders_of_leaves(tmp_path / "a"), columns=["state"])
    assert [list(item) for item in read(store(2))] == [["state"]] * 7
    with pytest.raises(StoreError, match=r"episode8 \(stream 0\) has .*action.*: not all streams have \['depth'\]"):
        NpyStore(store.path, columns=["depth"])
    with pytest.raises(StoreError, match="each stream is one array"):
        NpyStore(files_of_rows(tmp_path / "b"), columns=["state"])


STATE = "episode10/state.npy"
DAMAGES = {
    "alone.npy": lambda folder: np.save(folder / "alone.npy", np.arange(3)),
    "episode10 .* not all streams have \\['state'\\]": lambda folder: os.unlink(folder / STATE),
    "episode10 .* not all streams have \\['depth'\\]": lambda folder: np.save(
        folder / "episode10" / "depth.npy", np.zeros(7)
    ),
    "episode99": lambda folder: (folder / "episode99").mkdir(),
    "6 steps of": lambda folder: np.save(folder / STATE, np.zeros((6, 4), np.int16)),
    "140 bytes of 184": lambda folder: os.truncate(folder / STATE, 140),
    "of dtype object": lambda folder: np.save(folder / STATE, np.array([{}, None]), allow_pickle=True),
    "184 bytes of 56,000,000,000,128": lambda folder: claim(
        folder / STATE, b"(7, 4), }          ", b"(7, 4000000000000),"
    ),
    "single number": lambda folder: np.save(folder / STATE, np.float32(1)),
}


def claim(path, old, new):
    path.write_bytes(path.read_bytes().replace(old, new, 1))


@pytest.mark.parametrize("message", DAMAGES)
def test_what_is_no_store_is_refused_by_name(tmp_path, message):
    DAMAGES[message](folders_of_leaves(tmp_path / "a"))
    with pytest.raises(StoreError, match=message):
        stores.open(tmp_path / "a")


def test_a_file_that_was_written_to_is_noticed_when_it_is_opened(tmp_path):
    store = NpyStore(files_of_rows(tmp_path / "a"))
    np.save(tmp_path / "a" / "clip11.npy", ARRAYS[2] + 1)
    os.utime(tmp_path / "a" / "clip11.npy", (1, 1))
    with pytest.raises(StoreError, match=r"stream 2 \(clip11\) was written to since"):
        store(2)
    assert len(read(store(0))) == 23
    os.unlink(tmp_path / "a" / "clip11.npy")
    with pytest.raises(StoreError, match=r"clip11.npy"):
        store(2)


def test_rows_of_no_bytes_are_counted(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((3, 0)))
    assert len(read(stores.open(tmp_path).open_stream(0))) == 3
