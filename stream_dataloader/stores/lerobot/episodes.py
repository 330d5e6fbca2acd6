"""Where each episode of a dataset lies: its rows, its frames, its tasks.

Guarantee: what was read is plain arrays, a few numbers an episode. Nothing of the tables or videos is read for it.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.stores.lerobot.info import INFO, Feature, Info
from stream_dataloader.stores.lerobot.rows import read_columns, values

__all__ = ["EpisodeVideo", "Episodes", "meta_files", "read_episodes"]

_MOST_JSONL_BYTES = 1 << 30
_MOST_STEPS = 1 << 40
_MOST_EPISODES = 1 << 31


class EpisodeVideo(NamedTuple):
    """Where an episode's frames of one camera lie.

    Attributes:
        path: The file, in the dataset's folder.
        begin: Seconds, in the file's own time: the row at `timestamp` t shows the frame at `begin + t`.
        end: Where the next episode begins; infinite if the file has no other.
    """

    path: str
    begin: float
    end: float


class _Videos(NamedTuple):
    """The table of a camera: folder and file `(episodes, 2)`, begin and end `(episodes, 2)`."""

    files: NDArray[np.int32]
    seconds: NDArray[np.float64]


class Episodes:
    """The index of a dataset; see `Store._read_index`.

    Attributes:
        info: What info.json says.
        numbers: Each stream's `episode_index`, `(episodes,)`, ascending.
        lengths: Rows of each, `(episodes,)`.
        tasks: The text of each `task_index`.
        fingerprint: Of info.json, the tasks, and where episodes lie.
    """

    def __init__(
        self,
        info: Info,
        columns: Mapping[str, NDArray[np.int64]],
        videos: Mapping[str, _Videos],
        tasks: Mapping[int, str],
        texts: Any,
    ) -> None:
        given = columns["episode_index"]
        ascending = bool((np.diff(given) > 0).all())
        order: Any = slice(None) if ascending else np.argsort(given, kind="stable")  # a slice copies nothing
        self.info = info
        self.numbers = given[order]
        self.lengths = columns["length"][order]
        self.tasks = tasks
        self._files = np.stack([columns["data/chunk_index"], columns["data/file_index"]], 1)[order].astype(np.int32)
        self._videos = {name: _Videos(found.files[order], found.seconds[order]) for name, found in videos.items()}
        self._texts = texts
        self._order = order
        self.fingerprint = self._digest()
        self._check()

    def _check(self) -> None:
        where = os.path.join(self.info.path, "meta")
        if len(repeated := self.numbers[1:][np.diff(self.numbers) == 0]):
            raise StoreError(f"{where} has episode {repeated[0]} twice; write it anew")
        if len(wrong := np.flatnonzero((self.lengths < 0) | (self.lengths > _MOST_STEPS) | (self.numbers < 0))):
            number, rows = self.numbers[wrong[0]], self.lengths[wrong[0]]
            raise StoreError(f"{where} has an episode {number} of {rows} rows; it is damaged")
        if any((files < 0).any() for files in (self._files, *(found.files for found in self._videos.values()))):
            raise StoreError(f"{where} has episodes in folders or files of negative numbers; it is damaged")
        if self.info.episodes not in (None, len(self)):
            raise StoreError(
                f"{where} describes {len(self)} episodes, and {INFO} counts {self.info.episodes}: the dataset is "
                "unfinished or damaged; finalize or download it anew"
            )

    def _digest(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        digest.update(json.dumps([self.info.content, sorted(self.tasks.items())], sort_keys=True).encode())
        for array in (self.numbers, self.lengths, self._files):
            digest.update(np.ascontiguousarray(array, "<i8").tobytes())
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self.numbers)

    def table(self, number: int) -> str:
        """The path of the file that has an episode's rows."""
        chunk, file = map(int, self._files[number])
        if self.info.is_v2:
            return self.info.file(self.info.data_path, episode_chunk=chunk, episode_index=file)
        return self.info.file(self.info.data_path, chunk_index=chunk, file_index=file)

    def video(self, number: int, camera: str) -> EpisodeVideo:
        """Where an episode's frames lie."""
        info = self.info
        if info.video_path is None:
            raise StoreError(f"{info.path}/{INFO} has the video {camera!r}, and no video_path; it is damaged")
        if info.is_v2:
            chunk, file = map(int, self._files[number])
            path = info.file(info.video_path, episode_chunk=chunk, video_key=camera, episode_index=file)
            return EpisodeVideo(path, 0.0, np.inf)
        found = self._videos[camera]
        begin, end = map(float, found.seconds[number])
        if not 0 <= begin <= end < np.inf:
            raise StoreError(
                f"{info.path}/meta/episodes: episode {self.numbers[number]} is from {begin} to {end} s of {camera!r}; "
                "it is damaged"
            )
        chunk, file = map(int, found.files[number])
        path = info.file(info.video_path, video_key=camera, chunk_index=chunk, file_index=file)
        return EpisodeVideo(path, begin, end)

    def texts(self, number: int) -> list[str]:
        """The tasks that an episode has."""
        found = self._texts[number if isinstance(self._order, slice) else int(self._order[number])]
        return list(found.as_py() or () if hasattr(found, "as_py") else found)


def meta_files(path: str) -> list[str]:
    """What says where episodes lie, in a dataset's folder; it is written anew whenever episodes are."""
    meta = os.path.join(path, "meta")
    return [
        os.path.join(path, INFO),
        os.path.join(meta, "episodes.jsonl"),
        *_episode_tables(meta),
    ]


