"""Files that streams share: which are closed, when, and by whom."""

import os
import weakref

from helpers import soon

from stream_dataloader.stores._base.files import _DIGESTED_BYTES, digest_of
from stream_dataloader.stores._base.handles import Handles, ShardReader, Shards
from stream_dataloader.streams._media.section import KnownFile


class Noted:
    """Opens files in name only, and notes which."""

    def __init__(self):
        self.opened, self.closed = [], []

    def __call__(self, key):
        self.opened.append(key)
        noted = self

        class File:
            def close(self):
                noted.closed.append(key)

        return File()


def test_of_idle_files_the_one_not_used_for_longest_is_closed():
    files = Noted()
    handles = Handles(files, most_idle=2)
    for key in "abac":
        handles.lease(key).close()
    assert (files.opened, files.closed) == (["a", "b", "c"], ["b"])


def test_a_forked_process_leaves_files_of_its_parent_open():
    """HDF5 would write to them, and free its lock."""
    files = Noted()
    lease = Handles(files).lease("a")  # idle ones are closed before
    if not (child := os.fork()):
        lease.close()
        os._exit(len(files.closed))
    assert os.waitpid(child, 0)[1] == 0
    lease.close()
    assert files.closed == ["a"]


class Fetched:
    """Part of a store that is held in the cache for as long as somebody has it."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


class Parts(Shards):
    def __init__(self):
        self.fetched = []
        super().__init__()

    def file(self, number):
        found = Fetched()
        self.fetched.append((number, weakref.ref(found)))
        return found

    def _opened(self, number):
        return Noted()(number)


def test_parts_that_were_fetched_ahead_are_let_go_of_with_their_reader():
    parts = Parts()
    reader = ShardReader(parts, 2, 5)
    reader.at(0)

    def held():
        return {number for number, file in parts.fetched if file() is not None}

    assert soon(lambda: held() == {1, 2})
    reader.close()
    assert soon(lambda: not held(), 20)


def test_files_that_differ_at_their_end_alone_have_two_digests(tmp_path):
    content = bytes(3 * _DIGESTED_BYTES)
    for name, end in (("a", b"0"), ("b", b"1")):
        (tmp_path / name).write_bytes(content + end)
    one, other = (digest_of(KnownFile.of(str(tmp_path / name))) for name in "ab")
    assert one != other
