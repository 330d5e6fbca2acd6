"""Opening by itself: early or in time, errors, and an end while something is being opened."""

import threading
import warnings

import pytest

from stream_dataloader import StreamDataset
from stream_dataloader._reading.begin import read_here
from stream_dataloader._reading.share import Reading, Start
from stream_dataloader._schedule.rules import NEVER


class Opened:
    """A stream that notes in which thread it was opened, and whether it was closed."""

    def __init__(self, name):
        self.name, self.thread, self.closed = name, threading.current_thread(), threading.Event()
        self._items = iter(name)

    def __iter__(self):
        return self

    def __next__(self):
        return next(self._items)

    def close(self):
        self.closed.set()


class Factory:
    """Opens streams by name, and keeps them; waits at `gate`, and refuses what is called `broken`.

    Args:
        gate: Opening waits for it; open by default.
    """

    def __init__(self, gate=None):
        self.streams, self.begun, self.gate = [], threading.Event(), gate

    def __call__(self, name):
        self.begun.set()
        if self.gate is not None:
            self.gate.wait()
        if name == "broken":
            raise OSError("no such disk")
        self.streams.append(Opened(name))
        return self.streams[-1]

    def __reduce__(self):
        return Factory, ()


@pytest.fixture
def reader_of():
    """Makes a reader of one lane, of which the opener is tested, and closes it."""
    readers = []

    def make(factory, *names, open_early=True, **options):
        given = {"time_steps": 1, "lookahead": 2, "padding_mode": "zeros", "seed": 0} | options
        dataset = StreamDataset(names, factory, 1, open_early=open_early, **given)
        (begin,) = read_here(Reading.alone(dataset.plan(), Start(0)))
        reader = begin()
        reader.share.queue.publish(NEVER)  # its tickets wait for nobody
        readers.append(reader)
        return reader

    yield make
    while readers:
        readers.pop().close()


NAMES = tuple("abcdefgh")  # many enough that reservations are granted


def test_a_lane_out_of_data_gets_the_next_source(reader_of):
    factory = Factory()
    opener = reader_of(factory, "a", "b")._opener
    streams = [opener.now(lane=0, time=time) for time in range(2)]
    assert [stream.source for stream in streams] == ["a", "b"]
    assert opener.now(lane=0, time=2) is None
    assert all(stream.thread is threading.current_thread() for stream in factory.streams)


def test_a_reservation_is_opened_in_another_thread(reader_of):
    factory = Factory()
    opener = reader_of(factory, *NAMES)._opener
    reservation = opener.reserve(lane=0, time=0)
    assert factory.begun.wait(60)
    stream = opener.take(reservation)
    assert stream.source == "a"
    assert factory.streams[0].thread is not threading.current_thread()
    assert stream.next_item() == "a", "the item that was taken early comes first"


def test_a_lane_waits_for_a_stream_that_is_being_opened(reader_of):
    factory = Factory(gate=threading.Event())
    opener = reader_of(factory, *NAMES)._opener
    reservation = opener.reserve(lane=0, time=0)
    assert factory.begun.wait(60)
    threading.Timer(0.05, factory.gate.set).start()
    assert opener.take(reservation).source == "a"
    assert len(factory.streams) == 1, "opened once"


@pytest.mark.parametrize("open_early", [None, False])
def test_nothing_is_opened_before_its_time_unless_it_may_be(reader_of, open_early):
    factory = Factory()
    opener = reader_of(factory, *NAMES, open_early=open_early)._opener
    reservations = [opener.reserve(lane=0, time=0) for _ in range(3)]
    assert [thread for thread in threading.enumerate() if thread.name == "stream-opener"] == []
    assert factory.streams == []
    assert [opener.take(reservation).source for reservation in reservations] == ["a", "b", "c"]
    assert {stream.thread for stream in factory.streams} == {threading.current_thread()}


def test_a_reservation_in_the_tail_is_refused(reader_of):
    opener = reader_of(Factory(), "a", "b")._opener
    assert opener.take(opener.reserve(lane=0, time=0)) is None
    assert opener.now(lane=0, time=0).source == "a"


@pytest.mark.parametrize("open_early", [True, False])
def test_an_error_in_opening_is_kept_for_the_first_item(reader_of, open_early):
    opener = reader_of(Factory(), "broken", *NAMES, open_early=open_early)._opener
    stream = opener.take(opener.reserve(lane=0, time=0))
    with pytest.raises(Exception, match="no such disk"):
        stream.next_item()
    assert opener.take(opener.reserve(lane=0, time=1)).source == "a"


def test_what_ends_the_thread_is_raised_in_the_lane(reader_of):
    class Exiting(Factory):
        def __call__(self, name):
            raise SystemExit("enough")

    opener = reader_of(Exiting(), *NAMES)._opener
    reservation = opener.reserve(lane=0, time=0)
    with pytest.raises(SystemExit, match="enough"):
        opener.take(reservation)


def test_reservations_of_a_saved_state_are_opened_as_they_were_granted(reader_of):
    opener = reader_of(Factory(), *NAMES)._opener
    reservations = opener.restore(lane=0, grants=[3, 1])
    assert [opener.take(reservation).source for reservation in reservations] == ["d", "b"]


def test_a_stream_that_is_being_opened_at_the_end_is_closed(reader_of):
    factory = Factory(gate=threading.Event())
    opener = reader_of(factory, *NAMES)._opener
    opener.reserve(lane=0, time=0)
    assert factory.begun.wait(60)
    threading.Timer(0.05, factory.gate.set).start()
    opener.close()
    assert factory.streams[0].closed.wait(60)


def test_a_reader_closes_what_was_opened_early(reader_of):
    factory = Factory()
    reader = reader_of(factory, *NAMES, lookahead=1)
    next(reader)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reader.close()
    assert factory.streams
    assert all(stream.closed.is_set() for stream in factory.streams)
