"""Videos as streams of frames. Open `stream` first, then `selection` and `frames`."""

from stream_dataloader.streams.video.stream import VideoStream

__all__ = ["VideoStream"]
