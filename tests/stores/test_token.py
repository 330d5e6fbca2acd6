"""Files of tokens."""

import os

import numpy as np
import pytest
from helpers import FULL, read
from store_tests import StoreTests
from tokens import CODES, documents, write_headed, write_megatron

from stream_dataloader import StreamDataLoader, StreamDataset, sections, stores
from stream_dataloader.errors import StoreError
from stream_dataloader.stores import TokenStore

LENGTHS = (40, 0, 7, 61)
FOUND = documents(LENGTHS)
FLAT = {"stored_dtype": "uint16"}


class OfTokens(StoreTests):
    damages = 200 if FULL else 12


class TestDocuments(OfTokens):
    @pytest.fixture
    def made(self, tmp_path):
        (tmp_path / "a").mkdir()
        write_megatron(tmp_path / "a" / "x", FOUND[:3], sequences=2)
        write_megatron(tmp_path / "a" / "y", FOUND[3:], modes=True)
        return TokenStore(tmp_path / "a", stream="document")

    @pytest.fixture
    def expected(self):
        return [list(tokens) for tokens in FOUND]


class TestFiles(OfTokens):
    @pytest.fixture
    def made(self, tmp_path):
        for number, tokens in enumerate(FOUND[2:]):
            tokens.tofile(tmp_path / f"part{9 + number}.npy")
        return TokenStore(tmp_path, dtype="int64", **FLAT)

    @pytest.fixture
    def expected(self):
        return [list(tokens.astype(np.int64)) for tokens in FOUND[2:]]


@pytest.mark.parametrize("dtype", CODES)
def test_each_dtype_of_an_index(tmp_path, dtype):
    found = documents((5, 8), dtype=dtype)
    sources, store = stores.open(write_megatron(tmp_path / "x", found))
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


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_tokens_alone_are_of_the_dtype_that_is_given(tmp_path, dtype):
    tokens = np.arange(30, dtype=dtype)
    for name in ("x.bin", "x.npy"):
        tokens.tofile(tmp_path / name)
        with pytest.raises(StoreError, match="stored_dtype"):
            stores.open(tmp_path / name)
        assert read(stores.open(tmp_path / name, stored_dtype=dtype).open_stream(0)) == tokens.tolist()


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


def test_sections_of_a_file_are_all_of_it(tmp_path):
    np.arange(1000, dtype=np.uint16).tofile(tmp_path / "x.bin")
    sources, store = stores.open(tmp_path / "x.bin", **FLAT, dtype="int64")
    options = {"windows": "packed", "shuffle": True, "seed": 0, "sections": sections(None, 70)}
    found = []
    for batch in StreamDataLoader(StreamDataset(sources, store, 3, time_steps=16, **options)):
        assert (batch.data[batch.mask] == batch.position[batch.mask]).all()
        found += batch.data[batch.mask].tolist()
    assert sorted(found) == list(range(1000))


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
    ):
        with pytest.raises(error):
            stores.open(tmp_path / "x.bin", **options)
    os.truncate(tmp_path / "x.bin", 1030)
    np.save(tmp_path / "y.npy", np.arange(3))
    for path in ("x.bin", "y.npy"):
        with pytest.raises(StoreError, match=path):
            stores.open(tmp_path / path, format="token")
