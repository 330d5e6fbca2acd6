"""Values of `--option` and `--stream-option`: one spelling for all, and what is refused is named."""

import argparse
from functools import partial

import numpy as np
import pytest

from stream_dataloader import stores
from stream_dataloader.cli.arguments import option
from stream_dataloader.cli.main import main
from stream_dataloader.streams import AudioStream, TextStream, VideoStream

VALUES = {
    "false": False,
    "TRUE": True,
    "null": None,
    "None": None,
    "3": 3,
    "-0.5": -0.5,
    "1e3": 1000.0,
    "red": "red",
    "": "",
    "a/b c": "a/b c",
    "'false'": "false",
    '"3"': "3",
    '["a", true]': ["a", True],
    '{"a": null}': {"a": None},
    "(1, 2)": (1, 2),
    "10:30": "10:30",
    "360x240": "360x240",
}


def test_a_value_means_one_thing():
    for text, value in VALUES.items():
        name, found = option(f"x={text}")
        assert (name, found, type(found)) == ("x", value, type(value))
    for text in ("['a'", "{1: 2", "'a", "[a, b]"):
        with pytest.raises(argparse.ArgumentTypeError):
            option(f"x={text}")


@pytest.fixture
def sounds(tmp_path, write_sound):
    write_sound(tmp_path / "sounds" / "a.wav", 1000)
    return tmp_path / "sounds"


@pytest.mark.parametrize(("value", "items"), [("false", 2), ("true", 3)])
def test_false_is_false(tmp_path, run, sounds, value, items):
    given = ["--stream-option", "window=400", "--stream-option", f"pad_last={value}"]
    assert run("pack", sounds, tmp_path / "out", "--workers", "0", *given)[0] == 0
    assert stores.inspect(tmp_path / "out").steps == items


REFUSED = {
    "sounds": ["pad_last=maybe", "pad_last=2", "pad_last=rate"],
    "a.md": ["dtype=maybe", "block_bytes=many", "vocabulary=3"],
    "a.lmdb": ["readahead=maybe", "check=3", "colour=red"],
}


@pytest.mark.parametrize(("source", "given"), [(source, given) for source in REFUSED for given in REFUSED[source]])
@pytest.mark.usefixtures("sounds")
def test_what_is_refused_is_named_with_its_option(tmp_path, run, source, given):
    (tmp_path / "a.md").write_text("a")
    stores.pack(([3], range), tmp_path / "a.lmdb", format="lmdb", num_workers=0)
    path = tmp_path / source
    last = ("pack", path, tmp_path / "out", "--workers", "0", "--stream-option")
    if source == "a.lmdb":
        last = ("verify", path, "--option")
    for command in (("inspect", path, "--option"), last):
        status, _, errors = run(*command, given)
        assert (status, given in errors) == (2, True)


@pytest.mark.parametrize(
    "arguments",
    [
        ["pack", "a", "b", "--format", "tfds"],
        ["pack", "a", "b", "--workers", "-1"],
        ["demo", "--size", "64"],
        ["demo", "--size", "7x8"],
        ["demo", "--lanes", "0"],
        ["demo", "--time-steps", "x"],
        ["inspect", "a", "--option", "x"],
    ],
)
def test_arguments_are_checked(arguments, capsys):
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert all(word in message for word in arguments[-2:])


@pytest.mark.parametrize("command", ["demo", "pack", "inspect", "timeline", "profile", "play", "verify"])
def test_help_has_examples_and_tells_how_values_are_written(command, capsys):
    with pytest.raises(SystemExit) as raised:
        main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert raised.value.code == 0
    assert f"Examples: stream-dataloader {command}" in text
    assert "true, false, none" in text or command == "demo"


@pytest.mark.parametrize(
    ("make", "name"),
    [(partial(AudioStream, window=4), "pad_last"), (TextStream, "targets"), (VideoStream, "with_times")],
)
def test_a_flag_is_no_string(make, name):
    with pytest.raises(TypeError):
        make(**{name: "false"})
    make(**{name: np.True_})
    make(**{name: 0})
