"""Tables of a dataset: the place of each episode, and its rows.

Guarantee: an episode has as many rows as the dataset declares. Only a few pictures are kept in memory.
No data or videos are read to find the episodes.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.stores._base.files import damage_named, hashed
from stream_dataloader.stores.lerobot.info import INFO, Feature, Info
from stream_dataloader.stores.parquet.columns import Numbers, Objects, Source, column_of
from stream_dataloader.stores.parquet.store import Rows, RowSteps
from stream_dataloader.stores.parquet.tables import TableFile, open_parquet
from stream_dataloader.streams._media.listing import files_below

__all__ = ["EpisodeVideo", "Episodes", "Tables", "meta_files", "read_episodes"]

_MOST_STEPS = 1 << 40

_NUMBER, _LENGTH, _CHUNK, _FILE = "episode_index", "length", "data/chunk_index", "data/file_index"
_PLACE, _TIMES = ("chunk_index", "file_index"), ("from_timestamp", "to_timestamp")
_MOST_FILES = 64
_MOST_KEPT_BYTES = 128 << 20  # for each kind
_PICTURES_AT_ONCE = 16
_BUFFER_BYTES = 1 << 18


class EpisodeVideo(NamedTuple):
    """Place of an episode's frames of one camera."""

    path: str
    begin: float  # seconds: the row at `timestamp` t shows the frame at `begin + t`
    end: float  # start of the next episode; infinite if the file has only one


class Episodes:
    """Places of the episodes; `columns` are named as in version 3."""

    def __init__(
        self,
        info: Info,
        columns: Mapping[str, NDArray[Any]],
        tasks: Mapping[int, str],
        texts: Sequence[Any],
    ) -> None:
        self.info, self.tasks, self._texts = info, tasks, texts
        self._order = np.argsort(columns[_NUMBER], kind="stable")
        self._columns = {name: column[self._order] for name, column in columns.items()}
        self.numbers, self.lengths = self._columns[_NUMBER], self._columns[_LENGTH]
        files = np.stack([self._columns[_CHUNK], self._columns[_FILE]], 1)
        arrays = [np.ascontiguousarray(one, "<i8").tobytes() for one in (self.numbers, self.lengths, files)]
        said = json.dumps([info.content, sorted(tasks.items())], sort_keys=True)
        self.fingerprint = hashed(said, *arrays)
        self._check()

    def _check(self) -> None:
        where = os.path.join(self.info.path, "meta")
        if len(repeated := self.numbers[1:][np.diff(self.numbers) == 0]):
            raise StoreError(f"{where} has episode {repeated[0]} twice; write it again")
        is_wrong = (self.lengths < 0) | (self.lengths > _MOST_STEPS) | (self.numbers < 0)
        if is_wrong.any():
            number, rows = self.numbers[is_wrong][0], self.lengths[is_wrong][0]
            raise StoreError(f"{where} has an episode {number} of {rows} rows; it is damaged")
        if self.info.episodes not in (None, len(self)):
            counted = f"{len(self)} episodes, and {INFO} counts {self.info.episodes}"
            raise StoreError(f"{where} describes {counted}: it is unfinished or damaged")

    def __len__(self) -> int:
        return len(self.numbers)

    def _file(self, number: int, template: str, folder: str, **more: str) -> str:
        chunk, file = (int(self._columns[f"{folder}/{name}"][number]) for name in _PLACE)
        values = {"episode_chunk": chunk, "episode_index": file}
        if not self.info.is_v2:
            values = {"chunk_index": chunk, "file_index": file}
        return self.info.file(template, **values, **more)

    def table(self, number: int) -> str:
        return self._file(number, self.info.data_path, "data")

    def video(self, number: int, camera: str) -> EpisodeVideo:
        info, folder, begin, end = self.info, "data", 0.0, np.inf
        if info.video_path is None:
            raise StoreError(f"{info.path}/{INFO} has a camera {camera!r}, and no video_path")
        if not info.is_v2:
            folder = f"videos/{camera}"
            begin, end = (float(self._columns[f"{folder}/{name}"][number]) for name in _TIMES)
        if not 0 <= begin <= end:
            name = f"{info.path}/meta/episodes: episode {self.numbers[number]}"
            raise StoreError(f"{name} is from {begin} to {end} s of {camera!r}; it is damaged")
        path = self._file(number, info.video_path, folder, video_key=camera)
        return EpisodeVideo(path, begin, end)

    def texts(self, number: int) -> list[str]:
        found = self._texts[int(self._order[number])]
        with damage_named(f"{self.info.path}/meta/episodes: the tasks of episode {self.numbers[number]}"):
            return list(found.as_py() or () if hasattr(found, "as_py") else found)


