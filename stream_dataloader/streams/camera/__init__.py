"""Cameras, live.

`stream` is the factory, `live` reads in a thread of its own and connects again, and `captures` are the two ways to
read a device or URL: PyAV and OpenCV. It imports `_media`. Open `stream` first.
"""

from stream_dataloader.streams.camera.stream import CameraStream

__all__ = ["CameraStream"]
