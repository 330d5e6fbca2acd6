"""The commands that look: inspect media, timeline, profile, play."""

import json
import os
import re
import sys

import av
import cv2
import numpy as np
import odd_clips
import pytest
from clips import write_clip

from stream_dataloader import stores
from stream_dataloader.cli import film, probe
from stream_dataloader.streams import VideoStream

LENGTHS = {"0.mp4": 20, "1.mp4": 50, "2.mp4": 13}


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def videos(tmp_path):
    folder = tmp_path / "videos"
    folder.mkdir()
    for name, frames in LENGTHS.items():
        write_clip(folder / name, frames)
    return folder


@pytest.fixture
def numbers(tmp_path):
    stores.pack(([4, 8, 1], range), tmp_path / "numbers.store")
    return tmp_path / "numbers.store"


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("abcdefgh\nij")
    (folder / "b.txt").write_text("xyz")
    return folder


def test_videos_are_inspected(run, videos):
    status, told, errors = run("inspect", videos)
    assert (status, errors) == (0, "")
    lines = told.splitlines()
    assert lines[0].split() == ["source", "codec", "size", "rate", "frames", "duration", "keys", "bytes"]
    assert re.fullmatch(r"1.mp4 +h264 +64x48 +25 +50 +0:02.0 +12 +[\d.]+ kB", lines[2])
    assert re.fullmatch(r"3 sources, video +83 +0:03.3 +[\d.]+ kB", lines[4])
    found = json.loads(run("inspect", videos, "--json")[1])
    assert (found["kind"], found["totals"]["frames"], found["totals"]["with_problems"]) == ("video", 83, 0)
    assert {row["key"]: row["frames"] for row in found["sources"]} == LENGTHS
    assert found["sources"][0]["duration_seconds"] == pytest.approx(0.8)


@pytest.mark.parametrize("name", ["fields.mp4", "not coded.avi", "unknown.avi"])
def test_frames_are_counted_not_packets(run, tmp_path, name):
    if name == "fields.mp4":
        odd_clips.fields(tmp_path, name)
    else:
        whole = odd_clips.encoded(tmp_path / "whole.avi", "mpeg4" if name == "not coded.avi" else "msmpeg4")
        odd_clips.remuxed(whole, tmp_path / name, odd_clips.not_coded if name == "not coded.avi" else (lambda _, p: p))
    (row,) = json.loads(run("inspect", tmp_path / name, "--json")[1])["sources"]
    frames = len(list(VideoStream()(tmp_path / name)))
    assert (row["frames"], row["exact"]) == (frames, name != "unknown.avi")
    assert name != "fields.mp4" or row["keyframe_interval"] == 10


def test_what_is_wrong_with_files_is_told(run, videos, monkeypatch):
    whole = (videos / "1.mp4").read_bytes()
    (videos / "3.mp4").write_bytes(whole[:1500])
    (videos / "4.mp4").write_bytes(b"")
    write_clip(videos / "5.mkv", 30, "h264-mkv", size=(96, 64))
    (videos / "5.mkv").write_bytes((videos / "5.mkv").read_bytes()[:-200])
    status, told, errors = run("inspect", videos, "--batch-size", 2)
    assert status == 1
    problems = re.findall(r"^problem: (\S+): (.*)$", told, re.MULTILINE)
    assert [name for name, _ in problems][:2] == ["3.mp4", "4.mp4"]
    assert "cut off" in problems[0][1]
    assert "empty" in problems[1][1]
    assert ("5.mkv", True) in [(name, "cut off" in what) for name, what in problems]
    assert "sizes differ (64x48, 64x96)" in told
    assert "the lanes are left out" in errors
    monkeypatch.setattr(probe, "_MOST_PACKETS", 5)  # so that some have two problems
    found = json.loads(run("inspect", videos, "--json")[1])
    problems = [len(row["problems"]) for row in found["sources"]]
    assert max(problems) > 1, found
    assert found["totals"]["with_problems"] == sum(map(bool, problems))


def test_durations_are_written_as_people_do():
    for seconds, text in ((3723.5, "1:02:03.5"), (62.04, "1:02.0"), (0, "0:00.0")):
        assert text in probe.Probe("a", "video", duration_seconds=seconds).row()


