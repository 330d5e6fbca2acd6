"""Contract of a stream: the requirements on a factory that make every promise hold.

Published as `testing.StreamContract`.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cloudpickle

from stream_dataloader._engine.kept_fields import map_leaves
from stream_dataloader._engine.reading.opening import declares_early, keeps_state, seeks_items, takes_start
from stream_dataloader.dataloader import StreamDataLoader
from stream_dataloader.dataset import StreamDataset
from stream_dataloader.testing._items import (
    assert_same,
    close,
    copied,
    has_objects,
    held,
    items_of,
    iterated,
    marks_of,
    shapes_of,
    written,
)
from stream_dataloader.testing.resume import batch_key, check_resume

__all__ = ["StreamContract"]

Open = Callable[..., Any]


class StreamContract:
    """Tests that a factory of streams must pass. Subclass this class, and give two fixtures.

    ::

        class TestMyStream(StreamContract):
            @pytest.fixture
            def open_stream(self):
                return MyStream(width=64)

            @pytest.fixture
            def sources(self, tmp_path):
                return [write_recording(tmp_path / f"{n}.rec", items=n) for n in (25, 0)]

    Streams must end within a few hundred items, and yield single time steps.

    Example:
        >>> import numpy as np
        >>> from stream_dataloader.streams import ArrayStream
        >>> passed = StreamContract().check(ArrayStream(), [np.zeros((7, 2)), np.ones((3, 2))], num_workers=(0,))
        >>> "resumes" in passed
        True
    """

    #: Numbers of workers that the loaders of the tests use in turn.
    num_workers: Sequence[int] = (0, 2)

    def check(
        self, open_stream: Open, sources: Sequence[Any], *, num_workers: Sequence[int] | None = None, **given: Any
    ) -> list[str]:
        """Run all of the tests, without pytest.

        Args:
            open_stream: The factory.
            sources: Sources for the factory to open.
            num_workers: Numbers of workers, in place of the class's.
            given: Further arguments of a subclass's tests.

        Returns:
            The names of the tests that passed.

        Raises:
            AssertionError: A test failed; the message names the source and the item.
        """
        if num_workers is not None:
            self.num_workers = num_workers
        given.update(open_stream=open_stream, sources=sources)
        names = sorted(name for name in dir(self) if name.startswith("test_"))
        for name in names:
            test = getattr(self, name)
            test(*(given[wanted] for wanted in inspect.signature(test).parameters))
        return [name.removeprefix("test_") for name in names]

    def test_the_same_twice(self, open_stream: Open, sources: Sequence[Any]) -> None:
        for source in sources:
            first = items_of(open_stream(source))
            assert_same(items_of(open_stream(source)), first, source, "opened a second time")

    def test_items_are_alike(self, open_stream: Open, sources: Sequence[Any]) -> None:
        shapes = [(source, shapes_of(item)) for source in sources for item in items_of(open_stream(source))]
        for source, shape in shapes:
            assert shape == shapes[0][1], f"{source!r} has {shape}, and the first item is {shapes[0][1]}"

    def test_starts_at_any_item(self, open_stream: Open, sources: Sequence[Any]) -> None:
        """`open_stream(source, start=n)` begins with item n, and yields nothing if n is the number of items."""
        if not takes_start(open_stream):
            return
        for source, items, start in _places(open_stream, sources):
            found = items_of(open_stream(source, start=start))
            assert_same(found, items[start:], source, f"opened with start={start}")

    def test_seeks_any_item(self, open_stream: Open, sources: Sequence[Any]) -> None:
        """`seek_item(n)` of a stream's iterator, if it has one, goes to item n."""
        for source, items, item in _places(open_stream, sources):
            stream = open_stream(source)
            iterator = iter(stream)
            assert seeks_items(iterator) or not seeks_items(stream), _unused(source, "seek_item")
            if seeks_items(iterator):
                iterator.seek_item(item)
                assert_same(list(iterated(iterator)), items[item:], source, f"sent to item {item} by seek_item")
            close(iterator)
            close(stream)

    def test_goes_on_with_its_state(self, open_stream: Open, sources: Sequence[Any]) -> None:
        """`state_dict` of a stream's iterator, if it has one, takes another iterator to the same item."""
        for source, items, item in _places(open_stream, sources):
            before, after = open_stream(source), open_stream(source)
            first, second = iter(before), iter(after)
            assert keeps_state(first) or not keeps_state(before), _unused(source, "state_dict")
            if keeps_state(first):
                assert_same(list(iterated(itertools.islice(first, item))), items[:item], source, "read so far")
                second.load_state_dict(copy.deepcopy(first.state_dict()))
                assert_same(list(iterated(second)), items[item:], source, f"begun with the state of item {item}")
            for opened in (first, before, second, after):
                close(opened)

    def test_opens_early(self, open_stream: Open, sources: Sequence[Any]) -> None:
        """If the factory declares `open_early`, another thread can open a stream while one is read."""
        if not declares_early(open_stream):
            return
        expected = [items_of(open_stream(source)) for source in sources]
        for index, source in enumerate(sources):
            opened: list[Any] = []
            thread = threading.Thread(target=_open_early, args=(open_stream, source, opened))
            thread.start()
            assert_same(items_of(open_stream(sources[index - 1])), expected[index - 1], sources[index - 1], "meanwhile")
            thread.join()
            stream, iterator, first = opened[-1]
            if isinstance(first, BaseException):
                raise AssertionError(f"{source!r} cannot be opened in another thread: {first!r}") from first
            found = [*first, *iterated(iterator)]
            close(iterator)
            close(stream)
            assert_same(found, expected[index], source, "opened early in another thread")

    def test_length_is_right(self, open_stream: Open, sources: Sequence[Any]) -> None:
        """`length(source)` of a factory, if it has one, returns the number of items, or None."""
        for source in sources if callable(getattr(open_stream, "length", None)) else ():
            length, items = open_stream.length(source), len(items_of(open_stream(source)))  # type: ignore[attr-defined]
            assert length is None or length == items, f"{source!r} has {items} items of {length}"

    def test_writes_what_it_yields(self, open_stream: Open, sources: Sequence[Any]) -> None:
        """`read_into`, if the stream has one, writes the items that it would yield; items with objects are left out."""
        for source in sources:
            items = items_of(open_stream(source))
            if items and has_objects(items[0]):
                continue
            starts = {0, len(items) // 2, max(0, len(items) - 2)} if takes_start(open_stream) else {0}
            for room, start in itertools.product((1, 3, 7), sorted(starts)):
                stream = open_stream(source, start=start) if start else open_stream(source)
                if not hasattr(stream, "read_into"):
                    close(stream)
                    continue
                iterator = iterated(stream)  # kept, as the loader does
                found = list(itertools.islice(iterator, 1))
                while found and (more := written(stream, items[0], room, source)):
                    found += more
                assert not found or not written(stream, items[0], 1, source), f"{source!r}: goes on after its end"
                close(iterator)
                close(stream)
                assert_same(found, items[start:], source, f"written {room} at a time from item {start} on")

    def test_marks_starts(self, open_stream: Open, sources: Sequence[Any]) -> None:
        """`starts_within`, if the stream has one, marks the same items wherever the stream is opened."""
        for source in sources:
            count = len(items_of(open_stream(source)))
            expected = marks_of(open_stream(source), 0, count, max(1, count))
            starts = {0, count // 3, count // 2} if takes_start(open_stream) else {0}
            for start, most in itertools.product(sorted(starts), (1, 3)):
                stream = open_stream(source, start=start) if start else open_stream(source)
                found = marks_of(stream, start, count, most)
                wanted = [mark for mark in expected if mark >= start]
                assert found == wanted, f"{source!r} marks {found} from item {start} on, not {wanted}"

    def test_two_at_once(self, open_stream: Open, sources: Sequence[Any]) -> None:
        expected = [items_of(open_stream(source)) for source in sources]
        streams = [open_stream(source) for source in sources]
        found = list(itertools.zip_longest(*map(iterated, streams), fillvalue=_NOTHING))
        for index, source in enumerate(sources):
            items = [row[index] for row in found if row[index] is not _NOTHING]
            assert_same(items, expected[index], source, "read beside others")
            close(streams[index])

    def test_closes(self, open_stream: Open, sources: Sequence[Any]) -> None:
        """A stream leaves nothing open, whether it is read to its end, left early, or never started."""
        for source in sources:
            items_of(open_stream(source))  # what is opened once for all is opened now
        before = held()
        for items in (0, 1, 2, None):
            for source in sources:
                stream = open_stream(source)
                iterator = iterated(stream)
                for _ in itertools.islice(iterator, items):
                    pass
                close(iterator)
                close(stream)
                del stream, iterator
        deadline = time.monotonic() + 5
        while any(now > then for now, then in zip(held(), before, strict=True)):
            assert time.monotonic() < deadline, f"descriptors and threads were {before}, and are {held()}"
            time.sleep(0.01)

    def test_is_picklable(self, open_stream: Open, sources: Sequence[Any]) -> None:
        """A pickled copy of the factory opens the same streams."""
        copy = cloudpickle.loads(cloudpickle.dumps(open_stream))
        for source in sources:
            sent = cloudpickle.loads(cloudpickle.dumps(source))
            assert_same(items_of(copy(sent)), items_of(open_stream(source)), source, "opened by a pickled factory")

    def test_workers_do_not_matter(self, open_stream: Open, sources: Sequence[Any]) -> None:
        expected = None
        for workers in self.num_workers:
            loader = StreamDataLoader(_dataset(open_stream, sources), workers)
            batches = [batch_key(batch) for batch in loader]
            assert expected is None or batches == expected, f"{workers} workers read other batches"
            expected = batches
        assert expected or not any(items_of(open_stream(source)) for source in sources), "no item was read"

    def test_resumes(self, open_stream: Open, sources: Sequence[Any]) -> None:
        def loader(workers: int) -> StreamDataLoader:
            return StreamDataLoader(_dataset(open_stream, sources), workers)

        check_resume(loader, num_workers=self.num_workers, epochs=1)


_NOTHING = object()
_PLACES = 12  # about as many of the first items and of the others are begun at


def _places(open_stream: Open, sources: Sequence[Any]) -> Iterator[tuple[Any, list[Any], int]]:
    """Yield each source, its items, and an item to start at: the first few, some more, and the end."""
    for source in sources:
        items = items_of(open_stream(source))
        places = {*range(min(len(items), _PLACES)), *range(0, len(items), 1 + len(items) // _PLACES), len(items)}
        yield from ((source, items, place) for place in sorted(places))


def _unused(source: Any, method: str) -> str:
    return f"{source!r}: the stream's {method} is never used, as the object that iter() returns has none"


def _open_early(open_stream: Callable[..., Any], source: Any, opened: list[Any]) -> None:
    """Open a stream as the background thread of a worker does."""
    stream = iterator = None
    try:
        stream = open_stream(source)
        iterator = iter(stream)
        opened.append((stream, iterator, [map_leaves(item, copied) for item in itertools.islice(iterator, 1)]))
    except BaseException as error:
        close(stream)
        opened.append((stream, iterator, error))


def _dataset(open_stream: Open, sources: Sequence[Any]) -> StreamDataset:
    longest = max((len(items_of(open_stream(source))) for source in sources), default=1)
    time_steps = max(3, longest // 8)  # few batches: each is a place to resume at
    return StreamDataset(list(sources), open_stream, 2, time_steps=time_steps, windows="packed", shuffle=True, seed=0)
