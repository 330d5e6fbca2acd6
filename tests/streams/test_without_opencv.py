"""Where OpenCV is not installed: all but what draws or reads by it works, and that says what to install."""

import json
import subprocess
import sys
from zlib import crc32

import clips
import pytest

from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader.streams import VideoStream

PICTURES = [
    {"layout": "HWC"},
    {"layout": "HWC", "dtype": "float32", "size": (31, 47), "fit": "letterbox"},
    {"layout": "HWC", "color": "gray"},
    {"size": (24, 32)},
]
OPENCV = ["ImageFolderStream()", "CameraStream(backend='opencv')", "CameraStream()(0)"]

CODE = """
import json, sys, zlib
sys.modules["cv2"] = None  # as if it was not there
from stream_dataloader import StreamDataLoader, StreamDataset
from stream_dataloader.cli.main import main
from stream_dataloader.streams import AudioStream, CameraStream, ImageFolderStream, VideoStream

clip, pictures, needing = json.loads(sys.argv[1])
told = []
for code in needing:
    try:
        eval(code)
    except ImportError as error:
        told.append(str(error))
AudioStream(window=100), CameraStream()
datasets = [StreamDataset([clip], VideoStream(**options), 1, time_steps=5) for options in pictures]
found = [[zlib.crc32(batch.data.numpy()) for batch in StreamDataLoader(dataset)] for dataset in datasets]
print(json.dumps([found, told, main(["demo"])]))
"""


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips")
    clip = clips.write_clip(folder / "a.mp4", 10)
    arguments = [sys.executable, "-c", CODE, json.dumps([clip, PICTURES, OPENCV])]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, cwd=folder)
    return clip, *json.loads(done.stdout), done.stderr


def test_videos_are_the_same(without):
    clip, found, *_ = without
    datasets = [StreamDataset([clip], VideoStream(**options), 1, time_steps=5) for options in PICTURES]
    assert found == [[crc32(batch.data.numpy()) for batch in StreamDataLoader(dataset)] for dataset in datasets]


def test_what_needs_it_says_so_where_it_is_built(without):
    _, _, told, status, stderr = without
    names = ["ImageFolderStream", 'CameraStream(backend="opencv")', "CameraStream"]
    assert len(told) == len(names)
    for name, message in zip(names, told, strict=True):
        assert message.startswith(name)
        assert "needs OpenCV, which is not installed: pip install opencv-python" in message
    assert status == 2
    assert "stream-dataloader: The demo, which draws, needs OpenCV" in stderr
    assert stderr.count("\n") == 1