def meta_files(path: str) -> list[str]:
    """Return the files that have the places of episodes."""
    lines = os.path.join(path, "meta", "episodes.jsonl")
    return [os.path.join(path, INFO), lines, *_episode_tables(path)]


def _episode_tables(path: str) -> list[str]:
    folder = os.path.join(path, "meta", "episodes")
    return files_below(folder, ".parquet") if os.path.isdir(folder) else []


def read_episodes(info: Info, cameras: Sequence[str]) -> Episodes:
    """Read the places of episodes, and of their frames of some cameras."""
    return _read_v2(info) if info.is_v2 else _read_v3(info, cameras)


def _read_v3(info: Info, cameras: Sequence[str]) -> Episodes:
    import pyarrow

    paths = _episode_tables(info.path)
    dtypes = dict.fromkeys((_NUMBER, _LENGTH), "int64") | dict.fromkeys((_CHUNK, _FILE), "int32")
    for camera in cameras:
        dtypes |= {f"videos/{camera}/{name}": "int32" for name in _PLACE}
        dtypes |= {f"videos/{camera}/{name}": "float64" for name in _TIMES}
    names = [*dtypes, "tasks"]
    tables = [(path, opened(path, names).read(names)) for path in paths]
    columns: dict[str, NDArray[Any]] = {}
    for name, dtype in dtypes.items():
        feature = Feature(name, "number", np.dtype(dtype), ())
        found = [values(table[name], feature, Source(path, name, 0, len(table[name]))).array for path, table in tables]
        columns[name] = np.concatenate([np.empty(0, dtype), *found])
    texts = pyarrow.chunked_array([table["tasks"] for _, table in tables]) if tables else ()
    return Episodes(info, columns, _tasks_v3(info), texts)


def _tasks_v3(info: Info) -> dict[int, str]:
    path = os.path.join(info.path, "meta", "tasks.parquet")
    if not os.path.exists(path) and info.episodes == 0:
        return {}
    file = opened(path, ["task_index"])
    columns = file.read(file.columns)
    texts = [name for name, array in columns.items() if str(array.type).endswith("string")]
    for name in ("task", "__index_level_0__", *texts):  # pandas' index
        if name in texts:
            with damage_named(path):  # a text may be no UTF-8
                return dict(zip(columns["task_index"].to_pylist(), columns[name].to_pylist(), strict=True))
    raise StoreError(f"{path} has the columns {file.columns}, and none of texts")


