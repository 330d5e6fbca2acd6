"""Videos decoded by a device: the same items as by the CPU, or an error that says why not; never by the CPU in silence.

No device decodes here: `device.Device` stands in for one. What is said where there is none is real.
"""

import errno
import functools
import gc
import warnings
from pathlib import Path

import av
import av.error
import clips
import device
import helpers
import numpy as np
import pytest
import torch

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader.errors import DeviceError, OpenError
from stream_dataloader.streams import VideoStream

pytestmark = pytest.mark.usefixtures("own_cache")
without_a_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="where there is no GPU")


EXTERNAL = functools.partial(av.error.ExternalError, 542398533, "Generic error in an external library")
INVALID = functools.partial(av.error.InvalidDataError, 1094995529, "Invalid data found when processing input")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("clips")


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch):
    monkeypatch.setattr("stream_dataloader.streams.video.device._warned", set())


@pytest.fixture
def gpu(monkeypatch):
    return device.Device(monkeypatch)


def clip(folder, codec="h264"):
    return clips.made(folder, codec, 30)


def noise(path, encoder="libx264", pixel_format="yuv420p", size=(46, 66), full=False):
    """A clip of noise, whose every pixel counts."""
    with av.open(str(path), "w") as container:
        track = container.add_stream(encoder, 25, options={"qp": "1", "x265-params": "log-level=none"})
        track.height, track.width, track.pix_fmt = *size, pixel_format
        track.codec_context.color_range = 2 if full else 1
        for number in range(6):
            random = np.random.default_rng(number)
            image = random.integers(0, 256, (*size, 3), np.uint8)
            frame = av.VideoFrame.from_ndarray(image, "rgb24").reformat(format=pixel_format, dst_color_range=1 + full)
            container.mux(track.encode(frame))
        container.mux(track.encode(None))
    return str(path)


def read(path, item=0, **options):
    return helpers.read(VideoStream(**options)(path, start=item))


def same(found, expected):
    found, expected = list(found), list(expected)
    return len(found) == len(expected) > 0 and all(map(np.array_equal, found, expected))


def loaded(sources, workers=0, lanes=1, **options):
    dataset = StreamDataset(sources, VideoStream(size=(24, 32), **options), lanes, time_steps=8, seed=0)
    return [batch.data.clone() for batch in StreamDataLoader(dataset, workers)]


CODECS = ["h264", "h264-open-gop", "h264-ts", "h264-avi", "h264-10bit", "h265", "mpeg2-mpg", "vp9-webm", "two sizes"]


@pytest.mark.parametrize(("codec", "tags"), [*((codec, 2) for codec in CODECS), ("h264", 0), ("h264-10bit", 0)])
def test_items_are_those_of_the_cpu(folder, tmp_path, gpu, codec, tags):
    gpu.tags = tags
    path = clips.write_two_sizes(tmp_path) if codec == "two sizes" else clip(folder, codec)
    for start in (0, 1, 17, 29):
        assert same(read(path, start, device="cuda"), read(path, start))
    assert same(read(path, 3, device="cuda", fps=10), read(path, 3, fps=10))
    assert len(gpu.asked) == len(gpu.opened) >= 5  # not one of them by the CPU


@pytest.mark.parametrize("color", ["rgb", "gray"])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("bits", [8, 10, 12])
def test_conversion_makes_no_difference(tmp_path, gpu, bits, full, color):
    """Measured: libswscale differs by 0 in all of these, once p010 and p012 were made planar."""
    encoder, pixel_format = "libx265" if bits == 12 else "libx264", "yuv420p" + ("" if bits == 8 else f"{bits}le")
    path = noise(tmp_path / "noise.mkv", encoder, pixel_format, full=full)
    for size in (None, (23, 33), (46, 50), (90, 100)):
        assert same(read(path, device="cuda", size=size, color=color), read(path, size=size, color=color))


def test_a_loader_s_batches_are_the_same(folder, gpu):
    sources = [clip(folder), (clip(folder), 5, 20), clip(folder, "h264-10bit"), clip(folder, "h264-ts")]
    expected = loaded(sources, lanes=2)
    for workers in (0, 2):
        assert same(loaded(sources, workers, lanes=2, device="cuda"), expected)
    dataset = StreamDataset(sources, VideoStream(size=(24, 32), device="cuda"), 2, time_steps=8, seed=0)
    batches = iter(StreamDataLoader(dataset))
    state = [next(batches) for _ in range(3)][-1].state_dict()
    on_cpu = StreamDataLoader(StreamDataset(sources, VideoStream(size=(24, 32)), 2, time_steps=8, seed=0))
    on_cpu.load_state_dict(state)  # a state does not tell what decodes
    assert same((batch.data for batch in on_cpu), expected[3:])


