"""However an iteration is left, each object that a factory opened is closed once, and lanes open few at a time."""

import pytest
from helpers import declared, soon
from ledger import Counted

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader.errors import ReadError

WAYS = {
    "here": {},
    "thread": {"num_workers": 2, "worker_method": "thread"},
    "processes": {"num_workers": 2, "prefetch_factor": 1},
}
SOURCES = [(number, (0, 1, 2, 7)[number % 4]) for number in range(18)]
LANES, AHEAD = 3, 2


def ended(loader):
    assert len(list(loader)) > 3


def closed(loader):
    iterator = iter(loader)
    next(iterator)
    iterator.close()
    return iterator  # what is closed waits for no garbage


def dropped(loader):
    for _ in loader:
        break


def replaced(loader):
    first, second = iter(loader), iter(loader)
    next(first)
    next(second)
    first.close()
    next(second)
    second.close()


def reloaded(loader):
    first = iter(loader)
    next(first)
    loader.load_state_dict(loader.state_dict())
    first.close()
    dropped(loader)


def set_anew(loader):
    dropped(loader)
    loader.set_epoch(4)
    dropped(loader)


def broken(loader):
    with pytest.raises(ReadError):
        list(loader)


def in_parts(loader):
    parts = loader.parts()
    next(parts)
    parts.close()
    return parts


LEFT = [ended, closed, dropped, replaced, reloaded, set_anew, broken, in_parts]


@pytest.mark.one_of_each
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("leave", LEFT)
@pytest.mark.parametrize("way", WAYS)
def test_what_was_opened_is_closed_once(way, leave, early, ledger):
    faults = {7: (4, 1), 11: (1, 9 if leave is broken else 1)}  # items of sources, and how often they cannot be read
    lookahead = AHEAD if early else 0
    factory = declared(Counted(ledger, faults), early=early)
    dataset = StreamDataset(SOURCES, factory, LANES, time_steps=2, lookahead=lookahead, retries=1)
    loader = StreamDataLoader(dataset, **WAYS[way])
    held = leave(loader)
    assert ledger.of("open")
    assert soon(lambda: not ledger.problems(), 30), ledger.problems()
    del held
    if leave not in (replaced, reloaded, set_anew):  # there, workers of two iterations may read at once
        assert ledger.most_open() <= LANES * (1 + lookahead), "a lane opened a stream before it closed the last"


@pytest.mark.parametrize("way", ["here", "thread"])
def test_streams_of_an_iteration_are_closed_when_a_newer_one_begins(way, ledger):
    def streams(what):
        return {event.name for event in ledger.of(what)}

    loader = StreamDataLoader(StreamDataset(SOURCES, Counted(ledger), LANES, time_steps=2), **WAYS[way])
    first, second = iter(loader), iter(loader)  # the first is held
    next(first)
    opened = streams("open")
    next(second)
    assert soon(lambda: opened <= streams("close"), 30), f"of {len(opened)}: {opened - streams('close')}"
    second.close()


def test_plain_iteration_closes_what_it_opened(ledger):
    dataset = StreamDataset(SOURCES, Counted(ledger), LANES, time_steps=2)
    for _ in range(2):
        next(iter(dataset))
    assert len(list(dataset)) > 3
    assert not ledger.problems()
