"""The commands about stores: what they pack, what they tell, and how they say no."""

import json
import os
import re

import cv2
import numpy as np
import pytest
from clips import write_clip

from stream_dataloader import stores
from stream_dataloader.stores import MemmapStore


@pytest.fixture
def numbers(tmp_path):
    stores.pack((["a", "b", "c"], lambda name: range("abc".index(name) * 4)), tmp_path / "numbers.store")
    return tmp_path / "numbers.store"


@pytest.fixture
def arrays(tmp_path):
    folder = tmp_path / "arrays"
    (folder / "below").mkdir(parents=True)
    for name, length in [("a10.npy", 3), ("a9.npy", 2), ("below/b.npy", 0)]:
        np.save(folder / name, np.arange(2 * length, dtype=np.int16).reshape(-1, 2))
    return folder


def lengths(path):
    store = MemmapStore(path)
    found = {store.key(n): int(store.lengths[n]) for n in range(len(store))}
    store.close()
    return found


@pytest.mark.parametrize("workers", [0, 2])
def test_a_folder_of_arrays_is_packed(tmp_path, run, arrays, workers):
    status, told, errors = run("pack", arrays, tmp_path / "out", "--workers", workers, "--verify")
    assert (status, errors) == (0, "")
    assert re.fullmatch(r"packed 3 streams, 5 steps, [\d.]+ (kB|bytes), in \d+\.\d s into .*/out \(memmap\)\n", told)
    assert list(lengths(tmp_path / "out").items()) == [("a9.npy", 2), ("a10.npy", 3), ("below/b.npy", 0)]


def test_media_of_all_kinds_are_packed(tmp_path, run, write_sound):
    for name in ("videos", "texts", "shots/1", "shots/2"):
        (tmp_path / name).mkdir(parents=True)
    write_clip(tmp_path / "videos" / "a.mp4", 5, size=(64, 48))
    write_sound(tmp_path / "sounds" / "a.wav", 1000)
    (tmp_path / "texts" / "a.txt").write_text("hello")
    for name in ("1/a.png", "1/b.png", "2/c.png"):
        cv2.imwrite(str(tmp_path / "shots" / name), np.zeros((4, 6, 3), np.uint8))
    for name, arguments, leaf, steps in [
        ("videos", ["--size", "32x16"], "uint8 (3, 16, 32)", {"a.mp4": 5}),
        ("sounds", ["--stream-option", "window=400"], "float32 (1, 400)", {"a.wav": 3}),
        ("texts", [], "int64 ()", {"a.txt": 5}),
        ("shots", ["--stream-option", "color=gray"], "uint8 (1, 4, 6)", {"1": 2, "2": 1}),
    ]:
        out = tmp_path / f"{name}.store"
        status, _, errors = run("pack", tmp_path / name, out, "--workers", 0, *arguments)
        assert (status, errors) == (0, ""), name
        assert lengths(out) == steps
        assert list(stores.inspect(out).leaves.values()) == [leaf]


def test_a_list_is_packed_in_its_order_and_one_file_or_a_store_alone(tmp_path, run, arrays, numbers):
    (tmp_path / "list.txt").write_text("# chosen\narrays/below/b.npy\n\narrays/a10.npy\n")
    for number, (given, expected) in enumerate(
        [
            (tmp_path / "list.txt", {"arrays/below/b.npy": 0, "arrays/a10.npy": 3}),
            (arrays / "a9.npy", {"a9.npy": 2}),
            (numbers, {"a": 0, "b": 4, "c": 8}),
        ]
    ):
        assert run("pack", given, tmp_path / f"out{number}", "--workers", 0)[0] == 0
        assert lengths(tmp_path / f"out{number}") == expected


def test_a_store_is_inspected(run, numbers):
    status, told, _ = run("inspect", numbers, "--streams", 2)
    assert status == 0
    assert re.search(r"format +memmap 1\nstreams +3\nsteps +12\non disk +[\d.]+ \w+\nleaf item +int64 \(\)\n", told)
    assert told.endswith("\n         0  a\n         4  b\n")
    status, told, _ = run("inspect", numbers, "--format", "memmap", "--json", "--streams", 1)
    found = json.loads(told)
    assert (status, found["steps"], found["leaves"]) == (0, 12, {"item": "int64 ()"})
    assert found["first_streams"] == [{"key": "a", "steps": 0}]


