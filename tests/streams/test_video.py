"""Videos as streams: every frame where it belongs, however it is reached; and what is wrong is said."""

import contextlib
import functools
import gc
import itertools
import os
import shutil
import struct
import wave
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import av
import clips
import cv2
import helpers
import numpy as np
import odd_clips
import pytest
import torch
from helpers import FULL, random_cases, seldom
from hypothesis import given
from hypothesis import strategies as st

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader.errors import OpenError, ReadError
from stream_dataloader.streams import VideoStream, segment_videos
from stream_dataloader.streams.video import frame_index, frames
from stream_dataloader.streams.video import pictures as pictures_of_packets
from stream_dataloader.streams.video.frames import PacketGaps
from stream_dataloader.testing import StreamContract

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("clips")


clip = clips.made


def read(path, item=0, **options):
    return helpers.read(VideoStream(**options)(path, start=item))


def numbers(path, item=0, **options):
    return [clips.number_of(frame) for frame in read(path, item, **options)]


def load(sources, workers=0, lanes=1, time_steps=8, on_error="raise", **options):
    dataset = StreamDataset(sources, VideoStream(**options), lanes, time_steps=time_steps, on_error=on_error)
    return list(StreamDataLoader(dataset, workers))


class TestVideo(StreamContract):
    @pytest.fixture(params=[{}, {"layout": "HWC", "dtype": "float32"}, {"color": "gray", "with_times": True}])
    def open_stream(self, request):
        return VideoStream(size=(24, 32), **request.param)

    @pytest.fixture
    def sources(self, folder):
        return [clip(folder), (clip(folder, "h264-mkv", 30), 4, 17), (clip(folder), 5, 5)]


class TestResampled(TestVideo):
    @pytest.fixture(params=[{"fps": 7}, {"fps": 40, "frame_step": 3}, {"start": 0.5, "stop": 1.5}])
    def open_stream(self, request):
        return VideoStream(size=(24, 32), **request.param)


def test_resampled_sections_resume_at_their_end(folder):
    for item in range(12):
        assert numbers((clip(folder), 1, 12), item, fps=25) == list(range(1 + item, 12))


PYAV = {"conversion": "swscale", "layout": "HWC"}
MAKERS = {
    **{codec: functools.partial(clips.made, codec=codec, frames=36) for codec in clips.CODECS},
    **odd_clips.MAKERS,
}


def beginning(path, start, **options):
    """The first pictures from a start."""
    with contextlib.closing(VideoStream(**options)(path, start=start)) as stream:
        return list(itertools.islice(stream, 3))


def same(found, expected):
    return len(found) == len(expected) and all(map(np.array_equal, found, expected))


#: Together they take every branch of the code. The others are of other codecs and containers, which FFmpeg tells apart.
OFTEN = (
    *("h264", "h264-avi", "mpeg2-mpg", "vp9-webm", "vp8-webm", "mjpeg-mov"),
    *("fields-alone", "fields-mp4", "interlaced-ts", "not-coded-mkv", "packed-mkv", "hidden-vp8", "keys-h264"),
    *("joined-sooner", "edit-list-3", "refreshed", "unmarked-flv", "unmarked-first-h265", "jump"),
    *("leading-asf", "leading-bare-mpeg1", "program-keys"),
)


