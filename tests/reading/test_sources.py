"""The list of sources: packed, shared, and cheap to start with."""

import copy
import dataclasses
import itertools
import os
import pathlib
import pickle
import random
import sys
import threading
import tracemalloc
from collections.abc import Sequence

import numpy as np
import psutil
import pytest
import torch
from helpers import START_METHODS
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, get_worker_info

from stream_dataloader import StreamDataLoader, StreamDataset, interleave
from stream_dataloader._engine.reading.sources import PackedSources
from stream_dataloader._engine.schedule.order import Permutation
from stream_dataloader.errors import OpenError
from stream_dataloader.streams import ArrayStream


def paths(count):
    return [f"/data/recordings/day_{i % 365:03d}/camera_{i % 17:02d}/{i:09d}.mp4" for i in range(count)]


@pytest.mark.parametrize(
    "sources",
    [
        paths(1000),
        [],
        ["a", "b" * 100_000, "c"] * 50,
        [(p, 0, 10) for p in paths(70)],
        [pathlib.Path("/x")] * 3,
        range(65),
        [{"a": np.ones(2)}],
        (1, "x", None),
    ],
    ids=["paths", "none", "texts", "segments", "Path", "range", "dicts", "tuple"],
)
def test_packed_sources_are_a_sequence_of_equal_sources(sources):
    packed = PackedSources(sources)
    assert len(packed) == len(sources)
    for copied in (packed, pickle.loads(pickle.dumps(packed)), copy.deepcopy(packed)):
        assert all(repr(a) == repr(b) for a, b in zip(copied, sources, strict=True))
    assert repr(packed[-1:]) == repr(list(sources)[-1:])
    assert repr(packed[1:5]) == repr(list(sources)[1:5])
    with pytest.raises(IndexError, match="out of range"):
        packed[len(sources)]


@pytest.mark.parametrize(
    "array",
    [
        np.array(5),
        np.zeros((0, 3), np.float32),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.arange(12)[::2],
        np.array([1.5], ">f8"),
        np.array([1], np.longdouble),
        np.array([1j]),
        np.array(["text"]),
        np.zeros(3, [("field", "i4")]),
        np.array(["2020-01-01"], "M8[D]"),
        np.broadcast_to(np.arange(3.0), (2, 3)),  # read-only
        np.frombuffer(b"abc", np.uint8),
    ],
    ids=repr,
)
def test_a_source_holds_the_arrays_that_it_was_given(array):
    (copied,) = PackedSources([{"one": array, "same": array}])
    found = copied["one"]
    assert copied["same"] is found
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert np.array_equal(found, array)
    if array.flags.forc:
        assert found.flags.writeable == array.flags.writeable
        assert found.flags.f_contiguous == array.flags.f_contiguous


def growth_by_reading_all(_):
    """Bytes of its own that a worker adds by looking at every source."""
    sources, process = growth_by_reading_all.sources, psutil.Process()
    before = process.memory_full_info().uss
    for i in range(len(sources)):
        assert sources[i]
    yield process.memory_full_info().uss - before


def note_sources(_):
    growth_by_reading_all.sources = get_worker_info().dataset.sources  # which streams do not see


@pytest.mark.slow
@pytest.mark.parametrize("method", START_METHODS)
def test_workers_share_the_sources(method):
    count = 200_000
    dataset = StreamDataset(paths(count), growth_by_reading_all, 2, time_steps=1, lookahead=0)
    how = {"multiprocessing_context": method, "worker_init_fn": note_sources}
    parts = iter(DataLoader(dataset, batch_size=None, num_workers=2, **how))
    grown = max(int(next(parts).data) for _ in range(2))
    a_copy = sum(map(sys.getsizeof, paths(count)))
    assert grown < a_copy / 20
    del parts


class Counted:
    """A source that knows how often one was pickled and unpickled in this process."""

    pickled = unpickled = 0

    def __getstate__(self):
        Counted.pickled += 1
        return {"number": self.number}

    def __setstate__(self, state):
        Counted.unpickled += 1
        self.number = state["number"]

    def __init__(self, number):
        self.number = number


@pytest.mark.parametrize("method", START_METHODS)
def test_sources_are_pickled_once_however_many_workers_there_are(method):
    Counted.pickled = 0
    dataset = StreamDataset([Counted(i) for i in range(300)], lambda _: [1], 2, time_steps=1)
    for _ in range(2):
        assert len(list(StreamDataLoader(dataset, 2, multiprocessing_context=method))) == 150
    assert Counted.pickled == 300