def test_of_a_long_video_the_first_packets_are_read(run, videos, monkeypatch):
    monkeypatch.setattr(probe, "_MOST_PACKETS", 15)
    rows = json.loads(run("inspect", videos, "--json")[1])["sources"]
    found = [(row["frames"], row["exact"], row["keyframe_interval"]) for row in rows]
    assert found == [(frames, True, 12) for frames in LENGTHS.values()]
    monkeypatch.setattr(probe, "_MOST_PACKETS", 5)
    status, told, _ = run("inspect", videos / "1.mp4")
    assert (status, "problem: 1.mp4: no second key frame within 5 frames" in told) == (1, True)
    write_clip(videos / "a.mkv", 50, "h264-mkv")
    assert " ~50 " in run("inspect", videos / "a.mkv")[1]


def test_other_media_are_inspected(run, tmp_path, texts, write_sound):
    (tmp_path / "shots" / "1").mkdir(parents=True)
    write_sound(tmp_path / "sounds" / "a.wav", 12000, channels=2)
    for name in ("a", "b"):
        cv2.imwrite(str(tmp_path / "shots" / "1" / f"{name}.png"), np.zeros((4, 6, 3), np.uint8))
    (texts / "bad.txt").write_bytes(b"ab\xff\xfe\xff")
    assert re.search(r"a.wav +pcm_s16le +2 ch +8000 +12,000 +0:01.5 ", run("inspect", "sounds")[1])
    assert re.search(r"\n1 +png +6x4 +2 ", run("inspect", "shots")[1])
    status, told, _ = run("inspect", "texts")
    assert (status, "problem: bad.txt: 'utf-8' codec can't decode" in told) == (1, True)
    np.save("a.npy", np.zeros((5, 2, 3), np.float32))
    assert re.search(r"a.npy +float32 +2x3 +5 ", run("inspect", "a.npy", "--kind", "array")[1])


def test_lanes_are_told_without_reading(run, videos, numbers, texts):
    arguments = "--batch-size", 2, "--time-steps", 8, "--workers", 2
    status, told, _ = run("inspect", videos, *arguments)
    assert status == 0
    assert "\n\n7 batches of 8 time steps, 2 lanes: padding 25.9%, longest lane 1 with 50 items, shortest 33\n" in told
    assert told.endswith("items of each worker: 33, 50\n")
    status, told, _ = run("inspect", numbers, "--batch-size", 2, "--time-steps", 4, "--json")
    assert json.loads(told)["lanes"]["items_of_lanes"] == [5, 8]
    status, told, errors = run("inspect", texts, "--batch-size", 2)
    assert (status, told) == (2, "")
    assert "not known without reading" in errors
    assert run("inspect", texts, "--option", "units=bytes", "--batch-size", 2)[0] == 0
    assert "add --batch-size" in run("inspect", numbers, "--workers", 2)[2]


@pytest.mark.usefixtures("fonts")
def test_a_timeline_is_told_or_drawn(run, videos, numbers, texts, tmp_path):
    status, told, errors = run("timeline", numbers, "--batch-size", 2, "--time-steps", 4)
    assert (status, errors) == (0, "")
    assert told.splitlines()[2:] == ["lane 0    AaaaC···", "lane 1    Bbbbbbbb"]
    status, told, _ = run("timeline", videos, "--batch-size", 2, "--json")
    names = [(segment["lane"], segment["name"]) for segment in json.loads(told)["segments"]]
    assert names == [(0, "0.mp4"), (0, "2.mp4"), (1, "1.mp4")]
    assert "lane 1    Bbb·" in run("timeline", texts, "--time-steps", 4, "--batch-size", 2)[1]  # it is read
    assert run("timeline", numbers, "--output", "t.svg")[:2] == (0, "written t.svg\n")
    assert "<svg" in (tmp_path / "t.svg").read_text()


