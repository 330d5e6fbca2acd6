"""`len(loader)` is of the epoch being read, or of the one that `iter()` would begin."""

import itertools

import pytest
from cases import Case
from helpers import seldom

from stream_dataloader import StreamDataLoader, StreamDataset

LENGTHS = [1, 30, 2, 17, 3, 24, 5, 9]
CASE = Case(LENGTHS, 3, 1, shuffle=True, seed=5)  # whose first six epochs have six lengths


def loader_of(workers=0, **options):
    return StreamDataLoader(CASE.dataset(lengths=LENGTHS), workers, **options)


_loader = loader_of()
READ = [len(list(_loader)) for _ in range(6)]


def read(batches, hold, count=None):
    hold.append(batches)
    return list(itertools.islice(batches, count))


def load(loader, epoch, count=1):
    other = loader_of()
    other.set_epoch(epoch)
    list(itertools.islice(other, count))
    loader.load_state_dict(other.state_dict())


#: What happens to a loader, and the epoch that its length is then of; `hold` keeps iterators.
CASES = {
    "fresh": (0, lambda loader, hold: None),
    "asked for and not begun": (0, lambda loader, hold: hold.append(iter(loader))),
    "in the loop": (0, lambda loader, hold: read(iter(loader), hold, 1)),
    "on the last batch": (0, lambda loader, hold: read(iter(loader), hold, READ[0])),
    "exhausted and held": (1, lambda loader, hold: read(iter(loader), hold)),
    "exhausted parts and held": (1, lambda loader, hold: read(loader.parts(), hold)),
    "left": (1, lambda loader, hold: next(iter(loader))),
    "closed": (1, lambda loader, hold: (read(iter(loader), hold, 1), hold[-1].close())),
    "set before": (3, lambda loader, hold: loader.set_epoch(3)),
    "set on the dataset": (2, lambda loader, hold: (loader.set_epoch(3), loader.dataset.set_epoch(2))),
    "set while one is read": (0, lambda loader, hold: (read(iter(loader), hold, 1), loader.set_epoch(4))),
    "set while an ended one is held": (4, lambda loader, hold: (read(iter(loader), hold), loader.set_epoch(4))),
    "loaded in mid-epoch": (2, lambda loader, hold: (read(iter(loader), hold, 1), load(loader, 2))),
    "resumed in mid-epoch": (2, lambda loader, hold: (load(loader, 2), read(iter(loader), hold, 1))),
    "loaded at an end": (1, lambda loader, hold: load(loader, 0, READ[0])),
    "loaded and another set": (5, lambda loader, hold: (load(loader, 2), loader.set_epoch(5))),
    "a newer one has begun": (1, lambda loader, hold: (read(iter(loader), hold, 1), read(iter(loader), hold, 1))),
}


def check_len(loader, case):
    (epoch, happens), hold = CASES[case], []
    happens(loader, hold)
    assert len(loader) == READ[epoch]


@pytest.mark.parametrize("case", CASES)
def test_len_is_of_the_epoch_that_is_read_or_comes(case):
    assert len(set(READ)) == 6
    check_len(loader_of(), case)


#: Where copies that are ahead could be taken for those that were delivered.
AHEAD = ("on the last batch", "exhausted and held", "set while an ended one is held", "resumed in mid-epoch")


@pytest.mark.parametrize("case", seldom([case for case in CASES if case != "closed"], *AHEAD))
def test_so_it_is_where_batches_are_copied_ahead(case, cuda):
    check_len(loader_of(device="cuda"), case)


def epochs_of(loader, total):
    """What a loop reads that goes on from a state: numbers of epochs and steps."""
    found = []
    for epoch in range(loader.epoch, total):
        loader.set_epoch(epoch)
        for batch in loader:
            assert loader.epoch == epoch
            found.append((epoch, batch.batch_index))
    return found


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["unknown", "known"])
@pytest.mark.parametrize(
    ("length", "steps"), [(None, 0), (None, 1), (None, 7), (None, READ[0]), (7, 0), (7, 1), (7, 7)]
)
def test_a_loop_over_epochs_goes_on_where_it_was(lengths, steps, length):
    case = CASE if length is None else Case(LENGTHS, 3, 1, padding_mode="cycle", seed=5)

    def build():
        return StreamDataLoader(case.dataset(lengths=lengths), batches_per_epoch=length)

    loader, resumed = build(), build()
    used = list(itertools.islice(loader, steps))
    resumed.load_state_dict(used[-1].state_dict() if used else loader.state_dict())
    assert epochs_of(resumed, 3) == epochs_of(build(), 3)[steps:]
    assert resumed.epoch == 3


@pytest.mark.filterwarnings("ignore:skipped the rest")
def test_with_skips_it_is_the_number_that_would_come_without():
    def read(length):
        if length == 30:
            raise OSError("gone")
        yield from range(length)

    options = {"time_steps": 1, "lengths": LENGTHS}
    loader = StreamDataLoader(StreamDataset(LENGTHS, read, 3, on_error="skip", **options))
    assert len(loader) == len(list(StreamDataLoader(StreamDataset(LENGTHS, range, 3, **options))))
    assert len(list(loader)) < len(loader)