def test_a_decoder_lives_as_long_as_its_stream(folder, gpu):
    stream = VideoStream(device="cuda")(clip(folder))
    next(iter(stream))
    gc.disable()  # devices have room for few decoders
    try:
        assert gpu.opened[0]() is not None
        stream.close()
        assert gpu.opened[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(("name", "number"), [("cuda", 0), ("cuda:1", 1), (torch.device("cuda", 2), 2)])
def test_the_device_is_asked_for(folder, gpu, name, number):
    read(clip(folder), device=name)
    (asked,) = gpu.asked
    assert (asked.device_id, asked.is_hw_owned, asked.allow_software_fallback) == (number, False, False)
    assert asked.options == {"primary_ctx": "1"}  # one CUDA context for all decoders of a process


def test_a_primary_context_that_torch_has_set_up(folder, gpu):
    gpu.open_errors = [av.error.OSError(errno.EOPNOTSUPP, "Operation not supported")]
    assert same(read(clip(folder), device="cuda"), read(clip(folder)))
    assert [asked.options for asked in gpu.asked] == [{"primary_ctx": "1"}, {}]


@pytest.mark.parametrize("name", [None, "cpu", torch.device("cpu")])
def test_the_cpu(folder, gpu, name):
    assert same(read(clip(folder), device=name, device_fallback=True), read(clip(folder)))
    assert not gpu.asked
    VideoStream(device=name, on_corrupt="keep")


@without_a_gpu
@pytest.mark.parametrize(("codec", "name"), [("h264", "h264"), ("ffv1-mkv", "ffv1")])
def test_no_device(folder, codec, name):
    with pytest.raises(OpenError) as found:
        loaded([clip(folder, codec)], 1, device="cuda:1")
    problem = found.value.__cause__
    assert isinstance(problem, DeviceError)
    assert (problem.device, problem.codec) == ("cuda:1", name)


def test_an_ffmpeg_without_cuda(folder, monkeypatch):
    monkeypatch.setattr("stream_dataloader.streams.video.device.hwdevices_available", lambda: ["vaapi"])
    with pytest.raises(DeviceError, match="without CUDA"):
        read(clip(folder), device="cuda")


@without_a_gpu
def test_files_that_are_at_fault_are_told_as_ever(tmp_path):
    (tmp_path / "text.mp4").write_text("no video")
    for name in ("missing.mp4", "text.mp4"):
        with pytest.raises((OSError, ValueError)) as expected:
            read(tmp_path / name)
        with pytest.raises(type(expected.value)) as found:
            read(tmp_path / name, device="cuda", device_fallback=True)
        assert str(found.value) == str(expected.value)


#: How a device fails. PyAV itself raises only if no stream of a file has a decoder there.
FAILURES = {
    "no decoder": {"has_decoder": False},
    "software": {"software_from": 0},
    "software later": {"software_from": 14},
    "crops": {"crops": True},
    "fails at once": {"fails_at": 0, "error": INVALID},
    "fails early": {"fails_at": 3, "error": EXTERNAL},
    "fails later": {"fails_at": 12, "error": EXTERNAL},
}


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
def test_what_the_device_does_not_decode_is_an_error(folder, gpu, failure):
    vars(gpu).update(failure)
    with pytest.raises(DeviceError) as found:
        read(clip(folder), device="cuda")
    assert (found.value.device, found.value.codec) == ("cuda", "h264")


def test_a_later_frame_that_fails_is_the_video_s_fault(folder, gpu):
    vars(gpu).update(fails_at=12, error=INVALID)
    with pytest.raises(ValueError, match=r"mp4: a frame cannot be decoded"):
        read(clip(folder), device="cuda")


def fallen_back(path, item=0, **options):
    """What is read where the CPU decodes in the end, and how often that was said."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        frames = read(path, item, device="cuda", device_fallback=True, **options)
    assert {warning.category for warning in told} <= {RuntimeWarning}
    return frames, [str(warning.message) for warning in told]


@without_a_gpu
def test_the_cpu_decodes_if_that_is_asked_for_and_says_so_once(folder):
    frames, told = fallen_back(clip(folder))
    again, more = fallen_back(clip(folder, "h264-ts"))
    assert same(frames, read(clip(folder)))
    assert same(again, read(clip(folder, "h264-ts")))
    assert len(told) == 1
    assert not more
    assert clip(folder) in told[0]


@pytest.mark.parametrize("item", [0, 7])
@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
def test_the_cpu_goes_on_at_the_very_frame(folder, gpu, failure, item):
    expected = read(clip(folder), item, size=(20, 30), with_times=True)
    vars(gpu).update(failure)
    frames, warned = fallen_back(clip(folder), item, size=(20, 30), with_times=True)
    assert len(warned) == 1
    assert [frame["pts_seconds"] for frame in frames] == [frame["pts_seconds"] for frame in expected]
    assert same([frame["frame"] for frame in frames], [frame["frame"] for frame in expected])
    assert not any(reference() for reference in gpu.opened)


def test_damage_is_damage_by_the_cpu_too(folder, tmp_path, gpu):
    path = tmp_path / "damaged.mkv"
    data = bytearray(Path(clip(folder, "h264-mkv")).read_bytes())
    late = len(data) * 7 // 10
    data[late : late + 200] = b"\xff" * 200
    path.write_bytes(data)
    gpu.fails_at, gpu.error = 0, INVALID
    with pytest.warns(RuntimeWarning), pytest.raises(ValueError, match=r"damaged\.mkv: .*; use on_corrupt="):
        read(path, device="cuda", device_fallback=True)
