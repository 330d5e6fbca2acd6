"""Reads a LeRobot dataset: the factory, and one episode's steps.

Guarantee: an episode's numbers are copied from arrays, and its frames are decoded into the batch, each once; beginning
at any step costs a seek a camera.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.stores._base.files import read_json, stamp_of
from stream_dataloader.stores._base.store import Store
from stream_dataloader.stores.lerobot.episodes import Episodes, meta_files, read_episodes
from stream_dataloader.stores.lerobot.frames import Camera, image_pictures, video_pictures
from stream_dataloader.stores.lerobot.info import INFO, Feature, Info, read_info
from stream_dataloader.stores.lerobot.rows import Tables
from stream_dataloader.stores.parquet.tables import pyarrow_of
from stream_dataloader.streams._media.opencv import check_opencv
from stream_dataloader.streams.video.stream import VideoStream

__all__ = ["LeRobotStore"]

_TASK, _TASK_INDEX, _TIMESTAMP = "task", "task_index", "timestamp"


class LeRobotStore(Store):
    """A LeRobot dataset on a local disk, version v3.0, v2.1 or v2.0; an episode is a stream of dicts.

    An item has a picture for each camera, the table's columns of that time step (`observation.state`, `action`, ...),
    and the text of its task. A feature of shape `(1,)` is a number, as in lerobot.
    Windows of consecutive steps are the loader's `time_steps`; lerobot's `delta_timestamps` may differ by feature.

    Sources are numbers of episodes in the order of `episode_index`, which is the key.

    Args:
        path: The dataset's folder, with `meta/info.json`.
        cameras: Names of the cameras; None takes all, `()` none.
        columns: Names of the table's columns; None takes all, `()` none.
        task: Whether items have the text of their task, as `task`, a string. Without it, items are numbers and pictures
            only, which are written straight into the batch; `store.tasks` has the text of each `task_index`.
        size: `(height, width)` of pictures; None keeps that of each camera.
        layout: `"CHW"` or `"HWC"`.
        fit: `"stretch"`, `"letterbox"` or `"crop"`, as of `VideoStream`.
        image_dtype: `"uint8"`, 0 to 255, or `"float32"`, 0 to 1.
        tolerance_s: How far from a row's time its frame may be shown, in seconds; None is a quarter of a time step.
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
        tolerance_s: float | None = None,
    ) -> None:
        pyarrow_of("LeRobotStore")
        self._video = VideoStream(size=size, layout=layout, fit=fit, dtype=image_dtype)
        if tolerance_s is not None and not 0 <= tolerance_s < float("inf"):
            raise ValueError(f"tolerance_s is {tolerance_s!r}; give seconds, or None for a quarter of a time step")
        super().__init__(
            path,
            cameras=_names("cameras", cameras),
            columns=_names("columns", columns),
            task=bool(task),
            size=self._video.picture.size,
            layout=layout,
            fit=fit,
            image_dtype=self._video.picture.dtype,
            tolerance_s=tolerance_s,
        )
        self._tables = Tables()
        assert self.index is not None

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_tables": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._tables = Tables()

    def close(self) -> None:
        super().close()
        self._tables = Tables()

    def _state(self) -> str:
        return stamp_of(meta_files(self.path))

    def _read_index(self) -> _Index:
        info = read_info(self.path)
        cameras = self._chosen(
            info,
            "cameras",
            [feature for feature in info.features.values() if feature.is_camera],
        )
        columns = self._chosen(info, "columns", [other for other in info.features.values() if not other.is_camera])
        if any(camera.kind == "image" for camera in cameras):
            check_opencv("LeRobotStore (pictures in the table)")
        videos = [camera.name for camera in cameras if camera.kind == "video"]
        return _Index(read_episodes(info, videos), cameras, columns)

    def _chosen(self, info: Info, option: str, there: list[Feature]) -> list[Feature]:
        """The features that an option names."""
        by_name = {feature.name: feature for feature in there}
        names = self._options[option]
        if missing := [name for name in names or () if name not in by_name]:
            raise StoreError(f"{info.path} has no {option} {missing}; it has {list(by_name)}")
        chosen = there if names is None else [by_name[name] for name in names]
        if odd := [feature for feature in chosen if not feature.is_camera and feature.kind not in ("number", "string")]:
            known = [name for name, feature in by_name.items() if feature not in odd]
            raise StoreError(
                f"{info.path}/{INFO}: {odd[0].name!r} is of dtype {odd[0].kind!r}, which is not read; leave it out: "
                f"columns={shorten(known, 200)}"
            )
        return chosen

    def _open_steps(self, number: int) -> _Steps:
        index: _Index = self.index
        episodes = index.episodes
        info, name = episodes.info, self.name_of(number)
        length, episode = int(episodes.lengths[number]), int(episodes.numbers[number])
        hidden = [_TIMESTAMP] if any(camera.kind == "video" for camera in index.cameras) else []
        hidden += [_TASK_INDEX] if index.has_task(self._options) else []
        features = list(dict.fromkeys([*index.columns, *(_needed(info, column) for column in hidden)]))
        path = episodes.table(number)
        rows = self._tables.read(path, episode, length, features, name)
        leaves = {feature.name: rows[feature.name] for feature in index.columns}
        texts = None
        if index.has_task(self._options):
            texts = _texts(rows[_TASK_INDEX].tolist(), episodes.tasks, name)
        cameras: dict[str, Camera] = {}
        for camera in index.cameras if length else ():
            what = f"{name}, camera {camera.name!r}"
            if camera.kind == "video":
                tolerance = self._options["tolerance_s"]
                opened = video_pictures(
                    self._video,
                    episodes.video(number, camera.name),
                    rows[_TIMESTAMP],
                    info.fps,
                    0.25 / info.fps if tolerance is None else tolerance,
                    what,
                )
            else:
                opened = image_pictures(
                    lambda camera=camera: self._tables.pictures(path, episode, camera.name),  # type: ignore[misc]
                    self.path,
                    self._video.picture,
                    what,
                )
            cameras[camera.name] = Camera(what, opened)
        self._check_state()
        return _Steps(length, cameras, leaves, texts)

    def key(self, number: int) -> str:
        """The episode's `episode_index`."""
        return str(self.index.episodes.numbers[self._check_number(number)])

    def metadata(self, number: int) -> Mapping[str, Any]:
        """The episode's `episode_index` and `tasks`."""
        number = self._check_number(number)
        episodes: Episodes = self.index.episodes
        return {"episode_index": int(episodes.numbers[number]), "tasks": episodes.texts(number)}

    @property
    def tasks(self) -> Mapping[int, str]:
        """The text of each `task_index`."""
        tasks: Mapping[int, str] = self.index.episodes.tasks
        return tasks

    @property
    def fps(self) -> float:
        """Time steps a second."""
        fps: float = self.index.episodes.info.fps
        return fps

    def stats(self) -> Mapping[str, Any]:
        """What `meta/stats.json` says: for each feature its mean, std, min and max, ..., as lists.

        Raises:
            StoreError: There is no such file: version v2.1 has none for the whole dataset; or it is damaged.
        """
        found: Mapping[str, Any] = read_json(os.path.join(self.path, "meta", "stats.json"), dict)
        return found

    def _version(self) -> str:
        return str(self.index.episodes.info.version)

    def _metadata(self) -> Mapping[str, Any]:
        content = self.index.episodes.info.content
        return {name: content[name] for name in ("robot_type", "fps", "splits") if name in content}


