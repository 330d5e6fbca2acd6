"""Where OpenCV is not installed: all but what draws or reads by it works, and that says what to install."""

import json
from zlib import crc32

import clips

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


def test_what_needs_it_says_so_and_videos_are_the_same(tmp_path, programs):
    clip = clips.write_clip(tmp_path / "a.mp4", 10)
    done = programs(CODE, json.dumps([clip, PICTURES, OPENCV]))
    found, told, status = json.loads(done.stdout)
    datasets = [StreamDataset([clip], VideoStream(**options), 1, time_steps=5) for options in PICTURES]
    assert found == [[crc32(batch.data.numpy()) for batch in StreamDataLoader(dataset)] for dataset in datasets]
    names = ["ImageFolderStream", 'CameraStream(backend="opencv")', "CameraStream"]
    for name, message in zip(names, told, strict=True):
        assert message.startswith(name)
        assert "pip install opencv-python" in message
    assert status == 2
    assert done.stderr.count("\n") == 1
