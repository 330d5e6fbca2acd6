"""Small LeRobot datasets: a writer of both layouts, by PyAV and pyarrow alone.

A frame tells its camera, episode and step by its grey values, so that a wrong one is noticed.
"""

import fractions
import io
import json

import av
import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

FPS = 10
CAMERAS = {"observation.images.top": (48, 64), "observation.images.wrist": (32, 48)}
TASKS = ("put the block into the bowl", "öffne die Schublade")
#: Frames between two key frames: more than an episode has.
KEY_INTERVAL = 50
DEFAULTS = {
    name: {"dtype": "float32" if name == "timestamp" else "int64", "shape": [1], "names": None}
    for name in ("timestamp", "frame_index", "episode_index", "index", "task_index")
}


def code(camera, episode, step):
    """Twelve bits that no other frame of the dataset has."""
    return (list(CAMERAS).index(camera) << 11) | (episode << 6) | step


def picture(camera, episode, step):
    """A frame: a row of twelve black or white blocks."""
    height, width = CAMERAS[camera]
    bits = [code(camera, episode, step) >> bit & 1 for bit in range(12)]
    blocks = np.repeat(np.array(bits, np.uint8) * 200 + 20, -(-width // 12))[:width]
    return np.broadcast_to(blocks[None, :, None], (height, width, 3)).copy()


def code_of(image):
    """The bits that a frame `(3, H, W)` shows."""
    width = image.shape[-1]
    block = -(-width // 12)
    level = [image[:, :, bit * block : (bit + 1) * block].mean() for bit in range(12) if bit * block < width]
    return sum((value > 120) << bit for bit, value in enumerate(level))


def write_video(path, frames, fps=FPS, key_interval=KEY_INTERVAL, first_pts=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w", options={"movflags": "faststart"}) as container:
        stream = container.add_stream("libx264", rate=fps)
        stream.width, stream.height = frames[0].shape[1], frames[0].shape[0]
        stream.pix_fmt = "yuv420p"
        stream.time_base = fractions.Fraction(1, fps)
        stream.options = {"crf": "12", "g": str(key_interval), "preset": "veryfast", "threads": "1"}
        for number, array in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(array, format="rgb24")
            frame.pts = first_pts + number
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def table_of(episode, length, first, state=6):
    rng = np.random.default_rng(episode)
    steps = np.arange(length)
    return {
        "observation.state": rng.standard_normal((length, state)).astype(np.float32),
        "action": rng.standard_normal((length, 2)),
        "next.done": steps == length - 1,
        "timestamp": (steps / FPS).astype(np.float32),
        "frame_index": steps,
        "episode_index": np.full(length, episode),
        "index": first + steps,
        "task_index": np.full(length, episode % 2),
    }


def features(cameras, kind="video"):
    found = {
        "observation.state": {"dtype": "float32", "shape": [6], "names": None},
        "action": {"dtype": "float64", "shape": [2], "names": ["x", "y"]},
        "next.done": {"dtype": "bool", "shape": [1], "names": None},
    }
    for camera in cameras:
        shape = [*CAMERAS[camera], 3]
        found[camera] = {"dtype": kind, "shape": shape, "names": ["height", "width", "channels"]}
    return found | DEFAULTS


def arrow(rows):
    """Rows as an Arrow table: lists of numbers where there is more than one."""
    columns = {}
    for name, values in rows.items():
        if isinstance(values, np.ndarray):
            flat = pa.array(values.reshape(-1))
            columns[name] = flat if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
        else:
            columns[name] = pa.array(values)
    return pa.table(columns)


def encoded(image):
    return {"bytes": cv2.imencode(".png", image[..., ::-1])[1].tobytes(), "path": None}


def expected_items(lengths, pictures=None, task=True):
    """What the store should yield; `pictures` are those that were decoded by other means, by camera and episode."""
    streams, first = [], 0
    for episode, length in enumerate(lengths):
        rows = table_of(episode, length, first)
        first += length
        items = []
        for step in range(length):
            item = {camera: frames[episode][step] for camera, frames in (pictures or {}).items()}
            item |= {name: values[step] for name, values in rows.items()}
            items.append(item | ({"task": TASKS[episode % 2]} if task else {}))
        streams.append(items)
    return streams


def write_v3(folder, lengths, *, files=2, cameras=tuple(CAMERAS), kind="video", groups="episode", drift=0.0, **video):
    """A dataset of version v3.0, a row group for each of `groups`, an `"episode"` or a `"file"`.

    Episodes are spread over `files`, those of the second camera over one more, and `drift` seconds late in the video.
    """
    (folder / "meta").mkdir(parents=True)
    episodes = [{"episode_index": e, "tasks": [TASKS[e % 2]], "length": n} for e, n in enumerate(lengths)]
    first = np.cumsum([0, *lengths])
    for part, numbers in enumerate(np.array_split(np.arange(len(lengths)), files)):
        path = folder / f"data/chunk-000/file-{part:03d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        tables = []
        for e in numbers.tolist():
            rows = table_of(e, lengths[e], int(first[e]))
            if kind == "image":
                rows |= {c: [encoded(picture(c, e, step)) for step in range(lengths[e])] for c in cameras}
            tables.append(arrow(rows))
            episodes[e] |= {"data/chunk_index": 0, "data/file_index": part}
            episodes[e] |= {"dataset_from_index": int(first[e]), "dataset_to_index": int(first[e + 1])}
        tables = [table for table in tables if table.num_rows]
        with pq.ParquetWriter(path, tables[0].schema) as writer:
            for table in tables if groups == "episode" else [pa.concat_tables(tables)]:
                writer.write_table(table)
    for more, camera in enumerate(cameras if kind == "video" else ()):
        for part, numbers in enumerate(np.array_split(np.arange(len(lengths)), files + more)):
            frames = []
            for e in numbers.tolist():
                where = f"videos/{camera}/"
                begin, end = len(frames) / FPS, (len(frames) + lengths[e]) / FPS
                episodes[e] |= {where + "chunk_index": 0, where + "file_index": part}
                episodes[e] |= {where + "from_timestamp": begin + drift, where + "to_timestamp": end + drift}
                frames += [picture(camera, e, step) for step in range(lengths[e])]
            write_video(folder / f"videos/{camera}/chunk-000/file-{part:03d}.mp4", frames, **video)
    path = folder / "meta/episodes/chunk-000/file-000.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(episodes), path)
    write_tasks(folder / "meta/tasks.parquet")
    stats = {"action": {"mean": [0.0, 0.0], "std": [1.0, 1.0]}}
    (folder / "meta/stats.json").write_text(json.dumps(stats))
    write_info(
        folder,
        lengths,
        features(cameras, kind),
        codebase_version="v3.0",
        data_path="data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        video_path="videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4" if kind == "video" else None,
    )
    return folder


def write_tasks(path, index="__index_level_0__"):
    """The tasks as pandas writes them, with their texts as its index."""
    pq.write_table(pa.table({"task_index": [0, 1], index: list(TASKS)}), path)


def write_v21(folder, lengths, *, cameras=tuple(CAMERAS)):
    (folder / "meta").mkdir(parents=True)
    first = np.cumsum([0, *lengths])
    for e, length in enumerate(lengths):
        chunk = f"chunk-{e // 2:03d}"
        path = folder / f"data/{chunk}/episode_{e:06d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(arrow(table_of(e, length, int(first[e]))), path)
        for camera in cameras:
            frames = [picture(camera, e, step) for step in range(length)]
            write_video(folder / f"videos/{chunk}/{camera}/episode_{e:06d}.mp4", frames)
    episodes = [{"episode_index": e, "tasks": [TASKS[e % 2]], "length": n} for e, n in enumerate(lengths)]
    tasks = [{"task_index": i, "task": text} for i, text in enumerate(TASKS)]
    for name, lines in (("episodes", episodes), ("tasks", tasks)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"meta/{name}.jsonl").write_text(text)
    write_info(
        folder,
        lengths,
        features(cameras),
        codebase_version="v2.1",
        chunks_size=2,
        data_path="data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        video_path="videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    )
    return folder


def write_info(folder, lengths, features, **more):
    info = {
        "robot_type": "arm",
        "total_episodes": len(lengths),
        "total_frames": sum(lengths),
        "total_tasks": 2,
        "chunks_size": 1000,
        "fps": FPS,
        "splits": {"train": f"0:{len(lengths)}"},
        "features": features,
    }
    (folder / "meta/info.json").write_text(json.dumps(info | more, indent=1))


def change(path, **changes):
    """Change a file of JSON, or columns of a table: None takes one away."""
    if path.suffix == ".json":
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        return
    table = pq.read_table(io.BytesIO(path.read_bytes()))
    for column, value in changes.items():
        name = column.replace("__", "/")
        place = table.column_names.index(name)
        table = table.remove_column(place)
        if value is not None:
            table = table.add_column(place, name, [pa.array(value)])
    pq.write_table(table, path)
