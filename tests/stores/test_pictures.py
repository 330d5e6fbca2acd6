"""Encoded images in stores that hold anyone's: their depth, and which way is up."""

import cv2
import numpy as np
import pytest
from tars import write_tar
from test_images import jpeg_turned

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader.errors import ReadError, StoreError
from stream_dataloader.stores import ParquetStore, WebDatasetStore
from stream_dataloader.streams import ImageFolderStream

pyarrow = pytest.importorskip("pyarrow")
pytest.importorskip("pyarrow.parquet")

DEEP = (np.arange(48, dtype=np.uint16) * 1365 + 7).reshape(6, 8)


def parquet(folder, rows, **options):
    pyarrow.parquet.write_table(pyarrow.table({"png": rows}), folder / "a.parquet")
    return ParquetStore(folder / "a.parquet", decode={"png": "image"}, **options)


def huggingface(folder, files, **options):
    return parquet(folder, [{"bytes": file, "path": None} for file in files], **options)


def webdataset(folder, files, **options):
    write_tar(folder / "a.tar", [(f"a/{number}.png", file) for number, file in enumerate(files)])
    return WebDatasetStore(folder / "a.tar", columns=["png"], **options)


every_store = pytest.mark.parametrize("store", [parquet, huggingface, webdataset])


def png(image):
    return bytes(cv2.imencode(".png", image)[1])


@every_store
def test_sixteen_bits_are_kept(tmp_path, store):
    opened = store(tmp_path, [png(DEEP)] * 4, color="gray")
    (batch,) = StreamDataLoader(StreamDataset(opened.sources, opened, 1, time_steps=4))
    found = batch.data["png"].numpy()
    assert found.dtype == np.uint16
    assert np.array_equal(found[:, 0], np.broadcast_to(DEEP, (4, 1, 6, 8)))
    color = store(tmp_path, [png(cv2.merge([DEEP, DEEP + 1, DEEP + 2]))], layout="HWC")
    item = next(iter(color(0)))["png"]
    assert np.array_equal(item, np.stack([DEEP + 2, DEEP + 1, DEEP], -1))
    small = next(iter(store(tmp_path, [png(DEEP)], color="gray", size=(3, 4))(0)))["png"]
    assert (small.dtype, small.shape) == (np.uint16, (1, 3, 4))
    assert small.max() > 255


@every_store
@pytest.mark.parametrize("size", [None, (6, 8)])
def test_images_of_another_depth_than_the_first_are_an_error(tmp_path, store, size):
    opened = store(tmp_path, [png(DEEP), png(DEEP), png(DEEP.astype(np.uint8))], size=size)
    with pytest.raises(ReadError) as caught:
        list(StreamDataLoader(StreamDataset(opened.sources, opened, 1, time_steps=3)))
    assert isinstance(caught.value.__cause__, StoreError)


@every_store
def test_images_are_turned_as_their_exif_says_unless_that_is_switched_off(tmp_path, store):
    image = np.zeros((16, 32, 3), np.uint8)
    image[:, :16] = 255
    file = jpeg_turned(image)
    (tmp_path / "0.jpg").write_bytes(file)
    for upright in (True, False):
        item = next(iter(store(tmp_path, [file], upright=upright)(0)))["png"]
        assert item.shape == ((3, 32, 16) if upright else (3, 16, 32))
        assert np.array_equal(item, next(iter(ImageFolderStream(upright=upright)(tmp_path))))