@pytest.mark.parametrize("name", seldom(MAKERS, *OFTEN))
def test_every_start_gives_what_pyav_decodes_from_the_beginning(tmp_path, name):
    """Also where a packet is no frame, a mark of a key frame is wrong, or the clock jumps."""
    path = str(MAKERS[name](tmp_path))
    with av.open(path) as container:
        track = container.streams.video[0]
        decoded = [(frame.pts, frame.to_ndarray(format="rgb24")) for frame in container.decode(track)]
        untimed = container.format.name in ("avi", "asf", "mpegvideo") and track.codec_context.has_b_frames
        times = [None if untimed or time is None else 1000 * time * track.time_base for time, _ in decoded]
    pictures = [picture for _, picture in decoded]
    assert VideoStream().length(path) == len(pictures) > 25
    for start in [*range(0, len(pictures), 1 if FULL else 7), len(pictures) - 1, len(pictures)]:
        assert same(beginning(path, start, **PYAV), pictures[start : start + 3]), start
    assert same(read(path, len(pictures) // 2, **PYAV), pictures[len(pictures) // 2 :])
    assert same(read((path, 13, 25), 4, **PYAV), pictures[17:25])
    if None in times:
        return
    if times != sorted(times):
        with pytest.raises(ValueError, match="clock jumps back"):
            read(path, fps=10, **PYAV)
        return
    steady = [pictures[n] for n in shown_at(times, 10)]
    found = read(path, fps=10, **PYAV)
    assert same(found[: len(steady)], steady)
    for start in range(0, len(steady), 1 if FULL else 7):
        assert same(beginning(path, start, fps=10, **PYAV), found[start : start + 3]), start


@pytest.mark.parametrize("name", ["hidden-vp8", "not-coded"])
def test_packets_that_tell_something_else_than_frames(tmp_path, monkeypatch, name):
    path = str(odd_clips.MAKERS[name](tmp_path))
    pictures = read(path, **PYAV)
    every = pictures_of_packets.Inspector(lambda packet: pictures_of_packets.Shown(1, packet.is_keyframe))
    monkeypatch.setattr(frame_index, "inspector", lambda _: every)
    monkeypatch.setattr(frames, "inspector", lambda _: None)
    assert VideoStream().length(path) > len(pictures)
    assert same(read(path, 1, **PYAV), pictures[1:])
    assert VideoStream().length(path) == len(pictures)


@pytest.mark.parametrize("codec", ["h264", "h264-mkv", "h264-ts"])
def test_times_that_begin_late_and_frames_of_several_streams(folder, codec):
    late = clip(folder, codec, offset=5500)
    several = clip(folder, codec, 40, streams=2)
    for start in (0, 1, 13, 39):
        assert numbers(late, start) == list(range(start, 60))
        assert numbers(several, start, track=1) == list(range(100 + start, 140))
    assert numbers((late, 0.4, 0.72)) == list(range(10, 18)), "seconds count from the first frame"
    assert read(late, 3, with_times=True)[0]["pts_seconds"] == pytest.approx(
        read(late, with_times=True)[0]["pts_seconds"] + 0.12, abs=0.002
    )


def test_bare_streams_without_times(folder, tmp_path):
    from av.bitstream import BitStreamFilterContext

    with av.open(clip(folder)) as source, av.open(str(tmp_path / "bare.h264"), "w") as bare:
        track = bare.add_stream_from_template(source.streams.video[0])
        annex_b = BitStreamFilterContext("h264_mp4toannexb", source.streams.video[0])
        for packet in source.demux(video=0):
            for part in annex_b.filter(packet) if packet.size else ():
                part.stream = track
                bare.mux(part)
    for start in (0, 1, 31, 60):
        assert numbers(str(tmp_path / "bare.h264"), start) == list(range(start, 60))
    assert numbers(str(tmp_path / "bare.h264"), fps=5) == list(range(0, 60, 5))


@pytest.mark.parametrize("encoder", ["mpeg4", "libx264"])
def test_repeated_frames_of_a_container_without_times_keep_their_place(tmp_path, encoder):
    path = str(odd_clips.with_repeats(tmp_path, encoder))
    frames = read(path)
    assert len(frames) == odd_clips.FRAMES
    assert same(read(path, fps=25 / 4), frames)
    assert same(read((path, 1.6, 3.2)), frames[10:20])


def shown_at(times, fps, first=0, stop=None, step=1):
    """The model: for each moment the number of the last frame that has begun by then; times in 1/1000 s."""
    stop = len(times) if stop is None else stop
    end = times[stop] if stop < len(times) else None
    found, moment = [], Fraction(times[first])
    while moment < (end if end is not None else times[-1] + 1):
        found.append(max(i for i, time in enumerate(times) if time <= moment))
        moment += Fraction(1000 * step) / Fraction(fps)
    return found


@random_cases(20)
@given(
    gaps=st.lists(st.integers(1, 900), min_size=20, max_size=20),
    fps=st.sampled_from([1, 3.5, Fraction(30000, 1001), 8, 60]),
    first=st.integers(0, 19),
    step=st.integers(1, 3),
    data=st.data(),
)
def test_a_steady_rate_out_of_irregular_times(gaps, fps, first, step, data, tmp_path_factory):
    times = [sum(gaps[:i]) for i in range(20)]
    path = clips.write_clip(tmp_path_factory.mktemp("vfr") / "clip.mkv", 20, "h264-mkv", times=times)
    stop = data.draw(st.none() | st.integers(first, 20))
    options = {"fps": fps, "frame_step": step, "start": first, "stop": stop}
    found = numbers(path, **options)
    expected = [] if stop == first else shown_at(times, fps, first, stop, step)
    assert found[: len(expected)] == expected
    assert set(found[len(expected) :]) <= {19}  # the last one is shown a while longer
    assert VideoStream(**options).length(path) == len(found)
    item = data.draw(st.integers(0, len(found)))
    assert numbers(path, item, **options) == found[item:]


def test_sections_in_frames_and_in_seconds(folder):
    path = clip(folder)
    assert numbers((path, 7, 31), frame_step=5) == [7, 12, 17, 22, 27]
    assert VideoStream(frame_step=5).length((path, 7, 31)) == 5
    assert numbers((path, 58, None)) == [58, 59]
    assert numbers((path, 0.4, 0.72)) == list(range(10, 18))
    assert numbers(path, start=0, stop=1.0) == list(range(25))
    assert numbers((path, 2.0, 2.43)) == list(range(50, 60))  # its 2.4 s, rounded up
    assert numbers((path, 7, 9), stop=3) == [7, 8]  # the source's own goes first
    assert read((path, 60, 60)) == []


@pytest.mark.one_of_each
@pytest.mark.parametrize("size", [None, (37, 51), (96, 128), (1, 1)])
@pytest.mark.parametrize("color", ["rgb", "gray"])
def test_sizes_layouts_and_types(folder, size, color):
    path = clip(folder)
    first = read(path, size=size, color=color)[9]
    channels = {"rgb": 3, "gray": 1}[color]
    assert first.shape == (channels, *(size or (48, 64)))
    assert first.dtype == np.uint8
    turned = read(path, size=size, color=color, layout="HWC")[9]
    assert np.array_equal(turned, first.transpose(1, 2, 0))
    for dtype in (float, np.float32, torch.float32, "float32"):
        scaled = read(path, size=size, color=color, dtype=dtype)[9]
        assert scaled.dtype == np.float32
        assert np.allclose(scaled, first / np.float32(255), atol=1e-7)


def test_a_picture_of_another_shape_is_stretched_boxed_or_cut(folder):
    path = clip(folder)  # 64 wide, 48 high: stripes above, gray below
    boxed = read(path, size=(96, 64), fit="letterbox")[3]
    assert not boxed[:, :23].any()
    assert not boxed[:, 73:].any()
    assert boxed[:, 24:72].any(axis=(0, 2)).all()
    cut = read(clip(folder, frames=64), size=(48, 32), fit="crop")[0b00111100]
    assert (cut[:, :20] > 250).all()  # the four middle stripes, all white
    assert clips.number_of(read(path, size=(100, 200), fit="stretch")[37]) == 37


def test_a_start_at_a_key_frame_decodes_from_that_one():
    index = frame_index.FrameIndex(None, np.array([[0, -1], [10, -1]]), None)
    assert [index.key_before(time) for time in (-1, 0, 9, 10, 11)] == [None, 0, 0, 10, 10]


def test_frames_are_given_back_to_the_decoder_without_garbage_collection(folder):
    video = VideoStream(size=(24, 32))(clip(folder))
    gc.collect()
    gc.disable()
    try:
        assert sum(1 for _ in video) == 60
        assert sum(isinstance(thing, av.VideoFrame) for thing in gc.get_objects()) <= 2
    finally:
        gc.enable()
        video.close()


@pytest.mark.one_of_each
@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("turns", [0, 1, 2, 3])
def test_rotated_and_mirrored_videos_come_upright(folder, tmp_path, turns, mirrored):
    path = tmp_path / "turned.mp4"
    data = bytearray(Path(clip(folder)).read_bytes())
    one = 1 << 16
    matrix = data.index(struct.pack(">9i", one, 0, 0, 0, one, 0, 0, 0, 1 << 30), data.index(b"tkhd"))
    a, b = [(one, 0), (0, -one), (-one, 0), (0, one)][turns]  # turns the picture counter-clockwise
    c, d = -b, a
    if mirrored:  # left and right change places before
        a, b = -a, -b
    data[matrix : matrix + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    path.write_bytes(data)
    upright = read(clip(folder))[5]
    expected = np.rot90(upright[:, :, ::-1] if mirrored else upright, turns, axes=(1, 2))
    for layout in ("CHW", "HWC"):
        found = read(str(path), layout=layout)[5]
        found = found if layout == "CHW" else found.transpose(2, 0, 1)
        assert np.array_equal(found, expected)


def test_a_size_that_changes_in_mid_stream(tmp_path):
    both = clips.write_two_sizes(tmp_path)
    frames = read(both)
    assert {frame.shape for frame in frames} == {(3, 48, 64)}
    assert [clips.number_of(frame) for frame in frames] == list(range(40))
    assert numbers(both, 27) == list(range(27, 40))
    assert read(both, 30)[0].shape == (3, 48, 64)  # that of the first frame, wherever reading begins


def decibels(found, expected):
    return 10 * np.log10(255**2 / np.square(found.astype(float) - expected).mean())


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("matrix", ["bt601", "bt709"])
@pytest.mark.parametrize("bits", [8, 10])
def test_colours_follow_their_tags(tmp_path, matrix, full, bits):
    red, blue = {"bt601": (0.299, 0.114), "bt709": (0.2126, 0.0722)}[matrix]
    rgb = np.zeros((3, 64, 96))
    rgb[0], rgb[1], rgb[2] = np.linspace(0, 1, 96), np.linspace(1, 0, 64)[:, None], 0.5
    luma = red * rgb[0] + (1 - red - blue) * rgb[1] + blue * rgb[2]
    chroma = (rgb[2] - luma) / (2 - 2 * blue), (rgb[0] - luma) / (2 - 2 * red)
    scale = 1 << (bits - 8)
    planes = [(luma * 255 if full else luma * 219 + 16) * scale]
    planes += [(c * (255 if full else 224) + 128) * scale for c in chroma]
    planes = [np.round(plane).astype(np.uint8 if bits == 8 else np.uint16) for plane in planes]
    path = str(tmp_path / "colours.mkv")
    with av.open(path, "w") as container:
        track = container.add_stream("ffv1", 25)
        track.width, track.height, track.pix_fmt = 96, 64, "yuv444p" if bits == 8 else "yuv444p10le"
        track.codec_context.color_range = 2 if full else 1
        track.codec_context.colorspace = 1 if matrix == "bt709" else 5
        frame = av.VideoFrame(96, 64, track.pix_fmt)
        for plane, values in zip(frame.planes, planes, strict=True):
            row = plane.line_size // values.itemsize
            plane.update(np.pad(values, ((0, 0), (0, row - 96))).tobytes())
        frame.colorspace, frame.color_range = track.codec_context.colorspace, track.codec_context.color_range
        for _ in range(3):
            container.mux(track.encode(frame))
        container.mux(track.encode(None))
    assert decibels(read(path)[0], rgb * 255) > 44
    assert decibels(read(path, color="gray")[0][0], luma * 255) > 48
    assert decibels(read(path, size=(32, 48))[0], rgb.reshape(3, 32, 2, 48, 2).mean((2, 4)) * 255) > 40


def test_times_and_key_frames(folder):
    items = read(clip(folder), with_times=True)
    assert [item["is_key"] for item in items] == [i % 12 == 0 for i in range(60)]
    assert [item["pts_seconds"] for item in items] == pytest.approx([i / 25 for i in range(60)])
    batch = load([clip(folder)], with_times=True)[1]
    assert batch.data["frame"].shape == (8, 1, 3, 48, 64)
    assert batch.data["pts_seconds"].dtype == torch.float64
    assert batch.data["is_key"][:, 0].tolist() == [False] * 4 + [True] + [False] * 3


def test_long_videos_are_cut_into_sections(folder):
    paths = [clip(folder), clip(folder, "h264-ts", 25), clip(folder, "h264-mkv", 8)]
    sections = segment_videos(map(Path, paths), max_frames=25, progress=False)
    assert sections == [(paths[0], 0, 20), (paths[0], 20, 40), (paths[0], 40, 60), (paths[1], 0, 25), (paths[2], 0, 8)]
    batches = load(sections, workers=2, lanes=2, time_steps=20, size=(48, 64))
    seen = sorted(
        (int(batch.source_index[t, b]), clips.number_of(batch.data[t, b]))
        for batch in batches
        for t, b in batch.mask.nonzero().tolist()
    )
    assert seen == [(i, number) for i, (_, start, stop) in enumerate(sections) for number in range(start, stop)]
    with pytest.raises(ValueError, match="max_frames is 0"):
        segment_videos(paths, max_frames=0)


def test_a_count_is_remembered_until_the_file_changes(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("STREAM_DATALOADER_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "clip.mp4"
    shutil.copy(clip(folder), path)
    assert VideoStream().length(path) == 60
    kept = list((tmp_path / "cache" / "probes").iterdir())
    assert len(kept) == 1
    shutil.copy(clip(folder, "h264", 33), path)
    assert VideoStream().length(path) == 33
    monkeypatch.setenv("STREAM_DATALOADER_CACHE", "/proc/nowhere")  # cannot be written to: no reason to fail
    shutil.copy(clip(folder, "h264", 34), path)
    assert VideoStream().length(path) == 34


def test_a_file_rewritten_at_its_size_has_an_index_of_its_own(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("STREAM_DATALOADER_CACHE", str(tmp_path / "cache"))
    path, clips_read = tmp_path / "clip.mp4", [(clip(folder), 60), (clip(folder, "h264", 33), 33)]
    size = max(os.path.getsize(source) for source, _ in clips_read)
    for number, (source, count) in enumerate(clips_read * 2):
        content = Path(source).read_bytes()
        box = struct.pack(">I4s", size + 8 - len(content), b"free")  # as MP4 fills what is not used
        path.write_bytes(content + box.ljust(size + 8 - len(content), b"\0"))
        os.utime(path, ns=(number, number))
        assert os.path.getsize(path) == size + 8
        assert VideoStream().length(str(path)) == count


def test_each_track_of_a_file_has_an_index_of_its_own(folder, tmp_path):
    path = str(tmp_path / "two.mkv")
    with av.open(clip(folder)) as long, av.open(clip(folder, "h264", 33)) as short, av.open(path, "w") as both:
        tracks = [(source, both.add_stream_from_template(source.streams.video[0])) for source in (long, short)]
        for source, track in tracks:
            for packet in source.demux(video=0):
                if packet.size:
                    packet.stream = track
                    both.mux(packet)
    assert [VideoStream(track=track).length(path) for track in (0, 1)] == [60, 33]
    assert segment_videos([path], max_frames=40, track=1, progress=False) == [(path, 0, 33)]


BUSY = {"size": (240, 320)}  # enough bytes a frame to break some


def test_bad_files_are_refused_by_name(folder, tmp_path):
    with wave.open(str(tmp_path / "sound.wav"), "wb") as sound:
        sound.setparams((1, 2, 8000, 0, "NONE", ""))
        sound.writeframes(bytes(1600))
    (tmp_path / "text.mp4").write_text("no video at all\n" * 100)
    (tmp_path / "no-index.mp4").write_bytes(Path(clip(folder)).read_bytes()[:2000])
    for name in ("text.mp4", "no-index.mp4", "sound.wav"):
        with pytest.raises(OpenError, match=rf"(?s)source 0 .*{name}"):
            load([str(tmp_path / name)])


CUT = {
    "index first": ("h264", {"movflags": "faststart"}),
    "fragments": ("h264", {"movflags": "frag_keyframe+empty_moov"}),
    **{codec: (codec, {}) for codec in ("h264-mkv", "h264-avi", "h264-ts")},
    "m2ts": ("h264-ts", {"mpegts_m2ts_mode": "1"}),
}


@pytest.mark.parametrize("kind", seldom(CUT, "index first", "fragments", "h264-mkv", "h264-ts"))
def test_a_file_that_was_cut_is_an_error_after_its_last_frame(tmp_path, kind):
    codec, options = CUT[kind]
    whole = Path(clips.write_clip(tmp_path / f"whole.{clips.CODECS[codec][0]}", 60, codec, **BUSY, **options))
    path, data = tmp_path / f"cut{whole.suffix}", whole.read_bytes()
    for end in (len(data) // 3 + 1, len(data) * 9 // 10, len(data) - 5, len(data) * 6 // 10 + 1):
        path.write_bytes(data[:end])
        with pytest.raises((OpenError, ReadError)) as caught:
            load([path], time_steps=1)
    assert 5 < caught.value.position < 60
    kept = numbers(path, on_corrupt="drop")
    assert len(kept) > 5
    assert kept == list(range(len(kept)))
    assert len(numbers(whole)) == 60


REFUSED = {"mp4": "libx264", "flv": "libx264", "wmv": "wmv2", "apng": "apng"}
READ_ON = {"ts": "mpeg2video", "mkv": "ffv1", "avi": "mpeg4", "mpg": "mpeg1video", "gif": "gif", "mjpeg": "mjpeg"}
PIXELS = {"apng": "rgb24", "gif": "rgb8", "mjpeg": "yuvj420p"}


@pytest.mark.parametrize("suffix", REFUSED | READ_ON)
def test_files_joined_byte_by_byte_are_read_whole_or_refused(suffix, tmp_path):
    """Of some formats FFmpeg reads the first file alone."""
    pixels = PIXELS.get(suffix, "yuv420p")
    whole = Path(odd_clips.encoded(tmp_path / f"whole.{suffix}", (REFUSED | READ_ON)[suffix], pixels)).read_bytes()
    assert len(read(tmp_path / f"whole.{suffix}")) == odd_clips.FRAMES
    path = tmp_path / f"joined.{suffix}"
    path.write_bytes(whole + whole)
    if suffix in READ_ON:
        assert len(read(path)) == 2 * odd_clips.FRAMES
        return
    with pytest.raises(ReadError, match=rf"{path.name} is two files: another one begins at byte {len(whole)}.*concat"):
        load([str(path)])
    assert len(read(path, on_corrupt="drop")) == odd_clips.FRAMES


#: Formats, the muxer's options, and the number of bytes to leave out at the end, besides a third.
ENDS = {
    **dict.fromkeys(("flv", "wmv", "apng", "gif"), ({}, (30,))),
    "mjpeg": ({}, (1, 30)),
    "mxf": ({}, (9000,)),
    "mkv": ({"live": "1"}, (1, 30)),  # of unknown size
    "y4m": ({}, (1, 30, 9000)),
}


@pytest.mark.parametrize("suffix", ENDS)
def test_more_formats_that_were_cut_are_an_error_and_other_data_behind_them_is_none(suffix, tmp_path):
    encoder = (REFUSED | READ_ON | {"mxf": "mpeg2video", "y4m": "wrapped_avframe"})[suffix]
    options, cuts = ENDS[suffix]
    path = tmp_path / f"clip.{suffix}"
    odd_clips.encoded(path, encoder, PIXELS.get(suffix, "yuv420p"), muxer=options)
    whole = path.read_bytes()
    if suffix != "y4m":  # FFmpeg refuses other data there
        path.write_bytes(whole + bytes(900))
    assert len(read(path)) == odd_clips.FRAMES
    for end in (len(whole) * 2 // 3, *(len(whole) - cut for cut in cuts)):
        path.write_bytes(whole[:end])
        with pytest.raises(ReadError, match=r"is cut off|cannot be decoded|is damaged"):
            load([str(path)], time_steps=1)
        assert 1 < len(read(path, on_corrupt="drop")) <= odd_clips.FRAMES


def test_a_file_cut_within_its_index_is_told_to_be_cut(tmp_path):
    data = Path(clips.write_clip(tmp_path / "whole.mp4", 60)).read_bytes()
    (tmp_path / "cut.mp4").write_bytes(data[: data.index(b"moov") + 200])
    with pytest.raises(OpenError, match=r"cut.mp4 is cut off: it has .* bytes"):
        load([str(tmp_path / "cut.mp4")])


def test_a_name_is_no_pattern_of_other_files(tmp_path):
    """FFmpeg reads the numbered pictures instead."""
    for name, number in (("0.png", 1), ("1.png", 2), ("%d.png", 3)):
        (tmp_path / name).write_bytes(cv2.imencode(".png", clips.picture(number)[..., ::-1])[1].tobytes())
    assert numbers(tmp_path / "%d.png") == [3]


def test_a_wrong_time_stamp_does_not_repeat_a_frame_without_end(tmp_path):
    times = [40 * n + 10**12 * (n > 20) for n in range(40)]
    path = clips.write_clip(tmp_path / "a.mkv", 40, "h264-mkv", times=times)
    with pytest.raises(ReadError, match=r"a.mkv: its clock jumps from 0.800 s .*; leave fps out"):
        load([path], fps=25)
    with pytest.raises(ValueError, match="its clock jumps"):
        read((path, 0, 21), fps=25)
    assert len(numbers((path, 0, 20), fps=25)) == 20
    assert len(numbers(path)) == 40


def test_a_file_that_yields_nothing_is_no_empty_stream(tmp_path):
    path = Path(clips.write_clip(tmp_path / "nothing.mp4", movflags="frag_keyframe+empty_moov"))
    data = path.read_bytes()
    path.write_bytes(data[: data.index(b"moof") - 4])
    with pytest.raises((OpenError, ReadError), match="nothing"):
        load([path])


def test_damaged_frames(tmp_path):
    whole = clips.write_clip(tmp_path / "whole.mkv", 60, "h264-mkv", **BUSY)
    data = bytearray(Path(whole).read_bytes())
    data[len(data) // 2 : len(data) // 2 + 300] = os.urandom(300)
    path = str(tmp_path / "damaged.mkv")
    Path(path).write_bytes(data)
    with pytest.raises(ReadError, match=r"damaged\.mkv") as caught:
        load([path], time_steps=1)
    assert 0 < caught.value.position < 60
    kept, dropped = numbers(path, on_corrupt="keep"), numbers(path, on_corrupt="drop")
    assert len(dropped) < 60
    assert len(dropped) <= len(kept) <= 60
    assert numbers(path, 10, on_corrupt="drop") == dropped[10:]
    with pytest.warns(RuntimeWarning, match="skipped"):
        batches = load([path, whole], on_error="skip", time_steps=4)
    assert int(batches[-1].source_index[0, 0]) == 1


def test_a_file_that_shrinks_while_it_is_read(folder, tmp_path):
    path = tmp_path / "shrinking.mkv"
    clips.write_clip(path, 120, "h264-mkv", **BUSY)
    stream = VideoStream()(str(path))
    frames = iter(stream)
    for _ in range(10):
        next(frames)
    os.truncate(path, os.path.getsize(path) // 2)
    with pytest.raises(ValueError, match=r"shrinking\.mkv"):
        list(frames)
    stream.close()


def test_packets_that_were_lost_on_the_way_are_noticed(tmp_path):
    whole = Path(clips.write_clip(tmp_path / "whole.ts", 60, "h264-ts", size=(240, 320))).read_bytes()
    middle = len(whole) // 2 // 188 * 188
    (tmp_path / "lossy.ts").write_bytes(whole[:middle] + whole[middle + 20 * 188 :])
    with pytest.raises(ReadError, match="lossy"):
        load([str(tmp_path / "lossy.ts")])
    gaps, packet = PacketGaps(), SimpleNamespace(is_keyframe=False, is_corrupt=True)
    assert [gaps.has_one_before(one) for one in (packet, None)] == [False, True]  # also where the last one is marked


def test_places_that_are_not_there(folder):
    path = clip(folder)
    for section in ((0.0, 9.0), (0, 400), (61, None), (61, 70), (10, 70)):
        for fps in (None, 10):
            with pytest.raises((OpenError, ReadError), match="were asked for"):
                load([(path, *section)], fps=fps)
    for item, fps in ((61, None), (25, 10)):
        with pytest.raises(ValueError, match=f"has {item - 1} items"):
            read(path, item, fps=fps)
    with pytest.raises(TypeError, match="paths"):
        segment_videos(path, max_frames=5)
