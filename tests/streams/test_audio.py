"""Audio streams: the same samples wherever reading begins, in any container, and every bad file told by name."""

import contextlib
import itertools
import math
import random
import re
import struct
import wave
from fractions import Fraction

import av
import helpers
import numpy as np
import pytest
from helpers import seldom
from hypothesis import given
from hypothesis import strategies as st

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader.errors import ReadError
from stream_dataloader.streams.audio.decoding import AudioDecoder
from stream_dataloader.streams.audio.stream import AudioStream, SampleReader
from stream_dataloader.testing import StreamContract

RATE = 22050

#: File, encoder, and what else is to be known about it.
KINDS = {
    "u8.wav": ("pcm_u8", {}),
    "s16.wav": ("pcm_s16le", {}),
    "s24.wav": ("pcm_s24le", {}),
    "f64.wav": ("pcm_f64le", {}),
    "s16.aiff": ("pcm_s16be", {}),
    "pcm.mov": ("pcm_s24le", {}),
    "one.flac": ("flac", {"layout": "mono"}),
    "flac.mkv": ("flac", {"video": True}),
    "flac.nut": ("flac", {}),
    "alac.m4a": ("alac", {}),
    "one.mp3": ("libmp3lame", {}),
    "low.mp3": ("libmp3lame", {"layout": "mono", "bit_rate": 8000}),
    "mp3.ts": ("libmp3lame", {}),
    **{name: ("aac", {}) for name in ("aac.m4a", "raw.aac", "aac.ts")},
    "six.mp4": ("aac", {"layout": "5.1", "video": True}),
    "aac.mkv": ("aac", {"video": True}),
    **{name: ("libopus", {"rate": 24000}) for name in ("one.opus", "opus.webm")},
    "vorbis.ogg": ("vorbis", {"options": {"strict": "experimental"}}),
    "one.ac3": ("ac3", {"rate": 44100}),
}


def sound(rate, channels, seconds, seed=0):
    """Something that is not the same anywhere: chirps and noise."""
    rng, t = np.random.default_rng(seed), np.arange(int(rate * seconds)) / rate
    chirps = [0.3 * np.sin(2 * np.pi * (200 * (c + 1) + 35 * t) * t) for c in range(channels)]
    return (np.stack(chirps) + 0.05 * rng.standard_normal((channels, len(t)))).astype(np.float32)


def write(path, codec, *, rate=RATE, layout="stereo", seconds=6.0, options=None, container_options=None, video=False,
          bit_rate=None, samples=None, gap_seconds=0.0):  # fmt: skip
    """Encode a file; after its half, the time stamps may leave out a gap."""
    if samples is None:
        samples = sound(rate, av.AudioLayout(layout).nb_channels, seconds)
    with av.open(str(path), "w", options=container_options or {}) as out:
        stream = out.add_stream(codec, rate=rate, layout=layout, options=options or {})
        if bit_rate:
            stream.bit_rate = bit_rate
        if video:
            add_video(out, int(seconds * 10))
        resampler = av.AudioResampler(stream.format.name, layout, rate, frame_size=stream.frame_size or 1024)
        frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout=layout)
        frame.sample_rate, frame.pts = rate, 0
        for piece in [*resampler.resample(frame), *resampler.resample(None)]:
            if piece.pts is not None and piece.pts * piece.time_base > seconds / 2:
                piece.pts += int(gap_seconds / piece.time_base)
            out.mux(stream.encode(piece))
        out.mux(stream.encode(None))
    return path


def add_video(out, frames):
    pictures = out.add_stream("mpeg4", rate=10, width=64, height=48, pix_fmt="yuv420p")
    for _ in range(frames):
        out.mux(pictures.encode(av.VideoFrame(64, 48, "yuv420p")))
    out.mux(pictures.encode(None))


