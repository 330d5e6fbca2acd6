"""The contract of a stream: what a factory must do so that every promise of the library holds for its streams.

Guarantee: if a factory passes, any number of workers read the same from it, it resumes exactly, writes in place what it
would yield, and leaves nothing open. Published as `testing.StreamContract`.
"""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cloudpickle
import numpy as np
import torch

from stream_dataloader._items.layout import as_array
from stream_dataloader._reading.early import declares_early
from stream_dataloader._reading.stream import keeps_state, seeks_items, takes_start
from stream_dataloader.batch import map_leaves
from stream_dataloader.dataloader import StreamDataLoader
from stream_dataloader.dataset import StreamDataset
from stream_dataloader.testing.resume import batch_key, check_resume, leaf_key

__all__ = ["StreamContract"]

_DESCRIPTORS = "/proc/self/fd"


class StreamContract:
    """Tests that a factory of streams must pass. Subclass it under pytest, and give what to test as two fixtures.

    ::

        class TestMyStream(StreamContract):
            @pytest.fixture
            def open_stream(self):
                return MyStream(width=64)

            @pytest.fixture
            def sources(self, tmp_path):
                return [write_recording(tmp_path / "a.rec", items=25), write_recording(tmp_path / "b.rec", items=0)]

    Streams must be finite, end within a few hundred items, and yield single time steps. Without pytest,
    `StreamContract().check(open_stream, sources)` runs all of the tests.

    Example:
        >>> from stream_dataloader.streams import ArrayStream
        >>> StreamContract().check(ArrayStream(), [np.zeros((7, 2)), np.ones((3, 2))], num_workers=(0,))
        ['closes', 'goes_on_with_its_state', 'is_picklable', 'items_are_alike', 'length_is_right', 'opens_early', \
'resumes', 'seeks_any_item', 'starts_at_any_item', 'the_same_twice', 'two_at_once', 'workers_do_not_matter', \
'writes_what_it_yields']
    """

    #: How many workers the loaders of the tests have, in turn.
    num_workers: Sequence[int] = (0, 2)

    def check(
        self, open_stream: Callable[..., Any], sources: Sequence[Any], *, num_workers: Sequence[int] | None = None
    ) -> list[str]:
        """Run all of the tests.

        Args:
            open_stream: The factory.
            sources: What it opens.
            num_workers: Instead of the class's.

        Returns:
            Which tests were passed.

        Raises:
            AssertionError: A test failed; tells what and where.
        """
        if num_workers is not None:
            self.num_workers = num_workers
        names = sorted(name for name in dir(self) if name.startswith("test_"))
        for name in names:
            getattr(self, name)(open_stream, sources)
        return [name.removeprefix("test_") for name in names]

    def test_the_same_twice(self, open_stream: Callable[..., Any], sources: Sequence[Any]) -> None:
        """A source yields the same items each time it is opened."""
        for source in sources:
            first = _items(open_stream(source))
            _assert_same(_items(open_stream(source)), first, source, "opened a second time")

    def test_items_are_alike(self, open_stream: Callable[..., Any], sources: Sequence[Any]) -> None:
        """All items have one structure, one dtype and one shape a leaf, as a batch needs them."""
        shapes = [(source, _shapes(item)) for source in sources for item in _items(open_stream(source))]
        for source, shape in shapes:
            assert shape == shapes[0][1], f"{source!r} has an item of {shape}, and the first item is {shapes[0][1]}"

    def test_starts_at_any_item(self, open_stream: Callable[..., Any], sources: Sequence[Any]) -> None:
        """`open_stream(source, start=n)` goes on with item n, and yields nothing at the end."""
        if not takes_start(open_stream):
            return
        for source in sources:
            items = _items(open_stream(source))
            for start in _places(items):
                found = _items(open_stream(source, start=start))
                _assert_same(found, items[start:], source, f"opened with start={start}")

    def test_seeks_any_item(self, open_stream: Callable[..., Any], sources: Sequence[Any]) -> None:
        """`seek_item(n)` of a stream's iterator, if there is one, goes to item n, and at the end to its end."""
        for source in sources:
            items = _items(open_stream(source))
            for item in _places(items):
                stream = open_stream(source)
                iterator = iter(stream)
                assert seeks_items(iterator) or not seeks_items(stream), _unused(source, "seek_item")
                if seeks_items(iterator):
                    iterator.seek_item(item)
                    _assert_same(list(_iterated(iterator)), items[item:], source, f"sent to item {item} by seek_item")
                _close(iterator)
                _close(stream)

    def test_goes_on_with_its_state(self, open_stream: Callable[..., Any], sources: Sequence[Any]) -> None:
        """What `state_dict` of a stream's iterator returned, if there is one, takes another one to the same item."""
        for source in sources:
            items = _items(open_stream(source))
            for item in _places(items):
                before, after = open_stream(source), open_stream(source)
                first, second = iter(before), iter(after)
                assert keeps_state(first) or not keeps_state(before), _unused(source, "state_dict")
                if keeps_state(first):
                    _assert_same(list(_iterated(itertools.islice(first, item))), items[:item], source, "read so far")
                    second.load_state_dict(copy.deepcopy(first.state_dict()))
                    told = f"begun with the state of item {item}"
                    _assert_same(list(_iterated(second)), items[item:], source, told)
                for opened in (first, before, second, after):
                    _close(opened)

    def test_opens_early(self, open_stream: Callable[..., Any], sources: Sequence[Any]) -> None:
        """If the factory declares `open_early`, another thread can open a stream and take its first item.

        This thread reads another stream meanwhile. (A fault that shows only now and then may not be found.)
        """
        if not declares_early(open_stream):
            return
        expected = [_items(open_stream(source)) for source in sources]
        for index, source in enumerate(sources):
            opened: list[Any] = []
            thread = threading.Thread(target=_open_early, args=(open_stream, source, opened))
            thread.start()
            _assert_same(_items(open_stream(sources[index - 1])), expected[index - 1], sources[index - 1], "meanwhile")
            thread.join()
            stream, iterator, first = opened[-1]
            if isinstance(first, BaseException):
                raise AssertionError(f"{source!r} cannot be opened in another thread: {first!r}") from first
            found = [*first, *_iterated(iterator)]
            _close(iterator)
            _close(stream)
            _assert_same(found, expected[index], source, "opened early in another thread")

    def test_length_is_right(self, open_stream: Callable[..., Any], sources: Sequence[Any]) -> None:
        """A factory that has a method `length` tells how many items a source has, or None."""
        for source in sources if callable(getattr(open_stream, "length", None)) else ():
            length, items = open_stream.length(source), len(_items(open_stream(source)))  # type: ignore[attr-defined]
            assert length is None or length == items, f"{source!r} has {items} items, and its length is {length}"

    def test_writes_what_it_yields(self, open_stream: Callable[..., Any], sources: Sequence[Any]) -> None:
        """`read_into`, if there is one, writes the items that would be yielded, as many as there is room for."""
        for source in sources:
            items = _items(open_stream(source))
            starts = {0, len(items) // 2, max(0, len(items) - 2)} if takes_start(open_stream) else {0}
            for room, start in itertools.product((1, 3, 7), sorted(starts)):
                stream = open_stream(source, start=start) if start else open_stream(source)
                if not hasattr(stream, "read_into"):
                    _close(stream)
                    continue
                iterator = _iterated(stream)  # kept, as the loader does
                found = list(itertools.islice(iterator, 1))
                while found and (written := _written(stream, items[0], room, source)):
                    found += written
                assert not found or not _written(stream, items[0], 1, source), f"{source!r}: goes on after its end"
                _close(iterator)
                _close(stream)
                _assert_same(found, items[start:], source, f"written {room} at a time from item {start} on")

    def test_two_at_once(self, open_stream: Callable[..., Any], sources: Sequence[Any]) -> None:
        """Streams that are read in turn do not disturb each other."""
        expected = [_items(open_stream(source)) for source in sources]
        streams = [open_stream(source) for source in sources]
        found = list(itertools.zip_longest(*map(_iterated, streams), fillvalue=_NOTHING))
        for index, source in enumerate(sources):
            items = [row[index] for row in found if row[index] is not _NOTHING]
            _assert_same(items, expected[index], source, "read beside others")
            _close(streams[index])

    def test_closes(self, open_stream: Callable[..., Any], sources: Sequence[Any]) -> None:
        """A stream leaves nothing open, whether it is read to its end, left early, or never begun."""
        for source in sources:
            _items(open_stream(source))  # what is opened once for all is opened now
        before = _held()
        for items in (0, 1, 2, None):
            for source in sources:
                stream = open_stream(source)
                iterator = _iterated(stream)
                for _ in itertools.islice(iterator, items):
                    pass
                _close(iterator)
                _close(stream)
                del stream, iterator
        deadline = time.monotonic() + 5
        while (after := _held()) != before and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.01)
        assert after == before, f"descriptors and threads were {before}, and are {after}"

    def test_is_picklable(self, open_stream: Callable[..., Any], sources: Sequence[Any]) -> None:
        """The factory, sent to another process, opens the same streams."""
        copy = cloudpickle.loads(cloudpickle.dumps(open_stream))
        for source in sources:
            sent = cloudpickle.loads(cloudpickle.dumps(source))
            _assert_same(_items(copy(sent)), _items(open_stream(source)), source, "opened by a pickled factory")

    def test_workers_do_not_matter(self, open_stream: Callable[..., Any], sources: Sequence[Any]) -> None:
        """Batches are bit-identical for any number of workers, and hold the items in order."""
        expected = None
        for workers in self.num_workers:
            loader = StreamDataLoader(_dataset(open_stream, sources), workers)
            batches = [batch_key(batch) for batch in loader]
            assert expected is None or batches == expected, f"{workers} workers read other batches"
            expected = batches
        assert expected or not any(_items(open_stream(source)) for source in sources), "no item was read"

    def test_resumes(self, open_stream: Callable[..., Any], sources: Sequence[Any]) -> None:
        """A loader of them goes on exactly from every place, with another number of workers."""

        def loader(workers: int) -> StreamDataLoader:
            return StreamDataLoader(_dataset(open_stream, sources), workers)

        check_resume(loader, num_workers=self.num_workers, epochs=1)


