"""Contract of a store: its streams are found, read from any step, and verified."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import cloudpickle
import numpy as np

from stream_dataloader import stores
from stream_dataloader._engine.items.structure import flatten
from stream_dataloader._engine.kept_fields import map_leaves
from stream_dataloader.stores import Store
from stream_dataloader.testing._items import assert_same, copied, items_of
from stream_dataloader.testing.streams import StreamContract

__all__ = ["StoreContract"]

_MOST_PICKLED_BYTES = 16 << 10


class StoreContract(StreamContract):
    """Tests that a store must pass, in addition to those of `StreamContract`. Give three fixtures.

    ::

        class TestMyStore(StoreContract):
            @pytest.fixture
            def open_stream(self, tmp_path):
                store = MyStore(write_store(tmp_path, STREAMS))
                yield store
                store.close()

            @pytest.fixture
            def sources(self, open_stream):
                return list(open_stream.sources)

            @pytest.fixture
            def expected(self):
                return STREAMS           # the items of each stream

    Its streams should have a few hundred steps. One should be empty if the format allows it.
    """

    def check(self, open_stream: Any, sources: Sequence[Any] | None = None, **given: Any) -> list[str]:
        """Run all of the tests, without pytest; see `StreamContract.check`.

        Args:
            open_stream: The store.
            sources: Numbers of streams, or sections of them; None: all streams.
            given: `expected=`, the items of each stream, if they are known.
        """
        numbers = list(open_stream.sources)
        if "expected" not in given:
            given["expected"] = [items_of(open_stream(number)) for number in numbers]
        return super().check(open_stream, numbers if sources is None else sources, **given)

    #: Number of damaged copies that are tried, each damaged at another place.
    damages: int = 20

    #: Whether the format has checksums over all of its data, so that `verify` notices any damage.
    has_checksums: bool = False

    def test_holds_what_was_put_in(self, open_stream: Store, expected: Sequence[Any]) -> None:
        assert list(open_stream.sources) == list(range(len(expected)))
        for number, items in enumerate(expected):
            assert_same(items_of(open_stream(number)), list(items), open_stream.path, f"read from stream {number}")

    def test_is_found(self, open_stream: Store, expected: Sequence[Any]) -> None:
        """`stores.open` detects the format, or takes its name."""
        number = _longest(expected)
        for name in (None, open_stream.format):
            sources, opened = stores.open(open_stream.path, format=name, **open_stream._options)
            assert type(opened) is type(open_stream), f"taken for {opened.format}"
            assert len(sources) == len(expected)
            assert sources.fingerprint == open_stream.sources.fingerprint, "another fingerprint"
            assert_same(items_of(opened(number)), list(expected[number]), open_stream.path, "opened again")

    def test_knows_its_lengths(self, open_stream: Store, expected: Sequence[Any]) -> None:
        known = open_stream.lengths is not None
        steps = [len(items) if known else None for items in expected]
        assert [open_stream.length(number) for number in range(len(steps))] == steps
        assert not known or np.asarray(open_stream.lengths).tolist() == steps

    def test_cuts_sections(self, open_stream: Store, expected: Sequence[Any]) -> None:
        """A source may be a section of a stream, and can be started in its middle."""
        number = _longest(expected)
        items = list(expected[number])
        start, stop = len(items) // 4, len(items) - len(items) // 4
        name = open_stream.name_of(number)
        assert open_stream.length((number, start, stop)) in (None, stop - start)
        assert_same(items_of(open_stream((number, start, stop))), items[start:stop], name, "cut")
        late = items_of(open_stream((number, start, None), start=1))
        assert_same(late, items[start + 1 :], name, "cut and begun late")

    def test_gives_one_item_by_its_place(self, open_stream: Store, expected: Sequence[Any]) -> None:
        """In any order, of a section, too; a place that is none is an error that names the stream and its length."""
        number = _longest(expected)
        items = list(expected[number])
        name, count = open_stream.name_of(number), len(items)
        places = random.Random(0).choices(range(count), k=12)  # noqa: S311
        found = [map_leaves(open_stream.item(number, place), copied) for place in places]
        assert_same(found, [items[place] for place in places], name, "by place")
        start = count // 3
        cut = map_leaves(open_stream.item((number, start, None), 0), copied)
        assert_same([cut], items[start : start + 1], name, "cut, by place")
        empty = [n for n, items in enumerate(expected) if not len(items)][:1]
        for stream, place in [(number, count), (number, -1), *((one, 0) for one in empty)]:
            try:
                open_stream.item(stream, place)
            except IndexError as raised:
                error = str(raised)
            else:
                raise AssertionError(f"{open_stream.name_of(stream)} has an item at {place}")
            assert open_stream.name_of(stream) in error, error

    def test_keys_name_streams(self, open_stream: Store, expected: Sequence[Any]) -> None:
        keys = [open_stream.key(number) for number in range(len(expected))]
        assert [open_stream.number(key) for key in keys] == list(range(len(expected)))

    def test_tells_what_it_holds(self, open_stream: Store, expected: Sequence[Any]) -> None:
        info = open_stream.info()
        assert (info.path, info.format, info.streams) == (open_stream.path, open_stream.format, len(expected))
        assert info.steps in (None, sum(map(len, expected)))
        for item in itertools.islice(itertools.chain.from_iterable(expected), 1):
            assert len(info.leaves) == len(flatten(item)[1])
        for number in range(len(expected)):
            assert isinstance(open_stream.metadata(number), Mapping)

    def test_items_are_copies(self, open_stream: Store, expected: Sequence[Any]) -> None:
        """Items may be written to, as they share no memory with a map, a cache or a file."""
        number = _longest(expected)
        name = open_stream.name_of(number)
        for change in (False, True):
            stream = open_stream(number)
            items = list(stream)
            stream.close()
            kept = [map_leaves(item, copied) for item in items]
            assert_same(kept, list(expected[number]), name, "kept until the stream was closed")
            for leaf in itertools.chain.from_iterable(flatten(item)[1] for item in items if change):
                if isinstance(leaf, np.ndarray):
                    assert leaf.flags.writeable, f"{name} yields read-only arrays"
                    leaf[...] = leaf[...] == 0
        assert_same(items_of(open_stream(number)), list(expected[number]), name, "not written to")

    def test_can_be_used_after_it_was_closed(self, open_stream: Store, expected: Sequence[Any]) -> None:
        number = _longest(expected)
        stream, items = open_stream(number), list(expected[number])
        open_stream.close()
        assert_same(items_of(stream), items, open_stream.path, "read after the store was closed")
        assert_same(items_of(open_stream(number)), items, open_stream.path, "opened after close")

    def test_is_whole(self, open_stream: Store, expected: Sequence[Any]) -> None:
        told: list[tuple[int, int]] = []
        assert open_stream.verify(lambda *numbers: told.append(numbers)) == []
        assert told == [(number + 1, len(expected)) for number in range(len(expected))]

    def test_costs_little_to_send(self, open_stream: Store) -> None:
        """A pickled store says how to open it, and holds none of its data."""
        if len(open_stream):
            assert open_stream.number(open_stream.key(0)) == 0
        assert len(cloudpickle.dumps(open_stream)) < _MOST_PICKLED_BYTES

    def test_refuses_what_is_no_stream(self, open_stream: Store, expected: Sequence[Any]) -> None:
        for wrong, kind in ((len(expected), ValueError), (-1, ValueError), ("no such", TypeError)):
            error = _error_of(open_stream, wrong, kind)
            assert str(open_stream.path) in str(error), f"{wrong!r}: {error}"

    def test_damage_is_noticed(self, open_stream: Store, expected: Sequence[Any]) -> None:
        """Damage raises an error that names the store; with checksums, always."""
        with tempfile.TemporaryDirectory() as folder:
            for seed in range(self.damages if os.path.exists(open_stream.path) else 0):
                copy = os.path.join(folder, f"{seed}-{os.path.basename(open_stream.path)}")
                what = _damaged_copy(open_stream.path, copy, random.Random(seed))  # noqa: S311
                try:
                    _, opened = stores.open(copy, format=open_stream.format, **open_stream._options)
                    problems = opened.verify()
                    found = list(map(items_of, map(opened, opened.sources[: len(expected) + 1])))
                except (OSError, ValueError) as error:
                    if copy not in str(error):
                        raise AssertionError(f"{what}: the error does not name the store") from error
                    continue
                finally:
                    shutil.rmtree(copy) if os.path.isdir(copy) else os.unlink(copy)
                if self.has_checksums and not problems:
                    assert len(found) == len(expected), f"{what}: {len(found)} streams of {len(expected)}"
                    for number, items in enumerate(expected):
                        assert_same(found[number], list(items), number, f"{what}, unnoticed by verify")


def _longest(expected: Sequence[Any]) -> int:
    return max(range(len(expected)), key=lambda number: len(expected[number]))


def _error_of(store: Store, source: Any, kind: type[Exception]) -> Exception:
    try:
        store(source)
    except kind as error:
        return error
    raise AssertionError(f"{store!r} has opened the stream {source!r}")


def _damaged_copy(path: str, copy: str, rng: random.Random) -> str:
    """Copy a store, damage one of its files, and return a description of the damage."""
    shutil.copytree(path, copy) if os.path.isdir(path) else shutil.copy(path, copy)
    file = rng.choice(sorted(_files(copy)))
    size = os.stat(file).st_size
    place = rng.randrange(size) if size else 0
    how = rng.choice(("cut off", "one bit", "bytes", "zeros", "gone", "longer"))
    if how == "gone":
        os.unlink(file) if file != copy else os.truncate(file, 0)
    elif how == "cut off":
        os.truncate(file, place)
    else:
        place = size if how == "longer" else place
        with open(file, "rb+") as opened:
            opened.seek(place)
            before = opened.read(8)
            opened.seek(place)
            if how == "one bit" and before:
                opened.write(bytes([before[0] ^ 1 << rng.randrange(8)]))
            else:
                opened.write(bytes(8) if how == "zeros" else rng.randbytes(8))
    return f"{os.path.relpath(file, copy)}, {how} at byte {place} of {size}"


def _files(path: str) -> Iterator[str]:
    if os.path.isfile(path):
        yield path
    for folder, _, names in os.walk(path):
        yield from (os.path.join(folder, name) for name in names)