@pytest.fixture(scope="module")
def media(tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("audio"), {}

    def get(name):
        if name not in made:
            codec, options = KINDS[name]
            made[name] = write(folder / name, codec, **options)
        return made[name]

    return get


def items(stream):
    return [item.copy() for item in helpers.read(stream)]


def same(found, expected):
    return len(found) == len(expected) and all(map(np.array_equal, found, expected))


def joined(options, source):
    found = items(AudioStream(window=1000, pad_last=False, **options)(source))
    return np.concatenate(found, 1) if found else np.zeros((2, 0), np.float32)


def reference(path):
    """The samples as FFmpeg hands them out."""
    with av.open(str(path)) as container:
        resampler = av.AudioResampler("fltp", container.streams.audio[0].layout)
        packets = [packet for packet in container.demux(audio=0) if packet.size or packet.pts is None]  # not NUT's last
        pieces = [r.to_ndarray() for packet in packets for f in packet.decode() for r in resampler.resample(f)]
    return np.concatenate(pieces, 1)


def write_wave(path, samples, rate=8000):
    with wave.open(str(path), "wb") as file:
        file.setparams((1 if samples.ndim == 1 else samples.shape[1], 2, rate, 0, "NONE", ""))
        file.writeframes(samples.astype("<i2").tobytes())
    return path


#: One of each encoder, and of each container that FFmpeg does not tell the length or the place of.
OFTEN = (
    *("u8.wav", "f64.wav", "pcm.mov", "one.flac", "flac.mkv", "alac.m4a", "one.mp3", "low.mp3", "mp3.ts"),
    *("raw.aac", "six.mp4", "one.opus", "vorbis.ogg", "one.ac3"),
)


@pytest.mark.parametrize("name", seldom(KINDS, *OFTEN))
def test_samples_are_those_of_ffmpeg(media, name):
    expected = reference(media(name))
    assert expected.shape[1] >= 5.9 * RATE
    stream = AudioStream(window=expected.shape[1])(media(name))
    (found,) = items(stream)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.one_of_each
@pytest.mark.parametrize("name", seldom(KINDS, *OFTEN))
@pytest.mark.parametrize("options", [{}, {"rate": 16000, "channels": 1, "hop": 700}, {"rate": 44100, "hop": 3333}])
def test_every_start_gives_the_same_bits(media, name, options):
    audio = AudioStream(window=1024, **options)
    expected = items(audio(media(name)))
    whole, *starts = random.Random(name).choices(range(len(expected)), k=3)
    assert same(items(audio(media(name), start=whole)), expected[whole:]), whole
    for start in [*starts, 0, len(expected) - 1, len(expected)]:
        with contextlib.closing(audio(media(name), start=start)) as stream:
            found = [item.copy() for item in itertools.islice(stream, 3)]
        assert same(found, expected[start : start + 3]), start


@pytest.mark.parametrize("name", ["s16.wav", "one.flac", "alac.m4a", "one.mp3", "low.mp3", "pcm.mov"])
def test_far_starts_do_not_decode_what_is_before(media, name, monkeypatch):
    decoded = []
    decode = AudioDecoder._decoded
    monkeypatch.setattr(AudioDecoder, "_decoded", lambda *a: (decoded.append(f) or f for f in decode(*a)))
    stream = AudioStream(window=512, rate=16000)(media(name), start=160)  # 5.1 s
    assert next(iter(stream)).shape[1] == 512
    stream.close()
    assert sum(frame.samples for frame in decoded) < 1.2 * RATE


RATES = st.sampled_from([7999, 8000, 11025, 12345, 16000, 22050, 44100, 48000, 96000])


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("scratch") / "any.wav"


@given(
    rate=RATES,
    to=RATES,
    count=st.integers(1, 100) | st.integers(1, 30_000),
    window=st.integers(1, 4000),
    data=st.data(),
)
def test_any_number_of_samples_is_resampled_whole(scratch, rate, to, count, window, data):
    write_wave(scratch, np.random.default_rng(count).integers(-20_000, 20_000, count), rate)
    audio = AudioStream(window=window, hop=max(1, window // 2), rate=to)
    expected = items(audio(scratch))
    assert audio.length(scratch) == len(expected) == audio.items(math.ceil(count * to / rate))
    start = data.draw(st.integers(0, len(expected)))
    assert same(items(audio(scratch, start=start)), expected[start:])


def test_resampling_keeps_the_sound_and_its_place(tmp_path):
    def tone(rate):
        return (0.5 * np.sin(2 * np.pi * 440 * np.arange(3 * rate) / rate)[None]).astype(np.float32)

    path = write(tmp_path / "a.wav", "pcm_f32le", rate=44100, layout="mono", samples=tone(44100))
    found = joined({"rate": 16000}, path)
    np.testing.assert_allclose(found[0, 100:-100], tone(16000)[0, 100:-100], atol=2e-4)


def test_channels_are_mixed_within_full_scale(tmp_path):
    left, right = np.full(RATE, 0.9, np.float32), np.full(RATE, 0.5, np.float32)
    stereo = write(tmp_path / "s.wav", "pcm_f32le", samples=np.stack([left, right]))
    np.testing.assert_allclose(joined({"channels": 1}, stereo), 0.7, atol=1e-6)
    mono = write(tmp_path / "m.wav", "pcm_f32le", layout="mono", samples=left[None])
    for rate in (None, 16000):
        found = joined({"channels": 3, "rate": rate}, mono)[:, 500:-500]
        assert len(found) == 3
        np.testing.assert_allclose(found, 0.9, atol=1e-3)
    six = write(tmp_path / "six.wav", "pcm_f32le", layout="5.1", samples=np.ones((6, RATE), np.float32))
    assert 0.5 < joined({"channels": 2}, six).max() <= 1.0
    assert joined({"channels": 6}, six).shape[0] == 6


def test_many_channels_without_a_layout(tmp_path):
    samples = np.arange(12 * 4000).reshape(4000, 12) % 30000
    path = write_wave(tmp_path / "twelve.wav", samples)
    np.testing.assert_array_equal(joined({}, path), samples.T / np.float32(32768))
    assert joined({"rate": 4000}, path).shape == (12, 2000)
    with pytest.raises(ValueError, match=r"twelve.wav: what its 12 channels are is not known"):
        AudioStream(window=100, channels=1)(path)


@pytest.mark.parametrize("hop", [None, 1, 30, 99, 101, 250])
@pytest.mark.parametrize("pad_last", [True, False])
def test_windows_are_cut_as_by_slicing(tmp_path, hop, pad_last):
    audio = AudioStream(window=100, hop=hop, pad_last=pad_last)
    for samples in (0, 1, 99, 100, 101, 150, 1000, 1001, 1059):
        ramp = np.arange(1, samples + 1, dtype="<i2")
        path = write_wave(tmp_path / f"{samples}.wav", ramp)
        expected, seen = [], 0
        for start in range(0, samples, hop or 100):
            part = ramp[start : start + 100]
            if len(part) < 100 and (not pad_last or start + len(part) <= seen):
                break  # nothing new
            seen = start + len(part)
            expected.append(np.pad(part, (0, 100 - len(part)))[None] / np.float32(32768))
        for start in {0, 1, len(expected) // 2, len(expected)} & set(range(len(expected) + 1)):
            assert same(items(audio(path, start=start)), expected[start:])
        assert audio.length(path) in (len(expected), None if not samples else -1)


def test_sections_are_slices(media):
    path = media("one.mp3")
    whole = joined({"rate": 16000}, path)
    for start, stop in [(0, 5000), (123, 64123), (70000, 80000), (4.5, 5.25), (5.25, 5.5), (1000, 1000)]:
        first, last = (round(at * 16000) if isinstance(at, float) else at for at in (start, stop))
        found = joined({"rate": 16000}, (path, start, stop))
        np.testing.assert_array_equal(found, whole[:, first : first + found.shape[1]])
        assert found.shape[1] == (last - first) // 1000 * 1000 or not found.size
        audio = AudioStream(window=300, hop=200, rate=16000)
        assert audio.length((path, start, stop)) == len(items(audio((path, start, stop))))


def test_files_made_wholly_of_other_audio_streams(tmp_path):
    path = tmp_path / "two.mkv"
    with av.open(str(path), "w") as out:
        streams = [out.add_stream("pcm_s16le", rate=8000, layout="mono") for _ in range(2)]
        for value, stream in enumerate(streams):
            frame = av.AudioFrame.from_ndarray(np.full((1, 8000), 100 * value, np.int16), layout="mono")
            frame.sample_rate, frame.pts = 8000, 0
            out.mux(stream.encode(frame))
    assert joined({"track": 1}, path)[0, 0] == 100 / 32768
    with pytest.raises(ValueError, match=r"two.mkv has no audio track 2; it has 2 of them"):
        AudioStream(window=10, track=2)(path)


class TestPlain(StreamContract):
    @pytest.fixture(params=["s16.wav", "one.mp3", "opus.webm"])
    def sources(self, request, media):
        path = media(request.param)
        return [(path, 1000, 20_000), (path, 4.5, None), *[path] * (request.param == "s16.wav")]

    @pytest.fixture
    def open_stream(self):
        return AudioStream(window=2048)


class TestConverted(StreamContract):
    @pytest.fixture
    def sources(self, media):
        return [(media(name), 3.7, 4.2) for name in ("u8.wav", "low.mp3", "six.mp4", "aac.ts", "flac.mkv")]

    @pytest.fixture
    def open_stream(self):
        return AudioStream(window=1000, hop=400, rate=16000, channels=1)


def test_files_that_are_no_audio(tmp_path):
    (tmp_path / "text.mp3").write_text("Sing, O goddess, the anger of Achilles son of Peleus\n" * 5)
    with av.open(str(tmp_path / "film.mp4"), "w") as out:
        add_video(out, 1)
    path = write(tmp_path / "no_index.m4a", "aac")
    path.write_bytes(path.read_bytes()[:20000])
    for name in ("text.mp3", "film.mp4", "no_index.m4a"):
        for ask in (AudioStream(window=100), AudioStream(window=100).length):
            with pytest.raises(ValueError, match=name):
                ask(tmp_path / name)


CUT = {
    "a.wav": ("pcm_s16le", {}),
    "f64.wav": ("pcm_f64le", {}),
    "a.aiff": ("pcm_s16be", {}),
    "a.flac": ("flac", {}),
    "a.mp3": ("libmp3lame", {}),
    "v.mp3": ("libmp3lame", {"options": {"compression_level": "7", "q": "4"}}),
    "bare.mp3": ("libmp3lame", {"container_options": {"write_xing": "0"}}),
    "a.mp2": ("mp2", {}),
    "a.ts": ("mp2", {}),
    "a.mkv": ("aac", {"video": True}),
    "a.opus": ("libopus", {"rate": 24000}),
    "a.avi": ("pcm_s16le", {"video": True}),
    "a.m4a": ("aac", {"container_options": {"movflags": "faststart"}}),
    "f.mp4": ("aac", {"container_options": {"movflags": "frag_keyframe+empty_moov"}}),
}


@pytest.mark.parametrize(
    "name", seldom(CUT, "a.wav", "a.flac", "a.mp3", "bare.mp3", "a.ts", "a.mkv", "a.opus", "a.m4a", "f.mp4")
)
def test_files_that_are_cut_are_found_out(tmp_path, name):
    codec, options = CUT[name]
    path = write(tmp_path / name, codec, **options)
    whole = items(AudioStream(window=1000)(path))
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 6 // 10 + 100])  # not just between two frames
    stream, found = AudioStream(window=1000)(path), []
    with pytest.raises(ValueError, match=name):
        found.extend(iter(stream))
    stream.close()
    assert 0.45 * len(whole) < len(found) < len(whole)
    assert same(found, whole[: len(found)])
    assert len(found) <= len(items(AudioStream(window=1000, on_corrupt="keep")(path))) < len(whole)
    with pytest.raises(ValueError, match=name):
        items(AudioStream(window=1000)(path, start=len(found)))
    out = np.empty((len(whole), *whole[0].shape), np.float32)
    written = AudioStream(window=1000)(path)
    assert written.read_into(out) == len(found)
    with pytest.raises(ValueError, match=name):
        written.read_into(out)
    written.close()
    with pytest.raises(ReadError, match=name):
        list(StreamDataLoader(StreamDataset([path], AudioStream(window=1000), 1, time_steps=10)))


def test_a_wave_file_of_unknown_size_is_read_to_its_end(media, tmp_path):
    data = bytearray(media("s16.wav").read_bytes())
    at = data.index(b"data") + 4
    data[at : at + 4] = data[4:8] = b"\xff\xff\xff\xff"
    path = tmp_path / "piped.wav"
    path.write_bytes(data)
    assert same(items(AudioStream(window=900)(path)), items(AudioStream(window=900)(media("s16.wav"))))
    assert AudioStream(window=900).length(path) is None


@pytest.mark.parametrize(("name", "codec"), [("a.flac", "flac"), ("a.m4a", "aac"), ("a.mkv", "aac")])
def test_damaged_data(tmp_path, name, codec):
    path = write(tmp_path / name, codec)
    whole = joined({}, path)
    data = bytearray(path.read_bytes())
    with av.open(str(path)) as container:  # within a packet: Matroska also loses what lies between a bad header of one
        packets = [packet for packet in container.demux(audio=0) if packet.size]  # and the next cluster, seconds away
    at = 20 + max(packet.pos for packet in packets if packet.pos <= len(data) // 2)
    data[at : at + 300] = random.Random(0).randbytes(300)
    path.write_bytes(data)
    stream, found = AudioStream(window=500)(path), []
    with pytest.raises(ValueError, match=rf"{name}, at [23]\.\d\d\d s: "):
        found.extend(iter(stream))
    stream.close()
    assert len(found) > 2.5 * RATE / 500
    kept, dropped = (joined({"on_corrupt": policy}, path) for policy in ("keep", "drop"))
    assert dropped.shape[1] < kept.shape[1] == whole.shape[1]
    lost = np.flatnonzero(np.abs(kept - whole).max(0) > 0.2)  # coders' noise aside
    assert 0 < np.ptp(lost) < 20000
    audio = AudioStream(window=500, on_corrupt="drop")
    assert same(items(audio(path, start=200)), items(audio(path))[200:])
    assert audio.length(path) is None


def test_a_checksum_that_is_wrong(tmp_path):
    path = write(tmp_path / "a.mkv", "flac")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x55  # decodes all the same, to something else
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"a\.mkv, at [23]\.\d+ s: "):
        joined({}, path)


@pytest.mark.parametrize(
    ("name", "codec"), [("a.mkv", "libopus"), ("a.webm", "vorbis"), ("a.opus", "libopus"), ("a.ogg", "vorbis")]
)
def test_an_end_that_the_demuxer_leaves_out(tmp_path, name, codec):
    path = write(tmp_path / name, codec, rate=24000, options={"strict": "experimental"})
    whole = joined({}, path)
    data = bytearray(path.read_bytes())
    if pages := [found.start() for found in re.finditer(b"OggS", data)]:
        data[pages[-2] + 200] ^= 1  # its checksum is wrong
    else:
        at = len(data) * 9 // 10
        data[at : at + 800] = bytes(800)
    path.write_bytes(data)
    with pytest.raises(ValueError, match=name):
        joined({}, path)
    assert 0.8 * whole.shape[1] < joined({"on_corrupt": "keep"}, path).shape[1] < whole.shape[1]


@pytest.mark.parametrize("name", ["a.ogg", "a.opus"])
def test_ogg_files_that_are_joined_or_begin_late(tmp_path, name):
    codec, rate = ("libopus", 48000) if name == "a.opus" else ("vorbis", 24000)
    long, short = (
        write(tmp_path / f"{seconds}{name}", codec, rate=rate, seconds=seconds, options={"strict": "experimental"})
        for seconds in (5, 3)
    )
    for parts in ((long, short), (short, long), (long, short, long), (short, long, short)):
        path = tmp_path / name
        path.write_bytes(b"".join(part.read_bytes() for part in parts))
        seconds = sum(5 if part is long else 3 for part in parts)
        assert joined({}, path).shape[1] == pytest.approx(rate * seconds, abs=4000)
    data = long.read_bytes()
    pages = [b"OggS" + page for page in data.split(b"OggS")[1:]]
    path.write_bytes(b"".join(pages[:2] + pages[4:]))  # as a broadcast that one comes late to
    assert 2.5 * rate < joined({}, path).shape[1] < 4.5 * rate


@pytest.mark.parametrize("name", ["a.mkv", "a.mp4"])
def test_a_gap_in_the_time_stamps(tmp_path, name):
    path = write(tmp_path / name, "aac", gap_seconds=1.5)
    with pytest.raises(ValueError, match=rf"{name}, at 3.\d+ s: the next 1.5\d* s are missing by the time stamps"):
        joined({}, path)
    kept, dropped = (joined({"on_corrupt": policy}, path) for policy in ("keep", "drop"))
    assert kept.shape[1] - dropped.shape[1] == pytest.approx(1.5 * RATE, abs=1100)
    assert not kept[:, int(3.5 * RATE) : int(4 * RATE)].any()
    assert dropped[:, int(3.5 * RATE) : int(4 * RATE)].any()


def numbered(path, slower=1.0, jumps=(), rate=16000, size=500, count=640_000):
    """PCM whose sample n is n + 1, with time stamps that are stretched, and jump before some samples."""
    begins = [n for n in range(0, count + 1, size) if not 60_000 < n < 68_000]  # one frame is long
    with av.open(str(path), "w") as out:
        stream, moved = out.add_stream("pcm_f32le", rate=rate, layout="mono"), 0.0
        for begin, end in itertools.pairwise(begins):
            moved += dict(jumps).get(begin, 0.0)
            samples = (np.arange(begin, end, dtype=np.float32) + 1) / 2**20
            frame = av.AudioFrame.from_ndarray(samples[None], "flt", "mono")
            frame.sample_rate, frame.time_base = rate, Fraction(1, rate)
            frame.pts = round(begin * slower + moved * rate)
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    return path


def placed(path, rate=16000):
    """Numbered samples at the places of their time stamps, by a plain loop, and how far they may be from those."""
    out, size, end, longest = np.zeros(1_000_000, np.float32), 0, 0, 0
    with av.open(str(path)) as container:
        for packet in container.demux(audio=0):
            for frame in packet.decode():
                samples, tick = frame.to_ndarray()[0], container.streams.audio[0].time_base * rate
                longest = max(longest, len(samples))
                near, off = max(2 * tick, min(rate / 50, longest / 2)), frame.pts * tick - end
                if abs(off) > near:
                    whole = round(off / len(samples)) * len(samples)  # packets that were lost
                    end += whole if abs(whole - off) <= 2 * tick else round(off)
                size = max(size, end)  # silence
                new = samples[size - end :]
                out[size : size + len(new)] = new
                size += len(new)
                end += len(samples)
    return out[:size], float(near + 2 * tick)


@pytest.mark.parametrize(("slower", "size"), [(1.01, 400), (1.001, 8000), (0.999, 500), (0.99, 8000)])
def test_sound_does_not_drift_away_from_its_time_stamps(tmp_path, slower, size):
    path = numbered(tmp_path / "a.mkv", slower, size=size)
    with pytest.raises(ValueError, match=r"a\.mkv, at \d+\.\d+ s: the next 0\.0\d\d s (are|were) "):
        joined({}, path)
    expected, near = placed(path)
    (found,) = joined({"on_corrupt": "keep"}, path)
    np.testing.assert_array_equal(found, expected[: len(found)])
    assert len(expected) - 1000 < len(found)
    for part, first in ((found, 0), (joined({"on_corrupt": "keep"}, (path, 30.0, 31.0))[0], 30 * 16000)):
        heard = np.flatnonzero(part)
        off = heard + first - (part[heard] * 2**20 - 1) * slower
        assert abs(off).max() < near + size * abs(slower - 1)


@pytest.mark.parametrize(
    ("jumps", "added"),
    [
        ([(500, 0.003), (1000, -0.003), (9000, -0.003)], 0),  # near enough
        ([(50_000, 1.5)], 1.5),
        ([(60_000, 0.05), (125_000, 0.05)], 0.1),
        ([(68_000, -0.2)], -0.2),  # cut from several frames
        ([(68_000, -0.2), (69_000, 0.2)], 0),
        ([(68_000, -0.2), (125_000, 0.5)], 0.3),
    ],
)
def test_gaps_are_filled_and_overlaps_cut(tmp_path, jumps, added):
    rate, count = 22050, 160_000
    path = numbered(tmp_path / "a.mkv", jumps=jumps, rate=rate, count=count)
    (kept,) = joined({"on_corrupt": "keep"}, path)
    expected, _ = placed(path, rate)
    np.testing.assert_array_equal(kept, expected[: len(kept)])
    assert (len(expected) - count) / rate == pytest.approx(added, abs=0.002)
    if any(abs(jump) > 0.003 for _, jump in jumps):
        with pytest.raises(ValueError, match=r"a\.mkv, at \d+\.\d+ s: the next \d\.\d+ s (are|were) "):
            joined({}, path)
    else:
        np.testing.assert_array_equal(joined({}, path)[0] * 2**20, np.arange(len(kept)) + 1)


def test_rate_and_channels_that_change_in_mid_stream(tmp_path):
    plain = {"container_options": {"write_xing": "0", "id3v2_version": "0"}}
    one = write(tmp_path / "one.mp3", "libmp3lame", rate=44100, seconds=5, **plain)
    two = write(tmp_path / "two.mp3", "libmp3lame", rate=48000, layout="mono", seconds=5, **plain)
    path = tmp_path / "both.mp3"
    path.write_bytes(one.read_bytes() + two.read_bytes())
    for options in ({}, {"rate": 16000, "channels": 1}):
        audio = AudioStream(window=1000, **options)
        expected = items(audio(path))
        assert len(expected) == pytest.approx(10 * options.get("rate", 44100) / 1000, abs=8)
        assert abs(expected[-40]).max() > 0.1
        for start in (1, 90, 130, len(expected) - 3):
            assert same(items(audio(path, start=start)), expected[start:])
    path.write_bytes(one.read_bytes() + two.read_bytes() + one.read_bytes())
    with av.open(str(path)) as file:
        kinds = itertools.groupby(file.decode(audio=0), lambda frame: (frame.sample_rate, frame.layout.name))
        counts = [(rate, sum(frame.samples for frame in frames)) for (rate, _), frames in kinds]
    reader = SampleReader(str(path), AudioStream(window=1))  # each kind of frames is resampled to its end
    assert reader.fill(10**9) == sum(math.ceil(count * 44100 / rate) for rate, count in counts)
    reader.close()


@pytest.mark.parametrize("name", ["s16.wav", "one.mp3", "aac.m4a"])
def test_sections_beyond_the_end(media, name):
    path, audio = media(name), AudioStream(window=1000, rate=16000)
    for section in ((path, 10**6, None), (path, 70.0, 80.0), (path, 1000, 200000)):
        with pytest.raises(ValueError, match=rf"{name} ends at sample 9\d{{4}}"):
            items(audio(section))
    for source, on_corrupt in ((path, "raise"), (path, "drop"), ((path, 1000, 5000), "raise")):
        with pytest.raises(ValueError, match=rf"{name} has \d+ items"):
            items(AudioStream(window=1000, rate=16000, on_corrupt=on_corrupt)(source, start=500))


def test_a_recording_of_which_only_headers_were_written_is_no_empty_stream(tmp_path):
    path = write(tmp_path / "nothing.mp4", "aac", container_options={"movflags": "frag_keyframe+empty_moov"})
    data = path.read_bytes()
    path.write_bytes(data[: data.index(b"moof") - 4])
    with pytest.raises(ValueError, match="nothing"):
        items(AudioStream(window=1000)(path))


def wave_header(data, rate=8000):
    riff = b"RIFF" + struct.pack("<I", (data + 36) % 2**32) + b"WAVEfmt "
    return riff + struct.pack("<IHHIIHH", 16, 1, 1, rate, 2 * rate, 2, 16) + b"data" + struct.pack("<I", data % 2**32)


def rf64(data):
    sizes = struct.pack("<IQQQI", 28, 72 + len(data), len(data), len(data) // 2, 0)
    return b"RF64\xff\xff\xff\xffWAVEds64" + sizes + b"fmt " + wave_header(0)[16:36] + b"data\xff\xff\xff\xff" + data


def declaring(name, declared, samples):
    """A file of a format whose header declares fewer bytes of data than there are; 0: it leaves open how many."""
    data, rest = samples.astype("<i2").tobytes(), samples.astype(">i2").tobytes()
    if name.endswith("wav"):
        sizes = struct.pack("<I", declared + 36 if declared else 0), struct.pack("<I", declared)
        header = wave_header(len(data))
        return header[:4] + sizes[0] + header[8:40] + sizes[1] + data
    if name.endswith("rf64"):
        return rf64(data[:declared]) + data[declared:]
    if name.endswith("w64"):
        riff, other = b".\x91\xcf\x11\xa5\xd6(\xdb\x04\xc1\0\0", b"\xf3\xac\xd3\x11\x8c\xd1\0\xc0O\x8e\xdb\x8a"
        start = b"riff" + riff + struct.pack("<Q", 104 + declared) + b"wave" + other
        sound = b"data" + other + struct.pack("<Q", 24 + declared)
        return start + b"fmt " + other + struct.pack("<Q", 40) + wave_header(len(data))[20:36] + sound + data
    if name.endswith("caf"):
        described = struct.pack(">4sq d4sIIIII", b"desc", 32, 8000, b"lpcm", 0, 2, 1, 1, 16)
        return b"caff\0\1\0\0" + described + struct.pack(">4sqI", b"data", 4 + declared, 0) + rest
    if name.endswith("au"):
        return struct.pack(">4sIIIII", b".snd", 24, declared or 2**32 - 1, 3, 8000, 1) + rest
    rate = b"\x40\x0b\xfa" + bytes(7)  # 8,000, as 80 bits
    common = struct.pack(">4sIHIH", b"COMM", 18, 1, declared // 2, 16) + rate
    sound = struct.pack(">4sIII", b"SSND", declared + 8, 0, 0)
    return struct.pack(">4sI4s", b"FORM", 4 + len(common) + len(sound) + declared, b"AIFF") + common + sound + rest


@pytest.mark.parametrize("name", ["a.wav", "a.rf64", "a.w64", "a.caf", "a.au", "a.aiff"])
def test_a_file_longer_than_its_header_says_is_an_error_that_says_so(name, tmp_path):
    samples, path, stream = np.arange(-30_000, 30_000), tmp_path / name, AudioStream(window=1000)
    path.write_bytes(declaring(name, 20_000, samples))
    found = []
    with pytest.raises(ValueError, match=f"{name} is longer than its header says.*bytes.*ignore_length"):
        found.extend(stream(path))
    assert len(found) == (60 if name == "a.au" else 10), "what FFmpeg reads of it comes before"
    path.write_bytes(declaring(name, 20_000, samples[: 10_000 + 100]))  # such as tags
    assert len(items(stream(path))) == 10 + (name == "a.au")
    path.write_bytes(declaring(name, 120_000, samples))
    assert np.array_equal(np.concatenate(items(stream(path)), 1), np.float32(samples[None] / 2**15))
    path.write_bytes(declaring(name, 120_000, samples)[:-20])
    with pytest.raises(ValueError, match=f"{name} is cut off"):
        items(stream(path))


@pytest.mark.parametrize("name", ["a.wav", "a.rf64", "a.w64", "a.caf", "a.au", "a.aiff"])
def test_short_recordings_joined_byte_by_byte_are_refused(name, tmp_path):
    """FFmpeg reads the first alone, or takes the second one's header for sound."""
    samples, path, stream = np.arange(-5000, 5000), tmp_path / name, AudioStream(window=1000)
    whole = declaring(name, 20_000, samples)
    path.write_bytes(whole)
    assert len(items(stream(path))) == 10
    for count in (2, 3):
        path.write_bytes(whole * count)
        with pytest.raises(ValueError, match=f"{name} is two files: another one begins at byte {len(whole)}"):
            items(stream(path))


@pytest.mark.parametrize(
    ("codec", "told"),
    [("tta", "is two files: another one begins at byte {}"), ("flac", "is longer than its header says")],
)
def test_lossless_recordings_joined_byte_by_byte_are_refused(codec, told, tmp_path):
    """FFmpeg reads the first alone; or both, of which the header counts the first."""
    path = write(tmp_path / f"a.{codec}", codec, seconds=2.5)
    whole = path.read_bytes()
    assert len(items(AudioStream(window=RATE // 2)(path))) == 5
    path.write_bytes(2 * whole)
    with pytest.raises(ValueError, match=told.format(len(whole))):
        items(AudioStream(window=100)(path))


@pytest.mark.parametrize("gigabytes", [4, 6])
def test_a_wav_file_whose_sizes_ran_over_is_read_to_its_end(gigabytes, tmp_path):
    """Sizes of 32 bits are those of the file, less 4 GiB. The file is a hole but for its end, and takes no disk."""
    path, samples, held = tmp_path / "a.wav", np.arange(20_000, dtype="<i2"), gigabytes << 29
    size = 2 * held + samples.nbytes
    with open(path, "wb") as file:
        file.write(wave_header(size))
        file.seek(44 + size % 2**32)
        file.write(b"junk\xf0\xff\xff\xff")  # sound: what FFmpeg takes for the next chunk there
        file.seek(44 + 2 * held)
        file.write(samples.tobytes())
    found = np.concatenate(items(AudioStream(window=1000)(path, start=held // 1000)), 1)[0]
    silent = held % 1000  # samples of the first window, which is behind them in part
    assert not found[:silent].any()
    assert np.array_equal(found[silent : silent + len(samples)], np.float32(samples / 2**15))
    assert len(found) == -(-(silent + len(samples)) // 1000) * 1000


@pytest.mark.parametrize("name", ["a.w64", "a.caf"])
def test_chunks_behind_the_samples_are_no_samples(name, tmp_path):
    samples, path, stream = np.arange(10_000), tmp_path / name, AudioStream(window=1000)
    whole = bytearray(declaring(name, 20_000, samples))
    notes = b"x" * 4000  # such as a program's overview of the samples
    if name == "a.w64":
        whole[16:24] = struct.pack("<Q", len(whole) + 24 + len(notes))
        whole += b"levl\xf3\xac\xd3\x11\x8c\xd1\0\xc0O\x8e\xdb\x8a" + struct.pack("<Q", 24 + len(notes)) + notes
    else:
        whole += struct.pack(">4sq", b"ovvw", len(notes)) + notes
    path.write_bytes(whole)
    found = np.concatenate(items(stream(path)), 1)
    assert stream.length(path) == 10
    assert np.array_equal(found, np.float32(samples[None] / 2**15))


@pytest.mark.parametrize("name", ["a.wav", "a.au"])
def test_a_header_that_leaves_its_size_open_is_no_claim(name, tmp_path):
    path = tmp_path / name
    path.write_bytes(declaring(name, 0, np.arange(60_000)))
    assert len(items(AudioStream(window=1000)(path))) == 60


@pytest.mark.parametrize("name", ["a.wav", "a.w64", "a.caf"])
def test_headers_with_sizes_of_64_bits(tmp_path, name):
    path = tmp_path / name
    samples = np.arange(6000, dtype="<i2")
    if name == "a.wav":
        path.write_bytes(rf64(samples.tobytes()))
    else:
        with av.open(str(path), "w") as out:
            track = out.add_stream("pcm_s16le", 8000, layout="mono")
            frame = av.AudioFrame.from_ndarray(samples[None], "s16", "mono")
            frame.sample_rate, frame.pts, frame.time_base = 8000, 0, Fraction(1, 8000)
            out.mux(track.encode(frame))
            out.mux(track.encode(None))
    stream = AudioStream(window=1000)
    assert stream.length(path) == len(items(stream(path))) == 6
    path.write_bytes(path.read_bytes()[:7000])
    opened, found = stream(path), []
    with pytest.raises(ValueError, match=f"{name} is cut off"):
        found.extend(iter(opened))
    opened.close()
    assert len(found) == 3
