"""Live cameras. Open `stream` first, then `live`."""

from stream_dataloader.streams.camera.stream import CameraStream

__all__ = ["CameraStream"]
