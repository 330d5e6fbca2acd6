"""One place of a store is damaged: a bit flipped, bytes cut out, or bytes put in; a hundred times each format.

What is read then is exactly what was written, or a `StoreError`; or numbers that are others, but only where the format
has no checksum over them (`SMALL` says where). The interpreter stays alive and takes no memory for what damage claims.
"""

import os
import random
import shutil
from contextlib import closing

import pytest
from small_stores import SMALL

from stream_dataloader import stores
from stream_dataloader.errors import StoreError
from stream_dataloader.testing._items import assert_same, items_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_zarr_threads")]

TIMES = 100


def files_of(path):
    """A store's files, those with more bytes more often: each kilobyte counts as one more."""
    if os.path.isfile(path):
        return [path]
    found = sorted(os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
    return [file for file in found if os.path.getsize(file) for _ in range(1 + os.path.getsize(file) // 1024)]


def damage(path, rng):
    """Damage one place; returns the file, relative to the store, and what was done."""
    file = rng.choice(files_of(path))
    with open(file, "rb") as opened:
        content = bytearray(opened.read())
    place, count = rng.randrange(len(content)), rng.choice((1, 4, 16, 512))
    how = rng.choice(("flipped", "cut", "inserted"))
    if how == "flipped":
        content[place] ^= 1 << rng.randrange(8)
    elif how == "cut":
        del content[place : place + count]
    else:
        content[place:place] = rng.randbytes(count)
    with open(file, "wb") as opened:
        opened.write(content)
    return os.path.relpath(file, path), f"{how} at byte {place}, {count}"


def read_all(path, options):
    """Everything that is in a store, or None and what the error says."""
    try:
        sources, store = stores.open(path, **options)
        with closing(store):
            return [items_of(store(number)) for number in sources], ""
    except StoreError as error:
        return None, str(error)


def is_same(found, expected):
    try:
        assert len(found) == len(expected)
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, number, "read")
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("name", sorted(SMALL))
def test_a_store_that_is_damaged_at_one_place_is_exact_or_an_error(tmp_path, name):
    small = SMALL[name]
    path = str(tmp_path / "whole" / name)
    os.makedirs(tmp_path / "whole")
    small.make(path, 0)
    expected, _ = read_all(path, small.options)
    for seed in range(TIMES):
        copy = str(tmp_path / f"{seed}" / name)
        os.makedirs(tmp_path / f"{seed}")
        shutil.copytree(path, copy) if os.path.isdir(path) else shutil.copy(path, copy)
        file, what = damage(copy, random.Random(seed))
        found, error = read_all(copy, small.options)
        if found is None:
            assert str(tmp_path / f"{seed}") in error, f"{file}, {what}: it is not named, {error}"
        elif small.checked and not is_same(found, expected):
            assert not small.checked_when_read, f"{file}, {what}: other data"
            assert stores.verify(copy, **small.options), f"{file}, {what}: other data, and verify says nothing"
        shutil.rmtree(tmp_path / f"{seed}")
