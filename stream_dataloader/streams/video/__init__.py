"""Videos, frame by frame.

`stream` is the factory, `selection` picks frames, `frames` seeks and decodes, `device` has a GPU decode, `losses` finds
what is missing, `frame_index` knows when each frame is shown, and `h264` looks into packets. It imports `_media` and
`cache`. Open `stream` first.
"""

from stream_dataloader.streams.video.stream import VideoStream

__all__ = ["VideoStream"]