def test_a_store_is_profiled(run, numbers, tmp_path):
    arguments = "--batch-size", 3, "--time-steps", 2, "--trace", "trace.json"
    status, told, errors = run("profile", numbers, *arguments)
    assert (status, errors) == (0, "")
    assert re.match(r"the first batch came after [\d.]+ s; since then:\n3 batches in ", told)
    assert "worker  reading" in told
    assert "% of the batches is padding" in told.splitlines()[-1]
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    found = json.loads(run("profile", numbers, *arguments[:4], "--json")[1])
    assert (found["batches"], found["advice"]["kind"]) == (3, "sections")
    assert found["padding_share_of_epoch"] == pytest.approx(11 / 24)
    arguments = "--batch-size", 1, "--time-steps", 1, "--train-ms", 60, "--batches", 6
    assert "The trainer is slower" in run("profile", numbers, *arguments)[1]


TRAINING = """
import time
from stream_dataloader import StreamDataLoader, StreamDataset

def slow(n):
    for i in range(n):
        time.sleep(0.005)
        yield i

def make_loader():
    return StreamDataLoader(StreamDataset([40] * 4, slow, 4, time_steps=4), 0)

def nothing():
    return 7

def in_the_function():
    raise ValueError("mine")

def read(n):
    yield n
    raise KeyError("mine")

def in_a_stream():
    return StreamDataLoader(StreamDataset([1], read, 1, time_steps=1))
"""


def test_a_loader_that_a_function_returns_is_profiled(run, tmp_path):
    (tmp_path / "cli_training.py").write_text(TRAINING)
    status, told, errors = run("profile", "cli_training:make_loader", "--batches", 5)
    assert (status, errors) == (0, "")
    assert "\n4 batches in " in told
    if len(os.sched_getaffinity(0)) > 1:
        assert "use more workers (num_workers=" in told.splitlines()[-1]
    del sys.modules["cli_training"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["timeline", "numbers.store", "--output", "a.txt"], "--output is a.txt; it must end in .png"),
        (["profile", "json:nothing"], "json.* has no attribute 'nothing'"),
        (["profile", "no_module_here:nothing"], "there is no module no_module_here"),
        (["profile", "cli_other:nothing"], "gives a int; have it return a StreamDataLoader"),
        (["profile", "numbers.store", "--trace", "no/t.json"], "no/t.json: No such file or directory"),
        (["play", "floats.npy"], "floats.npy has neither uint8 pictures nor text"),
    ],
)
@pytest.mark.usefixtures("numbers", "texts")
def test_mistakes_are_told_in_one_line(tmp_path, run, arguments, message):
    (tmp_path / "cli_other.py").write_text(TRAINING)
    np.save("floats.npy", np.zeros((4, 2)))
    status, told, errors = run(*arguments)
    assert (status, told) == (2, "")
    assert re.fullmatch(rf"stream-dataloader: .*{message}.*\n", errors)


@pytest.mark.parametrize("command", ["profile", "play", "timeline"])
def test_a_broken_stream_and_sources_without_data_are_a_problem(run, texts, command):
    (texts / "c.txt").write_bytes(b"ab\xff")
    np.save("empty.npy", np.zeros((0, 2)))
    given = [(texts, r"source 2 .*c\.txt")] + [("empty.npy", "no batch")] * (command != "timeline")
    for sources, said in given:
        status, told, errors = run(command, sources)
        assert (status, told) == (1, "")
        assert re.fullmatch(rf"stream-dataloader: .*{said}.*\n", errors)
    status, told, errors = run(command, texts, "--on-error", "skip", "--time-steps", 4)
    assert (status, bool(told)) == (1, True)
    assert re.fullmatch(r"stream-dataloader: skipped: source 2 .*c\.txt.*\n", errors)


SHOWN = {
    "timeline": r"lane 1    Cc",
    "inspect": r"\n3 batches of 8 time steps, 2 lanes: ",
    "profile": r"\n2 batches in ",
    "play": r"written play.mp4",
    "pack": r"\nskipped source 1",
}


@pytest.mark.parametrize("command", SHOWN)
def test_a_broken_source_is_a_problem_and_may_be_skipped(run, videos, command):
    (videos / "1.mp4").write_bytes(b"none" * 100)
    packs = command == "pack"
    arguments = [command, videos, *(["out", "--workers", 0] if packs else ["--batch-size", 2, "--time-steps", 8])]
    status, _, errors = run(*arguments)
    assert (status, packs or len(errors.splitlines())) == (1, 1)
    status, told, errors = run(*arguments, "--on-error", "skip")
    assert status == 1
    assert packs or re.fullmatch(r"stream-dataloader: skipped: .*1\.mp4.*\n", errors)
    assert re.search(SHOWN[command], told)


