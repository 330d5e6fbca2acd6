"""Videos, frame by frame.

`stream` is the factory, `selection` picks frames, `frames` decodes them and seeks, `frame_index` knows when each is
shown, `opencv` reads by OpenCV instead. It imports `_media` and `cache`. Open `stream` first.
"""

from stream_dataloader.streams.video.stream import VideoStream

__all__ = ["VideoStream"]
