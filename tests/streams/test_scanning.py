"""Data is scanned once: twice as much of it takes twice the time, not four times."""

import contextlib
import io
import tarfile
import time

import numpy as np
import pytest

from stream_dataloader.stores import WebDatasetStore
from stream_dataloader.stores.webdataset import members
from stream_dataloader.streams import ArrayStream
from stream_dataloader.streams._media.opencv import decoded_image
from stream_dataloader.streams._media.section import natural_order

pytest.importorskip("av")
from stream_dataloader.cli import film
from stream_dataloader.cli.inspect import _table

MOST = 1 << 14  # a quadratic scan of so many bytes takes a second


def jpeg(head, run, tail=b"\0"):
    return lambda folder, count: lambda: decoded_image(b"\xff\xd8\xff" + head + run * count + tail, "a picture")


def tar(*names):
    def made(folder, count):
        path = folder / f"{count}.tar"
        with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as file:
            for name in names:
                file.addfile(tarfile.TarInfo(name(count)))
        return lambda: WebDatasetStore(path)

    return made


def npy(text):
    def made(folder, count):
        header = text(count).encode("latin1")
        path = folder / f"{count}.npy"
        path.write_bytes(b"\x93NUMPY\x02\x00" + len(header).to_bytes(4, "little") + header)
        return lambda: ArrayStream()(str(path))

    return made


SCANNED = {
    "fill bytes before a JPEG's marker": jpeg(b"", b"\xff"),
    "markers of a JPEG": jpeg(b"", b"\xff\xc0\x00\x02"),
    "a JPEG's scan": jpeg(b"\xda\x00\x02", b"\xff\x00\xff\xd0"),
    "folders in a tar's name": tar(lambda count: "a/" * count + "b"),
    "dots in a tar's name": tar(lambda count: "." * count),
    "a short name with many folders": tar(lambda count: "a/" * min(count, 2000) + "b"),
    "fields of an array": npy(lambda count: "'descr': [" * count),
    "spaces in an array's header": npy(lambda count: "{'descr'" + " " * count),
    "axes of an array": npy(lambda count: "{'descr': '<f8', 'fortran_order': False, 'shape': (" + "9," * count + ")}"),
    "a name on a picture": lambda folder, count: (
        lambda: film._write(np.zeros((99, 320, 3), np.uint8), "i" * count, 4, 9)
    ),
    "a long name among short ones": lambda folder, count: lambda: _table([["a" * count, "b"], *[["a", "b"]] * count]),
    "digits of a name": lambda folder, count: lambda: natural_order("7" * count + "a7" * count),
}


def seconds(task):
    begin = time.thread_time()
    with contextlib.suppress(ValueError, OSError):
        task()
    return time.thread_time() - begin


@pytest.mark.parametrize("made", SCANNED.values(), ids=SCANNED)
def test_twice_the_data_takes_twice_the_time(tmp_path, made):
    once, twice = (made(tmp_path, count) for count in (MOST, 2 * MOST))
    first, second = (min(seconds(task) for _ in range(3)) for task in (once, twice))
    assert second < 3 * first + 0.1, f"{first:.3f} s, and {second:.3f} s for twice as much"


def test_names_are_split_as_webdataset_does():
    expected = {
        "a/0.png": (b"a/0", "png"),
        "a.b/0.left.PNG": (b"a.b/0", "left.png"),
        ".hidden": None,
        "a/.b": None,  # webdataset reads it; files that begin with a dot are no data here
        "a.b/.c": None,
        "a/b": None,
        "__meta__/a.b": None,
        "a\nb/0.x": (b"a\nb/0", "x"),
    }
    assert {name: members._parts(tarfile.TarInfo(name), "a.tar") for name in expected} == expected


@pytest.mark.parametrize(
    ("name", "headers", "told"), [("a" * 5000 + ".x", {}, "5,002 characters"), ("a.x", {"k": "v" * (2 << 20)}, "names")]
)
def test_long_names_and_headers_of_tars_are_refused(tmp_path, name, headers, told):
    info = tarfile.TarInfo(name)
    info.pax_headers = headers
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as file:
        file.addfile(info, io.BytesIO())
    with pytest.raises(ValueError, match=told):
        WebDatasetStore(tmp_path / "a.tar")


def test_an_array_of_fields_is_named(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(2, [("x", "<i4")]))
    with pytest.raises(ValueError, match=r"dtype \[\('x', '<i4'\)\]; save"):
        ArrayStream()(str(tmp_path / "a.npy"))
