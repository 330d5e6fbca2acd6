"""Reading of a LeRobot dataset: the factory, and the steps of one episode.

Guarantee: each frame is decoded once, directly into the batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.stores._base.files import package, read_json, stamp_of
from stream_dataloader.stores._base.formats import given_options
from stream_dataloader.stores._base.rows import read_rows, row_of
from stream_dataloader.stores._base.store import Store
from stream_dataloader.stores.lerobot.frames import Camera, image_pictures, video_pictures
from stream_dataloader.stores.lerobot.info import INFO, Feature, Info, read_info
from stream_dataloader.stores.lerobot.tables import Episodes, Tables, meta_files, read_episodes
from stream_dataloader.stores.parquet.columns import Numbers
from stream_dataloader.streams._media.limits import Limits
from stream_dataloader.streams._media.opencv import check_opencv
from stream_dataloader.streams._media.picture import Conversion
from stream_dataloader.streams.cache.gate import Files
from stream_dataloader.streams.video.stream import VideoStream

__all__ = ["LeRobotStore"]

_TASK, _TASK_INDEX, _TIMESTAMP = "task", "task_index", "timestamp"
_KINDS = ("number", "string", "video", "image", "depth image")


class LeRobotStore(Store):
    """LeRobot dataset of version v3.0, v2.1 or v2.0; an episode is a stream of dicts.

    An item has each camera's picture, the table's columns (`action`, ...), and its task's text.
    A feature of shape `(1,)` is a number. Episodes are in the order of `episode_index`, which is the key.

    Args:
        path: The dataset's folder, with `meta/info.json`.
        cameras: Names of the cameras; None: all, `()`: none.
        columns: Names of the table's columns; None: all, `()`: none.
        task: Whether items have the text of their task.
        size: `(height, width)` of pictures; None keeps the size of each camera.
        layout: `"CHW"` or `"HWC"`.
        fit: `"stretch"`, `"letterbox"` or `"crop"`, as for `VideoStream`.
        image_dtype: `"uint8"`, 0 to 255, or `"float32"`, 0 to 1.
        conversion: `"accurate"` or `"swscale"`, as for `VideoStream`; only for cameras that are videos.
        tolerance_s: Largest difference between the times of a frame and its row; None: a quarter of a step.
        files: Files that links in the folder may lead to: `"inside"` it, or `"anywhere"`.
        limits: Largest sizes of decoded data; see `streams.Limits`. None: the defaults.
    """

    format: ClassVar[str] = "lerobot"

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        cameras: Sequence[str] | None = None,
        columns: Sequence[str] | None = None,
        task: bool = True,
        size: tuple[int, int] | None = None,
        layout: Literal["CHW", "HWC"] = "CHW",
        fit: Literal["stretch", "letterbox", "crop"] = "stretch",
        image_dtype: Any = "uint8",
        conversion: Conversion = "accurate",
        tolerance_s: float | None = None,
        files: Files = "inside",
        limits: Limits | None = None,
    ) -> None:
        package("pyarrow", "LeRobotStore", "arrow")
        self._video = VideoStream(
            size=size, layout=layout, fit=fit, dtype=image_dtype, conversion=conversion, limits=limits
        )
        if tolerance_s is not None and not 0 <= tolerance_s < float("inf"):
            raise ValueError(f"tolerance_s is {tolerance_s!r}; give seconds, or None")
        cameras, columns = _names("cameras", cameras), _names("columns", columns)
        super().__init__(path, **given_options(locals()))
        _ = self.index

    def _with_columns(self, names: list[str]) -> LeRobotStore:
        cameras = {camera.name for camera in self.index.cameras}
        options: dict[str, Any] = {
            "cameras": [name for name in names if name in cameras],
            "columns": [name for name in names if name not in cameras and name != _TASK],
            "task": _TASK in names,
        }
        return LeRobotStore(self.path, **self._options | options)

    def _state(self) -> str:
        return stamp_of(meta_files(self.path))

    def _read_index(self) -> _Index:
        info = read_info(self.path)
        features = info.features.values()
        cameras = self._chosen(info, "cameras", [one for one in features if one.is_camera])
        columns = self._chosen(info, "columns", [one for one in features if not one.is_camera])
        if any(camera.kind != "video" for camera in cameras):
            check_opencv("LeRobotStore (pictures in the table)")
        videos = [camera.name for camera in cameras if camera.kind == "video"]
        hidden = [_needed(info, _TIMESTAMP)] if videos else []
        has_task = _TASK not in info.features and _TASK_INDEX in info.features
        if has_task := self._options["task"] and has_task:
            hidden.append(_needed(info, _TASK_INDEX))
        names = [column.name for column in columns]
        tables = Tables([*columns, *hidden])
        return _Index(read_episodes(info, videos), cameras, names, tables, has_task)

    def _chosen(self, info: Info, option: str, there: list[Feature]) -> list[Feature]:
        by_name = {feature.name: feature for feature in there}
        names = self._options[option]
        if missing := [name for name in names or () if name not in by_name]:
            raise StoreError(f"{info.path} has no {option} {missing}; it has {list(by_name)}")
        chosen = there if names is None else [by_name[name] for name in names]
        if odd := [feature for feature in chosen if feature.kind not in _KINDS]:
            read = [name for name, feature in by_name.items() if feature.kind in _KINDS]
            known = shorten(read, 200)
            what = f"{odd[0].name!r} is of dtype {odd[0].kind!r}"
            raise StoreError(f"{info.path}/{INFO}: {what}, which is not read; leave it out, by {option}={known}")
        return chosen

    def _open_steps(self, number: int) -> _Steps:
        index: _Index = self.index
        episodes = index.episodes
        name, path = self.name_of(number), episodes.table(number)
        episode, length = int(episodes.numbers[number]), int(episodes.lengths[number])
        rows = index.tables.read(path, episode, length, name)
        cameras: dict[str, Camera] = {}
        for camera in index.cameras if length else ():
            what = f"{name}, camera {camera.name!r}"
            if camera.kind == "video":
                fps, tolerance = episodes.info.fps, self._options["tolerance_s"]
                tolerance = 0.25 / fps if tolerance is None else tolerance
                video = episodes.video(number, camera.name)
                times = rows[_TIMESTAMP].array
                opened = video_pictures(self._video, video, times, fps, tolerance, what)
            else:
                where = path, episode, length, camera.name, name
                images = functools.partial(index.tables.pictures, *where)
                picture = self._video.picture
                if camera.kind == "depth image":
                    picture = dataclasses.replace(picture, color="gray", dtype="uint8", deep=True)
                opened = image_pictures(images, self.path, picture, what)
            cameras[camera.name] = Camera(what, opened)
        columns = {column: rows[column] for column in index.columns}
        if index.has_task:
            columns[_TASK] = _texts(rows[_TASK_INDEX], episodes.tasks, name)
        self._check_state()
        return _Steps(length, cameras, columns)

    def key(self, number: int) -> str:
        return str(self.index.episodes.numbers[self._check_number(number)])

    def metadata(self, number: int) -> Mapping[str, Any]:
        """Return the episode's `episode_index` and `tasks`."""
        number = self._check_number(number)
        episodes: Episodes = self.index.episodes
        return {"episode_index": int(episodes.numbers[number]), "tasks": episodes.texts(number)}

    @property
    def tasks(self) -> Mapping[int, str]:
        """Text of each `task_index`."""
        tasks: Mapping[int, str] = self.index.episodes.tasks
        return tasks

    @property
    def fps(self) -> float:
        """Number of time steps per second."""
        fps: float = self.index.episodes.info.fps
        return fps

    def stats(self) -> Mapping[str, Any]:
        """Content of `meta/stats.json`: mean, std, ... of each feature, as lists."""
        path = os.path.join(self.path, "meta", "stats.json")
        found: Mapping[str, Any] = read_json(path, dict)
        return found

    def _version(self) -> str:
        return str(self.index.episodes.info.version)

    def _metadata(self) -> Mapping[str, Any]:
        content = self.index.episodes.info.content
        return {name: content[name] for name in ("robot_type", "fps", "splits") if name in content}