def test_a_store_is_verified(run, numbers):
    status, told, errors = run("verify", numbers)
    assert (status, told, errors) == (0, f"3 streams of {numbers} were read, no problem(s) found\n", "")
    with open(numbers / "0.bin", "rb+") as file:
        file.write(b"damage")
    status, told, _ = run("verify", numbers)
    assert status == 1
    assert re.fullmatch(r".*stream 1 \(b\).*checksum.*\n3 streams of .* were read, 1 problem\(s\) found\n", told)
    status, told, _ = run("verify", numbers, "--json")
    assert status == 1
    assert len(json.loads(told)["problems"]) == 1
    (numbers / "store.json").write_text("{")
    status, _, errors = run("verify", numbers)
    assert status == 1
    assert re.fullmatch(r"stream-dataloader: .*store.json cannot be read.*\n", errors)


@pytest.mark.parametrize(
    ("option", "status", "told"),
    [("columns=['b']", 0, ""), ("columns=['c']", 1, "no leaf"), ("colour=red", 2, "colour")],
)
def test_options_of_the_format_are_handed_on(tmp_path, run, option, status, told):
    stores.pack(([1], lambda n: [{"a": n, "b": n}]), tmp_path / "x")
    found, _, errors = run("inspect", tmp_path / "x", "--option", option)
    assert (found, told in errors) == (status, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "missing"], "missing does not exist; give media,"),
        (["verify", "missing"], "there is no store at missing"),
        (["pack", "empty", "out"], "empty has no media of one kind .*--kind"),
        (["pack", "mixed", "out"], r"mixed has no media of one kind \(1 of .*\); see --kind"),
        (["pack", "list.txt", "out"], r"list.txt lists .*gone.mp4, which does not exist, and 0 more"),
        (["pack", "arrays", "arrays"], "arrays exists, and pack overwrites nothing"),
        (["pack", "arrays", "out", "--size", "8x8"], "--size is for videos and images, but .* is array"),
        (["pack", "arrays", "out", "--stream-option", "fps=3"], "option fps=3: .*Array"),
        (["pack", "arrays", "out", "--option", "level=3"], "level"),
        (["pack", "numbers.store", "out", "--size", "8x8"], "--size is for videos and images, but .* is store"),
    ],
)
def test_mistakes_are_told_in_one_line(tmp_path, run, monkeypatch, arrays, numbers, arguments, message):
    monkeypatch.chdir(tmp_path)
    for folder in ("empty", "mixed"):
        (tmp_path / folder).mkdir()
    np.save(tmp_path / "mixed" / "a.npy", np.zeros(3))
    (tmp_path / "mixed" / "a.mp4").touch()
    (tmp_path / "list.txt").write_text("gone.mp4")
    before = sorted(os.listdir(tmp_path))
    status, told, errors = run(*arguments)
    assert (status, told) == (2, "")
    assert re.fullmatch(rf"stream-dataloader: .*{message}.*\n", errors)
    assert sorted(os.listdir(tmp_path)) == before


INTERRUPTED = """
import os, pathlib, signal, sys, threading, time
from stream_dataloader.cli.main import main

def interrupt():
    while not (pathlib.Path(sys.argv[2] + ".partial") / "store" / "0.bin").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
threading.Thread(target=interrupt, daemon=True).start()
raise SystemExit(main(["pack", *sys.argv[1:], "--workers", "2", "--quiet"]))
"""


def test_ctrl_c_ends_with_130_and_a_remedy(tmp_path, programs):
    for number in range(300):
        write = np.lib.format.open_memmap(tmp_path / f"{number}.npy", "w+", np.uint8, (200, 100, 100))
        del write  # a file without data, which is read as zeros
    done = programs(INTERRUPTED, tmp_path, tmp_path / "out")
    errors = done.stderr
    assert (done.returncode, done.stdout) == (130, "")
    kept = (tmp_path / "out.partial").exists()
    remedy = r"\d+ of 300 .*: pack again and it goes on.*" if kept else "Nothing is packed, and nothing is kept"
    assert re.fullmatch(rf"stream-dataloader: packing was interrupted\. {remedy}\n", errors)