def test_pictures_of_several_sizes_need_one_size(run, videos):
    write_clip(videos / "3.mp4", 20, size=(96, 64))
    status, _, errors = run("profile", videos)
    assert (status, "--size" in errors) == (1, True)
    assert run("profile", videos, "--size", "48x32")[0] == 0


@pytest.mark.parametrize("function", ["in_the_function", "in_a_stream", "at_import"])
def test_what_user_code_raises_has_a_traceback(run, tmp_path, function):
    code = TRAINING + "import missing_of_mine" * (function == "at_import")
    (tmp_path / f"user_{function}.py").write_text(code)
    status, told, errors = run("profile", f"user_{function}:{function}")
    assert (status, told) == (1, "")
    for said in ("Traceback", f"user_{function}.py", "mine"):
        assert said in errors


def test_pictures_are_played_into_a_file(run, videos):
    arguments = "--batch-size", 2, "--time-steps", 8
    assert run("play", videos, *arguments, "--batches", 2)[:2] == (0, "written play.mp4\n")
    with av.open("play.mp4") as container:
        assert sum(1 for _ in container.decode(video=0)) == 16
    stores.pack(([3], lambda n: ({"image": np.zeros((1, 32, 48), np.uint8), "n": i} for i in range(n))), "gray.store")
    assert run("play", "gray.store", *arguments, "--output", "gray.mp4")[:2] == (0, "written gray.mp4\n")


def test_pictures_are_played_in_a_window(run, videos, monkeypatch):
    shown, keys = [], iter([-1] * 4 + [ord("q")])
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr(film.cv2, "namedWindow", lambda name: None)
    monkeypatch.setattr(film.cv2, "imshow", lambda name, picture: shown.append(picture.shape))
    monkeypatch.setattr(film.cv2, "waitKey", lambda milliseconds: next(keys))
    monkeypatch.setattr(film.cv2, "destroyAllWindows", lambda: None)
    monkeypatch.setattr(sys, "platform", "linux")
    assert run("play", videos, "--batch-size", 2, "--size", "64x48") == (0, "", "")
    assert shown == [(78, 140, 3)] * 5


def test_lanes_of_text_are_played(run, texts, monkeypatch):
    arguments = "play", texts, "--batch-size", 2, "--time-steps", 4, "--rate", 1000
    status, told, _ = run(*arguments)
    assert status == 0
    lanes = ["|abcd", "|xyz·", "efgh", "····", " ij·", "····"]
    assert re.findall(r"^lane . +(.*)$", told.replace("lane 0   ", "lane 0 "), re.MULTILINE)[0] == lanes[0]
    assert [line[9:] for line in told.splitlines() if line.startswith("lane")] == lanes
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    _, told, _ = run(*arguments)
    assert told.split("\x1b[2A")[-1] == "lane 0   |abcdefgh ij·\x1b[K\nlane 1   |xyz·········\x1b[K\n"


def test_the_package_is_a_program(programs, numbers):
    program = 'import runpy; runpy.run_module("stream_dataloader", run_name="__main__")'
    done = programs(program, "timeline", "missing")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("stream-dataloader: missing does not exist")
    done = programs(program, "profile", numbers, "--batch-size", 8)
    assert (done.returncode, done.stderr) == (0, ""), "few sources are no warning in a shell"


LEFT = """
import os, runpy, sys
read, write = os.pipe()
if (child := os.fork()) == 0:
    os.close(read)
    os.dup2(write, 1)
    runpy.run_module("stream_dataloader", run_name="__main__")
os.close(write)
with open(read) as output:
    print(output.readline())
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_reader_that_has_enough_ends_it_quietly(programs, texts):
    (texts / "a.txt").write_text("abc " * 20_000)
    done = programs(LEFT, "play", texts, "--time-steps", "10")
    assert (done.stdout.split(), done.stderr) == (["batch", "0", "0"], "")
