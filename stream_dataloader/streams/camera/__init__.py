"""Cameras, live.

`stream` is the factory, and `live` reads a device or URL, by PyAV or OpenCV, in a thread of its own, and connects
again. It imports `_media`. Open `stream` first.
"""

from stream_dataloader.streams.camera.stream import CameraStream

__all__ = ["CameraStream"]
