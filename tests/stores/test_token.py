"""Files of tokens."""

import os

import numpy as np
import pytest
import torch
from helpers import FULL, read
from store_tests import StoreTests
from tokens import CODES, documents, write_headed, write_megatron

from stream_dataloader import Sections, StreamDataLoader, StreamDataset, stores
from stream_dataloader.errors import StoreError
from stream_dataloader.stores import TokenStore

LENGTHS = (40, 0, 7, 61)
FOUND = documents(LENGTHS)
FLAT = {"stored_dtype": "uint16"}


class OfTokens(StoreTests):
    damages = 200 if FULL else 12


class TestDocuments(OfTokens):
    def make(self, tmp_path):
        (tmp_path / "a").mkdir()
        write_megatron(tmp_path / "a" / "x", FOUND[:3], sequences=2)
        write_megatron(tmp_path / "a" / "y", FOUND[3:], modes=True)
        return TokenStore(tmp_path / "a", stream="document")

    streams = tuple(map(list, FOUND))


def next_tokens(found):
    """Each token's next one, and -100 behind a document's last."""
    return np.concatenate([np.append(tokens[1:].astype(int), -100)[: len(tokens)] for tokens in found])


class TestTargets(OfTokens):
    def make(self, tmp_path):
        return TokenStore(write_megatron(tmp_path / "x", FOUND), targets=True)

    @pytest.fixture
    def expected(self):
        pairs = zip(np.concatenate(FOUND), next_tokens(FOUND), strict=True)
        return [[{"input": token, "target": target} for token, target in pairs]]

    @pytest.fixture
    def sources(self):
        return [0, (0, 30, 90)]


MARK = 100
ENDING = documents((2, 40, 0, 7, 61, 130), end=MARK)
BEGINNING = [np.roll(tokens, 1) for tokens in ENDING]

#: What tells where documents begin: the documents, how they are written, and options.
MARKED = {
    "index": (ENDING, lambda path: write_megatron(path, ENDING, sequences=2), {}),
    "end": (ENDING, lambda path: write_headed(f"{path}.bin", np.concatenate(ENDING)), {"eos_token": MARK}),
    "begin": (BEGINNING, lambda path: write_headed(f"{path}.bin", np.concatenate(BEGINNING)), {"bos_token": MARK}),
}


@pytest.mark.parametrize("name", MARKED)
def test_documents_in_a_file_are_marked_and_have_targets_also_where_it_is_cut(tmp_path, name):
    found, write, options = MARKED[name]
    tokens, targets = map(torch.from_numpy, (np.concatenate(found).astype(np.int64), next_tokens(found)))
    starts = np.cumsum([0, *map(len, found)])
    cut = Sections(50, jitter=True, lengths=[len(tokens)])
    sources, store = stores.open(write(tmp_path / "x"), targets=True, dtype="int64", **options)
    read = torch.zeros(len(tokens), dtype=torch.int64)
    dataset = StreamDataset(sources, store, 2, time_steps=8, windows="packed", shuffle=True, seed=0, sections=cut)
    for batch in StreamDataLoader(dataset, 2):
        at = batch.position[batch.mask]
        assert torch.equal(batch.data["input"][batch.mask], tokens[at])
        assert torch.equal(batch.data["target"][batch.mask], targets[at])
        begins = [*starts, *(start for start, _ in cut.of(0, epoch=0, seed=0))]
        assert torch.equal(batch.is_first[batch.mask], torch.isin(at, torch.tensor(begins)))
        read[at] += 1
    assert (read == 1).all()
    stream = store(0)
    for item in (100, 0, 40):
        stream.seek_item(item)
        stream.read_into({"input": np.zeros(60, np.int64), "target": np.zeros(60, np.int64)})
        for first, stop in ((item, item + 60), (0, 50)):
            inside = {0, *(start for start in starts.tolist() if first <= start < min(stop, len(tokens)))}
            assert {0, *stream.starts_within(first, stop)} == inside
    stream.close()


@pytest.mark.parametrize("name", MARKED)
def test_each_document_is_a_stream(tmp_path, name):
    found, write, options = MARKED[name]
    sources, store = stores.open(write(tmp_path / "x"), stream="document", targets=True, **options)
    assert store.lengths.tolist() == list(map(len, found))
    given = (options, options | {"targets": True}, options | {"targets": True, "ignore_index": -1})
    others = [stores.open(store.path, **other).sources.fingerprint for other in given]
    assert len({sources.fingerprint, *others}) == 4
    for number, tokens in zip(sources, found, strict=True):
        items = read(store(number))
        assert [item["input"] for item in items] == tokens.tolist()
        assert [item["target"] for item in items] == next_tokens([tokens]).tolist()
    for batch in StreamDataLoader(StreamDataset(sources, store, 2, time_steps=5, windows="packed"), 2):
        assert torch.equal(batch.is_first, batch.position == 0)


