"""What the page on data of strangers says is held by a test, row by row."""

import io
import os
import re

import numpy as np
import pytest
from helpers import ROOT

from stream_dataloader import stores
from stream_dataloader.streams import ArrayStream

PAGE = (ROOT / "docs/guides/trust.md").read_text()
_PICKLES = "tests/pages/test_trust.py::test_arrays_that_hold_pickles_are_refused"
_LINKS = "tests/stores/test_strangers.py::test_links_in_a_folder_lead_nowhere_else"
_BOMBS = "tests/stores/test_strangers.py::test_little_data_does_not_become_much"
#: The tests that hold each row of the table.
HELD_BY = {
    "memmap, npy, token, tensordict": [_PICKLES, _LINKS, "tests/stores/test_store_errors.py::"],
    "LMDB (packed)": [_LINKS, _BOMBS],
    "MDS": ["tests/stores/test_mds.py::test_pickles_are_refused_unless_allowed", _LINKS, _BOMBS],
    "WebDataset": ["tests/stores/test_webdataset.py::test_what_runs_code_is_refused_unless_allowed", _LINKS, _BOMBS],
    "Parquet, Arrow": ["tests/stores/test_strangers.py::test_tables_name_no_picture_elsewhere", _BOMBS],
    "Hugging Face": ["tests/integrations/test_datasets.py::test_images_may_lie_in_files_and_sounds_are_named"],
    "HDF5": [
        "tests/stores/test_strangers.py::test_hdf5_reads_no_other_file",
        "tests/stores/test_strangers.py::test_virtual_datasets_read_files_beside_theirs",
        "tests/stores/test_strangers.py::test_chunks_have_a_limit",
    ],
    "Zarr": [
        "tests/stores/test_zarr.py::test_a_codec_that_runs_code_or_is_not_there_concerns_its_array_alone",
        "tests/stores/test_strangers.py::test_chunks_of_zarr_have_a_limit",
        _LINKS,
    ],
    "LeRobot": [_LINKS, "tests/stores/test_strangers.py::test_playlists_are_refused"],
    "TFDS": ["tests/stores/test_tfds.py::test_no_module_that_features_name_is_imported"],
    "folders of images": ["tests/streams/test_images.py::test_links_lead_nowhere_else", _BOMBS],
    "video, audio": ["tests/stores/test_strangers.py::test_playlists_are_refused", _BOMBS],
    "text": ["tests/streams/test_text.py::"],
}


def test_each_row_of_the_table_is_held_by_a_test():
    rows = re.findall(r"^\| (?!format|-)(.+?) \|", PAGE.partition("## By format")[2].partition("##")[0], re.MULTILINE)
    assert rows == list(HELD_BY)
    for row, tests in HELD_BY.items():
        for test in tests:
            path, _, name = test.partition("::")
            assert not name or f"def {name}(" in (ROOT / path).read_text(), f"{row}: {test} is not there"
            assert (ROOT / path).exists(), f"{row}: {path} is not there"


class Code:
    def __init__(self, marker):
        self._marker = marker

    def __reduce__(self):
        return os.mkdir, (self._marker,)


@pytest.mark.parametrize("as_store", [True, False])
def test_arrays_that_hold_pickles_are_refused(tmp_path, as_store):
    (tmp_path / "data").mkdir()
    path, marker = tmp_path / "data" / "a.npy", tmp_path / "marker"
    array = np.empty(3, object)
    array[:] = [Code(str(marker))] * 3
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    path.write_bytes(file.getvalue())

    def read():
        sources, open_stream = stores.open(tmp_path / "data") if as_store else ([str(path)], ArrayStream())
        return list(open_stream(sources[0]))

    with pytest.raises(ValueError, match=re.escape("a.npy")):
        read()
    assert not marker.exists()