_NOTHING = object()


def _places(items: list[Any]) -> list[int]:
    """Where to begin: the first few places, some further on, and the end."""
    return sorted({*range(min(len(items), 12)), *range(0, len(items), 1 + len(items) // 12), len(items)})


def _unused(source: Any, method: str) -> str:
    return (
        f"{source!r}: the stream's {method} is never used, since its iter() returns another object without one; return "
        "self from __iter__ and define __next__, or leave it out"
    )


def _open_early(open_stream: Callable[..., Any], source: Any, opened: list[Any]) -> None:
    """What the background thread of a worker does."""
    stream = iterator = None
    try:
        stream = open_stream(source)
        iterator = iter(stream)
        opened.append((stream, iterator, [map_leaves(item, _copied) for item in itertools.islice(iterator, 1)]))
    except BaseException as error:
        _close(stream)
        opened.append((stream, iterator, error))


def _dataset(open_stream: Callable[..., Any], sources: Sequence[Any]) -> StreamDataset:
    longest = max((len(_items(open_stream(source))) for source in sources), default=1)
    time_steps = max(3, longest // 8)  # few batches: each is a place to resume at
    return StreamDataset(list(sources), open_stream, 2, time_steps=time_steps, windows="packed", shuffle=True, seed=0)


def _iterated(stream: Any) -> Iterator[Any]:
    for item in stream:
        yield map_leaves(item, _copied)


def _items(stream: Any) -> list[Any]:
    """All items; the stream is closed."""
    try:
        return list(_iterated(stream))
    finally:
        _close(stream)


def _copied(leaf: Any) -> Any:
    """A leaf as an array of its own: a stream may use its memory again."""
    if isinstance(leaf, torch.Tensor):
        return as_array(leaf).copy() if leaf.dtype is not torch.bfloat16 else leaf.detach().clone()
    return np.array(leaf) if isinstance(leaf, (np.ndarray, np.generic, int, float, bool)) else leaf


def _close(stream: Any) -> None:
    if callable(close := getattr(stream, "close", None)):
        close()


def _assert_same(found: list[Any], expected: list[Any], source: Any, what: str) -> None:
    for position, (one, other) in enumerate(zip(found, expected, strict=False)):
        same = map_leaves(one, leaf_key) == map_leaves(other, leaf_key)
        assert same, f"{source!r}, {what}: item {position} of those is another one"
    assert len(found) == len(expected), f"{source!r}, {what}: {len(found)} items, and should be {len(expected)}"


def _shapes(item: Any) -> Any:
    return map_leaves(item, lambda leaf: (str(leaf.dtype), tuple(leaf.shape)) if hasattr(leaf, "shape") else type(leaf))


def _rows_of(item: Any, count: int) -> Any:
    """Room for `count` items like this one and one more, all bits set."""

    def room(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return torch.full((count + 1, *leaf.shape), float("nan"), dtype=leaf.dtype)
        rows: Any = np.empty((count + 1, *leaf.shape), leaf.dtype)
        rows.reshape(-1).view(np.uint8)[:] = 255
        return rows

    return map_leaves(item, room)


def _written(stream: Any, item: Any, room: int, source: Any) -> list[Any]:
    """The next items, as `read_into` writes them; nothing else is written to."""
    out, before = _rows_of(item, room), _rows_of(item, room)
    count: int = stream.read_into(map_leaves(out, lambda leaf: leaf[:room]))
    assert 0 <= count <= room, f"{source!r}: read_into returned {count}, with room for {room}"
    rest, rest_before = (map_leaves(rows, lambda leaf: leaf_key(leaf[count:])) for rows in (out, before))
    assert rest == rest_before, f"{source!r}: read_into wrote more than the {count} items it returned"
    return [map_leaves(out, functools.partial(_row, t=t)) for t in range(count)]


def _row(leaf: Any, t: int) -> Any:
    return _copied(leaf[t])


def _held() -> tuple[int, int]:
    """How many descriptors and threads there are."""
    gc.collect()
    descriptors = len(os.listdir(_DESCRIPTORS)) if sys.platform == "linux" else 0
    return descriptors, threading.active_count()
