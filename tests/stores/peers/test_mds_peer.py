"""MDS against mosaicml-streaming itself: it reads what we write, and we read what it writes."""

import decimal
import io
import json

import numpy as np
import pytest

streaming = pytest.importorskip("streaming")
Image = pytest.importorskip("PIL.Image")

from packed import images, pack_here  # noqa: E402

from stream_dataloader.stores import MdsStore, MdsWriter  # noqa: E402
from stream_dataloader.stores.mds import MdsPacker  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of the package itself

RNG = np.random.default_rng(0)
NUMBERS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
COMPRESSIONS = [None, "zstd", "zstd:9", "gz", "gz:1", "bz2", "br", "br:3", "snappy"]
HASHES = ["blake2b", "md5", "sha1", "sha3_256", "sha512", "xxh128", "xxh32", "xxh3_64", "xxh64"]


def number(dtype, index):
    kind = np.dtype(dtype)
    if kind.kind == "f":
        return kind.type(index / 3)
    return kind.type(np.iinfo(kind).max - index if index % 2 else np.iinfo(kind).min + index)


def plain(count=40):
    """Columns, and samples of everything but pictures."""
    columns = {name: name for name in NUMBERS}
    columns |= {"bytes": "bytes", "text": "str", "int": "int", "json": "json", "pickle": "pkl"}
    columns |= {"str_int": "str_int", "str_float": "str_float", "str_decimal": "str_decimal"}
    columns |= {"a": "ndarray", "b": "ndarray:int16", "c": "ndarray:float32:2,3", "d": "ndarray:uint8:5"}
    samples = [
        {name: number(name, index) for name in NUMBERS}
        | {
            "bytes": bytes(RNG.integers(0, 256, index % 5, np.uint8)),
            "text": "".join(map(chr, RNG.integers(1, 0xD000, index % 7))),
            "int": -(2**62) + index,
            "json": {"a": [index, 0.5, None, "x"], "b": {"c": index % 2 == 0}},
            "pickle": (index, {"z": 1}),
            "str_int": 10**index * (-1) ** index,
            "str_float": index / 7,
            "str_decimal": decimal.Decimal(index) / 3,
            "a": RNG.integers(0, 100, (1 + index % 3, 300 if index % 4 == 0 else 2)).astype(NUMBERS[index % 11]),
            "b": RNG.integers(-9, 9, (2,) * (1 + index % 4)).astype(np.int16),
            "c": RNG.standard_normal((2, 3)).astype(np.float32),
            "d": RNG.integers(0, 256, 5, np.uint8),
        }
        for index in range(count)
    ]
    return columns, samples


def assert_same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert {name: type(value) for name, value in one.items()} == {name: type(other[name]) for name in other}
        np.testing.assert_equal(one, other)
        assert all(one[name].dtype == value.dtype for name, value in other.items() if isinstance(value, np.ndarray))


def write(kind, folder, columns, samples, **options):
    with kind(out=str(folder), columns=columns, **options) as writer:
        for sample in samples:
            writer.write(sample)


WRITERS = {"ours": MdsWriter, "theirs": streaming.MDSWriter}


def theirs(folder, copy, hash_=None, **options):
    """All samples, as they read them."""
    dataset = streaming.StreamingDataset(
        remote=str(folder), local=str(copy), batch_size=1, validate_hash=hash_, allow_unsafe_types=True, **options
    )
    return [dataset[index] for index in range(len(dataset))]


def ours(folder, **options):
    """All samples, as we read them."""
    store = MdsStore(str(folder), stream="shard", allow_pickle=True, **options)
    assert store.verify() == []
    return [item for number in store.sources for item in store(number)]


