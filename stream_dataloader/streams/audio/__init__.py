"""Sound as windows of samples. Open `stream` first, then `decoding`."""

from stream_dataloader.streams.audio.stream import AudioStream

__all__ = ["AudioStream"]
