"""Videos with their sound: each frame gets the samples that belong to it, wherever reading began."""

from fractions import Fraction

import av
import clips
import helpers
import numpy as np
import pytest

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader.errors import OpenError
from stream_dataloader.streams import AudioVisualStream, Limits, VideoStream
from stream_dataloader.testing import StreamContract

RATE, FRAMES = 8000, 75
A_FRAME = RATE // 25


def write_talk(path, *, sound_frames=FRAMES, late=0, encoder="pcm_s16le", a_frame=A_FRAME):
    """A clip whose sound is, during frame n, of the constant height n; it may begin some frames late."""
    with av.open(str(path), "w") as container:
        video = container.add_stream("libx264", 25, options={"g": "12", "bf": "2"})
        video.height, video.width, video.pix_fmt = clips.HEIGHT, clips.WIDTH, "yuv420p"
        sound = container.add_stream(encoder, RATE, layout="stereo")
        for i in range(FRAMES):
            container.mux(video.encode(av.VideoFrame.from_ndarray(clips.picture(i), "rgb24")))
            if late <= i < sound_frames:
                samples = np.repeat(np.array([[i, -i]], np.int16) * 256, a_frame, axis=0).reshape(1, -1)
                frame = av.AudioFrame.from_ndarray(samples, "s16", "stereo")
                frame.sample_rate, frame.pts, frame.time_base = RATE, i * A_FRAME, Fraction(1, RATE)
                container.mux(sound.encode(frame))
        container.mux(video.encode(None))
        container.mux(sound.encode(None))
    return str(path)


def items(path, start=0, **options):
    return helpers.read(AudioVisualStream(**options)(path, start=start))


@pytest.fixture(scope="module")
def talk(tmp_path_factory):
    return write_talk(tmp_path_factory.mktemp("talk") / "talk.mov")


class TestAudioVisual(StreamContract):
    @pytest.fixture(params=[{}, {"rate": 6000, "channels": 1, "samples": 500, "video": VideoStream(fps=10)}])
    def open_stream(self, request):
        return AudioVisualStream(**request.param)

    @pytest.fixture
    def sources(self, talk, tmp_path):
        return [(talk, 3, 20), (talk, 60, None), (write_talk(tmp_path / "talk.mkv", late=8, sound_frames=20), 0, 28)]


def heights(item):
    return np.unique(np.round(item["audio"] * 128).astype(int)[0]).tolist()


@pytest.mark.parametrize("name", ["talk.mov", "talk.mkv", "talk.avi"])
def test_sound_belongs_to_its_frame(tmp_path, name):
    path = write_talk(tmp_path / name)
    for start in (0, 1, 30, 40, 74):
        found = items(path, start)
        assert len(found) == FRAMES - start
        for number, item in enumerate(found, start):
            assert clips.number_of(item["frame"]) == number
            assert item["audio"].shape == (2, A_FRAME)
            assert heights(item) == [number]
            assert (item["audio"][1] == -item["audio"][0]).all()


def test_steps_rates_and_sections(talk):
    for item in items((talk, 10, 60), 3, video=VideoStream(frame_step=5)):
        number = clips.number_of(item["frame"])
        assert heights(item) == list(range(number, number + 5))
    found = items(talk, 20, video=VideoStream(fps=50, with_times=True), samples=80)
    assert [clips.number_of(item["frame"]) for item in found] == [n // 2 for n in range(20, 150)]
    assert [heights(item) for item in found] == [[n // 2] for n in range(20, 150)]
    assert set(found[0]) == {"frame", "audio", "pts_seconds", "is_key"}


def test_silence_where_there_is_no_sound(tmp_path):
    path = write_talk(tmp_path / "late.mkv", late=20, sound_frames=50)
    for start in (0, 25, 60):
        for number, item in enumerate(items(path, start), start):
            assert heights(item) == [number if 20 <= number < 50 else 0], number
    with pytest.raises(ValueError, match=r"Limits\(sample_rate_ratio"):
        items(path, rate=RATE * 8, video=VideoStream(limits=Limits(sample_rate_ratio=7)))


@pytest.mark.parametrize("a_frame", [A_FRAME - 16, A_FRAME + 16])
@pytest.mark.parametrize("on_corrupt", ["keep", "drop"])
def test_sound_whose_clock_is_wrong_stays_with_its_picture(tmp_path, a_frame, on_corrupt):
    path = write_talk(tmp_path / "talk.mkv", a_frame=a_frame)
    for start in (0, 60):
        found = items(path, start, video=VideoStream(on_corrupt=on_corrupt))
        for number, item in enumerate(found, start):
            assert number in heights(item)
            assert {*heights(item)} <= {0, number - 1, number, number + 1}
    with pytest.raises(ValueError, match=r"talk\.mkv, at 0\.\d+ s: the next 0\.0\d+ s .* by the time stamps"):
        items(path)


def test_files_without_sound(talk, tmp_path):
    silent = clips.write_clip(tmp_path / "silent.mp4")
    with pytest.raises(OpenError, match=r"silent\.mp4 has no audio track 0; it has only video"):
        list(StreamDataLoader(StreamDataset([silent], AudioVisualStream(), 1, time_steps=5)))
    with pytest.raises(OpenError, match="has no audio track 1"):
        list(StreamDataLoader(StreamDataset([talk], AudioVisualStream(track=1), 1, time_steps=5)))
