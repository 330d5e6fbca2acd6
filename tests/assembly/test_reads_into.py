"""Streams that write their items straight into the batch."""

import numpy as np
import pytest
import torch

from stream_dataloader import ItemError, LengthError, ReadError, StreamDataLoader, StreamDataset
from stream_dataloader.protocols import ReadsInto

WORKERS = [0, 2]


class Writing:
    """Counts up by dicts, at most two time steps a call; may go wrong at some position."""

    def __init__(self, length, broken=None, answer=None, dtype=torch.int32):
        self.position, self.length, self.broken, self.answer, self.dtype = 0, length, broken, answer, dtype
        self.calls = []

    def __iter__(self):
        for _ in range(self.length):
            self.position += 1
            yield {"x": torch.full((3,), self.position - 1).to(self.dtype), "y": self.position - 1}

    def read_into(self, out):
        if self.position == self.broken:
            raise OSError("unplugged")
        if self.answer is not None:
            return self.answer
        assert set(out) == {"x", "y"}
        assert type(out["x"]) is (torch.Tensor if self.dtype == torch.bfloat16 else np.ndarray)
        count = min(2, len(out["x"]), self.length - self.position)
        for i in range(count):
            out["x"][i] = self.position + i
            out["y"][i] = self.position + i
        self.position += count
        return count


def iterated(source):
    return iter(Writing(*source))


def written(source):
    return Writing(*source)


def batches(open_stream, sources, workers=0, lanes=3, time_steps=5, **options):
    dataset = StreamDataset(sources, open_stream, lanes, time_steps=time_steps, **options)
    return list(StreamDataLoader(dataset, workers))


@pytest.mark.parametrize("transport", ["shared_memory", "queue"])
@pytest.mark.parametrize("windows", ["aligned", "packed"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.bfloat16])
def test_what_is_written_is_what_would_be_yielded(transport, windows, dtype):
    assert isinstance(Writing(1), ReadsInto)
    sources = [(n, None, None, dtype) for n in (7, 0, 12, 1, 5, 6, 2)]
    expected = batches(iterated, sources, windows=windows)
    for workers in WORKERS:
        dataset = StreamDataset(sources, written, 3, time_steps=5, windows=windows)
        loader = StreamDataLoader(dataset, workers, transport=transport)
        for batch, other in zip(loader, expected, strict=True):
            for name in ("x", "y"):
                assert torch.equal(batch.data[name], other.data[name])
            assert torch.equal(batch.position, other.position)
            assert torch.equal(batch.mask, other.mask)


def test_nothing_is_iterated_but_the_first_item():
    streams = []

    def open_stream(length):
        streams.append(Writing(length))
        return streams[-1]

    batches(open_stream, [9])
    assert streams[0].position == 9
    iterated_only = batches(lambda n: iter([("text", i) for i in range(n)]), [9])
    assert iterated_only[1].data[0][0][0] == "text"


@pytest.mark.filterwarnings("ignore:num_workers is")
@pytest.mark.parametrize("workers", WORKERS)
def test_errors_say_where_and_keep_what_was_read(workers):
    with pytest.raises(ReadError, match=r"source 0 .*item 3, .*read_into raised OSError\('unplugged'\)"):
        batches(written, [(9, 3)], workers)
    with pytest.warns(RuntimeWarning, match="skipped"):
        kept = batches(written, [(9, 3), (4,)], workers, lanes=1, on_error="skip", windows="packed")
    assert kept[0].source[:, 0].tolist() == [0, 0, 0, 1, 1]
    for answer in (6, -1, "x", 2.0):
        with pytest.raises(ItemError, match=r"read_into returned .*0 \(the stream's end\) to 4"):
            batches(written, [(9, None, answer)], workers)
    with pytest.raises(LengthError, match=r"only 4 items, and lengths.* is 5"):
        batches(written, [(4,)], workers, lengths=[5])
    with pytest.raises(LengthError, match=r"at least 5 items, and lengths.* is 4"):
        batches(written, [(9,)], workers, lengths=[4])
