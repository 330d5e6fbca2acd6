"""Text as bytes, characters or tokens. Open `stream` first, then `reader`."""

from stream_dataloader.streams.text.stream import TextStream

__all__ = ["TextStream"]
