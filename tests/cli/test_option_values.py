"""Values of `--option` and `--stream-option`: one spelling for all, and what is refused is named."""

import argparse
import wave

import numpy as np
import pytest

from stream_dataloader import stores
from stream_dataloader.cli.arguments import option
from stream_dataloader.cli.main import main
from stream_dataloader.streams import AudioStream, TextStream, VideoStream


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("false", False),
        ("False", False),
        ("TRUE", True),
        ("null", None),
        ("None", None),
        ("3", 3),
        ("-0.5", -0.5),
        ("1e3", 1000.0),
        ("red", "red"),
        ("", ""),
        ("a/b c", "a/b c"),
        ("'false'", "false"),
        ('"3"', "3"),
        ('["a", true]', ["a", True]),
        ('{"a": null}', {"a": None}),
        ("(1, 2)", (1, 2)),
        ("10:30", "10:30"),
        ("360x240", "360x240"),
    ],
)
def test_a_value_means_one_thing(text, value):
    name, found = option(f"x={text}")
    assert (name, found, type(found)) == ("x", value, type(value))


@pytest.mark.parametrize("text", ["['a'", "{1: 2", "'a", "[a, b]"])
def test_a_list_that_is_none_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError):
        option(f"x={text}")


@pytest.fixture
def sounds(tmp_path):
    (tmp_path / "sounds").mkdir()
    with wave.open(str(tmp_path / "sounds" / "a.wav"), "wb") as file:
        file.setparams((1, 2, 8000, 0, "NONE", ""))
        file.writeframes(bytes(2 * 1000))
    return tmp_path / "sounds"


@pytest.mark.parametrize(("value", "items"), [("false", 2), ("true", 3)])
def test_false_is_false(tmp_path, sounds, value, items):
    given = ["--stream-option", "window=400", "--stream-option", f"pad_last={value}"]
    assert main(["pack", str(sounds), str(tmp_path / "out"), "--workers", "0", *given]) == 0
    assert stores.inspect(tmp_path / "out").steps == items


@pytest.mark.parametrize("value", ["maybe", "2", "pad_last=rate"])
def test_a_bad_value_is_named_with_its_option(tmp_path, capsys, sounds, value):
    given = value if "=" in value else f"pad_last={value}"
    for command in (["inspect", str(sounds)], ["pack", str(sounds), str(tmp_path / "out"), "--workers", "0"]):
        assert main([*command, "--stream-option", given]) == 2
        assert given in capsys.readouterr().err


@pytest.mark.parametrize("given", ["dtype=maybe", "block_bytes=many", "vocabulary=3"])
def test_what_a_factory_refuses_is_named_too(tmp_path, capsys, given):
    (tmp_path / "a.md").write_text("a")
    assert main(["inspect", str(tmp_path), "--stream-option", given]) == 2
    assert given in capsys.readouterr().err


def test_options_of_a_store_are_named(tmp_path, capsys):
    np.save(tmp_path / "a.npy", np.arange(3))
    stores.pack(stores.open(tmp_path / "a.npy"), tmp_path / "a.lmdb", format="lmdb", num_workers=0)
    for given in ("readahead=maybe", "check=3", "colour=red"):
        assert main(["verify", str(tmp_path / "a.lmdb"), "--option", given]) == 2
        assert given in capsys.readouterr().err
        assert main(["inspect", str(tmp_path / "a.lmdb"), "--option", given]) == 2
        assert given in capsys.readouterr().err


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
    assert arguments[-2] in message
    assert arguments[-1] in message


@pytest.mark.parametrize("command", ["demo", "pack", "inspect", "timeline", "profile", "play", "verify"])
def test_help_has_examples_and_tells_how_values_are_written(command, capsys):
    with pytest.raises(SystemExit) as raised:
        main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert raised.value.code == 0
    assert f"Examples: stream-dataloader {command}" in text
    assert "true, false, none" in text or command == "demo"


@pytest.mark.parametrize(
    "make",
    [lambda v: AudioStream(window=4, pad_last=v), lambda v: TextStream(targets=v), lambda v: VideoStream(with_times=v)],
)
def test_a_flag_is_no_string(make):
    with pytest.raises(TypeError):
        make("false")
    make(np.True_)
    make(0)
