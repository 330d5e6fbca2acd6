"""Videos, frame by frame.

`stream` is the factory, `selection` picks frames, `frames` seeks and decodes, `device` has a GPU decode, `packets`
finds what is missing, and `frame_index` knows when each frame is shown. It imports `_media` and `cache`. Open `stream`
first.
"""

from stream_dataloader.streams.video.stream import VideoStream

__all__ = ["VideoStream"]
