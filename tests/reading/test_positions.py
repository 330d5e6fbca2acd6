"""A stream that is not begun at its first item is never at a wrong one: who may be told where to go, and who is not."""

import functools
import itertools
import logging
import threading

import pytest

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader.testing import StreamContract

LENGTHS = [23, 17, 30]


class VideoReader:
    """As decord's: `seek` is for its own `next`, and `iter()` begins at 0."""

    def __init__(self, length):
        self.length, self.position = length, 0

    def seek(self, position):
        self.position = position

    def __iter__(self):
        return iter(range(self.length))


class SecondsReader:
    """Seeks seconds, of ten items each."""

    def __init__(self, length):
        self.length, self.position = length, 0

    def seek(self, seconds):
        self.position = 10 * seconds

    def __iter__(self):
        return self

    def __next__(self):
        self.position += 1
        if self.position > self.length:
            raise StopIteration
        return self.position - 1


class Fresh(VideoReader):
    """Its methods say nothing of what `iter` returns."""

    seek_item = VideoReader.seek

    def state_dict(self):
        return {"at": self.position}

    def load_state_dict(self, state):
        self.position = state["at"]


class Generating(Fresh):
    """As above, and each iteration begins anew."""

    def __iter__(self):
        self.position = 0
        while self.position < self.length:
            self.position += 1
            yield self.position - 1


class Rewinding(SecondsReader):
    """Its own iterator, which `iter` takes back to the beginning; its state is a reference."""

    def __iter__(self):
        self.position = 0
        return self

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, state):
        self.__dict__ = state


class RewindingSeeker(Rewinding):
    def seek_item(self, item):
        self.position = item


def from_a_day(length, start="2020-01-01"):
    assert start == "2020-01-01"
    return range(length)


def from_false(length, start=False):
    assert start is False
    return range(length)


def any_keyword(length, **options):
    assert not options
    return range(length)


def opens_anywhere(length, start=0):
    return range(start, length)


@functools.wraps(opens_anywhere)
def wrapped(length):
    return range(length)


FACTORIES = [
    *(VideoReader, SecondsReader, Fresh, Generating, Rewinding, RewindingSeeker),
    *(from_a_day, from_false, any_keyword, wrapped),
    functools.partial(enumerate),
]


def loader(open_stream, workers=0, sources=LENGTHS, **options):
    if isinstance(open_stream, functools.partial):
        sources = [list(range(length)) for length in sources]
    return StreamDataLoader(StreamDataset(sources, open_stream, 2, time_steps=4, seed=0, **options), workers)


def numbers(batches):
    """What can be compared of batches of any items."""
    return [(str(batch.data), batch.source_index.tolist(), batch.position.tolist()) for batch in batches]


def resumed(before, after, taken):
    """The numbers of some batches of one loader, and of those of another that goes on from there."""
    head = numbers(itertools.islice(before, taken))
    after.load_state_dict(before.state_dict())
    return head + numbers(after)


@pytest.mark.parametrize("open_stream", FACTORIES)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_loaded_state_goes_on_at_the_right_item(open_stream, workers):
    expected = numbers(loader(open_stream))
    for taken in (1, 3, 6):
        assert resumed(loader(open_stream, workers), loader(open_stream), taken) == expected


def breaking(kind, at):
    """Opens streams of a kind, of which the first breaks once, at an item."""
    broken = []

    class Stream:
        def __init__(self, stream):
            self.stream = stream

        def __iter__(self):
            self.iterator = iter(self.stream)
            return self

        def __next__(self):
            if (item := next(self.iterator)) == at:
                broken.append(at)
                raise ConnectionError("reset")
            return item

        def __getattr__(self, name):  # what the iterator has
            if name == "iterator":
                raise AttributeError(name)
            return getattr(self.iterator, name)

    return lambda length: kind(length) if broken or length != LENGTHS[0] else Stream(kind(length))