@pytest.mark.parametrize("interleaved", [False, True])
def test_all_sources_are_read_a_block_at_a_time(interleaved):
    dataset = StreamDataset([Counted(i) for i in range(1000)], iter, 1, seed=0)
    sources = interleave([dataset]).sources if interleaved else dataset.sources
    Counted.unpickled = 0
    assert [source.number for source in sources] == list(range(1000))
    assert Counted.unpickled == 1000


def test_a_dataset_copied_elsewhere_is_a_dataset_of_its_own():
    dataset = StreamDataset([4, 3, 2], range, 2, time_steps=2, shuffle=True, seed=5)
    dataset.set_epoch(3)
    other = pickle.loads(pickle.dumps(dataset))
    first = [batch.source_index.tolist() for batch in dataset]
    assert [batch.source_index.tolist() for batch in other] == first
    assert next(batch.epoch for batch in other) == 4


class Sentence:
    """A source of some hundred bytes, which counts how many were unpickled."""

    unpickled = 0

    def __init__(self, number):
        self.number, self.codes = number, bytes([number % 256] * 100)

    def __setstate__(self, state):
        self.__dict__.update(state)
        Sentence.unpickled += 1


@given(st.lists(st.sampled_from([1, 3, 100]), min_size=1, max_size=200), st.randoms())
@example([100] * 200, random.Random(0))
def test_reading_a_small_source_reads_few_of_its_neighbours(kinds, random):
    """Strings, numbers in a list, sentences: each source is found; blocks are short where all are sentences."""
    made = {1: str, 3: lambda number: [number, 0], 100: Sentence}
    packed = PackedSources([made[kind](number) for number, kind in enumerate(kinds)])
    numbers = random.sample(range(len(kinds)), len(kinds))
    Sentence.unpickled = 0
    for number in numbers:
        source = packed[number]
        told = source.number if kinds[number] == 100 else int(source if kinds[number] == 1 else source[0])
        assert told == number
    neighbours = 20 if set(kinds) == {100} else 64  # a sentence may be in a block of strings, which are shorter
    assert Sentence.unpickled <= neighbours * kinds.count(100)


def test_reading_a_large_source_does_not_read_its_neighbours():
    packed = PackedSources(["x" * 1_000_000 for _ in range(64)])
    tracemalloc.start()
    packed[17]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3_000_000


