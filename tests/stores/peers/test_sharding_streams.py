"""Streams that are another package's datasets: each shards itself by torch's worker info, and must be read whole."""

import warnings
from collections import Counter

import pytest
from tars import write_tar

from stream_dataloader import StreamDataLoader, StreamDataset

pytestmark = pytest.mark.filterwarnings("ignore")  # of the packages themselves

LENGTHS = [6, 4, 5, 3]


@pytest.fixture(params=["webdataset", "mosaicml", "litdata"])
def opened(request, tmp_path):
    """Sources, and the factory that opens one with the package."""
    return globals()[f"_{request.param}"](tmp_path)


def _webdataset(folder):
    webdataset = pytest.importorskip("webdataset")

    def open_tars(source):  # two shards: with torch's worker info each worker takes every second one
        shards = [str(folder / f"{source}-{shard}.tar") for shard in range(2)]
        for sample in webdataset.WebDataset(shards, shardshuffle=False, empty_check=False):
            yield int(sample["txt"])

    for source, length in enumerate(LENGTHS):
        for shard, items in enumerate((range(2), range(2, length))):
            write_tar(folder / f"{source}-{shard}.tar", [(f"{item:04}.txt", b"%d" % item) for item in items])
    return list(range(len(LENGTHS))), open_tars


def _mosaicml(folder):
    streaming = pytest.importorskip("streaming")

    def open_mds(source):
        streaming.base.util.clean_stale_shared_memory()
        read = streaming.StreamingDataset(local=str(folder / str(source)), batch_size=1, shuffle=False)
        for sample in read:
            yield sample["x"]

    for source, length in enumerate(LENGTHS):
        with streaming.MDSWriter(out=str(folder / str(source)), columns={"x": "int"}) as writer:
            for item in range(length):
                writer.write({"x": item})
    return list(range(len(LENGTHS))), open_mds


def _litdata(folder):
    litdata = pytest.importorskip("litdata")
    from litdata.streaming.cache import Cache

    def open_chunks(source):
        yield from map(int, litdata.StreamingDataset(str(folder / str(source))))

    for source, length in enumerate(LENGTHS):
        cache = Cache(str(folder / str(source)), chunk_size=2)
        for item in range(length):
            cache[item] = item
        cache.done()
        cache.merge()
    return list(range(len(LENGTHS))), open_chunks


def test_every_item_of_each_dataset_is_read_once(opened):
    sources, factory = opened
    loader = StreamDataLoader(StreamDataset(sources, factory, 2, time_steps=2, seed=0), 2)
    read = Counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for batch in loader:
            read.update(zip(batch.source_index[batch.mask].tolist(), batch.data[batch.mask].tolist(), strict=True))
    assert read == Counter((n, item) for n, length in enumerate(LENGTHS) for item in range(length))