def _read_v2(info: Info) -> Episodes:
    meta = os.path.join(info.path, "meta")
    rows = _lines(
        os.path.join(meta, "episodes.jsonl"),
        lambda line: (*map(operator.index, (line[_NUMBER], line[_LENGTH])), line.get("tasks") or []),
    )
    tasks = _lines(
        os.path.join(meta, "tasks.jsonl"),
        lambda line: (operator.index(line["task_index"]), str(line.get("task"))),
    )
    with damage_named(meta):
        numbers, lengths = np.array([row[:2] for row in rows], np.int64).reshape(-1, 2).T
    columns = {_NUMBER: numbers, _LENGTH: lengths, _CHUNK: numbers // info.chunk_episodes, _FILE: numbers}
    return Episodes(info, columns, dict(tasks), [row[2] for row in rows])


def _lines(path: str, parsed: Callable[[Any], Any]) -> list[Any]:
    found = []
    with damage_named(path), open(path, "rb") as file:
        for number, text in enumerate(file, 1):
            with damage_named(f"{path}, line {number},"):
                if text.strip():
                    found.append(parsed(json.loads(text)))
    return found


class Tables:
    """Reader of numbers and texts of episodes, which any thread may use."""

    def __init__(self, features: Sequence[Feature]) -> None:
        self._features = {feature.name: feature for feature in features}
        self._rows = functools.lru_cache(_MOST_FILES)(self._open)

    def _open(self, path: str) -> tuple[Rows, dict[int, int]]:
        file = opened(path, {_NUMBER, *self._features})

        def decode(array: Any, source: Source) -> Numbers:
            return values(array, self._features[source.column], source)

        names = list(self._features)
        rows = Rows(path, [file], _NUMBER, names, decode, _MOST_KEPT_BYTES)
        return rows, {episode: number for number, episode in enumerate(rows.keys)}

    def _run(self, path: str, episode: int, length: int, name: str) -> tuple[Rows, int]:
        rows, numbers = self._rows(path)
        number = numbers.get(episode)
        found = 0 if number is None else int(rows.lengths[number])
        if number is None or found != length:
            raise StoreError(f"{name} has {length} rows by the dataset's meta, and {found} in {path}")
        return rows, int(rows.start[number])

    def read(self, path: str, episode: int, length: int, name: str) -> dict[str, Numbers]:
        """Return a copy of the numbers and texts of an episode, by name."""
        found = {
            feature.name: np.empty((length, *feature.shape), feature.dtype or object)
            for feature in self._features.values()
        }
        if length:
            rows, first = self._run(path, episode, length, name)
            if found:
                RowSteps(rows, first, length, name).read(0, found)
        return {name: Numbers(array, Source(path, name, 0, length)) for name, array in found.items()}

    def pictures(
        self,
        path: str,
        episode: int,
        length: int,
        camera: str,
        name: str,
    ) -> Iterator[dict[str, Any]]:
        """Yield encoded pictures: `{"bytes": ..., "path": ...}`, one of them None."""
        rows, first = self._run(path, episode, length, name)
        (file,) = rows.files
        group = int(np.searchsorted(file.first, first, "right")) - 1
        behind = int(np.searchsorted(file.first, first + length, "left"))
        options = {"metadata": file.metadata, "buffer_size": _BUFFER_BYTES}
        groups = range(group, behind)
        with damage_named(path), open_parquet(path, **options) as parquet:
            batches = parquet.iter_batches(_PICTURES_AT_ONCE, groups, [camera], use_threads=False)
            cells = itertools.chain.from_iterable(batch.column(0) for batch in batches)
            skipped = first - int(file.first[group])
            for cell in itertools.islice(cells, skipped, skipped + length):
                found = cell.as_py()
                yield found if isinstance(found, dict) else {"bytes": found}


def opened(path: str, columns: Iterable[str]) -> TableFile:
    """Open a file, and check that it has some columns."""
    with damage_named(path):
        file = TableFile(path)
    if missing := sorted(set(columns).difference(file.columns)):
        raise StoreError(f"{path} has no column {missing}; it has {shorten(file.columns, 300)}")
    return file


def values(array: Any, feature: Feature, source: Source) -> Numbers:
    """Return a feature's column, `(rows, *shape)`."""
    import pyarrow

    found = column_of(array, source)
    if feature.dtype is None and isinstance(found, Objects):
        texts: NDArray[Any] = np.empty(len(array), object)
        texts[:] = [text[0] if isinstance(text, list) else text for text in array.to_pylist()]
        return Numbers(texts, source)
    if feature.dtype is None or not isinstance(found, Numbers):
        said = feature.dtype or feature.kind
        raise source.error(f"it is of {array.type}, and meta/info.json says {said}")
    numbers = found.array
    if len(numbers) and math.prod(numbers.shape[1:]) != math.prod(feature.shape):
        shape = numbers.shape[1:]
        raise source.error(f"rows of the shape {shape}, and meta/info.json says {feature.shape}")
    if feature.dtype.kind == "b" and numbers.dtype != feature.dtype:
        raise source.error(f"it is of {numbers.dtype}, and meta/info.json says bool; write it again")
    if numbers.dtype != feature.dtype:  # this cast loses nothing
        wanted = pyarrow.from_numpy_dtype(feature.dtype)
        cast = pyarrow.array(numbers.reshape(-1)).cast(wanted)
        numbers = cast.to_numpy(zero_copy_only=False)
    return Numbers(numbers.reshape(len(array), *feature.shape), source)