class Squares(Sequence):
    """Sources that are made when they are asked for; one cannot be."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index == 13:
            raise OSError("no such shard")
        return index * index


@pytest.mark.parametrize("method", START_METHODS)
def test_a_billion_sources_made_by_a_rule(method):
    def numbers(source):
        yield source
        yield source + 1

    read = {}
    for workers in (0, 2):
        dataset = StreamDataset(Squares(10**9), numbers, 4, shuffle=True, seed=3, time_steps=2)
        loader = StreamDataLoader(
            dataset, workers, multiprocessing_context=method if workers else None, virtual_ranks=2
        )
        memory = psutil.Process().memory_info().rss
        batches = list(itertools.islice(loader, 10))
        assert psutil.Process().memory_info().rss - memory < 50e6
        assert all((batch.data[0] == batch.source_index[0] ** 2).all() for batch in batches)
        read[workers] = [batch.source_index.tolist() for batch in batches]
        other = StreamDataLoader(dataset, virtual_ranks=2)
        other.load_state_dict(batches[4].state_dict())
        assert next(iter(other)).source_index.tolist() == read[workers][5]
    assert read[0] == read[2]
    assert len({source for batch in read[0] for row in batch for source in row}) == 40


def test_a_range_is_not_copied_and_its_fingerprint_tells_rules_apart():
    def fingerprint(sources):
        return StreamDataset(sources, iter, 1).fingerprint

    dataset = StreamDataset(range(10**12), lambda source: [source], 2, time_steps=1)
    assert next(iter(dataset)).data.tolist() == [[0, 2]]  # source 1 is reserved
    assert len({fingerprint(made) for made in (range(10**9), range(10**9 + 1), range(1, 10**9 + 1))}) == 3
    assert fingerprint(range(10)) == fingerprint(list(range(10))) == fingerprint(range(10))


def test_a_source_that_cannot_be_made_is_an_error_of_that_source():
    def build(**options):
        return StreamDataLoader(StreamDataset(Squares(20), lambda n: iter([n]), 2, time_steps=1, **options))

    with pytest.raises(OpenError) as caught:
        list(build())
    assert caught.value.source_index == 13
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.warns(RuntimeWarning, match="no such shard"):
        read = [n for batch in build(on_error="skip") for n in batch.data[batch.mask].tolist()]
    assert sorted(read) == [i * i for i in range(20) if i != 13]


def test_a_sequence_that_cannot_be_pickled_is_refused():
    held = Squares(3)
    held.lock = threading.Lock()
    with pytest.raises(TypeError, match="a Squares that cannot be pickled"):
        StreamDataset(held, iter, 1)


@given(st.integers(1, 5000), st.integers(0, 1 << 30))
def test_a_permutation_has_each_once(size, seed):
    permutation = Permutation(size, np.random.default_rng(seed))
    assert sorted(permutation[i] for i in range(size)) == list(range(size))
    with pytest.raises(IndexError):
        permutation[size]


def test_a_permutation_is_random_enough():
    size = 10_000
    orders = [Permutation(size, np.random.default_rng(seed)) for seed in range(500)]
    order = np.array([one[i] for one in orders[:20] for i in range(500)])
    counts = np.bincount(order * 10 // size, minlength=10)
    assert abs(counts - 1000).max() < 150  # each tenth as often: 5 standard deviations
    steps = np.array([one[1] - one[0] for one in orders])
    assert abs(steps.mean()) < 5 * steps.std() / 500**0.5
    assert len(set(steps.tolist())) > 450


@dataclasses.dataclass
class Clip:
    path: str
    start: int


@pytest.mark.parametrize(
    ("sources", "fingerprint"),
    [
        ([f"/data/{i:03d}.mp4" for i in range(300)], "6912b357b81217c7630bb3f9cc4b3d50"),
        ([(f"a{i}.mp4", i, None) for i in range(130)], "4c1766253a3cd0af8af8b0c9da3cf2a8"),
        ([pathlib.PurePosixPath(f"x/{i}") for i in range(70)], "5e1db925f6963227ccecb37fb8a368fe"),
        ([np.arange(i) for i in range(100)], "3ecdff7f89d564b6ac988ecefe133f43"),
        ([np.full(20000, i, np.float32) for i in range(5)], "0825837ea4f751afe9d9a9cf79c0905f"),
        ([{"b": i, "a": [None, 1.5, True, b"x"]} for i in range(129)], "7d370e1149a65f0dd874b54bf11d1ab9"),
        ([Clip(f"\u00e9{i}", i) for i in range(65)], "907a9a6d1345c8b46c674d679162a620"),
        ([slice(i, 2 * i) for i in range(66)], "e11208a70d56e37c1e4cfd577cd50065"),
        (range(3000), "9ab9391bdd90be23d7a629aa225bb586"),
        (["\udcff x", "a\0b"], "112e13d54b3a4dc86d184ce850d59f2e"),
    ],
    ids=["paths", "sections", "pathlib", "arrays", "large", "dicts", "dataclasses", "objects", "made", "odd strings"],
)
def test_a_fingerprint_is_what_it_was_in_states_saved_before(sources, fingerprint):
    assert StreamDataset(sources, iter, 1).fingerprint == fingerprint


def test_no_live_process_loses_its_epochs_number_to_another():
    dataset = StreamDataset([3], range, 1, time_steps=3)
    dataset.set_epoch(3)
    (told, tell), (wait, release), pids = os.pipe(), os.pipe(), []
    for _ in range(80):
        if not (pid := os.fork()):
            dataset.set_epoch(50)
            os.write(tell, b".")
            os.close(release)
            os.read(wait, 1)
            os._exit(0)
        pids.append(pid)
    for _ in pids:
        os.read(told, 1)
    assert next(iter(dataset)).epoch == 3
    for fd in (release, told, tell, wait):
        os.close(fd)
    for pid in pids:
        os.waitpid(pid, 0)


def mapped(folder, mode="r", shape=(64, 1000)):
    path = folder / "table.bin"
    np.arange(np.prod(shape), dtype=np.int64).tofile(path)
    return np.memmap(path, np.int64, mode, 8 * shape[-1], (shape[0] - 1, *shape[1:]))


def test_a_memory_mapped_source_travels_as_its_place_in_the_file(tmp_path):
    table = mapped(tmp_path)
    dataset = StreamDataset([table[first : first + 9] for first in range(0, 63, 9)], iter, 2, time_steps=3)
    assert len(pickle.dumps(dataset)) < 20_000
    found = [batch.data[:, lane][batch.mask[:, lane]] for batch in StreamDataLoader(dataset, 2) for lane in range(2)]
    assert np.array_equal(np.sort(np.concatenate(found)[:, 0]), table[:, 0])


@pytest.mark.parametrize(
    "view",
    [
        lambda table: table,
        lambda table: table[5:7, 3:4],
        lambda table: table[::-2, 1::3],
        lambda table: table[:, ::-1].T,
        lambda table: table[7, 7:8].reshape(()),
        lambda table: table[:0],
        lambda table: table.view(np.uint8)[3:, 1::5],
        lambda table: table + 1,
    ],
)
@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_any_view_of_a_map_is_the_same_where_it_arrives(tmp_path, mode, view):
    table = mapped(tmp_path, mode)
    if mode == "c":
        table[3] = -1  # is in no file
    array = view(table)
    for _ in range(2):
        (found,) = (sent,) = PackedSources([array])
        assert type(found) is type(array)
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        assert np.array_equal(found, array)
        array = sent  # once more, as what arrived may be sent on


def test_a_map_whose_file_is_gone_is_copied_or_an_error(tmp_path):
    table = mapped(tmp_path)
    dataset = StreamDataset([table], iter, 1, time_steps=3)
    (tmp_path / "other").write_bytes(bytes(64 * 8000))
    os.replace(tmp_path / "other", tmp_path / "table.bin")
    with pytest.raises(OpenError, match=r"table\.bin"):
        list(StreamDataLoader(dataset))
    os.unlink(tmp_path / "table.bin")
    (found,) = PackedSources([table])
    assert np.array_equal(found, table)


@pytest.mark.parametrize("method", [None, *START_METHODS])
def test_an_array_that_many_sources_have_is_kept_once(method):
    tokens = np.arange(40_000)
    recording = {"x": tokens[:-1], "y": np.asfortranarray(np.stack([tokens[1:], -tokens[1:]], axis=1))}
    sources = [(recording, at, min(at + 1000, 39_999)) for at in range(0, 39_999, 1000)]
    dataset = StreamDataset(sources, ArrayStream(), 5, time_steps=1000)
    read = []
    for batch in StreamDataLoader(dataset, 2 if method else 0, multiprocessing_context=method):
        x, y = (batch.data[name][batch.mask] for name in "xy")
        assert (y == torch.stack([x + 1, -x - 1], dim=1)).all()
        read += x.tolist()
    assert sorted(read) == list(range(39_999))
    assert len(pickle.dumps(dataset)) < 3.2 * tokens.nbytes  # x, and two columns in y
    for copied in (dataset.sources, pickle.loads(pickle.dumps(dataset.sources))):
        (first, *_), (second, *_) = copied[0], copied[7]
        assert all(np.shares_memory(first[name], second[name]) for name in recording)
        with pytest.raises(ValueError, match="read-only"):
            first["x"][0] = 7  # the other lanes and workers would read it


def test_an_array_of_one_source_is_its_own_copy():
    table = np.zeros(100_000)
    packed = PackedSources([table, "other", np.ones(100_000)])
    packed[0][:] = 3
    assert not packed[0].any()
    assert packed[2].all()


@pytest.mark.parametrize(
    ("array", "remedy"),
    [
        (torch.zeros(20_000), r"tensor of 80,000 bytes.*its \.numpy\(\).*range\(n\)"),
        (np.zeros((20_000, 2))[:, 0], "strided array of 160,000 bytes.*ascontiguousarray"),
    ],
)
def test_copies_that_would_take_too_much_are_refused(array, remedy, monkeypatch):
    monkeypatch.setattr("stream_dataloader._engine.reading.array_buffers._MOST_COPIED_BYTES", 1_000_000)
    sources = [(array, at, at + 1) for at in range(30)]
    StreamDataset(sources[:3], ArrayStream(), 1, time_steps=1)
    with pytest.raises(ValueError, match=remedy):
        StreamDataset(sources, ArrayStream(), 1, time_steps=1)


class Unsendable:
    """A source whose own method fails while it is pickled."""

    def __init__(self, error):
        self.error = error

    def __getstate__(self):
        raise self.error


def test_a_source_that_cannot_be_pickled_says_why():
    sources = ["a", Unsendable(OSError("a.db was replaced")), "b"]
    with pytest.raises(TypeError, match=r"source 1 .*cannot be pickled.*OSError\('a.db was replaced'\)") as caught:
        StreamDataset(sources, range, 1, time_steps=1)
    assert "a.db was replaced" in str(caught.value.__cause__)


def test_a_lack_of_memory_is_not_taken_for_a_source_that_cannot_be_pickled():
    with pytest.raises(MemoryError):
        StreamDataset([Unsendable(MemoryError())], range, 1, time_steps=1)
