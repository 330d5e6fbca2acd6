"""Episodes in HDF5 and Zarr: this package's stores with two workers, against torch's `DataLoader` over the same file.

Guarantees: both sides deliver the same leaves of the same steps, in file order, in batches of as many steps, from a
warm page cache; starting workers is not counted; they take turns, see `interleaved`. The peer is a map-style dataset
that opens its file once a worker and reads a step a sample, with torch's default collate.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import h5py
import numcodecs
import numpy as np
import zarr
from interleaved import Result
from store_rows import bytes_of, in_turns, rate_of, row_of
from torch.utils.data import DataLoader, Dataset

from stream_dataloader import StreamDataLoader, StreamDataset, stores

LANES, TIME_STEPS, WORKERS = 8, 16, 2
IMAGE = "obs/agentview_image"
SHAPES: dict[str, tuple[tuple[int, ...], str]] = {
    IMAGE: ((84, 84, 3), "u1"),
    "obs/robot0_eef_pos": ((3,), "f8"),
    "obs/robot0_eef_quat": ((4,), "f8"),
    "obs/robot0_gripper_qpos": ((2,), "f8"),
    "actions": ((7,), "f8"),
    "rewards": ((), "f8"),
    "dones": ((), "i8"),
    "states": ((32,), "f8"),
}

# data -----------------------------------------------------------------------------------------------------------------


def demos(count: int) -> Iterator[dict[str, Any]]:
    """Demonstrations of 100 to 300 steps; pictures are smooth with some noise, as those of a simulator are not."""
    rng = np.random.default_rng(0)
    ramp = np.add.outer(np.arange(84), np.arange(84))[..., None]
    for _ in range(count):
        steps = int(rng.integers(100, 301))
        demo: dict[str, Any] = {name: rng.standard_normal((steps, *shape)) for name, (shape, _) in SHAPES.items()}
        demo[IMAGE] = ramp + np.arange(steps)[:, None, None, None] + rng.integers(0, 8, (steps, 84, 84, 3))
        yield {name: demo[name].astype(dtype) for name, (_, dtype) in SHAPES.items()}


def write_hdf5(path: str, count: int, **options: Any) -> str:
    """A file as robomimic writes it: contiguous datasets, or with `compression="gzip"` in chunks that h5py chooses."""
    with h5py.File(path, "w") as file:
        for number, demo in enumerate(demos(count)):
            group = file.create_group(f"data/demo_{number}")
            group.attrs["num_samples"] = len(demo["actions"])
            for name, rows in demo.items():
                group.create_dataset(name, data=rows, **(options if name.startswith("obs/") else {}))
    return path


def write_zarr(path: str, count: int) -> str:
    """A replay buffer as diffusion_policy writes it: format 2, Blosc, long chunks."""
    found = list(demos(count))
    root = zarr.open_group(path, mode="w", zarr_format=2)
    packer = numcodecs.Blosc("zstd", clevel=5, shuffle=numcodecs.Blosc.BITSHUFFLE)
    for name, (shape, _) in SHAPES.items():
        data = np.concatenate([demo[name] for demo in found])
        root.create_array(f"data/{name}", data=data, chunks=(161, *shape), compressors=packer)
    root.create_array("meta/episode_ends", data=np.cumsum([len(demo["actions"]) for demo in found]))
    return path


# contenders -----------------------------------------------------------------------------------------------------------


class Hdf5Samples(Dataset[Any]):
    """A step a sample; the file is opened once a worker, and its datasets are found anew each time."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: Any = None
        with h5py.File(path) as file:
            lengths = {key: int(file["data"][key].attrs["num_samples"]) for key in file["data"]}
        keys = sorted(lengths, key=lambda key: int(key.removeprefix("demo_")))
        self._steps = [(key, step) for key in keys for step in range(lengths[key])]

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, index: int) -> Any:
        if self._file is None:
            self._file = h5py.File(self._path)
        key, step = self._steps[index]
        return {name: rows[step] for name, rows in self._datasets(key).items()}

    def _datasets(self, key: str) -> dict[str, Any]:
        demo = self._file["data"][key]
        return {name: demo[name] for name in SHAPES}


class Hdf5KeptSamples(Hdf5Samples):
    """The same, with every dataset kept open: as fast as h5py goes, step by step."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._kept: dict[str, dict[str, Any]] = {}

    def _datasets(self, key: str) -> dict[str, Any]:
        if key not in self._kept:
            self._kept[key] = super()._datasets(key)
        return self._kept[key]


class ZarrSamples(Dataset[Any]):
    """A step a sample; the arrays are opened once a worker."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._arrays: Any = None
        self._length = int(np.asarray(zarr.open_array(f"{path}/meta/episode_ends", mode="r"))[-1])

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        if self._arrays is None:
            root = zarr.open_group(self._path, mode="r")
            self._arrays = {name: root[f"data/{name}"] for name in SHAPES}
        return {name: array[index] for name, array in self._arrays.items()}


def peer(samples: Dataset[Any], batches: int | None) -> Callable[[], float]:
    """Steps a second of torch's `DataLoader`, over so many batches, or all."""

    def measure() -> float:
        loader = DataLoader(samples, LANES * TIME_STEPS, num_workers=WORKERS)
        return rate_of(loader, lambda batch: len(batch["actions"]), WORKERS, batches)

    return measure


def ours(path: str) -> Callable[[], float]:
    """Steps a second of a store."""

    def measure() -> float:
        sources, store = stores.open(path)
        dataset = StreamDataset(sources, store, LANES, time_steps=TIME_STEPS, seed=0, lengths=store.lengths)
        return rate_of(StreamDataLoader(dataset, WORKERS), lambda batch: int(batch.mask.sum()), WORKERS)

    return measure


# figures --------------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """One row: what is read, by whom, and what is to be reached."""

    name: str
    write: Callable[[str, int], str]
    samples: type
    target: float | None
    batches: int | None


CASES = [
    Case("HDF5 episodes, contiguous", write_hdf5, Hdf5Samples, 3.0, 20),
    Case("HDF5 episodes, contiguous, peer keeps its datasets open", write_hdf5, Hdf5KeptSamples, None, 40),
    Case("HDF5 episodes, gzip", lambda path, n: write_hdf5(path, n, compression="gzip"), Hdf5Samples, None, 4),
    Case("Zarr replay buffer, Blosc", write_zarr, ZarrSamples, None, 2),
]


def rows(quick: bool) -> Iterator[Result]:
    """A row a case; of a quick run those of contiguous HDF5."""
    for case in CASES[: 2 if quick else None]:
        with tempfile.TemporaryDirectory() as folder:
            path = case.write(os.path.join(folder, "demos"), 10 if quick else 40)
            runs = {"ours": ours(path), "theirs": peer(case.samples(path), case.batches)}
            rates = in_turns(runs, case.name, quick)
            one, other = (statistics.median(rates[name]) for name in runs)
            note = f"{one:,.0f} steps/s against {other:,.0f}"
            yield row_of(case.name, rates, "ours", "theirs", case.target, bytes_of(path), note)
