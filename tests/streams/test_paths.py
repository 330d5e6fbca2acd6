"""What every kind of stream takes for a path, a section or a text."""

import contextlib
import json
import wave

import clips
import cv2
import numpy as np
import pytest

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader.streams import ArrayStream, AudioStream, FileCache, ImageFolderStream, TextStream, VideoStream
from stream_dataloader.streams import cache as cache_room

NAME = "2024-01-01T12:00:00"
STREAMS = {
    "video": (VideoStream(), f"{NAME}.mp4"),
    "opencv": (VideoStream(backend="opencv"), f"{NAME}.mp4"),
    "audio": (AudioStream(window=64), f"{NAME}.wav"),
    "images": (ImageFolderStream(), NAME),
    "array": (ArrayStream(), f"{NAME}.npy"),
    "text": (TextStream(), f"{NAME}.txt"),
}


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


def items(open_stream, source):
    with contextlib.ExitStack() as stack:
        stream = open_stream(source)
        if hasattr(stream, "close"):
            stack.callback(stream.close)
        return list(stream)


@pytest.mark.parametrize("kind", STREAMS)
def test_a_relative_path_may_have_colons(kind, folder, monkeypatch):
    monkeypatch.chdir(folder)
    open_stream, name = STREAMS[kind]
    for here, there in ((name, folder / name), ((name, 2, 7), (str(folder / name), 2, 7))):
        relative, absolute = (items(open_stream, source) for source in (here, there))
        assert len(relative) == len(absolute) > 0
        assert all(np.array_equal(one, other) for one, other in zip(relative, absolute, strict=True))


@pytest.mark.parametrize("kind", STREAMS)
def test_sections_may_have_gone_through_json(kind, folder):
    open_stream, name = STREAMS[kind]
    path = str(folder / name)
    for section in ((path, 3, 7), (path, 2, None)):
        written = json.loads(json.dumps(section))
        one, other = (items(open_stream, source) for source in (section, written))
        assert np.array_equal(one, other)
        assert open_stream.length(section) == open_stream.length(written)
    with pytest.raises(ValueError, match="and this is a list of 2"):
        open_stream([path, 3])


def test_a_video_section_that_is_a_list_is_not_cut_a_second_time(folder):
    open_stream = VideoStream(start=2, stop=4)
    path = str(folder / f"{NAME}.mp4")
    assert [open_stream.length(source) for source in (path, (path, 0, 9), [path, 0, 9])] == [2, 9, 9]


def test_rows_may_be_a_list_of_numbers():
    assert [row.tolist() for row in ArrayStream()([[1, 2], [3, 4], [5, 6]])] == [[1, 2], [3, 4], [5, 6]]


@pytest.mark.parametrize("text", ["hello world", "x" * 5000, "a\0b"], ids=["short", "long", "null"])
def test_a_text_is_not_taken_for_a_path_without_a_word(text):
    with pytest.raises(FileNotFoundError, match=r"there is no file '.*of='strings' reads texts themselves"):
        TextStream()(text)
    (batch,) = StreamDataLoader(StreamDataset([text], TextStream(of="strings"), 1, time_steps=len(text)))
    assert "".join(map(chr, batch.data[:, 0])) == text


def test_the_cache_is_imported_with_the_streams():
    assert FileCache is cache_room.FileCache
