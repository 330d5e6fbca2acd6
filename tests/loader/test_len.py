"""`len(loader)` is of the epoch being read, or of the one that `iter()` would begin."""

import itertools

import pytest
from cases import Case
from cuda_machine import cuda  # noqa: F401

from stream_dataloader import StreamDataLoader, StreamDataset

LENGTHS = [1, 30, 2, 17, 3, 24, 5, 9]
CASE = Case(LENGTHS, 3, 1, shuffle=True, seed=5)  # whose first six epochs have six lengths


def loader_of(workers=0, **options):
    return StreamDataLoader(CASE.dataset(lengths=LENGTHS), workers, **options)


def lengths_read():
    loader = loader_of()
    return [len(list(loader)) for _ in range(6)]


READ = lengths_read()


def fresh(loader, hold):
    return 0


def asked_for_and_not_begun(loader, hold):
    hold.append(iter(loader))
    return 0


def in_the_loop(loader, hold):
    hold.append(iter(loader))
    next(hold[-1])
    return 0


def on_the_last_batch(loader, hold):
    hold.append(iter(loader))
    list(itertools.islice(hold[-1], READ[0]))
    return 0


def exhausted_and_held(loader, hold):
    hold.append(iter(loader))
    list(hold[-1])
    return 1


def exhausted_parts_and_held(loader, hold):
    hold.append(loader.parts())
    list(hold[-1])
    return 1


def left(loader, hold):
    next(iter(loader))
    return 1


def closed(loader, hold):
    hold.append(iter(loader))
    next(hold[-1])
    hold[-1].close()
    return 1


def set_before(loader, hold):
    loader.set_epoch(3)
    return 3


def set_on_the_dataset(loader, hold):
    loader.set_epoch(3)
    loader.dataset.set_epoch(2)
    return 2


def set_while_one_is_read(loader, hold):
    in_the_loop(loader, hold)
    loader.set_epoch(4)
    return 0


def set_while_one_is_held_that_has_ended(loader, hold):
    exhausted_and_held(loader, hold)
    loader.dataset.set_epoch(4)
    return 4


def loaded_in_mid_epoch(loader, hold):
    other = loader_of()
    other.set_epoch(2)
    next(iter(other))
    in_the_loop(loader, hold)
    loader.load_state_dict(other.state_dict())
    return 2  # the whole of it


def resumed_in_mid_epoch(loader, hold):
    loaded_in_mid_epoch(loader, hold)
    hold.append(iter(loader))
    next(hold[-1])
    return 2


def loaded_at_an_end(loader, hold):
    other = loader_of()
    list(itertools.islice(other, READ[0]))
    loader.load_state_dict(other.state_dict())
    return 1


def loaded_and_another_set(loader, hold):
    loaded_in_mid_epoch(loader, hold)
    loader.set_epoch(5)
    return 5


def a_newer_one_has_begun(loader, hold):
    in_the_loop(loader, hold)
    hold.append(iter(loader))
    next(hold[-1])
    return 1


CASES = [
    fresh,
    asked_for_and_not_begun,
    in_the_loop,
    on_the_last_batch,
    exhausted_and_held,
    exhausted_parts_and_held,
    left,
    closed,
    set_before,
    set_on_the_dataset,
    set_while_one_is_read,
    set_while_one_is_held_that_has_ended,
    loaded_in_mid_epoch,
    resumed_in_mid_epoch,
    loaded_at_an_end,
    loaded_and_another_set,
    a_newer_one_has_begun,
]


@pytest.mark.parametrize("happens", CASES)
def test_len_is_of_the_epoch_that_is_read_or_comes(happens):
    assert len(set(READ)) == 6
    loader, hold = loader_of(), []  # the iterators that are still there
    epoch = happens(loader, hold)
    assert len(loader) == READ[epoch]


@pytest.mark.parametrize("happens", [case for case in CASES if case is not closed])
def test_so_it_is_where_batches_are_copied_ahead(happens, cuda):  # noqa: F811
    loader, hold = loader_of(device="cuda"), []
    epoch = happens(loader, hold)
    assert len(loader) == READ[epoch]


def test_ranks_have_one_len():
    loaders = [StreamDataLoader(CASE.dataset(lengths=LENGTHS), rank=rank, world_size=2) for rank in range(2)]
    for epoch in range(3):
        count = len(loaders[0])
        assert count == len(loaders[1]) == len(list(loaders[0]))
        loaders[1].set_epoch(epoch + 1)


def test_epochs_of_n_batches_have_n_whatever_happens():
    for happens in CASES:
        if "loaded" not in happens.__name__ and "resumed" not in happens.__name__:
            dataset = CASE.dataset(padding_mode="cycle", lengths=LENGTHS)
            loader, hold = StreamDataLoader(dataset, batches_per_epoch=READ[0]), []
            happens(loader, hold)
            assert len(loader) == READ[0]


def epochs_of(loader, total):
    """What a loop reads that goes on from a state: numbers of epochs and steps."""
    found = []
    for epoch in range(loader.epoch, total):
        loader.set_epoch(epoch)
        assert loader.epoch == epoch
        for batch in loader:
            assert loader.epoch == epoch
            found.append((epoch, batch.step))
    return found


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["unknown", "known"])
@pytest.mark.parametrize("steps", [0, 1, 7, READ[0]])
@pytest.mark.parametrize("length", [None, 7])
def test_a_loop_over_epochs_goes_on_where_it_was(lengths, steps, length):
    case = CASE if length is None else Case(LENGTHS, 3, 1, padding_mode="cycle", seed=5)

    def build():
        return StreamDataLoader(case.dataset(lengths=lengths), batches_per_epoch=length)

    whole = epochs_of(build(), 3)
    loader = build()
    batches = iter(loader)
    if length:
        steps = min(steps, length)
    used = list(itertools.islice(batches, steps))
    state = used[-1].state_dict() if used else loader.state_dict()
    resumed = build()
    resumed.load_state_dict(state)
    assert epochs_of(resumed, 3) == whole[steps:]
    assert resumed.epoch == 3


@pytest.mark.filterwarnings("ignore:skipped the rest")
def test_with_skips_it_is_the_number_that_would_come_without():
    def read(length):
        if length == 30:
            raise OSError("gone")
        yield from range(length)

    dataset = StreamDataset(LENGTHS, read, 3, time_steps=1, lengths=LENGTHS, on_error="skip")
    loader = StreamDataLoader(dataset)
    whole = StreamDataLoader(StreamDataset(LENGTHS, range, 3, time_steps=1, lengths=LENGTHS))
    assert len(loader) == len(list(whole))
    assert len(list(loader)) < len(whole)
