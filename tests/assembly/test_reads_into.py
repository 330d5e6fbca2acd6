"""Streams that write their items straight into the batch."""

import functools

import pytest
import torch
from helpers import loader_of
from worker_streams import Writing

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader.errors import ItemError, LengthError, ReadError
from stream_dataloader.protocols import ReadsInto
from stream_dataloader.testing.resume import batch_key

WORKERS = [0, 2]


def batches(open_stream, sources, workers=0, lanes=3, time_steps=5, **options):
    dataset = StreamDataset(sources, open_stream, lanes, time_steps=time_steps, **({"seed": 0} | options))
    return list(StreamDataLoader(dataset, workers))


@pytest.mark.parametrize(
    ("messages", "windows", "dtype", "mark_ends"),
    [
        (False, "aligned", torch.int32, True),
        (False, "packed", torch.bfloat16, False),
        (True, "aligned", torch.bfloat16, False),
        (True, "packed", torch.int32, True),
    ],
)
def test_what_is_written_is_what_would_be_yielded(messages, windows, dtype, mark_ends):
    assert isinstance(Writing(1), ReadsInto)
    lengths, written = [7, 0, 12, 1, 5, 6, 2], functools.partial(Writing, dtype=dtype)
    options = {"windows": windows, "mark_ends": mark_ends}
    expected = batches(lambda n: iter(written(n, may_be_iterated=True)), lengths, **options)
    for workers in WORKERS:
        dataset = StreamDataset(lengths, written, 3, time_steps=5, seed=0, **options)
        found = list(loader_of(dataset, workers, messages=messages))
        assert list(map(batch_key, found)) == list(map(batch_key, expected))


@pytest.mark.filterwarnings("ignore:num_workers is")
@pytest.mark.parametrize("workers", WORKERS)
def test_errors_say_where_and_keep_what_was_read(workers):
    def broken(length):
        return Writing(length, broken=3 if length == 9 else None)

    with pytest.raises(ReadError, match=r"read_into raised OSError\('unplugged'\)") as error:
        batches(broken, [9], workers)
    assert (error.value.source_index, error.value.position) == (0, 3)
    with pytest.warns(RuntimeWarning, match="skipped"):
        kept = batches(broken, [9, 4], workers, lanes=1, on_error="skip", windows="packed")
    assert kept[0].source_index[:, 0].tolist() == [0, 0, 0, 1, 1]
    for answer in (6, -1, "x", 2.0):
        with pytest.raises(ItemError, match=r"read_into returned .* to 4"):
            batches(lambda n, answer=answer: Writing(n, answer=answer), [9], workers)
    for length, promised in ((4, 5), (9, 4)):
        with pytest.raises(LengthError):
            batches(Writing, [length], workers, lengths=[promised])
