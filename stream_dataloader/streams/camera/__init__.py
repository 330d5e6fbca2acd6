"""Cameras, live.

`stream` is the factory, `live` reads in a thread that waits for nobody, `captures` are the two ways to read a device
or URL. It imports `_media`. Open `stream` first.
"""

from stream_dataloader.streams.camera.stream import CameraStream

__all__ = ["CameraStream"]