@pytest.fixture(autouse=True)
def _no_leaks():
    """Theirs keeps shared memory until the process ends."""


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("STREAM_DATALOADER_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_either_reads_what_the_other_wrote(tmp_path, compression):
    columns, samples = plain()
    options = {"compression": compression, "hashes": HASHES, "size_limit": 8000}
    for name, kind in WRITERS.items():
        write(kind, tmp_path / name, columns, samples, **options)
        assert_same(ours(tmp_path / name), samples)
    assert_same(theirs(tmp_path / "ours", tmp_path / "copy", "xxh64"), samples)
    assert_same(ours(f"file://{tmp_path}/theirs"), samples)
    assert len(MdsStore(tmp_path / "theirs", stream="shard", allow_pickle=True)) > 2


@pytest.mark.parametrize("compression", [None, "zstd", "bz2"])
def test_files_are_bit_for_bit_alike(tmp_path, compression):
    columns, samples = plain(20)
    for name, kind in WRITERS.items():
        options = {"hashes": HASHES, "size_limit": 1 << 14, "compression": compression}
        write(kind, tmp_path / name, columns, samples, **options)
    one, other = (json.loads((tmp_path / name / "index.json").read_text())["shards"] for name in WRITERS)
    assert [{**shard, "zip_data": None} for shard in one] == [{**shard, "zip_data": None} for shard in other]
    one, other = ({path.name: path.read_bytes() for path in (tmp_path / name).glob("shard*")} for name in WRITERS)
    assert one.keys() == other.keys()
    assert one == other or compression == "zstd"  # of which two packages compress differently


def picture(kind, mode, index):
    size = (19 + index, 11)
    bands = len(Image.new(mode, (1, 1)).getbands())
    smooth = np.add.outer(np.arange(size[1]) * 3, np.arange(size[0]) * 5) % 256
    noise = RNG.integers(0, 256, (size[1], size[0], bands))
    values = np.stack([smooth] * bands, -1) if kind == "jpeg" else noise
    if mode == "1":
        return Image.fromarray((noise[..., 0] > 99).astype(np.uint8) * 255).convert("1")
    if mode in ("I", "F", "I;16"):
        dtype = {"I": np.int32, "F": np.float32, "I;16": np.uint16}[mode]
        return Image.fromarray((noise[..., 0] * 200).astype(dtype))
    image = Image.fromarray(values.astype(np.uint8).reshape(size[1], size[0], *([bands] if bands > 1 else [])))
    if bands == 1:
        return image.convert(mode)
    return Image.merge(mode, image.split() if len(image.getbands()) == bands else [image] * bands)


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        *(("png", mode) for mode in ("L", "RGB", "RGBA", "I;16")),
        *(("jpeg", mode) for mode in ("L", "RGB")),
        *(("pil", mode) for mode in ("1", "L", "P", "LA", "RGB", "RGBA", "CMYK", "YCbCr", "I", "F", "I;16")),
    ],
)
def test_pictures_are_theirs(tmp_path, kind, mode):
    pictures = [picture(kind, mode, index) for index in range(5)]
    columns = {"one": kind, "many": f"list[{kind}]"}
    samples = [{"one": one, "many": [one, pictures[0]]} for one in pictures]
    for name, writer in WRITERS.items():
        write(writer, tmp_path / name, columns, samples)
    tolerance = 3 if kind == "jpeg" else 0
    for name in WRITERS:
        read_by_them = theirs(tmp_path / name, tmp_path / f"{name} copy")
        read_by_us = ours(tmp_path / name)
        for one, other in zip(read_by_us, read_by_them, strict=True):
            for mine, his in zip([one["one"], *one["many"]], [other["one"], *other["many"]], strict=True):
                array = np.asarray(his)
                assert (mine.shape, mine.dtype) == (array.shape, array.dtype)
                assert np.abs(mine.astype(np.float64) - array).max() <= tolerance


def test_jpeg_arrays_are_theirs(tmp_path):
    files = []
    for index in range(4):
        picture("jpeg", "RGB", index).save(file := io.BytesIO(), "JPEG", quality=95)
        files.append(file.getvalue())
    for name, kind in WRITERS.items():
        write(kind, tmp_path / name, {"x": "jpeg_array"}, [{"x": files[:count]} for count in (1, 3, 4)])
        (his, *_), (mine, *_) = theirs(tmp_path / name, tmp_path / f"{name} copy"), ours(tmp_path / name)
        assert np.abs(mine["x"][0].astype(int) - np.asarray(his["x"][0])).max() <= 3
    assert (tmp_path / "ours/shard.00000.mds").read_bytes() == (tmp_path / "theirs/shard.00000.mds").read_bytes()
    assert MdsStore(tmp_path / "theirs", stream="sample").lengths.tolist() == [1, 3, 4]


def test_they_read_what_was_packed(tmp_path):
    streams = images((7, 0, 12, 3))
    (tmp_path / "a").mkdir()
    pack_here(MdsPacker(str(tmp_path / "a"), compression="zstd", size_limit=1200), streams, workers=2)
    found = theirs(tmp_path / "a", tmp_path / "copy", "sha1")
    for number, items in enumerate(streams):
        samples = [sample for sample in found if sample["__key__"] == f"stream/{number}"]
        for sample, item in zip(samples, items, strict=True):
            assert np.array_equal(sample["image"], item["image"])
            assert sample["label"] == item["label"]
            assert np.array_equal(sample["pose.0"], item["pose"][0])


def test_their_pickles_are_refused(tmp_path):
    write(streaming.MDSWriter, tmp_path / "a", {"x": "pkl", "y": "int"}, [{"x": {1}, "y": 5}])
    with pytest.raises(ValueError, match=r"'pkl' is refused.*allow_pickle=True"):
        MdsStore(tmp_path / "a")
    assert list(MdsStore(tmp_path / "a", columns=["y"])(0)) == [{"y": 5}]
