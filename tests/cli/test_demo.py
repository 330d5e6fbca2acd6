"""The demo: what it films, what it reports, and how it says no."""

import io
import re
import sys

import av
import cv2
import numpy as np
import pytest
import torch
import tqdm
from clips import write_clip

from stream_dataloader import StreamBatch, StreamDataLoader, StreamDataset
from stream_dataloader.cli import demo, film


def table(output):
    found = {name: float(re.search(rf"([\d.]+) {name}", output)[1]) for name in ("videos", "batches", "opened")}
    items = re.findall(r"^ +\d+ .* s +([\d,]+)$", output, re.MULTILINE)
    found["items"] = sum(int(count.replace(",", "")) for count in items)
    return found | {"padding": float(re.search(r"padding ([\d.]+)%", output)[1])}


def decode(path):
    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def filmstrip_shape(batches, lanes, width, height):
    pitch = height + film.TRACK_HEIGHT + film.MARGIN_HEIGHT
    columns = min(6, batches)
    legend = film.LEGEND_HEIGHT
    return film.TITLE_HEIGHT + lanes * pitch + legend, film.LANE_WIDTH + columns * (width + film.GAP), 3


@pytest.fixture(autouse=True)
def _no_monitor_thread(monkeypatch):
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)  # tqdm keeps one for good


@pytest.mark.slow
def test_own_clips_are_made_once_streamed_counted_and_filmed(run, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    output = tmp_path / "output"
    status, told, errors = run("demo", "--output-dir", output)
    assert status == 0
    clips = sorted((tmp_path / "stream_dataloader").rglob("*.mp4"))
    lengths = [len(decode(clip)) for clip in clips]
    assert len(set(lengths)) == len(lengths) == 12
    numbers = table(told)
    batches = len(StreamDataLoader(StreamDataset(lengths, range, 4, time_steps=8, seed=0, lengths=lengths)))
    assert (numbers["batches"], numbers["items"], numbers["opened"]) == (batches, sum(lengths), 12)
    assert numbers["padding"] == pytest.approx(100 * (1 - sum(lengths) / (batches * 32)), abs=0.06)
    assert "12/12" in errors
    assert cv2.imread(str(output / "grid.png")).shape == filmstrip_shape(6, lanes=4, width=240, height=180)
    frames = decode(output / "grid.mp4")
    assert len(frames) == 8 * batches
    assert {frame.shape for frame in frames} == {(394, 492, 3)}
    corner = film.TITLE_HEIGHT + 1, film.GAP + 1  # lane 0's border
    assert frames[0][corner].min() > 200  # all lanes begin
    assert frames[7][corner].max() < 100
    last = frames[-1][film.TITLE_HEIGHT :]
    assert (np.abs(last.astype(int) - 128).max(axis=2) < 6).mean() > 0.5  # lanes without a source are grey
    before = {path: path.stat().st_mtime_ns for path in clips}
    assert demo.default_clips() == clips
    demo._make_clips(clips[0].parent)  # as a process would that began before they were there
    assert {path: path.stat().st_mtime_ns for path in clips[0].parent.parent.rglob("*.mp4")} == before


def test_half_made_clips_are_never_seen(tmp_path, monkeypatch):
    def write(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(film, "write_video", write)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ValueError, match="XDG_CACHE_HOME"):
        demo.default_clips()
    assert list((tmp_path / "stream_dataloader").iterdir()) == []


def test_folder_is_streamed_and_what_is_broken_reported(tmp_path, run, write_sound):
    folder, output = tmp_path / "videos", tmp_path / "output"
    (folder / "below").mkdir(parents=True)
    write_clip(folder / "a.mp4", 5)
    write_clip(folder / "below" / "b.MP4", 17, size=(32, 96))
    write_clip(folder / "c.mkv", 9, "h264-mkv")
    (folder / "broken.mp4").write_bytes(bytes(range(256)) * 20)
    write_sound(folder / "sound.mp4", 1000)
    (folder / "notes.txt").write_text("no video")

    sized = "--lanes", 2, "--time-steps", 4, "--size", "80x60"
    status, told, errors = run("demo", "--output-dir", output, folder, *sized)

    assert status == 1
    numbers = table(told)
    assert (numbers["videos"], numbers["items"]) == (5, 31)
    broken, sound = re.findall(r"^stream-dataloader: skipped: (.*)$", errors, re.MULTILINE)
    assert "broken.mp4" in broken
    assert "sound.mp4 has no video track 0; it has only audio" in sound
    assert "5/5" in errors
    assert "notes.txt" not in told + errors
    assert len(decode(output / "grid.mp4")) == 4 * numbers["batches"]
    shape = filmstrip_shape(int(numbers["batches"]), lanes=2, width=80, height=60)
    assert cv2.imread(str(output / "grid.png")).shape == shape


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["folder"], 2, r"folder has no video in it \(.avi .*\)"),
        (["file.txt"], 2, "file.txt lists text, which does not exist"),
        (["broken"], 1, "none of 1 videos can be decoded; pass another folder"),
        (["clips", "--output-dir", "file.txt"], 2, "file.txt: File exists"),
        ([], 2, r"cannot write the demo's clips to .*file.txt/.* \(Not a directory\); set XDG_CACHE_HOME"),
    ],
)
def test_mistakes_are_told_in_one_line_with_a_remedy(tmp_path, monkeypatch, run, arguments, status, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file.txt"))
    for folder in ("folder", "broken", "clips"):
        (tmp_path / folder).mkdir()
    (tmp_path / "file.txt").write_text("text")
    (tmp_path / "broken" / "a.mp4").write_text("text")
    write_clip(tmp_path / "clips" / "a.mp4", 3)
    found, told, errors = run("demo", *arguments, "--workers", "0")
    assert (found, told) == (status, "")
    assert re.search(rf"(?m)^stream-dataloader: {message}.*\n\Z", errors)
    assert not (tmp_path / "grid.mp4").exists()


def open_picture(length):
    for _ in range(length):
        yield np.zeros((3, 32, 48), np.uint8)


def test_filmstrip_keeps_the_batches_where_most_streams_start():
    lengths = [30, 2, 2, 2, 40]
    loader = StreamDataLoader(StreamDataset(lengths, open_picture, 1, time_steps=2, lookahead=0))
    strip = film.Filmstrip(lambda source: f"{source}", batches=4)
    for batch in loader:
        strip.add(batch)
    assert strip.image().shape == filmstrip_shape(4, lanes=1, width=48, height=32)
    flashes = [bool((column[film.TITLE_HEIGHT, 0] == 255).all()) for column in strip._best]
    assert flashes == [False, True, True, True]


def test_drawing_leaves_the_batch_as_it_is(tmp_path):
    batch: StreamBatch = next(iter(StreamDataLoader(StreamDataset([4, 2], open_picture, 2, time_steps=4))))
    pictures = film.grid_pictures(batch, lambda source: "a name too long for so small a picture")
    film.write_video(tmp_path / "film.mp4", pictures)
    assert not torch.any(batch.data)
    assert len(decode(tmp_path / "film.mp4")) == 4


def test_the_last_film_is_not_read_again_and_names_need_not_be_ascii(tmp_path, run, monkeypatch):
    write_clip(tmp_path / "good.mp4", 3)
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        status, told, _ = run("demo", ".", "--workers", "0")
        assert (status, table(told)["videos"]) == (0, 1)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii", write_through=True))
    output = tmp_path / "gr\u00fcn"
    assert run("demo", tmp_path, "--workers", 0, "--size", "80x60", "--output-dir", output)[0] == 0
    assert b"gr\\xfcn/grid.png" in sys.stdout.buffer.getvalue()
