"""A LeRobot dataset, episodes in order, against decoding each frame by a seek of its own.

Two cameras of 640x480 at 30 frames a second, once encoded as lerobot does by default (AV1, a key frame every second
frame, so that a seek costs little), once as cameras and ffmpeg do (H.264, a key frame every 60). All frames and rows
are delivered, by two workers; the consumer does nothing. The contender is a map-style dataset of torch's `DataLoader`,
which does a sample what lerobot's does: seek to the key frame before the sample's time, and decode up to it. Its rows
are arrays in memory, which is less than lerobot does.

- `a seek a frame`: its files stay open, pictures are uint8; ours too.
- `lerobot's way`: it opens the file for each frame and delivers float32, 0 to 1, as lerobot 0.4.4 does with its PyAV
  backend; ours is float32 too.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from interleaved import Result
from store_rows import bytes_of, in_turns, row_of
from torch.utils.data import DataLoader, Dataset

from stream_dataloader import StreamDataLoader, StreamDataset, stores

__all__ = ["rows"]

_FOLDER = Path(tempfile.gettempdir()) / "stream_dataloader_benchmark_lerobot"
_FPS, _SIZE, _LANES, _TIME_STEPS, _WORKERS = 30, (480, 640), 4, 10, 2
_CAMERAS = ("observation.images.top", "observation.images.wrist")
_CODECS: dict[str, tuple[str, dict[str, str]]] = {
    "AV1, a key frame every 2": ("libsvtav1", {"g": "2", "crf": "30", "preset": "12"}),
    "H.264, a key frame every 60": ("libx264", {"g": "60", "crf": "23", "preset": "veryfast"}),
}
_OURS, _KEPT, _ANEW = "stream_dataloader", "a seek a frame", "lerobot's way"
_OURS_FLOAT = "stream_dataloader, float32"


def _write_video(path: Path, frames: int, codec: str, options: Mapping[str, str], seed: int) -> None:
    """A window that wanders over a smooth picture, with some grain."""
    os.environ.setdefault("SVT_LOG", "1")  # the encoder of AV1 tells of errors alone
    height, width = _SIZE
    rng = np.random.default_rng(seed)
    coarse = torch.from_numpy(rng.uniform(0, 255, (1, 3, 24, 32)).astype(np.float32))
    land = torch.nn.functional.interpolate(coarse, (2 * height, 2 * width), mode="bicubic")[0].permute(1, 2, 0).numpy()
    grain = rng.normal(0, 2, (4, height, width, 1)).astype(np.float32)
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w", options={"movflags": "faststart"}) as container:
        stream: Any = container.add_stream(codec, rate=_FPS, options=dict(options))
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(frames):
            y, x = int((1 + np.sin(number / 37)) * height / 2), int((1 + np.cos(number / 53)) * width / 2)
            image = np.clip(land[y : y + height, x : x + width] + grain[number % 4], 0, 255).astype(np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())


def _dataset(name: str, episodes: int, length: int) -> Path:
    """A dataset of version v3.0, one file a camera; made once."""
    codec, options = _CODECS[name]
    folder = _FOLDER / f"{codec}-{episodes}-{length}"
    if (folder / "meta/info.json").exists():
        return folder
    total = episodes * length
    for seed, camera in enumerate(_CAMERAS):
        _write_video(folder / f"videos/{camera}/chunk-000/file-000.mp4", total, codec, options, seed)
    steps = np.arange(total)
    state = np.random.default_rng(0).standard_normal((total, 14)).astype(np.float32)
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(state.reshape(-1)), 14)
    columns = {"observation.state": vectors, "action": vectors}
    columns["timestamp"] = pa.array((steps % length / _FPS).astype(np.float32))
    counts = {"frame_index": steps % length, "episode_index": steps // length, "index": steps, "task_index": 0 * steps}
    columns |= {key: pa.array(value) for key, value in counts.items()}
    table = pa.table(columns)
    for part in ("data/chunk-000", "meta/episodes/chunk-000"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    with pq.ParquetWriter(folder / "data/chunk-000/file-000.parquet", table.schema) as writer:
        for episode in range(episodes):
            writer.write_table(table.slice(episode * length, length))
    described = []
    for episode in range(episodes):
        one = {"episode_index": episode, "length": length, "tasks": ["a task"]}
        one |= {"data/chunk_index": 0, "data/file_index": 0}
        for camera in _CAMERAS:
            times = {"from_timestamp": episode * length / _FPS, "to_timestamp": (episode + 1) * length / _FPS}
            one |= {
                f"videos/{camera}/{key}": value for key, value in {"chunk_index": 0, "file_index": 0, **times}.items()
            }
        described.append(one)
    pq.write_table(pa.Table.from_pylist(described), folder / "meta/episodes/chunk-000/file-000.parquet")
    pq.write_table(pa.table({"task_index": [0], "task": ["a task"]}), folder / "meta/tasks.parquet")
    features: dict[str, Any] = {camera: {"dtype": "video", "shape": [*_SIZE, 3]} for camera in _CAMERAS}
    features |= {key: {"dtype": "float32", "shape": [14]} for key in ("observation.state", "action")}
    features |= {"timestamp": {"dtype": "float32", "shape": [1]}}
    features |= {key: {"dtype": "int64", "shape": [1]} for key in counts}
    info = {
        "codebase_version": "v3.0",
        "fps": _FPS,
        "total_episodes": episodes,
        "features": features,
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    }
    (folder / "meta/info.json").write_text(json.dumps(info))
    return folder


class _SeeksEachFrame(Dataset[dict[str, Any]]):
    """Reads as lerobot's dataset does for each sample."""

    def __init__(self, folder: Path, *, anew: bool) -> None:
        self._folder = folder
        self._anew = anew
        table = pq.read_table(folder / "data/chunk-000/file-000.parquet")
        self._begin = pq.read_table(folder / "meta/episodes/chunk-000/file-000.parquet")[
            f"videos/{_CAMERAS[0]}/from_timestamp"
        ].to_numpy()
        self._rows: dict[str, Any] = {}
        for name in table.column_names:
            column = table[name].combine_chunks()
            vectors = pa.types.is_fixed_size_list(column.type)
            flat = torch.from_numpy(np.array(column.flatten() if vectors else column))
            self._rows[name] = flat.reshape(len(column), -1) if vectors else flat
        self._open: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self._rows["index"])

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = {name: rows[index] for name, rows in self._rows.items()}
        time_ = float(self._begin[item["episode_index"]] + item["timestamp"])
        return item | {camera: self._frame(camera, time_) for camera in _CAMERAS}

    def _frame(self, camera: str, seconds: float) -> torch.Tensor:
        container = self._open.get(camera)
        if container is None:
            container = av.open(str(self._folder / f"videos/{camera}/chunk-000/file-000.mp4"))
            container.streams.video[0].thread_type = "NONE"
            container.streams.video[0].codec_context.thread_count = 1
            if not self._anew:
                self._open[camera] = container
        stream: Any = container.streams.video[0]
        wanted = seconds - 0.5 / _FPS
        container.seek(max(0, int(seconds / stream.time_base)), stream=stream, backward=True)
        frame = next(frame for frame in container.decode(stream) if frame.time >= wanted)
        image = torch.from_numpy(frame.to_ndarray(format="rgb24")).permute(2, 0, 1)
        if self._anew:
            container.close()
            return image.type(torch.float32) / 255
        return image


