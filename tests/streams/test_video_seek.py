"""Videos whose time stamps or key frames mislead who seeks in them: every start gives the frames that belong there."""

import clips
import helpers
import numpy as np
import pytest

from stream_dataloader.streams import VideoStream

pytestmark = pytest.mark.usefixtures("own_cache")


def read(path, item=0, **options):
    return helpers.read(VideoStream(**options)(path, start=item))


@pytest.mark.parametrize(
    ("suffix", "size", "options"),
    [
        ("mpg", (120, 160), {"g": "12", "bf": "2"}),
        ("mpg", (48, 80), {"g": "12", "bf": "2"}),
        ("vob", (48, 80), {"g": "12", "bf": "0"}),
        ("mpg", (48, 80), {"g": "1", "bf": "0"}),  # each time stamp is a key frame's
    ],
)
def test_program_streams_whose_times_change_by_seeking(tmp_path, monkeypatch, suffix, size, options):
    """Several small frames share a packet with one time stamp, which FFmpeg gives to the wrong one after a seek."""
    monkeypatch.setitem(clips.CODECS, "mpeg2-ps", (suffix, "mpeg2video", "yuv420p", options))
    path = clips.write_clip(tmp_path / f"small.{suffix}", 60, "mpeg2-ps", size=size)
    for start in range(61):
        assert [clips.number_of(frame) for frame in read(path, start)] == list(range(start, 60)), start
    steady = [clips.number_of(frame) for frame in read(path, fps=10)]
    for start in range(0, 24, 5):
        assert [clips.number_of(frame) for frame in read(path, start, fps=10)] == steady[start:], start


@pytest.mark.parametrize("suffix", ["mp4", "mkv"])
def test_pictures_that_are_refreshed_bit_by_bit(tmp_path, monkeypatch, suffix):
    """What FFmpeg calls a key frame only begins a refresh; decoded from there on, pictures are not whole yet."""
    refresh = {"x264-params": "intra-refresh=1:keyint=12:bframes=0:scenecut=0:subme=0:me=dia"}
    monkeypatch.setitem(clips.CODECS, "refreshed", (suffix, "libx264", "yuv420p", refresh))
    path = clips.write_clip(tmp_path / f"refreshed.{suffix}", 60, "refreshed", size=(96, 128))
    whole = read(path)
    assert len(whole) == 60
    for start in range(0, 60, 5):
        found = read(path, start)
        assert len(found) == 60 - start
        assert all(map(np.array_equal, found, whole[start:])), start
