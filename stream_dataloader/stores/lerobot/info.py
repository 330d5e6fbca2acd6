"""Description of a LeRobot dataset, and the files that it consists of.

The layout is that of lerobot 0.4.4, or v2.1 as lerobot's converter reads it. ::

    v3.0  meta/info.json                      features, fps, templates of paths
          meta/tasks.parquet                  task_index, and the text as index
          meta/episodes/CHUNK/FILE.parquet    where an episode's rows and frames lie
          data/CHUNK/FILE.parquet             a row a time step, several episodes a file
          videos/CAMERA/CHUNK/FILE.mp4        several episodes end to end
    v2.1  meta/info.json, meta/tasks.jsonl, meta/episodes.jsonl
          data/CHUNK/EPISODE.parquet          an episode each
          videos/CHUNK/CAMERA/EPISODE.mp4

Guarantee: no file outside of the dataset's folder is named.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from stream_dataloader.errors import StoreError, shorten
from stream_dataloader.stores._base.files import inside, read_json
from stream_dataloader.stores._base.hub import fetched

__all__ = ["INFO", "Feature", "Info", "read_info"]

INFO = "meta/info.json"

_VERSION = re.compile(r"v?(3\.0|2\.[01])(\.\d+)?")
_FIELD = re.compile(r"\{(\w+)(?::0?([1-9]\d?)d)?\}")
_NUMBER = re.compile("bool|float(16|32|64)|u?int(8|16|32|64)")
_FASTEST = 1e6


class Feature(NamedTuple):
    """A feature of the dataset, such as `observation.state`."""

    name: str
    kind: str  # "video", "image", "depth image", "string", "number", or another
    dtype: np.dtype[Any] | None  # None unless `kind` is "number"
    shape: tuple[int, ...]  # of one time step; () where the dataset says (1,)

    @property
    def is_camera(self) -> bool:
        return self.kind.endswith(("video", "image"))


@dataclass(frozen=True)
class Info:
    """Content of info.json."""

    path: str  # the dataset's folder
    version: str
    fps: float
    features: Mapping[str, Feature]  # by name, in the dataset's order
    data_path: str  # template of the tables' paths
    video_path: str | None  # template of the videos' paths; None without videos
    chunk_episodes: int  # in version 2
    episodes: int | None  # number of episodes; None if it is not given
    content: Mapping[str, Any]

    @property
    def is_v2(self) -> bool:
        """Whether each episode has its own files."""
        return self.version.removeprefix("v").startswith("2")

    def file(self, template: str, **values: Any) -> str:
        what = os.path.join(self.path, INFO)

        def filled(field: re.Match[str]) -> str:
            if field[1] not in values:
                raise StoreError(f"{what}: {template!r} has {{{field[1]}}}; known are {list(values)}")
            return str(values[field[1]]).zfill(int(field[2] or 0))

        return fetched(inside(self.path, _FIELD.sub(filled, template), what))


def read_info(folder: str) -> Info:
    """Read info.json."""
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"there is no dataset at {folder}")
    path = os.path.join(folder, INFO)
    content = read_json(path, dict)
    version = content.get("codebase_version")
    if not isinstance(version, str) or not _VERSION.fullmatch(version):
        known = "v3.0, v2.1 and v2.0 are read; lerobot's scripts convert it"
        raise StoreError(f"{path} is of version {shorten(version)}, and {known}")
    videos, episodes = content.get("video_path"), content.get("total_episodes")
    try:
        info = Info(
            path=folder,
            version=version,
            fps=float(content["fps"]),
            features={name: _feature(name, one) for name, one in content["features"].items()},
            data_path=_text(content["data_path"]),
            video_path=None if videos is None else _text(videos),
            chunk_episodes=int(content.get("chunks_size") or 1000),
            episodes=None if episodes is None else int(episodes),
            content=content,
        )
        if not 0 < info.fps <= _FASTEST or info.chunk_episodes < 1:
            raise ValueError(f"fps is {info.fps}, chunks_size {info.chunk_episodes}")
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise StoreError(f"{path} is damaged or no LeRobot dataset's: {error!r}") from None
    return info


def _feature(name: str, found: Mapping[str, Any]) -> Feature:
    kind, shape = _text(found["dtype"]), tuple(map(int, found["shape"]))
    if any(side < 0 for side in shape) or math.prod(shape) > 1 << 40:
        raise ValueError(f"{name} has the shape {shape}")
    number = _NUMBER.fullmatch(kind) is not None
    told = {**(found.get("video_info") or {}), **(found.get("info") or {})}
    if told.get("is_depth_map") or told.get("video.is_depth_map"):
        kind = f"depth {kind}"
    dtype = np.dtype(kind) if number else None
    return Feature(name, "number" if number else kind, dtype, () if shape == (1,) else shape)


def _text(found: Any) -> str:
    if not isinstance(found, str):
        raise TypeError(f"{shorten(found)} is no text")
    return found