def _ours(folder: Path, dtype: str) -> tuple[float, int]:
    sources, store = stores.open(folder, task=False, image_dtype=dtype)
    dataset = StreamDataset(sources, store, _LANES, time_steps=_TIME_STEPS, lengths=store.lengths)
    begin = time.perf_counter()
    frames = sum(int(batch.mask.sum()) for batch in StreamDataLoader(dataset, _WORKERS))
    return time.perf_counter() - begin, frames


def _theirs(folder: Path, *, anew: bool) -> tuple[float, int]:
    loader = DataLoader(_SeeksEachFrame(folder, anew=anew), batch_size=_LANES * _TIME_STEPS, num_workers=_WORKERS)
    begin = time.perf_counter()
    frames = sum(len(batch["index"]) for batch in loader)
    return time.perf_counter() - begin, frames


def rows(quick: bool) -> Iterator[Result]:
    """Two rows for each way to encode; of a quick run one."""
    episodes, length = 4, 20 if quick else 100
    for name in list(_CODECS)[: 1 if quick else None]:
        folder = _dataset(name, episodes, length)
        contenders: dict[str, Callable[[], tuple[float, int]]] = {
            _OURS: partial(_ours, folder, "uint8"),
            _OURS_FLOAT: partial(_ours, folder, "float32"),
            _KEPT: partial(_theirs, folder, anew=False),
            _ANEW: partial(_theirs, folder, anew=True),
        }
        pairs = [(_OURS, _KEPT), (_OURS_FLOAT, _ANEW)][: 1 if quick else None]
        chosen = [who for pair in pairs for who in pair]
        outcomes = in_turns({who: contenders[who] for who in chosen}, name, quick)
        assert {frames for runs in outcomes.values() for _, frames in runs} == {episodes * length}
        seconds = {who: [seconds for seconds, _ in runs] for who, runs in outcomes.items()}
        for ours, other in pairs:
            rate = len(_CAMERAS) * episodes * length / statistics.median(seconds[ours])
            title, note = f"LeRobot, {name}, against {other}", f"{rate:,.0f} frames/s"
            yield row_of(title, seconds, other, ours, 4.0, bytes_of(folder), note)