def test_windows_of_a_file_are_those_of_get_batch(tmp_path):
    """nanoGPT takes x = data[i : i + T] and y = data[i + 1 : i + 1 + T], as int64."""
    (data,) = documents((1000,))
    data.tofile(tmp_path / "x.bin")
    sources, store = stores.open(tmp_path / "x.bin", targets=True, dtype="int64", **FLAT)
    dataset = StreamDataset(sources, store, 4, time_steps=32, shuffle=True, seed=0, sections=Sections(200, jitter=True))
    seen = 0
    for batch in StreamDataLoader(dataset):
        for lane in batch.mask.all(0).nonzero()[:, 0].tolist():
            i = batch.position[0, lane]
            if i + 33 <= len(data):
                seen += 1
                assert batch.data["input"][:, lane].tolist() == data[i : i + 32].tolist()
                assert batch.data["target"][:, lane].tolist() == data[i + 1 : i + 33].tolist()
    assert seen > 10


@pytest.mark.parametrize(("dtype", "code"), [*CODES.items(), ("float64", 7)])  # which RWKV writes, and older Megatron
def test_each_dtype_of_an_index(tmp_path, dtype, code):
    found = documents((5, 8), dtype=dtype)
    path = write_megatron(tmp_path / "x", found)
    change(path.with_suffix(".idx"), 17, bytes([code]))
    sources, store = stores.open(path)
    assert store.lengths.tolist() == [13]
    (batch,) = StreamDataLoader(StreamDataset(sources, store, 1, time_steps=13))
    assert str(batch.data.dtype) == f"torch.{dtype}"
    assert batch.data[:, 0].tolist() == np.concatenate(found).tolist()


@pytest.mark.parametrize(("magic", "version", "dtype"), [(20240520, 1, "uint16"), (20240801, 7, "uint32")])
def test_files_with_a_header(tmp_path, magic, version, dtype):
    tokens = np.arange(30, dtype=dtype)
    store = stores.open(write_headed(tmp_path / "x.bin", tokens, magic, version)).open_stream
    assert read(store(0)) == tokens.tolist()
    assert store(0, start=4).read_into(room := np.zeros(3, dtype)) == 3
    assert room.tolist() == [4, 5, 6]


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64"])
def test_tokens_alone_are_of_the_dtype_that_is_given(tmp_path, dtype):
    tokens = np.arange(30, dtype=dtype)
    for name in ("x.bin", "x.npy"):
        tokens.tofile(tmp_path / name)
        with pytest.raises(StoreError, match="stored_dtype"):
            stores.open(tmp_path / name)
        options = {"stored_dtype": dtype, "dtype": "int64"}  # OLMo's reader makes them int64
        assert read(stores.open(tmp_path / name, **options).open_stream(0)) == tokens.tolist()


def test_a_store_is_an_index_a_folder_a_pattern_or_on_a_server(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    for name in ("x2", "x10"):
        write_megatron(tmp_path / name, documents((len(name), 4)))
    fsspec.filesystem("memory").put(str(tmp_path), "/tokens", recursive=True)
    assert stores.open(tmp_path / "x10.idx").open_stream.lengths.tolist() == [7]
    for path in (tmp_path, tmp_path / "x*.bin", "memory://tokens/x*.bin", "memory://tokens/x{2,10}.idx"):
        store = stores.open(path).open_stream
        assert store.lengths.tolist() == [6, 7]
        assert read(store(1)) == np.concatenate(documents((3, 4))).tolist()
    np.arange(9, dtype=np.uint16).tofile(tmp_path / "flat.bin")
    fsspec.filesystem("memory").put(str(tmp_path / "flat.bin"), "/tokens/flat.bin")
    assert stores.open("memory://tokens/flat.bin", **FLAT).open_stream.lengths.tolist() == [9]


def change(path, place, content):
    with open(path, "rb+") as file:
        file.seek(place)
        file.write(content)


DAMAGES = {
    "is no index": lambda path: change(path.with_suffix(".idx"), 9, b"\2"),
    "is damaged: .* bytes of": lambda path: change(path.with_suffix(".idx"), 18, b"\xff" * 7),
    "sequences do not follow": lambda path: change(path.with_suffix(".idx"), 34, b"\1"),
    "documents do not follow": lambda path: change(path.with_suffix(".idx"), 34 + 36, b"\1"),
    "has 95 bytes of": lambda path: os.truncate(path, 95),
    "no name in .* ends with": lambda path: path.rename(path.with_suffix(".txt")),
}


@pytest.mark.parametrize("message", DAMAGES)
def test_what_is_damaged_is_refused_by_name(tmp_path, message):
    DAMAGES[message](write_megatron(tmp_path / "x", FOUND[:3]))
    with pytest.raises(StoreError, match=message):
        stores.open(tmp_path)


def test_what_does_not_fit_is_refused(tmp_path):
    write_headed(tmp_path / "x.bin", FOUND[0])
    for options, error in (
        ({"stored_dtype": "int32"}, StoreError),
        ({"stream": "document"}, StoreError),
        ({"dtype": "uint8"}, ValueError),
        ({"dtype": "S1"}, ValueError),
        ({"stream": "line"}, ValueError),
        ({"eos_token": 1 << 16}, ValueError),
        ({"eos_token": 3, "bos_token": 3}, ValueError),
        ({"eos_token": "<eos>"}, TypeError),
    ):
        with pytest.raises(error):
            stores.open(tmp_path / "x.bin", **options)
    os.truncate(tmp_path / "x.bin", 1030)
    np.save(tmp_path / "y.npy", np.arange(3))
    for path in ("x.bin", "y.npy"):
        with pytest.raises(StoreError, match=path):
            stores.open(tmp_path / path, format="token")