@dataclass
class _Index:
    """Index of the episodes, and the parts of them that items have."""

    episodes: Episodes
    cameras: list[Feature]
    columns: list[str]
    tables: Tables
    has_task: bool

    def __post_init__(self) -> None:
        self.fingerprint, self.lengths = self.episodes.fingerprint, self.episodes.lengths

    def __len__(self) -> int:
        return len(self.episodes)


class _Steps:
    """Steps of one episode; see `Steps`."""

    def __init__(
        self,
        length: int,
        cameras: dict[str, Camera],
        columns: dict[str, Numbers],
    ) -> None:
        self._length, self._cameras = length, cameras
        self._tree = {**cameras, **columns}

    def __len__(self) -> int:
        return self._length

    def item(self, index: int) -> Any:
        return row_of(self._tree, index)

    def read(self, start: int, out: Any) -> None:
        read_rows(self._tree, start, out)

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for camera in self._cameras.values():
                stack.callback(camera.close)


def _names(option: str, names: Sequence[str] | None) -> list[str] | None:
    if names is None:
        return None
    is_list = isinstance(names, Sequence) and not isinstance(names, str)
    if not is_list or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{option} is {names!r}; give a list of names, None for all, or () for none")
    return list(dict.fromkeys(names))


def _needed(info: Info, name: str) -> Feature:
    feature = info.features.get(name)
    if feature is None or feature.kind != "number":
        raise StoreError(f"{info.path}/{INFO} has no feature {name!r}, which is needed")
    return feature


def _texts(rows: Numbers, tasks: Mapping[int, str], name: str) -> Numbers:
    indices = rows.array.tolist()
    if missing := sorted(set(indices) - tasks.keys()):
        raise StoreError(f"{name} has the task_index {missing[0]}, which has no text; use task=False")
    texts: NDArray[Any] = np.empty(len(indices), object)
    texts[:] = [tasks[index] for index in indices]
    return Numbers(texts, rows.source)
