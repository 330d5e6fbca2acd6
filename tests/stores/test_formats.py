"""The table of formats, and what follows from it; formats of other packages; known lengths."""

import json
import os
import pathlib
import sys

import numpy as np
import pytest
from small_stores import SMALL
from store_tests import StoreTests

from stream_dataloader import StreamDataLoader, StreamDataset, stores
from stream_dataloader.errors import StoreError
from stream_dataloader.stores import Store
from stream_dataloader.stores._base.formats import FORMATS, known_formats

DOCS = pathlib.Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_in_the_pages_and_among_the_names(name):
    kind = FORMATS[name].load(FORMATS[name].store)
    assert kind.format == name
    assert FORMATS[name].store in stores.__all__
    page = (DOCS / "guides" / "stores.md").read_text()
    assert f'`"{name}"`' in page
    assert f"`{FORMATS[name].store}`" in page


def test_there_is_a_small_store_of_each_format_to_test_with():
    missing = [name for name in FORMATS if not any(name in known for known in SMALL)]
    assert missing == ["tfds"]  # which has tests beside its package


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_says_that_there_is_nothing(tmp_path, name):
    with pytest.raises(FileNotFoundError, match="nothing"):
        stores.open(tmp_path / "nothing", format=name)


@pytest.mark.parametrize("name", FORMATS)
def test_columns_are_names_that_differ(tmp_path, name):
    for columns in (3, [3], [], ["x", "x"], ""):
        with pytest.raises((TypeError, ValueError, FileNotFoundError), match=r"columns|nothing"):
            stores.open(tmp_path / "nothing", format=name, columns=columns)
        np.save(tmp_path / "x.npy", np.zeros(3))
        with pytest.raises((TypeError, ValueError), match="columns is"):
            stores.open(tmp_path, columns=columns)


def test_an_option_of_another_format_is_refused_with_the_format_that_was_found(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(3))
    for named in ({}, {"format": "npy"}):
        with pytest.raises(TypeError, match=r"format.*'npy'.* no option 'lengths'; it has columns"):
            stores.open(tmp_path, lengths="n", **named)


PACKAGES = {"demos.hdf5": "h5py", "plain.parquet": "pyarrow", "lerobot": "pyarrow.parquet"}


@pytest.mark.parametrize("name", PACKAGES)
def test_the_extra_of_a_missing_package_is_named(tmp_path, name, monkeypatch):
    SMALL[name].make(str(tmp_path / name), 0)
    monkeypatch.setitem(sys.modules, PACKAGES[name], None)
    with pytest.raises(ImportError, match=r"pip install 'stream-dataloader\["):
        stores.open(tmp_path / name, **SMALL[name].options)


class JsonStore(Store):
    """A file with a list of lists of numbers."""

    format = "numbers"

    @staticmethod
    def recognises(path, names):
        return path.endswith(".numbers")

    def _read_index(self):
        return Numbers(self.path)

    def _open_steps(self, number):
        return self.index[number]


class Numbers(list):
    def __init__(self, path):
        try:
            super().__init__(Row(map(int, row)) for row in json.loads(pathlib.Path(path).read_bytes()))
        except (ValueError, TypeError) as error:
            raise StoreError(f"{path} is damaged: {error}") from None
        self.lengths = np.array([len(row) for row in self])
        self.fingerprint = str(self)


class Row(list):
    def item(self, index):
        return np.int64(self[index])

    def read(self, start, out):
        out[...] = self[start : start + len(out)]

    def close(self):
        pass


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """As if a package had the entry point."""
    info = tmp_path / "packages" / "numbers-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Name: numbers\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[stream_dataloader.stores]\nnumbers = {__name__}:JsonStore\n")
    monkeypatch.setattr(sys, "path", [*sys.path, os.path.dirname(info)])
    known_formats.cache_clear()
    yield
    known_formats.cache_clear()


@pytest.mark.usefixtures("installed")
class TestOfAnotherPackage(StoreTests):
    @pytest.fixture
    def expected(self):
        return [[np.int64(10 * stream + step) for step in range(steps)] for stream, steps in enumerate((5, 0, 9, 3))]

    @pytest.fixture
    def made(self, tmp_path, expected):
        path = tmp_path / "a.numbers"
        path.write_text(json.dumps([[int(item) for item in items] for items in expected]))
        return JsonStore(path)


def test_a_dataset_of_a_store_knows_its_lengths(tmp_path):
    for name, steps in (("a", 5), ("b", 2), ("c", 7)):
        np.save(tmp_path / f"{name}.npy", np.arange(steps))
    dataset = StreamDataset(*stores.open(tmp_path), batch_size=2, time_steps=3, schedule="longest_first")
    assert dataset.lengths.tolist() == [5, 2, 7]
    loader = StreamDataLoader(dataset)
    assert len(loader) == len(list(loader)) == 3
    sources, store = stores.open(tmp_path)
    assert StreamDataset([0, (2, 1, 3)], store, 2, time_steps=3).lengths is None  # others than the store's own
    assert StreamDataset(sources, store, 2, time_steps=3, lengths=[5, 2, 7]).lengths.tolist() == [5, 2, 7]