@pytest.mark.parametrize("kind", [VideoReader, SecondsReader, Fresh, Generating, Rewinding, RewindingSeeker])
def test_a_stream_that_broke_goes_on_at_the_right_item(kind, monkeypatch):
    monkeypatch.setattr("stream_dataloader._engine.reading.stream.time.sleep", lambda _: None)
    expected = numbers(loader(kind))
    assert numbers(loader(breaking(kind, 14), retries=1)) == expected
    # the state is of item 8, and it breaks at 14
    assert resumed(loader(kind), loader(breaking(kind, 14), retries=1), 2) == expected


@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_that_is_a_reference_stays_that_of_its_batch(workers):
    batches, expected = list(itertools.islice(loader(Rewinding, workers), 4)), numbers(loader(Rewinding))
    for step, batch in enumerate(batches):
        after = loader(Rewinding)
        after.load_state_dict(batch.state_dict())
        assert numbers(after) == expected[step + 1 :]


def test_methods_that_say_nothing_of_the_iterator_are_told_of(caplog):
    class Unheard(Fresh):
        pass

    with caplog.at_level(logging.WARNING, "stream_dataloader"):
        resumed(loader(Unheard), loader(Unheard), 2)
    assert "Unheard has seek_item and load_state_dict" in caplog.text


class SeekingItems(SecondsReader):
    read = 0

    def __next__(self):
        SeekingItems.read += 1
        return super().__next__()

    def seek_item(self, item):
        self.position = item


class Stating(SeekingItems):
    """Goes by its state, though it could seek."""

    seek_item = None

    def state_dict(self):
        return {"at": self.position}

    def load_state_dict(self, state):
        self.position = state["at"]


class MakesIterators:
    """Its iterator is another object, which knows where it is."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return SeekingItems(self.length)


@pytest.mark.parametrize("kind", [SeekingItems, Stating, MakesIterators])
def test_streams_that_opted_in_are_not_read_forward(kind):
    expected, before, after = numbers(loader(kind)), loader(kind), loader(kind)
    head = numbers(itertools.islice(before, 3))
    after.load_state_dict(before.state_dict())
    SeekingItems.read = 0
    assert head + numbers(after) == expected
    assert SeekingItems.read <= sum(LENGTHS) - 24 + 3 + 1


class Lying(SecondsReader):
    seek_item = SecondsReader.seek


class LyingState(Stating):
    def load_state_dict(self, state):
        self.position = state["at"] + 1


def counted_from(length, start=0):
    return enumerate(range(length), start)


@pytest.mark.parametrize(
    ("open_stream", "test", "message"),
    [
        (counted_from, "starts_at_any_item", "opened with start=1"),
        (Lying, "seeks_any_item", "sent to item 1 by seek_item"),
        (Fresh, "seeks_any_item", "seek_item is never used"),
        (Generating, "goes_on_with_its_state", "state_dict is never used"),
        (LyingState, "goes_on_with_its_state", "state of item 0"),
    ],
)
def test_a_stream_that_lies_is_found(open_stream, test, message):
    with pytest.raises(AssertionError, match=message):
        getattr(StreamContract(), f"test_{test}")(open_stream, [5, 12])


@pytest.mark.parametrize("kind", [SeekingItems, Stating, VideoReader, from_a_day])
def test_a_stream_that_does_not_passes(kind):
    passed = StreamContract().check(kind, [5, 0, 12], num_workers=(0,))
    assert {"seeks_any_item", "goes_on_with_its_state"} <= set(passed)


class NotHere(SecondsReader):
    """Can be read by the thread that opened it only."""

    def __init__(self, length):
        super().__init__(length)
        self.thread = threading.get_ident()

    def __next__(self):
        assert threading.get_ident() == self.thread, "another thread"
        return super().__next__()


def test_a_factory_that_says_it_is_safe_in_a_thread_and_is_not_is_found(monkeypatch):
    StreamContract().test_opens_early(NotHere, [5, 12])
    monkeypatch.setattr(NotHere, "open_early", True, raising=False)
    with pytest.raises(AssertionError, match="another thread"):
        StreamContract().test_opens_early(NotHere, [5, 12])