def _episode_tables(meta: str) -> list[str]:
    return sorted(glob.glob(os.path.join(glob.escape(meta), "episodes", "*", "*.parquet")))


def read_episodes(info: Info, cameras: Sequence[str]) -> Episodes:
    """Read where episodes lie."""
    return _read_v2(info) if info.is_v2 else _read_v3(info, cameras)


def _read_v3(info: Info, cameras: Sequence[str]) -> Episodes:
    import pyarrow

    folder = os.path.join(info.path, "meta", "episodes")
    paths = _episode_tables(os.path.dirname(folder))
    if not paths and info.episodes != 0:
        raise StoreError(f"{folder} has no tables of episodes: the dataset is unfinished; download or write it anew")
    whole = ["episode_index", "length", "data/chunk_index", "data/file_index"]
    places = {camera: [f"videos/{camera}/{name}" for name in ("chunk_index", "file_index")] for camera in cameras}
    times = {camera: [f"videos/{camera}/{name}" for name in ("from_timestamp", "to_timestamp")] for camera in cameras}
    counts = [*whole, *(name for names in places.values() for name in names)]
    seconds = [name for names in times.values() for name in names]
    tables = [read_columns(path, [*counts, *seconds, "tasks"]) for path in paths]

    def column(name: str, dtype: str) -> NDArray[Any]:
        feature = Feature(name, "number", np.dtype(dtype), ())
        found = [values(table.column(name), feature, path) for path, table in zip(paths, tables, strict=True)]
        return np.concatenate(found) if found else np.empty(0, dtype)

    columns = {name: column(name, "int64" if name in whole[:2] else "int32") for name in counts}
    videos = {
        camera: _Videos(
            np.stack([columns[name] for name in places[camera]], 1).astype(np.int32),
            np.stack([column(name, "float64") for name in times[camera]], 1),
        )
        for camera in cameras
    }
    chunks = [chunk for table in tables for chunk in table.column("tasks").chunks]
    texts = pyarrow.chunked_array(chunks) if chunks else ()
    return Episodes(info, columns, videos, _tasks_v3(info), texts)


def _tasks_v3(info: Info) -> dict[int, str]:
    """The texts, which pandas wrote as its index; that has another name from version to version."""
    path = os.path.join(info.path, "meta", "tasks.parquet")
    if not os.path.exists(path) and info.episodes == 0:
        return {}
    from pyarrow import types

    from stream_dataloader.stores.lerobot.rows import opened

    with opened(path) as file:
        table = file.read(use_threads=False)
        texts = [
            field.name
            for field in table.schema
            if types.is_string(field.type) or types.is_large_string(field.type) or types.is_null(field.type)
        ]
        if "task_index" not in table.column_names or not texts:
            raise StoreError(f"{path} has the columns {table.column_names}, and should have task_index and a text")
        name = next((name for name in ("task", "__index_level_0__") if name in texts), texts[0])
        return dict(
            zip(
                table.column("task_index").to_pylist(),
                table.column(name).to_pylist(),
                strict=True,
            )
        )


def _read_v2(info: Info) -> Episodes:
    path = os.path.join(info.path, "meta", "episodes.jsonl")
    rows: list[tuple[int, int]] = []
    texts: list[list[str]] = []
    for line in _lines(path):
        rows.append((_whole(line, "episode_index", path), _whole(line, "length", path)))
        texts.append([text for text in line.get("tasks") or () if isinstance(text, str)])
    numbers, lengths = np.array(rows, np.int64).reshape(-1, 2).T
    if numbers.max(initial=0) >= _MOST_EPISODES:
        raise StoreError(f"{path} has an episode {numbers.max()}, and {_MOST_EPISODES:,} is the most; it is damaged")
    columns = {
        "episode_index": numbers,
        "length": lengths,
        "data/chunk_index": numbers // info.chunk_episodes,
        "data/file_index": numbers,
    }
    path = os.path.join(info.path, "meta", "tasks.jsonl")
    tasks = {_whole(line, "task_index", path): str(line.get("task")) for line in _lines(path)}
    return Episodes(info, columns, {}, tasks, texts)


def _lines(path: str) -> Iterator[dict[str, Any]]:
    """The objects of a file that has one a line."""
    try:
        with open(path, "rb") as file:
            if (size := os.fstat(file.fileno()).st_size) > _MOST_JSONL_BYTES:
                raise StoreError(f"{path} has {size:,} bytes, more than the {_MOST_JSONL_BYTES:,} that it may have")
            for number, text in enumerate(file, 1):
                if not text.strip():
                    continue
                try:
                    found = json.loads(text)
                except (ValueError, RecursionError) as error:
                    raise StoreError(f"{path}, line {number}, is no valid JSON ({error}); write it anew") from None
                if not isinstance(found, dict):
                    raise StoreError(f"{path}, line {number}, holds {shorten(found, 60)}, no object; write it anew")
                yield found
    except FileNotFoundError:
        raise StoreError(f"{path} is missing: the dataset is unfinished or damaged; download it anew") from None


def _whole(line: Mapping[str, Any], name: str, path: str) -> int:
    value = line.get(name)
    if not isinstance(value, int) or abs(value) > _MOST_STEPS:
        raise StoreError(f"{path}: {name} is {shorten(value, 60)} in {shorten(line, 100)}; it is damaged")
    return value
