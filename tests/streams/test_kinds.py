"""What all kinds of streams have in common: paths, sections, URLs, options, and what is refused by name."""

import contextlib
import fcntl
import json
import math
import os
import socket
import wave
from pathlib import Path

import clips
import cv2
import fsspec
import helpers
import numpy as np
import psutil
import pytest
import torch
from file_server import serving

from stream_dataloader import StreamDataLoader, StreamDataset, StreamError, streams
from stream_dataloader.errors import OpenError
from stream_dataloader.streams import (
    ArrayStream,
    AudioStream,
    AudioVisualStream,
    CameraStream,
    FileCache,
    ImageFolderStream,
    Limits,
    TextStream,
    VideoStream,
)
from stream_dataloader.testing import StreamContract
from stream_dataloader.testing.resume import batch_key

NAME = "2024-01-01T12:00:00"  # relative, it looks like a protocol
KINDS = {
    "video": (VideoStream, {}, ".mp4"),
    "audio": (AudioStream, {"window": 64}, ".wav"),
    "array": (ArrayStream, {}, ".npy"),
    "text": (TextStream, {}, ".txt"),
    "images": (ImageFolderStream, {}, ""),
}
FILES = [kind for kind in KINDS if kind != "images"]

#: By kind: the error, and values that an option cannot have, next to others.
WRONG = {
    ArrayStream: [
        (TypeError, {"dataset": [3, ["a", 3], {"a": None}, b"a"]}, {}),
        (ValueError, {"dataset": ["", [], ("a", ""), {}]}, {}),
    ],
    AudioStream: [
        (ValueError, {"window": [0, -5]}, {}),
        (ValueError, {"hop": [0], "rate": [0, -16000], "channels": [0]}, {"window": 9}),
        (ValueError, {"track": [-1], "on_corrupt": ["skip"]}, {"window": 9}),
        (TypeError, {"window": [0.5, None]}, {}),
        (TypeError, {"rate": [44.1e3], "pad_last": ["no"]}, {"window": 9}),
    ],
    AudioVisualStream: [
        (ValueError, {"samples": [0], "rate": [0, 10**9], "channels": [-1], "track": [-1]}, {}),
        (TypeError, {"samples": [2.5], "rate": [16e3], "channels": ["2"], "track": [None]}, {}),
    ],
    CameraStream: [
        (ValueError, {"size": [(0, 5)], "fps": [0], "buffer_frames": [0], "timeout_seconds": [0]}, {}),
        (ValueError, {name: ["no such"] for name in ("backend", "items", "keep", "on_corrupt")}, {}),
        (ValueError, {"reconnect_tries": [-1], "reconnect_seconds": [(2, 1)]}, {}),
        (ValueError, {"options": [{"a": "b"}]}, {"backend": "opencv"}),
    ],
    Limits: [(ValueError, {"picture_pixels": [0], "chunk_bytes": [-1]}, {}), (TypeError, {"json_levels": [1.5]}, {})],
    FileCache: [(ValueError, {"size_limit_bytes": [0, 1.5], "check_seconds": [-1], "timeout_seconds": [0]}, {})],
    ImageFolderStream: [
        (ValueError, {"size": [(0, 4)], "layout": ["CWH"], "frame_step": [0], "gaps": ["fill"]}, {}),
        (ValueError, {"on_corrupt": ["drop"], "pattern": ["a/*.png"]}, {}),
    ],
    TextStream: [
        (ValueError, {name: ["no such"] for name in ("of", "units", "errors", "newlines", "encoding")}, {}),
        (ValueError, {"encoding": ["hex"], "dtype": ["float32"], "block_bytes": [2], "longest_line_bytes": [0]}, {}),
        (ValueError, {"tokenizer": [ord], "newlines": ["universal"], "vocabulary": ["ab"]}, {"units": "bytes"}),
        (ValueError, {"units": ["tokens"], "unknown": [1], "vocabulary": ["aba", {"ab": 1}, {"a": -1}]}, {}),
        (ValueError, {"unknown": [256]}, {"vocabulary": "ab", "dtype": "uint8"}),
        (TypeError, {"vocabulary": [5], "tokenizer": [5], "targets": [None]}, {}),
        (FileNotFoundError, {"tokenizer": ["missing.json"]}, {}),
    ],
    VideoStream: [
        (ValueError, {"size": [(0, 10), 5, (4, 5, 6)], "dtype": ["int8"], "frame_step": [0], "track": [-1]}, {}),
        (ValueError, {name: ["no such"] for name in ("layout", "color", "fit", "on_corrupt", "conversion")}, {}),
        (ValueError, {"fps": [0, math.nan], "start": [-1]}, {}),
        (ValueError, {"start": [2]}, {"stop": 1}),
        (ValueError, {"device": ["gpu", "cuda:", "cuda:-1", "cuda:x", "CUDA", "", "mps", 0, torch.device("meta")]}, {}),
        (ValueError, {"on_corrupt": ["drop"]}, {"device": "cuda"}),
        (TypeError, {"frame_step": [1.5], "cache": ["/tmp/x"], "with_times": [2]}, {}),
    ],
}  # fmt: skip


