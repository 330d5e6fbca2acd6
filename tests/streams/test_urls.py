"""Every kind of stream that reads files reads them from a server too, each fetched once by all workers."""

import wave

import clips
import numpy as np
import pytest
from test_cache import serving

from stream_dataloader import OpenError, StreamDataLoader, StreamDataset
from stream_dataloader.streams import ArrayStream, AudioStream, AudioVisualStream, TextStream, VideoStream
from stream_dataloader.streams.cache.file_cache import FileCache
from stream_dataloader.testing import batch_key


@pytest.fixture
def files(tmp_path):
    with wave.open(str(tmp_path / "tone.wav"), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(np.arange(8000, dtype="<i2").tobytes())
    np.save(tmp_path / "table.npy", np.arange(60).reshape(20, 3))
    (tmp_path / "text.txt").write_text("many streams side by side " * 8)
    clips.write_clip(tmp_path / "clip.mp4", 30)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("clip.mp4", VideoStream, {}),
        ("clip.mp4", VideoStream, {"backend": "opencv"}),
        ("tone.wav", AudioStream, {"window": 300}),
        ("text.txt", TextStream, {}),
        ("table.npy", ArrayStream, {}),
    ],
)
def test_a_url_is_read_like_the_file_and_fetched_once(files, tmp_path, name, kind, options):
    def batches(sources, **more):
        dataset = StreamDataset(sources, kind(**options, **more), 2, time_steps=6)
        return [batch_key(batch) for batch in StreamDataLoader(dataset, 2)]

    data = (files / name).read_bytes()
    with serving() as server:
        url = server.put(name, data)
        cache = FileCache(directory=tmp_path / "cache")
        assert batches([url, (url, 2, 12), url], cache=cache) == batches(
            [str(files / name), (str(files / name), 2, 12), str(files / name)]
        )
        assert server.count("GET", name) == 1
        if hasattr(kind, "length"):
            assert kind(**options, cache=cache).length(url) == kind(**options).length(str(files / name))


def test_what_is_wrong_with_a_fetched_file_is_said(files, tmp_path):
    with serving() as server:
        url, cache = server.put("text.mp4", b"no video at all\n" * 100), FileCache(directory=tmp_path / "cache")
        for stream in (VideoStream(cache=cache), AudioVisualStream(video=VideoStream(cache=cache))):
            with pytest.raises(OpenError, match=r"text\.mp4.*cannot be read as a media file"):
                list(StreamDataLoader(StreamDataset([url], stream, 1, time_steps=4)))
        with pytest.raises(OpenError, match=r"missing\.mp4"):
            list(
                StreamDataLoader(
                    StreamDataset([f"{server.url}/missing.mp4"], VideoStream(cache=cache), 1, time_steps=4)
                )
            )
