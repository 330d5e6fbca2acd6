"""Stores that are written to while they are read: what is read is what was there, or an error."""

import os
import pickle
import time

import pytest
from small_stores import SMALL

from stream_dataloader import stores
from stream_dataloader.errors import StoreError
from stream_dataloader.streams._media.section import KnownFile
from stream_dataloader.testing._items import assert_same, items_of, written

pytestmark = pytest.mark.usefixtures("no_zarr_threads")

#: Those whose items another seed does not change.
WITHOUT_SEEDS = {"lerobot"}

#: What is written over a chunk in its place is not noticed: zarr itself writes another file, and gives it the name.
IN_FOLDERS = {"two.zarr", "three.zarr"}

#: What is mapped stays what it was: a file that has lost its name is read on.
IN_MAPS = {"memmap", "lmdb", "lmdb-zstd", "plain.lmdb", "mds", "mds-gz", "tensordict"}

#: What was read stays in memory: it is right, and nothing has to be noticed.
IN_MEMORY = {"plain.parquet", "checked.parquet"}


def overwrite(path, other):
    """Write one store's bytes over another's, file by file, in place."""
    time.sleep(0.02)  # an older kernel's clock has ticked
    for folder, _, names in os.walk(other) if os.path.isdir(other) else [("", (), [other])]:
        for name in names:
            source = os.path.join(folder, name)
            with open(source, "rb") as new, open(path + source.removeprefix(other), "r+b") as old:
                old.write(new.read())
                old.truncate()


@pytest.mark.parametrize("name", sorted(SMALL.keys() - WITHOUT_SEEDS))
def test_a_store_in_whose_place_another_is_put_is_an_error(tmp_path, name):
    small, path = SMALL[name], str(tmp_path / name)
    small.make(path, 0)
    _, store = stores.open(path, **small.options)
    sent = pickle.dumps(store)
    os.rename(path, tmp_path / "older")
    small.make(path, 1)
    with pytest.raises(StoreError):
        list(pickle.loads(sent)(len(store) - 1))
    if name not in IN_MAPS:
        with pytest.raises(StoreError):
            list(store(len(store) - 1))
    store.close()


@pytest.mark.parametrize("name", sorted(SMALL.keys() - WITHOUT_SEEDS - IN_FOLDERS))
def test_a_store_that_is_written_over_is_never_other_data(tmp_path, name):
    small = SMALL[name]
    path, other = str(tmp_path / name), str(tmp_path / f"other-{name}")
    small.make(path, 0)
    small.make(other, 1)
    _, store = stores.open(path, **small.options)
    last = len(store) - 1
    first, expected = items_of(store(0)), items_of(store(last))
    streams = [store(last), store(last), store(last)]
    for stream in streams:
        next(stream)
    begun = store(last)
    overwrite(path, other)
    rest = [
        (lambda: list(streams[0]), expected[1:]),
        (lambda: [next(streams[1])], expected[1:2]),
        (lambda: written(streams[2], expected[0], 3, name), expected[1:4]),
        (lambda: items_of(begun), expected),
        (lambda: items_of(store(0)), first),
    ]
    noticed = name in IN_MEMORY
    for read, right in rest:
        try:
            assert_same(read(), right, name, "written over")
        except StoreError:
            noticed = True
    assert noticed
    for opened in (*streams, begun, store):
        opened.close()


@pytest.mark.parametrize("error", [None, IndexError])
def test_what_was_read_of_a_file_while_it_changed_is_an_error(tmp_path, error):
    """It may be partly of the one file and partly of the other, and be the reason for another error."""
    (tmp_path / "a").write_bytes(b"old")
    known = KnownFile.of(str(tmp_path / "a"))

    def read():
        with known:
            (tmp_path / "b").write_bytes(b"new")
            os.replace(tmp_path / "b", tmp_path / "a")
            if error is not None:
                raise error

    with pytest.raises(StoreError, match="is another file now: replaced or written to"):
        read()
