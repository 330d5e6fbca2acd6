"""A small store of each format and of each way to write it, for tests that all of them have to pass."""

import os
import pathlib
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from episodes import columns, episodes, write_group, write_robomimic
from packed import images, pack_here
from saved_tensordicts import recording, save
from tars import samples, write_tar
from tokens import documents, write_megatron

from stream_dataloader import stores
from stream_dataloader.stores._base.formats import FORMATS

LENGTHS = (9, 0, 5, 14)


class Small(NamedTuple):
    """A store to be made.

    Attributes:
        make: Writes it to a path that does not exist yet; other seeds give other numbers, and nothing else.
        options: What `stores.open` takes with it.
        checked: Whether its data have checksums; of others, numbers may be damaged.
        checked_when_read: Whether these are compared by reading, and not by `verify` alone.
    """

    make: Callable[[str, int], object]
    options: Mapping[str, object] = MappingProxyType({})
    checked: bool = False
    checked_when_read: bool = True


def packed(path, seed, name, **options):
    os.makedirs(path)
    pack_here(FORMATS[name].load(FORMATS[name].packer)(path, **options), images(LENGTHS, seed))


def joined(path, seed, name, **options):
    streams, numbers = images(LENGTHS, seed), list(range(len(LENGTHS)))
    how = {"keys": [f"stream/{number}" for number in numbers], "stream_metadata": lambda number: {"n": number}}
    for part in range(2):
        stores.pack(
            (numbers, lambda number: iter(streams[number])), path, format=name, part=(part, 2), **how, **options
        )
    stores.join(path)


def plain_lmdb(path, seed):
    import lmdb

    rng = np.random.default_rng(seed)
    with lmdb.open(path, subdir=False, lock=False, map_size=1 << 24) as opened, opened.begin(write=True) as transaction:
        for number, length in enumerate(LENGTHS):
            for step in range(length):
                transaction.put(f"{number}/{step:03d}".encode(), rng.bytes(40))


def numbers(value):
    return np.frombuffer(value, np.uint8).copy()


def hdf5(path, seed, **options):
    write_robomimic(path, episodes(LENGTHS, seed), **options)


def hdf5_files(path, seed):
    import h5py

    os.makedirs(path)
    streams = episodes(LENGTHS, seed)
    for number, items in enumerate(streams):
        with h5py.File(os.path.join(path, f"{number}.hdf5"), "w") as file:
            write_group(file, items, streams[0][0])


def zarr(path, seed, version=2, **options):
    import zarr

    streams = episodes(LENGTHS, seed)
    root = zarr.open_group(path, mode="w", zarr_format=version)
    for name, found in columns([item for items in streams for item in items], streams[0][0]).items():
        root.create_array(f"data/{name}", data=found, chunks=(4, *found.shape[1:]), **options)
    root.create_array("meta/episode_ends", data=np.cumsum([len(items) for items in streams]))


def zipped_zarr(path, seed):
    zarr(f"{path}.folder", seed)
    shutil.make_archive(path.removesuffix(".zip"), "zip", f"{path}.folder")


def tokens(path, seed):
    os.makedirs(path)
    write_megatron(os.path.join(path, "corpus"), documents(LENGTHS, seed))


def tensordict(path, seed):
    save(path, {key: value for key, value in recording(61, seed).items() if key != "task"}, (61,))


def npy_files(path, seed):
    os.makedirs(path)
    rng = np.random.default_rng(seed)
    for number, length in enumerate(LENGTHS):
        np.save(os.path.join(path, f"{number}.npy"), rng.integers(0, 99, (length, 3, 2)).astype(np.float32))


def npy_folders(path, seed):
    streams = episodes(LENGTHS, seed)
    for number, items in enumerate(streams):
        os.makedirs(os.path.join(path, str(number)))
        for name, rows in columns(items, streams[0][0]).items():
            np.save(os.path.join(path, str(number), name.replace("/", "_") + ".npy"), rows)


def table(seed):
    import pyarrow

    rng = np.random.default_rng(seed)
    states = rng.standard_normal((sum(LENGTHS), 6)).astype(np.float32)
    return pyarrow.table(
        {
            "episode": np.repeat(np.arange(len(LENGTHS)), LENGTHS),
            "state": pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(states.reshape(-1)), 6),
            "reward": rng.integers(0, 99, len(states)),
        }
    )


def parquet(path, seed, **options):
    import pyarrow.parquet

    pyarrow.parquet.write_table(table(seed), path, row_group_size=7, **options)


def arrow(path, seed):
    import pyarrow.feather

    pyarrow.feather.write_feather(table(seed), path, compression="uncompressed", chunksize=7)


def webdataset(path, seed):
    os.makedirs(path)
    for shard in range(2):
        members = [member for name in "ab" for member in samples(f"{shard}{name}/", 5, seed)[0]]
        write_tar(os.path.join(path, f"train-{shard:03d}.tar"), [one for one in members if ".json" not in one[0]])


def lerobot(path, seed):
    import lerobot_data

    del seed  # numbers are those of the episode
    lerobot_data.write_v3(pathlib.Path(path), LENGTHS, cameras=())


LMDB = partial(packed, name="lmdb", window=3)
MDS = partial(packed, name="mds", size_limit=2000)

SMALL = {
    "memmap": Small(partial(packed, name="memmap"), checked=True, checked_when_read=False),
    "lmdb": Small(LMDB, checked=True),
    "lmdb-zstd": Small(partial(LMDB, codec="zstd"), checked=True),
    "plain.lmdb": Small(plain_lmdb, {"decode": numbers, "stream": "/"}),
    "mds": Small(partial(MDS, hashes=["sha1", "xxh64"]), checked=True, checked_when_read=False),
    "mds-gz": Small(partial(MDS, compression="gz", hashes=["sha1"]), checked=True),
    "joined": Small(partial(joined, name="memmap"), checked=True, checked_when_read=False),
    "joined-lmdb": Small(partial(joined, name="lmdb", window=3), checked=True),
    "joined-mds": Small(partial(joined, name="mds", size_limit=2000), checked=True, checked_when_read=False),
    "demos.hdf5": Small(hdf5),
    "checked.hdf5": Small(partial(hdf5, chunks=True, fletcher32=True)),
    "hdf5": Small(hdf5_files),
    "two.zarr": Small(zarr),
    "three.zarr": Small(partial(zarr, version=3)),
    "zipped.zarr.zip": Small(zipped_zarr),
    "tensordict": Small(tensordict, {"stream": ("collector", "traj_ids")}),
    "token": Small(tokens, {"stream": "document"}),
    "npy": Small(npy_files),
    "npy-folders": Small(npy_folders),
    "plain.parquet": Small(parquet, {"stream": "episode"}),
    "checked.parquet": Small(partial(parquet, write_page_checksum=True), {"stream": "episode"}),
    "table.arrow": Small(arrow, {"stream": "episode"}),
    "webdataset": Small(webdataset),
    "lerobot": Small(lerobot),
}
