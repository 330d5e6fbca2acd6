"""Where lengths are known no worker waits for another: each works out by itself which sources its lanes get."""

import itertools
import time

import pytest
from cases import cases, keys
from helpers import PATIENCE, random_cases
from hypothesis import given
from hypothesis import strategies as st

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader.errors import LengthError


class Meeting:
    """The first source waits until the sixth one was opened; each stream has two items."""

    def __init__(self, path):
        self.path = path

    def __call__(self, number):
        if number == 5:
            self.path.touch()
        until = time.monotonic() + PATIENCE
        while number == 0 and not self.path.exists():
            assert time.monotonic() < until, "the other worker waits for this one"
            time.sleep(0.01)
        return iter(range(2))


@pytest.mark.parametrize("worker_method", ["process", "thread"])
@pytest.mark.parametrize("padding_mode", ["zeros", "drop"])
def test_a_worker_goes_on_while_another_one_is_held_up(tmp_path, worker_method, padding_mode):
    options = {"padding_mode": padding_mode, "lengths": [2] * 8, "lookahead": 0}
    dataset = StreamDataset(range(8), Meeting(tmp_path / "met"), 2, time_steps=2, **options)
    loader = StreamDataLoader(dataset, 2, worker_method=worker_method, prefetch_factor=8, timeout=PATIENCE)
    assert sum(int(batch.mask.sum()) for batch in loader) == 16


@pytest.mark.parametrize("worker_method", ["process", "thread"])
@pytest.mark.parametrize("length", [2, 4])
def test_a_length_that_is_wrong_ends_the_epoch_at_its_stream(worker_method, length):
    dataset = StreamDataset(range(6), lambda n: iter(range(3)), 2, time_steps=2, lengths=[3, 3, length, 3, 3, 3])
    loader = StreamDataLoader(dataset, 2, worker_method=worker_method)
    with pytest.raises(LengthError, match=rf"lengths\[2\] is {length}") as caught:
        list(loader)
    assert caught.value.source_index == 2


MODES = ("zeros", "data", "drop", "cycle")


@random_cases(1_000, 20)
@given(
    cases(modes=MODES, min_streams=8, max_lanes=2),
    st.integers(1, 2),
    st.booleans(),
    st.integers(0, 12),
    st.lists(st.integers(1, 5), min_size=2, max_size=2),
)
@pytest.mark.filterwarnings("ignore:num_workers is")
def test_any_number_of_workers_goes_on_from_any_state(case, virtual_ranks, balanced, taken, workers):
    case.knows_lengths = True
    if case.padding_mode == "cycle":  # each virtual rank has to find an item
        case.lengths = [max(1, length) for length in case.lengths]
    options = {"schedule": "balanced", "shuffle": True} if balanced else {}

    def loader_of(number):
        way = {"num_workers": number, "worker_method": "thread"} if number else {}
        dataset = case.dataset(batch_size=2 * case.lanes, **options)
        return StreamDataLoader(dataset, virtual_ranks=virtual_ranks, **way)

    whole = keys(itertools.islice(loader_of(0), 16), seeds=True)
    loader = loader_of(workers[0])
    head = keys(itertools.islice(loader, min(taken, len(whole))), seeds=True)
    assert head == whole[: len(head)]
    if len(head) == len(whole):  # the state is that of the next epoch
        return
    other = loader_of(workers[1])
    other.load_state_dict(loader.state_dict())
    assert keys(itertools.islice(other, 16 - len(head)), seeds=True) == whole[len(head) :]


def breaking(n):
    yield from range(n)
    if n == 3:
        raise OSError("the disk is broken")


@pytest.mark.filterwarnings("ignore:skipped the rest")
@pytest.mark.parametrize("worker_method", ["process", "thread"])
def test_a_stream_that_is_skipped_makes_room_at_once_whoever_reads_it(worker_method):
    """What follows it comes earlier than lengths say, in each lane."""
    lengths = [5, 3, 4, 6, 2, 1, 3, 7, 8, 2]
    declared = [8 if length == 3 else length for length in lengths]
    dataset = StreamDataset(lengths, breaking, 3, time_steps=2, lengths=declared, on_error="skip")
    alone = keys(StreamDataLoader(dataset))
    assert keys(StreamDataLoader(dataset, 3, worker_method=worker_method)) == alone


def test_a_stream_that_is_too_long_is_an_error_at_the_first_item_too_many():
    dataset = StreamDataset([5], range, 1, time_steps=2, lengths=[3])
    with pytest.raises(LengthError, match=r"item 3, .* at least 4 items, and lengths\[0\] is 3") as raised:
        list(StreamDataLoader(dataset))
    assert raised.value.position == 3