class _Index:
    """See `Store._read_index`: where episodes lie, and which of their features are wanted."""

    def __init__(self, episodes: Episodes, cameras: list[Feature], columns: list[Feature]) -> None:
        self.episodes = episodes
        self.cameras = cameras
        self.columns = columns
        self.fingerprint = episodes.fingerprint
        self.lengths = episodes.lengths

    def __len__(self) -> int:
        return len(self.episodes)

    def has_task(self, options: Mapping[str, Any]) -> bool:
        """Whether items have a task's text beside what the table has."""
        features = self.episodes.info.features
        return bool(options["task"]) and _TASK not in features and _TASK_INDEX in features


class _Steps:
    """One episode; see `Steps`."""

    def __init__(
        self,
        length: int,
        cameras: dict[str, Camera],
        leaves: dict[str, Any],
        texts: list[str] | None,
    ) -> None:
        self._length = length
        self._cameras = cameras
        self._leaves = leaves
        self._texts = texts

    def __len__(self) -> int:
        return self._length

    def item(self, index: int) -> Any:
        item = {name: camera.item(index) for name, camera in self._cameras.items()}
        for name, rows in self._leaves.items():
            row = rows[index]
            item[name] = row.copy() if hasattr(row, "copy") else row
        if self._texts is not None:
            item[_TASK] = self._texts[index]
        return item

    def read(self, start: int, out: Any) -> None:
        for name, camera in self._cameras.items():
            camera.read(start, out[name])
        for name, rows in self._leaves.items():
            out[name][...] = rows[start : start + len(out[name])]
        if self._texts is not None:
            out[_TASK][...] = self._texts[start : start + len(out[_TASK])]

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for camera in self._cameras.values():
                stack.callback(camera.close)


def _names(option: str, names: Sequence[str] | None) -> list[str] | None:
    if names is None:
        return None
    if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{option} is {names!r}; give a list of names, None for all, or () for none")
    return list(dict.fromkeys(names))


def _needed(info: Info, name: str) -> Feature:
    """A feature that is read also if it is not asked for."""
    feature = info.features.get(name)
    if feature is None or feature.kind != "number":
        raise StoreError(f"{info.path}/{INFO} has no feature {name!r}, which its cameras need; write the dataset anew")
    return feature


def _texts(indices: list[Any], tasks: Mapping[int, str], name: str) -> list[str]:
    """The text of each row's task."""
    if missing := sorted(set(indices) - tasks.keys()):
        raise StoreError(f"{name} has the task_index {missing[0]}, and meta has no task of that number; use task=False")
    return [tasks[index] for index in indices]