def test_every_kind_is_here():
    found = {getattr(streams, name) for name in streams.__all__}
    assert set(WRONG) == {kind for kind in found if isinstance(kind, type)}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_options_are_refused_by_name(kind):
    for error, wrong, more in WRONG[kind]:
        for name, value in ((name, value) for name, values in wrong.items() for value in values):
            with pytest.raises(error, match=name):
                kind(**{name: value}, **more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("times")
    clips.write_clip(folder / f"{NAME}.mp4", 12)
    with wave.open(str(folder / f"{NAME}.wav"), "wb") as file:
        file.setnchannels(1), file.setsampwidth(2), file.setframerate(8000)
        file.writeframes(np.arange(4096, dtype="<i2").tobytes())
    np.save(folder / f"{NAME}.npy", np.arange(12))
    (folder / f"{NAME}.txt").write_text("a few words!")
    (folder / NAME).mkdir()
    for i in range(12):
        cv2.imwrite(str(folder / NAME / f"{i:02}.png"), np.full((4, 4, 3), i, np.uint8))
    return folder


def opened(kind, **more):
    """A factory of a kind, and the name of what it reads."""
    factory, options, suffix = KINDS[kind]
    return factory(**options, **more), f"{NAME}{suffix}"


def items(open_stream, source):
    return helpers.read(open_stream(source))


@pytest.mark.parametrize("kind", KINDS)
def test_a_relative_path_may_have_colons(kind, folder, monkeypatch):
    monkeypatch.chdir(folder)
    open_stream, name = opened(kind)
    for here, there in ((name, folder / name), ((name, 2, 7), (str(folder / name), 2, 7))):
        relative, absolute = (items(open_stream, source) for source in (here, there))
        assert len(relative) == len(absolute) > 0
        assert all(np.array_equal(one, other) for one, other in zip(relative, absolute, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_sections_may_have_gone_through_json(kind, folder):
    open_stream, name = opened(kind)
    path = str(folder / name)
    for section in ((path, 3, 7), (path, 2, None)):
        written = json.loads(json.dumps(section))
        one, other = (items(open_stream, source) for source in (section, written))
        assert np.array_equal(one, other)
        assert open_stream.length(section) == open_stream.length(written)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "section", [(3,), (-1, None), (5, 3), ("1s", None), (math.nan, None), (0, math.inf), (True, None), (1.5, 2)]
)
def test_sections_that_cannot_be(kind, folder, section):
    open_stream, name = opened(kind)
    for source in ((str(folder / name), *section), [str(folder / name), *section]):
        with pytest.raises(ValueError, match=r"start|stop|of 2"):
            items(open_stream, source)


@pytest.mark.parametrize("kind", KINDS)
def test_a_start_that_cannot_be(kind, folder):
    for start in (-1, 10_000):
        with pytest.raises(ValueError, match=str(start)):
            list(opened(kind)[0](str(folder / opened(kind)[1]), start=start))


def test_a_video_section_that_is_a_list_is_not_cut_a_second_time(folder):
    open_stream = VideoStream(start=2, stop=4)
    path = str(folder / f"{NAME}.mp4")
    assert [open_stream.length(source) for source in (path, (path, 0, 9), [path, 0, 9])] == [2, 9, 9]


@pytest.mark.parametrize("text", ["hello world", "x" * 5000, "a\0b"], ids=["short", "long", "null"])
def test_a_text_is_not_taken_for_a_path(text):
    with pytest.raises(FileNotFoundError, match="of='strings' reads texts themselves"):
        TextStream()(text)
    (batch,) = StreamDataLoader(StreamDataset([text], TextStream(of="strings"), 1, time_steps=len(text)))
    assert "".join(map(chr, batch.data[:, 0])) == text


@pytest.mark.parametrize(("kind", "options"), [("video", {"size": (20, 20)}), ("audio", {"rate": 5000, "channels": 2})])
def test_decoders_have_no_threads_of_their_own(kind, options, folder):
    open_stream, name = opened(kind, **options)
    items(open_stream, folder / name)
    before = psutil.Process().num_threads()
    streams = [open_stream(folder / name) for _ in range(16)]
    for stream in streams:
        next(iter(stream))
    assert psutil.Process().num_threads() == before
    for stream in streams:
        stream.close()


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize(
    ("name", "error"),
    [("missing", FileNotFoundError), ("folder", IsADirectoryError), ("empty", ValueError), ("locked", PermissionError)],
)
def test_what_is_no_file_is_refused_by_name(folder_of_nobody, kind, name, error):
    path = folder_of_nobody / f"{name}{KINDS[kind][2]}"
    if name == "folder":
        path.mkdir()
    elif name != "missing":
        path.write_bytes(b"RIFF"[: 4 * (name == "locked")])
        path.chmod(0 if name == "locked" else 0o600)
    open_stream, _ = opened(kind)
    for ask in (open_stream, open_stream.length):
        with pytest.raises(error, match=name):
            ask(str(path))
    with pytest.raises(OpenError, match=rf"source 0 .*{name}") as found:
        list(StreamDataLoader(StreamDataset([str(path)], open_stream, 1, time_steps=5)))
    assert isinstance(found.value.__cause__, error)


def refused(kind, source, message):
    """Opening the source is refused; a pipe would hold it up for ever."""
    with pytest.raises(StreamError, match=message):
        list(StreamDataLoader(StreamDataset([str(source)], opened(kind)[0], 1, time_steps=1)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_pipe_is_refused_and_its_writer_is_not_cut_off(tmp_path, kind):
    pipe = tmp_path / "0.png"
    os.mkfifo(pipe)
    source = tmp_path if kind == "images" else pipe
    refused(kind, source, f"{pipe} is a pipe")
    with open(os.open(pipe, os.O_RDWR | os.O_NONBLOCK), "r+b", 0) as with_writer:
        with_writer.write(b"data")
        refused(kind, source, f"{pipe} is a pipe")
        assert with_writer.read(9) == b"data"


def test_a_socket_and_a_device(tmp_path):
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        refused("video", tmp_path / "socket", "socket is a socket; ")
    refused("audio", "/dev/zero", "/dev/zero is a device; ")


MEDIA = Path(os.environ.get("STREAM_DATALOADER_MEDIA", "/nonexistent"))
_SOUND = {"window": 4000, "hop": 3000, "channels": 1}


@pytest.mark.skipif(not MEDIA.is_dir(), reason="STREAM_DATALOADER_MEDIA names no folder of real media")
class TestRealMedia(StreamContract):
    @pytest.fixture(
        params=[
            VideoStream(size=(45, 80)),
            pytest.param(AudioStream(**_SOUND), marks=pytest.mark.slow),
            AudioStream(rate=16000, **_SOUND),
        ]
    )
    def open_stream(self, request):
        return request.param

    @pytest.fixture
    def sources(self, open_stream):
        if isinstance(open_stream, AudioStream):
            return sorted((MEDIA / "audio").iterdir())
        paths = sorted((MEDIA / "video").iterdir())
        return [path if path.stat().st_size < 100_000 else (path, 0, 8) for path in paths]


@pytest.mark.parametrize("kind", FILES)
def test_a_url_is_read_like_the_file_and_fetched_once_by_all_workers(folder, tmp_path, kind):
    def batches(sources, **more):
        dataset = StreamDataset(sources, opened(kind, **more)[0], 2, time_steps=6)
        return [batch_key(batch) for batch in StreamDataLoader(dataset, 2)]

    path = str(folder / opened(kind)[1])
    with serving() as server:
        url = server.put(f"a{KINDS[kind][2]}", Path(path).read_bytes())
        cache, own = FileCache(directory=tmp_path / "cache"), fsspec.filesystem("http")
        assert own.cat(server.put("own", b"the user's")) == b"the user's"  # in the same loop and thread
        assert batches([url, (url, 2, 12), url], cache=cache) == batches([path, (path, 2, 12), path])
        assert server.count("GET", "a") == 1
        assert own.cat(f"{server.url}/own") == b"the user's"
        assert opened(kind, cache=cache)[0].length(url) == opened(kind)[0].length(path)
        with contextlib.closing(opened(kind, cache=cache)[0](url)) as stream:
            next(iter(stream))
        with cache.open(url) as copy, open(copy.path) as file:
            copy.close()
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # or a stream holds it that was closed
