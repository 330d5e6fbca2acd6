"""Files that systems and programs leave in folders, archives and on servers are no data, whatever the format."""

import gc
import io
import json
import os
import pathlib
import shutil
import tarfile
from contextlib import closing

import fsspec
import numpy as np
import pytest
from helpers import soon
from small_stores import SMALL

from stream_dataloader import stores
from stream_dataloader.cli.main import main
from stream_dataloader.streams import ImageFolderStream

pytestmark = pytest.mark.usefixtures("no_zarr_threads")

#: The head of an AppleDouble file.
APPLE = b"\0\5\x16\7\0\2\0\0Mac OS X        " + bytes(60)


def leave_behind(folder):
    """Leave what macOS, Jupyter, Windows and a NAS do in a folder and in all below it."""
    for place, _, names in [*os.walk(folder)]:
        here = pathlib.Path(place)
        for name in names:
            (here / f"._{name}").write_bytes(APPLE)
            for beside in (".ipynb_checkpoints", "__MACOSX", "@eaDir"):
                (here / beside).mkdir(exist_ok=True)
                shutil.copy(here / name, here / beside / name)
                (here / beside / f"._{name}").write_bytes(APPLE)
        for name in (".DS_Store", "Thumbs.db", "desktop.ini"):
            (here / name).write_bytes(APPLE)


def contents(path, **options):
    sources, store = stores.open(path, **options)
    found = {}
    for number in sources:
        with closing(store(number)) as steps:
            found[store.key(number)] = sum(1 for _ in steps)
    return type(store), list(found.items()), list(sources), stores.verify(path, **options)


@pytest.mark.parametrize("name", SMALL)
def test_a_store_stays_as_it_was(tmp_path, name):
    path = tmp_path / name
    SMALL[name].make(str(path), 0)
    before = contents(path, **SMALL[name].options)
    leave_behind(tmp_path)
    assert contents(path, **SMALL[name].options) == before


def held_in(folder):
    """The files of a folder that this process has open or mapped."""
    opened = [os.readlink(file) for file in pathlib.Path("/proc/self/fd").iterdir() if file.is_symlink()]
    mapped = pathlib.Path("/proc/self/maps").read_text().splitlines()
    return [file for file in opened + mapped if str(folder) in file]


@pytest.mark.parametrize("name", SMALL)
def test_a_closed_store_holds_no_file_although_nothing_collects_garbage(tmp_path, name):
    SMALL[name].make(str(path := tmp_path / name), 0)
    gc.disable()
    try:
        _, store = stores.open(path, **SMALL[name].options)
        with closing(store(0)) as stream:
            next(stream)
        store.item(0, 0)
        store.close()
        next(closed := store(0))
        closed.close()  # of a store that is opened again, and a stream of it that somebody keeps
        store.close()
        # Threads of Arrow may hold a file for a moment longer.
        assert soon(lambda: not held_in(tmp_path), 20), held_in(tmp_path)
    finally:
        gc.enable()


@pytest.mark.parametrize("root", ["{tmp_path}", "memory://left-behind"])
def test_a_pattern_matches_no_hidden_file_but_those_it_spells_out(tmp_path, root):
    root = root.format(tmp_path=tmp_path)
    for name in ("3.bin", "12.bin", "._4.bin", "__MACOSX/5.bin", ".spelled/6.bin", ".spelled/._7.bin"):
        with fsspec.open(f"{root}/{name}", "wb", auto_mkdir=True) as file:
            file.write(np.arange(int(name[-5])).astype("<u2").tobytes())

    def lengths(pattern):
        return stores.open(f"{root}/{pattern}", stored_dtype="uint16")[1].lengths.tolist()

    assert lengths("*.bin") == [3, 2]
    assert lengths(".spelled/*.bin") == [6]
    assert lengths("._*.bin") == [4]
    assert lengths("__MACOSX/5.bin") == [5]
    with pytest.raises(FileNotFoundError, match="no file"):
        lengths("*/*.bin")


def test_members_of_tars_stay_out(tmp_path):
    steps = [(f"{name}.cls", b"%d" % number) for number, name in enumerate(("a/0", "a/1", "b/0"))]
    behind = ["._a", "a/._0.cls", "__MACOSX/a/0.cls", "a/.DS_Store", "a/.ipynb_checkpoints/0.cls", "b/Thumbs.db"]
    with tarfile.open(tmp_path / "a.tar", "w") as out:
        for member, data in sorted([*steps, *((name, APPLE) for name in behind)]):
            info = tarfile.TarInfo(f"./{member}")
            info.size = len(data)
            out.addfile(info, io.BytesIO(data))
    sources, store = stores.open(tmp_path / "a.tar")
    assert [[int(item["cls"]) for item in store(source)] for source in sources] == [[0, 1], [2]]


def test_folders_of_images_and_of_media(tmp_path, capsys):
    cv2 = pytest.importorskip("cv2")
    for number in range(3):
        cv2.imwrite(str(tmp_path / f"{number}.png"), np.full((4, 4), number, np.uint8))
    leave_behind(tmp_path)
    for options in ({}, {"pattern": "*.png"}, {"pattern": "?.png"}):
        assert ImageFolderStream(**options).length(str(tmp_path)) == 3
    assert ImageFolderStream().length(str(tmp_path / "*.png")) == 3
    assert ImageFolderStream(pattern="._*").length(str(tmp_path)) == 3  # it spells them out
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    assert [source["frames"] for source in json.loads(capsys.readouterr().out)["sources"]] == [3]


def test_a_folder_below_that_cannot_be_listed_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "closed").mkdir()
    scandir = os.scandir

    def refusing(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    for name in ("parquet", "hdf5"):
        with pytest.raises(PermissionError, match="closed"):
            stores.open(tmp_path, format=name)
