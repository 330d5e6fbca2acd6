"""Factories that do not do what their signature says: `start` that is ignored, an iterator that two streams share."""

import functools
import itertools

import numpy as np
import pytest
import torch

from stream_dataloader import Sections, StreamDataLoader, StreamDataset, get_stream_info
from stream_dataloader.errors import LengthError, OpenError
from stream_dataloader.stream_info import StreamInfo
from stream_dataloader.testing import check_resume

LENGTHS = [9, 7, 8, 5]


def as_numbers(value):
    return value


def as_tensors(value):
    return {"a": torch.tensor([value, 0.5]), "b": (np.float32(value), str(value))}


def dark_at_first(number):
    return max(0, number - 3)


def ignoring(kind):
    def read(length, start=0):
        assert start >= 0, "no item has a number below 0"
        return map(kind, range(length))

    return read


def loader_of(open_stream, workers=0, time_steps=2, **options):
    dataset = StreamDataset(LENGTHS, open_stream, 2, time_steps=time_steps, seed=0, **options)
    return StreamDataLoader(dataset, workers)


def resumed(open_stream, workers=0, **options):
    loader = loader_of(open_stream, workers, **options)
    list(itertools.islice(loader, 2))
    other = loader_of(open_stream, workers, **options)
    other.load_state_dict(loader.state_dict())
    return other


@pytest.mark.parametrize("kind", [as_numbers, as_tensors, dark_at_first])
def test_a_start_that_is_ignored_is_an_error_when_reading_on(kind):
    """Also behind equal items: a recording that begins with black is alike wherever it is opened near its beginning."""
    with pytest.raises(OpenError) as caught:
        list(resumed(ignoring(kind)))
    assert caught.value.position == 4


@pytest.mark.parametrize("workers", [0, 2])
def test_with_lengths_or_sections_a_start_that_is_ignored_is_an_error_in_any_process(workers):
    with pytest.raises((OpenError, LengthError)):
        list(resumed(ignoring(as_numbers), workers, lengths=LENGTHS))
    with pytest.raises(OpenError):
        list(
            loader_of(
                ignoring(as_numbers), workers, lengths=LENGTHS, sections=Sections(4, jitter=True, lengths=LENGTHS)
            )
        )


@pytest.mark.filterwarnings("ignore:skipped the rest")
def test_each_stream_whose_start_is_ignored_is_skipped():
    loader = resumed(ignoring(as_numbers), on_error="skip")
    items = [int(item) for batch in loader for item in batch.data[batch.mask]]
    assert sorted(items) == sorted([*range(8), *range(5)])
    assert [failure.source_index for failure in loader.failures] == [0, 1]


@pytest.mark.parametrize(("time_steps", "kind"), [(1, as_numbers), (2, as_numbers), (12, dark_at_first)])
def test_check_resume_finds_a_start_that_is_ignored(time_steps, kind):
    """Also where no stream is longer than a window, so that none is ever left in its middle."""
    with pytest.raises((AssertionError, OpenError), match="ignores it"):
        check_resume(lambda workers: loader_of(ignoring(kind), workers, time_steps), num_workers=(0,))


def dark(length, start=0):
    return map(dark_at_first, range(start, length))


def equal(length, start=0):
    return [7] * (length - start)


def drawing(length, start=0):
    for position in range(start, length):
        yield get_stream_info().rng_at(position).integers(1 << 30)


def in_one_buffer(length, start=0):
    buffer = np.zeros(2)
    for position in range(start, length):
        buffer[:] = position
        yield buffer


@pytest.mark.parametrize("open_stream", [equal, dark, drawing, in_one_buffer])
def test_a_start_that_is_used_is_not_blamed(open_stream):
    assert check_resume(lambda workers: loader_of(open_stream, workers), num_workers=(0,)) > 8


def test_draws_of_a_stream_that_begins_in_its_middle_are_its_own():
    """What is opened to see whether `start` is used draws nothing from the stream's generator."""

    def read(length, start=0):
        rng = get_stream_info().rng
        yield from (rng.integers(1 << 30) + 10 * position for position in range(start, length))

    batch = next(iter(resumed(read)))
    assert batch.data[0, 0] == StreamInfo(0, 0, 0, 0, 0).rng.integers(1 << 30) + 40


@pytest.mark.parametrize("shared", [(i for i in range(20)), iter(range(20))])
def test_an_iterator_that_two_sources_share_is_an_error(shared):
    with pytest.raises(OpenError) as caught:
        list(loader_of(lambda _: shared, lookahead=0))
    assert caught.value.source_index == 1


def test_a_generator_that_is_over_is_an_error_not_an_empty_stream():
    generators = [(i for i in range(3)) for _ in LENGTHS]
    dataset = StreamDataset(range(4), generators.__getitem__, 2, time_steps=2)
    loader = StreamDataLoader(dataset)
    assert sum(int(batch.mask.sum()) for batch in loader) == 12
    with pytest.raises(OpenError):
        list(loader)


def test_an_object_that_begins_anew_may_serve_one_stream_after_the_other():
    class Reader:
        def __iter__(self):
            self.left = 3
            return self

        def __next__(self):
            if not self.left:
                raise StopIteration
            self.left -= 1
            return self.left

    readers = [Reader(), Reader()]
    dataset = StreamDataset(range(4), lambda number: readers[number % 2], 2, time_steps=3, lookahead=0)
    assert [batch.data.T.tolist() for batch in StreamDataLoader(dataset)] == [[[2, 1, 0]] * 2] * 2


def counting(start=0, step=1):
    return iter(range(start, start + 6, step))


@pytest.mark.parametrize("open_stream", [itertools.count, counting, functools.partial(counting, step=1)])
def test_a_parameter_start_that_takes_the_source_is_no_item_to_begin_at(open_stream):
    """`itertools.count(start=0, step=1)`: of source 5, item 2 is 7, also where reading goes on."""

    def loader():
        return StreamDataLoader(StreamDataset([5], open_stream, 1, time_steps=2))

    first = loader()
    assert next(iter(first)).data.flatten().tolist() == [5, 6]
    resumed = loader()
    resumed.load_state_dict(first.state_dict())
    assert next(iter(resumed)).data.flatten().tolist() == [7, 8]
