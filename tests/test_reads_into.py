"""Streams that write their items straight into the batch, and the array stream, which does."""

import numpy as np
import pytest
import torch
from cases import key

from stream_dataloader import ItemError, LengthError, OpenError, ReadError, StreamDataLoader, StreamDataset
from stream_dataloader.protocols import ReadsInto
from stream_dataloader.streams import ArrayStream

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


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("kind", ["file", "array", "tensor", "bfloat16"])
def test_rows_of_arrays(tmp_path, workers, kind):
    tables = [np.arange(rows * 3, dtype=np.float32).reshape(rows, 3) for rows in (7, 4, 12, 1)]
    expected = batches(iter, tables)
    sources = [*tables, (tables[2], 3, 9)]
    if kind == "file":
        for i, table in enumerate(tables):
            np.save(tmp_path / f"{i}.npy", table)
        sources = [tmp_path / f"{i}.npy" for i in range(4)]
    elif kind == "tensor":
        sources = list(map(torch.from_numpy, tables))
    elif kind == "bfloat16":
        sources = [torch.from_numpy(table).bfloat16() for table in tables]
    found = batches(ArrayStream(), sources[:4], workers)
    assert [batch.data.float().tolist() for batch in found] == [batch.data.tolist() for batch in expected]
    assert [key(batch)[1:] for batch in found] == [key(batch)[1:] for batch in expected]


def test_bad_arrays_are_named(tmp_path):
    with pytest.raises(OpenError, match=r"missing\.npy"):
        batches(ArrayStream(), [str(tmp_path / "missing.npy")])
    with pytest.raises(OpenError, match="single number"):
        batches(ArrayStream(), [np.float32(1)])
    with pytest.raises(OpenError, match="rows 2 to 9 were asked for, and the array has 4"):
        batches(ArrayStream(), [(np.arange(4), 2, 9)])
