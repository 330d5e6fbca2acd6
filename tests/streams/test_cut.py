"""Files that were cut, of formats that FFmpeg reads as if they simply ended, are found out; whole ones are not."""

import av
import clips
import pytest

from stream_dataloader import OpenError, ReadError, StreamDataLoader, StreamDataset
from stream_dataloader.streams import VideoStream

pytestmark = pytest.mark.usefixtures("own_cache")

FRAGMENTS = {"movflags": "frag_keyframe+empty_moov"}
# suffix: encoder, pixel format, the muxer's name, its options
VIDEOS = {
    "ts": ("libx264", "yuv420p", "mpegts", {}),
    "m2ts": ("libx264", "yuv420p", "mpegts", {"mpegts_m2ts_mode": "1"}),
    "mp4": ("libx264", "yuv420p", "mp4", FRAGMENTS),
    "mkv": ("libx264", "yuv420p", "matroska", {}),
    "avi": ("mpeg4", "yuv420p", "avi", {}),
}


def write_video(path, encoder, pixel_format, muxer, options, frames=24):
    height, width = 48, 64
    with av.open(str(path), "w", format=muxer, options=options) as container:
        track = container.add_stream(encoder, 25)
        track.height, track.width, track.pix_fmt = height, width, pixel_format
        track.codec_context.thread_count = 1
        for number in range(frames):
            frame = av.VideoFrame.from_ndarray(clips.picture(number, width, height), "rgb24")
            container.mux(track.encode(frame.reformat(format=pixel_format)))
        container.mux(track.encode(None))


def load(path, stream):
    batches = StreamDataLoader(StreamDataset([str(path)], stream, 1, time_steps=4))
    return sum(int(batch.mask.sum()) for batch in batches)


def is_found_out(path, stream):
    """Whole the file is read to its end; cut, it is refused."""
    assert load(path, stream) > 3
    data = path.read_bytes()
    for end in (len(data) // 3 + 1, len(data) * 6 // 10 + 1, len(data) * 9 // 10, len(data) - 5):
        path.write_bytes(data[:end])
        with pytest.raises((OpenError, ReadError), match=r"cut\.[a-z0-9.]+"):
            load(path, stream)


@pytest.mark.parametrize("suffix", VIDEOS)
def test_videos(tmp_path, suffix):
    path = tmp_path / f"cut.{suffix}"
    write_video(path, *VIDEOS[suffix])
    is_found_out(path, VideoStream(size=(24, 32)))


def test_what_says_what_is_missing(tmp_path):
    path = tmp_path / "cut.ts"
    write_video(path, *VIDEOS["ts"])
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ReadError, match=r"cut\.ts is cut off: its \d+ bytes end within a packet"):
        load(path, VideoStream())
    assert load(path, VideoStream(on_corrupt="drop")) >= 23


def test_a_file_that_yields_nothing_is_no_empty_stream(tmp_path):
    """A live recording of which only the beginning was written: its headers, and no picture."""
    path = tmp_path / "nothing.mp4"
    write_video(path, *VIDEOS["mp4"])
    data = path.read_bytes()
    path.write_bytes(data[: data.index(b"moof") - 4])
    with pytest.raises((OpenError, ReadError), match=r"nothing\.mp4.* has no frame that"):
        load(path, VideoStream())
